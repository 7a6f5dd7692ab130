//! The power goes, or the process is killed, before every operation of a run, and again during the repair after it.

#![allow(clippy::unwrap_used)]

mod common;

use common::{complete_and_check, disk_with_torn_tail, process, torn_bytes_are_kept};
use eaglet_core::atomic_file::write_atomic;
use eaglet_core::storage::Storage;
use eaglet_testkit::faulty_storage::{CrashMode, Fault, FaultPlan, FaultyStorage, Operation, Persistence};
use std::path::Path;

const MODES: [CrashMode; 3] = [CrashMode::Dropped, CrashMode::Kept, CrashMode::Torn];
const SEEDS: u64 = 5;
const OPERATIONS_MAX: u64 = 500;

fn stop_before(nth: u64) -> FaultPlan {
    FaultPlan { operation: Operation::Any, nth, fault: Fault::PowerCut, persistence: Persistence::Sticky }
}

/// Runs `check` with a stop before the first, second, … operation until the run gets to its end.
fn for_each_stop(mut check: impl FnMut(FaultPlan) -> u64) {
    for nth in 1..OPERATIONS_MAX {
        if check(stop_before(nth)) == 0 {
            assert!(nth > 3, "hardly an operation was counted");
            return;
        }
    }
    panic!("the run never gets to its end");
}

fn starts() -> [FaultyStorage; 2] {
    let fresh = FaultyStorage::new();
    fresh.create_dir_all(Path::new("run")).unwrap();
    [fresh, disk_with_torn_tail()]
}

/// The same start again: the disk at rest survives a crash unchanged.
fn copy(storage: &FaultyStorage) -> FaultyStorage {
    storage.crash(CrashMode::Kept, 0)
}

#[test]
fn a_power_cut_before_any_operation_loses_nothing_acknowledged() {
    for start in starts() {
        for_each_stop(|plan| {
            let storage = copy(&start);
            storage.plan(plan);
            let done = process(&storage, 1, || {});
            for mode in MODES {
                for seed in 0..SEEDS {
                    let what = format!("{plan:?} {mode:?} seed {seed}");
                    complete_and_check(&storage.crash(mode, seed), &done, &what);
                }
            }
            storage.fired()
        });
    }
}

#[test]
fn the_torn_bytes_survive_a_power_cut_before_any_operation() {
    for_each_stop(|plan| {
        let storage = disk_with_torn_tail();
        storage.plan(plan);
        process(&storage, 1, || {});
        for mode in MODES {
            for seed in 0..SEEDS {
                let after = storage.crash(mode, seed);
                complete_and_check(&after, &Default::default(), "the torn bytes");
                assert!(torn_bytes_are_kept(&after), "{plan:?} {mode:?} seed {seed}: {:?}", after.files());
            }
        }
        storage.fired()
    });
}

#[test]
fn a_second_power_cut_during_the_repair_loses_nothing_either() {
    for_each_stop(|first| {
        let storage = disk_with_torn_tail();
        storage.plan(first);
        let done = process(&storage, 1, || {});
        for seed in 0..SEEDS {
            for_each_stop(|second| {
                let after_first = storage.crash(CrashMode::Torn, seed);
                after_first.plan(second);
                let mut done = done.clone();
                done.extend(process(&after_first, 1, || {}));
                for mode in MODES {
                    let what = format!("{first:?} seed {seed}, then {second:?} {mode:?}");
                    complete_and_check(&after_first.crash(mode, seed), &done, &what);
                }
                after_first.fired()
            });
        }
        storage.fired()
    });
}

#[test]
fn a_kill_and_then_a_power_cut_lose_nothing_that_the_second_process_counted() {
    for_each_stop(|kill| {
        let killed = disk_with_torn_tail();
        killed.plan(kill);
        let done_by_first = process(&killed, 1, || {});
        let mut nth = 0;
        loop {
            nth += 1;
            let storage = disk_with_torn_tail();
            storage.plan(kill);
            process(&storage, 1, || {});
            // The process is dead, the machine is on: the cache keeps what was never synced.
            storage.heal();
            storage.plan(stop_before(nth));
            let mut done = done_by_first.clone();
            done.extend(process(&storage, 1, || {}));
            for mode in [CrashMode::Dropped, CrashMode::Torn] {
                let what = format!("{kill:?}, then stop before {nth}, {mode:?}");
                complete_and_check(&storage.crash(mode, nth), &done, &what);
            }
            if storage.fired() == 0 {
                break;
            }
        }
        killed.fired()
    });
}

#[test]
fn an_atomic_file_is_old_or_new_after_any_power_cut() {
    let path = Path::new("run/run.json");
    for_each_stop(|plan| {
        let storage = FaultyStorage::new();
        storage.put(path, b"{\"step\":1}");
        storage.plan(plan);
        let written = write_atomic(&storage, path, b"{\"step\":2,\"more\":true}").is_ok();
        for mode in MODES {
            for seed in 0..20 {
                let content = storage.crash(mode, seed).read(path).unwrap();
                let is_new = content == b"{\"step\":2,\"more\":true}";
                assert!(
                    is_new || (!written && content == b"{\"step\":1}"),
                    "{plan:?} {mode:?} seed {seed}: {content:?}"
                );
            }
        }
        storage.fired()
    });
}
