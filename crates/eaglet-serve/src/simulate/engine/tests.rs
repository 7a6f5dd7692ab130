use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;

/// A server so small that its cache, its seats and its budget all run out.
fn cramped() -> Profile {
    Profile {
        max_model_len: 64,
        max_num_seqs: 5,
        max_batched_tokens: 16,
        block_tokens: 4,
        kv_blocks: 20,
        warm_up_s: 0.0,
        ..Profile::named("small").unwrap()
    }
}

fn sequence(prompt_tokens: usize, answer_tokens: usize) -> NewSequence {
    NewSequence { prompt_tokens, answer_tokens }
}

#[derive(Clone, Debug)]
enum Act {
    Submit(usize, usize),
    Abort(usize),
    Step,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        3 => (1usize..32, 1usize..33).prop_map(|(prompt, answer)| Act::Submit(prompt, answer)),
        1 => any::<usize>().prop_map(Act::Abort),
        6 => Just(Act::Step),
    ];
    prop::collection::vec(act, 1..120)
}

/// What the outside knows: tokens still owed to each sequence that is not gone.
#[derive(Default)]
struct Books {
    owed: HashMap<SequenceId, usize>,
}

impl Books {
    fn step(&mut self, engine: &mut Engine) -> Option<Step> {
        let step = engine.step()?;
        assert!(step.duration_s > 0.0 || step.progressed.is_empty());
        let once: HashSet<_> = step.progressed.iter().collect();
        assert_eq!(once.len(), step.progressed.len(), "at most one token each");
        for id in &step.progressed {
            *self.owed.get_mut(id).expect("only sequences that are there gain tokens") -= 1;
        }
        for id in &step.finished {
            assert_eq!(self.owed.remove(id), Some(0), "finished with its last token");
        }
        assert!(self.owed.values().all(|&owed| owed > 0), "gone when nothing is owed");
        Some(step)
    }

    fn check(&self, engine: &Engine) {
        let gauges = engine.gauges();
        assert_eq!(gauges.running + gauges.waiting, self.owed.len(), "each waits, runs or is gone");
        assert!(gauges.running <= engine.profile.max_num_seqs);
        let held: usize = engine.running.iter().map(|sequence| sequence.blocks).sum();
        assert_eq!(held + engine.free_blocks, engine.profile.kv_blocks, "blocks are conserved");
        for running in &engine.running {
            assert!(running.computed <= running.blocks * engine.profile.block_tokens, "what is computed has room");
        }
        assert!(engine.waiting.iter().all(|waiting| waiting.blocks == 0));
    }
}

proptest! {
    #[test]
    fn sequences_and_blocks_are_conserved_and_all_come_to_an_end(acts in acts()) {
        let mut engine = Engine::new(cramped());
        let mut books = Books::default();
        let mut ids = Vec::new();
        for act in acts {
            match act {
                Act::Submit(prompt, answer) => {
                    let id = engine.submit(sequence(prompt, answer)).unwrap();
                    books.owed.insert(id, answer);
                    ids.push(id);
                }
                Act::Abort(which) if !ids.is_empty() => {
                    let id = ids[which % ids.len()];
                    prop_assert_eq!(engine.abort(id), books.owed.remove(&id).is_some());
                }
                Act::Abort(_) => {}
                Act::Step => { books.step(&mut engine); }
            }
            books.check(&engine);
        }
        // Each step gives somebody a token or computes part of a prompt; recomputation makes that more, never endless.
        let mut left = 200_000;
        while books.step(&mut engine).is_some() {
            books.check(&engine);
            left -= 1;
            prop_assert!(left > 0, "starved: {:?}", engine.gauges());
        }
        prop_assert!(books.owed.is_empty());
        prop_assert_eq!(engine.gauges().kv_use, 0.0);
    }

    #[test]
    fn the_same_acts_give_the_same_steps(acts in acts()) {
        let play = || {
            let mut engine = Engine::new(cramped());
            let mut steps = Vec::new();
            for act in &acts {
                match *act {
                    Act::Submit(prompt, answer) => { engine.submit(sequence(prompt, answer)).unwrap(); }
                    Act::Abort(which) => { engine.abort(SequenceId(which as u64 % 20)); }
                    Act::Step => steps.push(engine.step()),
                }
            }
            (steps, engine.gauges())
        };
        prop_assert_eq!(play(), play());
    }
}

#[test]
fn the_oldest_is_never_thrown_out_and_first_come_is_first_served() {
    let mut engine = Engine::new(cramped());
    let ids: Vec<SequenceId> = (0..12).map(|_| engine.submit(sequence(20, 40)).unwrap()).collect();
    let mut first_tokens = Vec::new();
    let mut preempted = 0;
    let mut left = ids.clone();
    while let Some(step) = engine.step() {
        assert!(!step.preempted.contains(&left[0]), "the oldest was thrown out");
        preempted += step.preempted.len();
        for id in step.progressed {
            if !first_tokens.contains(&id) {
                first_tokens.push(id);
            }
        }
        left.retain(|id| !step.finished.contains(id));
    }
    assert!(preempted > 0, "the cache was meant to run out");
    assert_eq!(first_tokens, ids, "first tokens in the order of arrival");
    assert_eq!(engine.gauges().preemptions, preempted as u64);
    assert_eq!((engine.gauges().generation_tokens, engine.gauges().prompt_tokens), (12 * 40, 12 * 20));
}

#[test]
fn a_long_prompt_shares_its_steps_with_those_that_decode() {
    let mut engine = Engine::new(cramped());
    let decoding = engine.submit(sequence(4, 30)).unwrap();
    engine.step().unwrap();
    let long = engine.submit(sequence(40, 2)).unwrap();
    let alone = engine.profile.step.base_s + engine.profile.step.per_running_s;
    for _ in 0..2 {
        let step = engine.step().unwrap();
        assert_eq!(step.progressed, [decoding], "the prompt takes 15 + 15 + 10 tokens");
        assert!(step.duration_s > alone, "and its tokens take time");
    }
    assert_eq!(engine.step().unwrap().progressed, [decoding, long]);
}

#[test]
fn what_does_not_fit_or_is_too_much_is_refused() {
    let mut engine = Engine::new(Profile { max_queued: Some(2), ..cramped() });
    for (prompt, answer) in [(0, 5), (5, 0), (60, 5)] {
        assert_eq!(engine.submit(sequence(prompt, answer)), Err(Refused::BadLength));
    }
    engine.submit(sequence(32, 32)).unwrap();
    engine.submit(sequence(5, 5)).unwrap();
    assert_eq!(engine.submit(sequence(5, 5)), Err(Refused::QueueFull));
    engine.step().unwrap();
    assert!(engine.submit(sequence(5, 5)).is_ok(), "one left the queue");
}

#[test]
fn the_first_step_is_slow_once() {
    let mut engine = Engine::new(Profile { warm_up_s: 7.0, ..cramped() });
    assert_eq!(engine.step(), None);
    engine.submit(sequence(1, 3)).unwrap();
    assert!(engine.step().unwrap().duration_s > 7.0);
    assert!(engine.step().unwrap().duration_s < 1.0);
}
