//! The limiter in virtual time: every scenario file against the best fixed limit, and against what was tried in its place.

#![allow(clippy::unwrap_used)]

mod virtual_time;

use virtual_time::alternatives::{AimdOnQueue, Gradient, LittlesLaw};
use virtual_time::{Controller, best_fixed, best_rate_named, drive, product, scenario};

#[allow(clippy::print_stderr, reason = "what a run did, for who asks with --success-output immediate")]
fn check(name: &str) {
    let mut scenario = scenario::named(name);
    if let Ok(seed) = std::env::var("EAGLET_SCENARIO_SEED") {
        scenario.seed = seed.parse().expect("EAGLET_SCENARIO_SEED is a number");
    }
    let auto = drive(&scenario, || product(&scenario));
    let (best_limit, best) = (scenario.expect.best_fixed, best_rate_named(&scenario));
    let share = auto.rate / best;
    let changes: Vec<String> = auto
        .changes
        .iter()
        .map(|(at, server, c)| format!("{at:6.0} s  #{server} {} -> {}: {}", c.from, c.to, c.reason))
        .collect();
    let told = format!(
        "{}\n{:.0} tok/s = {:.1} % of the best fixed limit {best_limit} ({best:.0} tok/s); median limit {}; refused {} of {}\n{}",
        scenario.about,
        auto.rate,
        share * 100.0,
        auto.median_limit(),
        auto.refused,
        auto.answered,
        changes.join("\n")
    );
    eprintln!("{told}");
    let expect = &scenario.expect;
    assert_eq!(auto.lost, 0, "lost or doubled; {told}");
    assert!(share >= expect.share_of_best, "{told}");
    assert!((expect.limit[0]..=expect.limit[1]).contains(&auto.median_limit()), "{told}");
    assert!(auto.refused as f64 <= expect.refused_per_answer_max * auto.answered as f64, "{told}");
}

macro_rules! scenarios {
    ($($test:ident = $file:literal;)*) => {
        $(#[test]
        fn $test() {
            check($file);
        })*

        #[test]
        fn every_file_is_a_test() {
            let files: Vec<String> = scenario::all().into_iter().map(|(name, _)| name).collect();
            assert_eq!(files, [$($file),*]);
        }
    };
}

scenarios! {
    steady = "01-steady";
    cold_start = "02-cold-start";
    length_shift = "03-length-shift";
    kv_collapse = "04-kv-collapse";
    bursts_of_429 = "05-bursts-of-429";
    server_restart = "06-server-restart";
    one_slow_of_three = "07-one-slow-of-three";
    one_dead_of_three = "08-one-dead-of-three";
    no_metrics = "09-no-metrics";
    heavy_tail = "10-heavy-tail";
    many_short = "11-many-short";
    gateway_in_flight = "12-gateway-in-flight";
    gateway_per_second = "13-gateway-per-second";
    small_server = "14-small-server";
    whole_replies = "15-whole-replies";
    whole_replies_no_metrics = "16-whole-replies-no-metrics";
}

/// Minutes: in `.ci/nightly`.
#[test]
#[ignore = "the whole search, for nightly runs"]
fn every_best_fixed_limit_is_the_best() {
    let mut wrong = vec![];
    for (name, scenario) in scenario::all() {
        let (limit, best) = best_fixed(&scenario);
        let named = best_rate_named(&scenario);
        if named < best * 0.995 {
            wrong.push(format!("{name}: {best:.0} tok/s at {limit}, {named:.0} tok/s around the one named"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The same scenarios with other prompts: the limiter must not be made for one draw of lengths. One percent less is allowed.
#[test]
#[ignore = "minutes, for nightly runs"]
fn other_prompts_give_the_same() {
    let mut short = vec![];
    for (name, scenario) in scenario::all() {
        for seed in 1..=4 {
            let scenario = scenario::Scenario { seed, ..scenario.clone() };
            let share = drive(&scenario, || product(&scenario)).rate / best_rate_named(&scenario);
            if share < scenario.expect.share_of_best - 0.01 {
                short.push(format!("{name}, seed {seed}: {:.1} %", share * 100.0));
            }
        }
    }
    assert!(short.is_empty(), "{}", short.join("\n"));
}

/// The limiter is within a point of the best of what was tried in its place. Prints the table of `docs/design/0004-concurrency.md`: `cargo nextest run -p eaglet-generate --run-ignored only --no-capture comparison`.
#[test]
#[ignore = "minutes, for nightly runs"]
#[allow(clippy::print_stdout, reason = "the table is for people, too")]
fn comparison() {
    let mut behind = vec![];
    println!("| scenario | best fixed | limiter | gradient | AIMD on queue | Little's law |");
    println!("|---|---|---|---|---|---|");
    for (name, scenario) in scenario::all() {
        let (limit, best) = best_fixed(&scenario);
        let max = scenario.limit_max;
        let rivals: [Box<dyn Fn() -> Box<dyn Controller>>; 4] = [
            Box::new(|| product(&scenario)),
            Box::new(move || Box::new(Gradient::new(max))),
            Box::new(move || Box::new(AimdOnQueue::new(max))),
            Box::new(move || Box::new(LittlesLaw::new(max))),
        ];
        let outcomes = rivals.map(|rival| drive(&scenario, rival));
        let [limiter, others @ ..] = &outcomes;
        let best_other = others.iter().map(|outcome| outcome.rate).fold(0.0, f64::max);
        if limiter.rate < best_other - 0.01 * best {
            behind.push(format!("{name}: {:.0} tok/s, another {best_other:.0}", limiter.rate));
        }
        let cells = outcomes.iter().map(|outcome| {
            let refused = outcome.refused as f64 / outcome.answered as f64;
            let refused = if refused > 0.005 { format!(", {refused:.2} refused") } else { String::new() };
            format!("{:.1} % at {}{refused}", outcome.rate / best * 100.0, outcome.median_limit())
        });
        println!("| {name} | {best:.0} tok/s at {limit} | {} |", cells.collect::<Vec<_>>().join(" | "));
    }
    assert!(behind.is_empty(), "{}", behind.join("\n"));
}
