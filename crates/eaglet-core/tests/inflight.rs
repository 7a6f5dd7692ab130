//! The checkpoint file on a disk that fails at any operation, loses its power, or was damaged: it is an optimisation, so nothing
//! that happens to it stops anybody, and what it gives back is always a beginning of what was saved.

#![allow(clippy::unwrap_used)]

use eaglet_core::ids::PromptKey;
use eaglet_core::inflight::{Frame, InflightLog, InflightSettings, Saved, Seam, Taken, Unfinished};
use eaglet_core::storage::Storage;
use eaglet_testkit::faulty_storage::{CrashMode, Fault, FaultPlan, FaultyStorage, Operation, Persistence};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const FILE: &str = "run/inflight.bin";
const GENERATIONS: u64 = 3;
/// Enough for compactions when each frame holds `TEXT_BYTES`.
const STEPS: usize = 16;
const TEXT_BYTES: usize = 40_000;
/// More operations than any session here has.
const OPERATIONS_MAX: u64 = 300;

fn quick() -> InflightSettings {
    let (ms, defaults) = (Duration::from_millis(1), InflightSettings::default());
    InflightSettings { sync_interval: ms, retry_interval: ms, compact_bytes_min: 1 << 20, ..defaults }
}

/// The answer of a generation after so many steps.
fn stage(generation: u64, steps: usize) -> Unfinished {
    let text = |step: usize| char::from(b'a' + (step % 26) as u8).to_string().repeat(TEXT_BYTES);
    Unfinished {
        prompt_token_ids: vec![generation as u32; 3],
        token_ids: (0..steps as u32).collect(),
        reasoning: String::new(),
        content: (0..steps).map(text).collect(),
        field: None,
        seam: Seam::Clean,
        segments: vec![],
        endpoint: "http://h:1".into(),
    }
}

fn whole(generation: u64, steps: usize) -> Frame {
    let unfinished = Box::new(stage(generation, steps));
    Frame::Whole { generation, key: PromptKey(u128::from(generation)), turn: 0, at: 0, unfinished }
}

fn open(storage: &FaultyStorage) -> (InflightLog, HashMap<PromptKey, Saved>) {
    // The directory is there before any run; only what happens to the file is under test.
    let _ = storage.create_dir_all(Path::new("run"));
    let shared: Arc<dyn Storage> = Arc::new(storage.clone());
    InflightLog::open(shared, Path::new(FILE), quick(), |_| true)
}

fn finish(log: InflightLog) {
    log.finish(Instant::now() + Duration::from_secs(60));
}

/// A session that checkpoints and finishes all but the last of its answers.
fn session(storage: &FaultyStorage) {
    let (log, _) = open(storage);
    let handle = log.handle();
    let mut epoch = handle.epoch();
    for step in 0..STEPS {
        for generation in 0..GENERATIONS {
            if generation + 1 < GENERATIONS && step > STEPS / 2 {
                handle.offer(&[Frame::End { generation }]);
                continue;
            }
            let (from, to) = (stage(generation, step), stage(generation, step + 1));
            let more = Frame::More {
                generation,
                follows: [from.token_ids.len(), 0, from.content.len()].map(|n| n as u64),
                token_ids: to.token_ids[step..].to_vec(),
                reasoning: String::new(),
                content: to.content[from.content.len()..].to_owned(),
                field: None,
                seam: Seam::Clean,
            };
            let anew = step == 0 || handle.epoch() != epoch;
            while handle.offer(&[if anew { whole(generation, step + 1) } else { more.clone() }]) == Taken::No {
                if handle.is_blocked() {
                    break;
                }
                std::thread::yield_now();
            }
        }
        epoch = handle.epoch();
    }
    finish(log);
}

/// Whatever is found is a beginning of the answer it belongs to.
fn check(found: &HashMap<PromptKey, Saved>) {
    for (key, saved) in found {
        let unfinished = saved.unfinished.as_ref().unwrap();
        assert_eq!(*unfinished, stage(key.0 as u64, unfinished.token_ids.len()));
    }
}

#[test]
fn what_was_saved_is_found_again_and_compaction_keeps_the_file_small() {
    let storage = FaultyStorage::new();
    session(&storage);
    let bytes = storage.len(Path::new(FILE)).unwrap().unwrap();
    assert!(bytes < 2 * (STEPS * TEXT_BYTES) as u64 + (1 << 20), "{bytes}");
    let (log, found) = open(&storage);
    check(&found);
    assert_eq!(found[&PromptKey(2)].unfinished.as_ref().unwrap().token_ids.len(), STEPS);
    assert_eq!(found.len(), 1, "what has ended is gone");
    finish(log);
}

