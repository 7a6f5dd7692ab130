//! Whole runs against random accidents, in virtual time: each prompt exactly once, everything counted at every look, every answer the one that an
//! undisturbed server would have given, joined or not.
//!
//! A case follows from its seed alone. `EAGLET_SEED=N` plays one, `EAGLET_SEEDS=N` so many instead of 300, from `EAGLET_SEED_FIRST` on.

#![allow(clippy::unwrap_used)]

mod case;
mod checks;
#[path = "../common/mod.rs"]
mod common;
mod play;

use case::Case;
use play::{Played, play};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Seeds of an ordinary test run, all parts together.
const SEEDS: u64 = 300;
/// Tests that share them, so that they run beside each other.
const PARTS: u64 = 6;
/// So many seeds that fail are named before the rest is left.
const NAMED_MAX: usize = 10;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is a number, got {text:?}")))
}

fn part(part: u64) {
    if let Some(seed) = number("EAGLET_SEED") {
        if part == 0 {
            report(Case::of(seed));
        }
        return;
    }
    let (first, seeds) = (number("EAGLET_SEED_FIRST").unwrap_or(0), number("EAGLET_SEEDS").unwrap_or(SEEDS));
    let mut wrong = vec![];
    for seed in (first..first + seeds).filter(|seed| seed % PARTS == part) {
        if catch_unwind(AssertUnwindSafe(|| play(&Case::of(seed)))).is_err() {
            wrong.push(seed);
        }
        assert!(wrong.len() < NAMED_MAX, "each of these is played by EAGLET_SEED=N: {wrong:?}");
    }
    assert!(wrong.is_empty(), "each of these is played by EAGLET_SEED=N: {wrong:?}");
}

#[allow(clippy::print_stderr, reason = "what a run did, for who asks for one seed")]
fn report(case: Case) {
    // Before it is played, so that a case that goes wrong is told, too.
    eprintln!("{case:#?}");
    let played = play(&case);
    eprintln!("{}", played.trace.join("\n"));
    eprintln!(
        "{} s, {} sessions, {} failed, {} joined",
        played.took.as_secs(),
        played.sessions,
        played.failed,
        played.joined
    );
}

macro_rules! parts {
    ($($test:ident = $part:literal;)*) => {
        $(#[test]
        fn $test() {
            part($part);
        })*
    };
}

parts! {
    random_accidents_part_1 = 0;
    random_accidents_part_2 = 1;
    random_accidents_part_3 = 2;
    random_accidents_part_4 = 3;
    random_accidents_part_5 = 4;
    random_accidents_part_6 = 5;
}

/// Whoever changes the drawing sees here what it no longer reaches.
#[test]
fn the_cases_reach_every_kind_of_accident() {
    let played: Vec<Played> = (0..90).map(|seed| play(&Case::of(seed))).collect();
    let seen: BTreeSet<&str> = played.iter().flat_map(|played| played.seen.iter().map(String::as_str)).collect();
    for kind in [
        "ServerDown",
        "ServerUp",
        "ServerAdded",
        "ServerRemoved",
        "ServerEjected",
        "ServerReadmitted",
        "LimitChanged",
        "DiskBlocked",
        "DiskUnblocked",
        "Draining",
        "Aborting",
        "Ended",
        "overloaded",
        "server_error",
        "reset",
        "connect",
        "aborted",
        "first_byte_timeout",
        "silence",
        "server_down",
    ] {
        assert!(seen.contains(kind), "no case reaches {kind}: {seen:?}");
    }
    for (what, is_reached) in [
        ("failed", played.iter().any(|played| played.failed > 0)),
        ("joined", played.iter().any(|played| played.joined > 0)),
        ("resumed", played.iter().any(|played| played.sessions > 1)),
    ] {
        assert!(is_reached, "no case in which something is {what}");
    }
}

#[test]
fn a_seed_is_the_same_run_each_time() {
    for seed in 0..6 {
        let traces = [play(&Case::of(seed)).trace, play(&Case::of(seed)).trace];
        let differ = traces[0].iter().zip(&traces[1]).position(|(a, b)| a != b);
        let at = differ.map(|at| (traces[0][at].clone(), traces[1][at].clone()));
        assert!(at.is_none() && traces[0].len() == traces[1].len(), "seed {seed}: {at:?}");
    }
}
