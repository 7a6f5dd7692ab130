use super::*;
use eaglet_core::random::Random;
use proptest::prelude::*;
use std::collections::BinaryHeap;

/// Sources whose answers differ in length, as the parts of a mixed instruction set do (chat, code, olympiad): mean tokens and share; log-normal.
const SOURCES: [(f64, f64); 3] = [(300.0, 0.6), (1200.0, 0.3), (5000.0, 0.1)];
const LENGTH_MAX: f64 = 8192.0;

fn normal(random: &mut Random) -> f64 {
    (0..12).map(|_| random.unit()).sum::<f64>() - 6.0
}

fn prompts(count: usize, seed: u64) -> Vec<(Known, u64)> {
    let mut random = Random::new(seed);
    let draw = |index| {
        let mut place = random.unit();
        let drawn = SOURCES.iter().position(|(_, share)| {
            place -= share;
            place < 0.0
        });
        let source = drawn.unwrap_or(0);
        let mean = SOURCES[source].0;
        let tokens = (mean * (0.6 * normal(&mut random) - 0.18).exp()).clamp(1.0, LENGTH_MAX);
        (Known { index, source, prompt_bytes: 500 }, tokens as u64)
    };
    (0..count).map(draw).collect()
}

/// Answers all prompts on `slots` slots, a token a step, and gives the steps that it took.
fn makespan(prompts: &[(Known, u64)], slots: usize, per_slot: usize) -> u64 {
    let mut lengths = Lengths::default();
    let mut out: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let (mut last, mut next, mut now) = (None::<LastPrompts>, 0, 0);
    loop {
        if last.is_none() && prompts.len() - next <= per_slot * slots {
            last = Some(LastPrompts::new(prompts[next..].iter().map(|(known, _)| known.clone()).collect()));
        }
        let started = match &mut last {
            Some(last) => last.next(&lengths),
            None => Some(next),
        };
        if let Some(index) = started {
            next += 1;
            out.push(Reverse((now + prompts[index].1, index)));
        }
        if out.len() == slots || started.is_none() {
            let Some(Reverse((ended, index))) = out.pop() else { return now };
            now = ended;
            let (known, tokens) = &prompts[index];
            lengths.add(known.source, known.prompt_bytes, *tokens);
        }
    }
}

#[test]
fn long_answers_first_makes_the_end_shorter() {
    let (mut plan_order, mut long_first) = (0, 0);
    for seed in 0..20 {
        let prompts = prompts(2000, seed);
        plan_order += makespan(&prompts, 128, 0);
        long_first += makespan(&prompts, 128, PROMPTS_PER_SLOT);
    }
    assert!(long_first * 100 < plan_order * 92, "{long_first} steps, {plan_order} in the plan's order");
}

/// The table of `docs/design/0005-the-end-of-a-run.md`: `cargo nextest run -p eaglet-generate --run-ignored only --no-capture share_of_the_run`.
#[test]
#[ignore = "minutes, for nightly runs"]
#[allow(clippy::print_stdout, reason = "the table is for people, too")]
fn share_of_the_run_that_is_saved() {
    for count in [1000, 2000, 5000] {
        let ideal: u64 = (0..20).map(|seed| prompts(count, seed).iter().map(|(_, t)| t).sum::<u64>() / 128).sum();
        let measured = [0, 1, 2, 4, PROMPTS_PER_SLOT].map(|per_slot| {
            let steps: u64 = (0..20).map(|seed| makespan(&prompts(count, seed), 128, per_slot)).sum();
            let share = steps as f64 / ideal as f64;
            println!("{count} prompts, {per_slot} a slot: {share:.3} of the ideal");
            share
        });
        let [plan_order, .., chosen] = measured;
        let best = measured.into_iter().fold(f64::INFINITY, f64::min);
        assert!(chosen <= best * 1.03 && chosen < plan_order * 0.95, "{count} prompts: {measured:?}");
    }
}

#[test]
fn nothing_known_keeps_the_plans_order() {
    let known = |index| Known { index, source: 0, prompt_bytes: 10 * index as u64 };
    let mut last = LastPrompts::new((3..8).map(known).collect());
    let order: Vec<usize> = std::iter::from_fn(|| last.next(&Lengths::default())).collect();
    assert_eq!(order, [3, 4, 5, 6, 7]);
}

#[test]
fn sources_and_prompt_lengths_are_told_apart() {
    const SHORT: usize = 0;
    const LONG: usize = 1;
    const NEW: usize = 2;
    let mut lengths = Lengths::default();
    for _ in 0..50 {
        lengths.add(SHORT, 100, 10);
        lengths.add(LONG, 100, 1000);
        lengths.add(LONG, 5000, 3000);
    }
    let known = |index, source, prompt_bytes| Known { index, source, prompt_bytes };
    let left = vec![known(0, SHORT, 100), known(1, LONG, 100), known(2, LONG, 5000), known(3, NEW, 100)];
    let mut last = LastPrompts::new(left);
    let order: Vec<usize> = std::iter::from_fn(|| last.next(&lengths)).collect();
    assert_eq!(order, [2, 3, 1, 0], "a source without answers counts as the mean of all");
}

proptest! {
    #[test]
    fn each_prompt_is_started_once(count in 0usize..200, answers in prop::collection::vec((0usize..4, 1u64..5000, 0u64..9000), 0..200)) {
        let known = |index: usize| Known { index, source: index % 4, prompt_bytes: index as u64 * 37 };
        let (mut lengths, mut answers) = (Lengths::default(), answers.into_iter());
        let mut last = LastPrompts::new((0..count).map(known).collect());
        let mut started = vec![];
        while let Some(index) = last.next(&lengths) {
            started.push(index);
            if let Some((of, prompt_bytes, tokens)) = answers.next() {
                lengths.add(of, prompt_bytes, tokens);
            }
        }
        started.sort_unstable();
        prop_assert_eq!(started, (0..count).collect::<Vec<_>>());
        prop_assert!(last.is_empty());
    }
}