#[test]
fn a_file_in_which_nothing_is_unfinished_goes() {
    let storage = FaultyStorage::new();
    let (log, _) = open(&storage);
    log.handle().offer(&[whole(1, 2)]);
    log.handle().offer(&[Frame::End { generation: 1 }]);
    finish(log);
    assert_eq!(storage.len(Path::new(FILE)).unwrap(), None);
}

#[test]
fn prompts_that_are_not_left_are_forgotten() {
    let storage = FaultyStorage::new();
    session(&storage);
    let shared: Arc<dyn Storage> = Arc::new(storage.clone());
    let (log, found) = InflightLog::open(shared, Path::new(FILE), quick(), |_| false);
    assert!(found.is_empty());
    finish(log);
    assert_eq!(storage.len(Path::new(FILE)).unwrap(), None);
}

#[test]
fn any_fault_at_any_operation_costs_checkpoints_and_nothing_else() {
    let operations =
        [Operation::Open, Operation::Write, Operation::Sync, Operation::Rename, Operation::Remove, Operation::SetLen];
    // How often the later ones come depends on how the thread batches.
    let comes_for_sure = [Operation::Open, Operation::Write, Operation::Sync, Operation::Rename];
    for operation in operations {
        for fault in [Fault::NoSpace, Fault::Io, Fault::ShortThenNoSpace] {
            for persistence in [Persistence::Once, Persistence::Sticky] {
                for nth in [1, 2, 3, 8, 21] {
                    let storage = FaultyStorage::new();
                    storage.create_dir_all(Path::new("run")).unwrap();
                    storage.plan(FaultPlan { operation, nth, fault, persistence });
                    session(&storage);
                    let struck = storage.fired() > 0;
                    // Only a write can be short.
                    let can_strike = fault != Fault::ShortThenNoSpace || operation == Operation::Write;
                    let must_strike = nth == 1 && can_strike && comes_for_sure.contains(&operation);
                    assert!(struck || !must_strike, "{operation:?} never came");
                    storage.heal();
                    let (log, found) = open(&storage);
                    check(&found);
                    finish(log);
                }
            }
        }
    }
}

#[test]
fn a_power_cut_at_any_moment_leaves_a_beginning() {
    let mut most = 0;
    for nth in (1..OPERATIONS_MAX).step_by(5) {
        let storage = FaultyStorage::new();
        storage.plan(FaultPlan {
            operation: Operation::Any,
            nth,
            fault: Fault::PowerCut,
            persistence: Persistence::Sticky,
        });
        session(&storage);
        if storage.fired() == 0 {
            break;
        }
        for mode in [CrashMode::Dropped, CrashMode::Kept, CrashMode::Torn] {
            let (log, found) = open(&storage.crash(mode, nth));
            check(&found);
            let tokens = found.values().map(|saved| saved.unfinished.as_ref().unwrap().token_ids.len());
            most = most.max(tokens.sum());
            finish(log);
        }
    }
    assert!(most > STEPS, "hardly anything was ever found again");
}

#[test]
fn a_full_disk_is_told_once_and_checkpoints_go_on_when_there_is_room() {
    let storage = FaultyStorage::new();
    let (log, _) = open(&storage);
    let handle = log.handle();
    storage.plan(FaultPlan {
        operation: Operation::Write,
        nth: 1,
        fault: Fault::ShortThenNoSpace,
        persistence: Persistence::Sticky,
    });
    assert_eq!(handle.offer(&[whole(1, 1)]), Taken::Yes);
    let until = |condition: &dyn Fn() -> bool| {
        let end = Instant::now() + Duration::from_secs(60);
        while !condition() {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    until(&|| handle.is_blocked());
    let epoch = handle.epoch();
    assert_eq!(handle.offer(&[whole(1, 2)]), Taken::No);
    assert!(handle.take_notice().unwrap().contains(FILE));
    storage.heal();
    until(&|| !handle.is_blocked());
    assert!(handle.epoch() > epoch, "whoever writes is to say everything anew");
    assert_eq!(handle.take_notice(), None);
    assert_eq!(handle.offer(&[whole(1, 3)]), Taken::Yes);
    finish(log);
    let (log, found) = open(&storage);
    assert_eq!(found[&PromptKey(1)].unfinished.as_ref().unwrap().token_ids.len(), 3);
    finish(log);
}
