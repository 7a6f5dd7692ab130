//! Every operation of a run fails once, or for good: nothing acknowledged is lost, nothing is doubled.
//!
//! The loops count the operation up until the fault no longer strikes, so they follow the code wherever it goes.

#![allow(clippy::unwrap_used)]

mod common;

use common::{complete_and_check, disk_with_torn_tail, process};
use eaglet_core::atomic_file::write_atomic;
use eaglet_core::storage::Storage;
use eaglet_testkit::faulty_storage::{CrashMode, Fault, FaultPlan, FaultyStorage, Operation, Persistence};
use std::path::Path;

const OPERATIONS: [Operation; 5] =
    [Operation::Open, Operation::Write, Operation::Sync, Operation::SetLen, Operation::Any];
const FAULTS: [Fault; 4] = [Fault::NoSpace, Fault::Io, Fault::ShortWrite, Fault::ShortThenNoSpace];
/// More operations than any run here has: a loop that gets here does not end.
const OPERATIONS_MAX: u64 = 500;

/// Runs `check` with the fault at the first, second, … operation until it does not strike; returns how often it did.
fn for_each_operation(mut plan: FaultPlan, mut check: impl FnMut(FaultPlan) -> u64) -> u64 {
    for nth in 1..OPERATIONS_MAX {
        plan.nth = nth;
        if check(plan) == 0 {
            return nth - 1;
        }
    }
    panic!("the fault never stops to strike: {plan:?}");
}

fn all_plans() -> impl Iterator<Item = FaultPlan> {
    OPERATIONS.into_iter().flat_map(|operation| {
        FAULTS.into_iter().flat_map(move |fault| {
            [Persistence::Once, Persistence::Sticky].map(|persistence| FaultPlan {
                operation,
                nth: 1,
                fault,
                persistence,
            })
        })
    })
}

#[test]
fn a_new_process_after_any_fault_finds_all_and_completes() {
    let mut struck = 0;
    for plan in all_plans() {
        for tries in [1, 4] {
            struck += for_each_operation(plan, |plan| {
                let storage = disk_with_torn_tail();
                storage.plan(plan);
                let done = process(&storage, tries, || {});
                let fired = storage.fired();
                complete_and_check(&storage, &done, &format!("{plan:?}, {tries} tries"));
                fired
            });
        }
    }
    assert!(struck > 200, "the faults struck only {struck} times");
}

#[test]
fn a_process_that_outlives_the_fault_completes_by_itself() {
    for plan in all_plans() {
        for_each_operation(plan, |plan| {
            let storage = disk_with_torn_tail();
            storage.plan(plan);
            let mut failures = 0;
            let done = process(&storage, 6, || {
                failures += 1;
                if failures == 3 {
                    storage.heal();
                }
            });
            let fired = storage.fired();
            if failures > 0 {
                assert_eq!(done.len() as u64, common::TOTAL, "{plan:?} after {failures} failures");
            }
            complete_and_check(&storage, &done, &format!("{plan:?}, healed"));
            fired
        });
    }
}

#[test]
fn a_failed_sync_is_not_believed_when_it_succeeds_the_second_time() {
    let plan = FaultPlan { operation: Operation::Sync, nth: 1, fault: Fault::Io, persistence: Persistence::Once };
    for_each_operation(plan, |plan| {
        let storage = disk_with_torn_tail();
        storage.plan(plan);
        let done = process(&storage, 2, || {});
        let fired = storage.fired();
        // The power cut shows what reached the disk, whatever the cache says.
        complete_and_check(&storage.crash(CrashMode::Dropped, 0), &done, &format!("{plan:?}"));
        fired
    });
}

#[test]
fn a_new_process_does_not_trust_what_a_failed_sync_left_in_the_cache() {
    let plan = FaultPlan { operation: Operation::Sync, nth: 1, fault: Fault::Io, persistence: Persistence::Sticky };
    for_each_operation(plan, |plan| {
        let storage = disk_with_torn_tail();
        storage.plan(plan);
        process(&storage, 1, || {});
        let fired = storage.fired();
        storage.heal();
        let done = process(&storage, 1, || {});
        complete_and_check(&storage.crash(CrashMode::Dropped, 0), &done, &format!("{plan:?}"));
        fired
    });
}

#[test]
fn an_atomic_file_is_old_or_new_after_any_fault() {
    let path = Path::new("run/progress.json");
    let operations = [OPERATIONS.as_slice(), &[Operation::Rename, Operation::Remove]].concat();
    for operation in operations {
        for fault in FAULTS {
            let plan = FaultPlan { operation, nth: 1, fault, persistence: Persistence::Once };
            for_each_operation(plan, |plan| {
                let storage = FaultyStorage::new();
                storage.put(path, b"{\"old\":true}");
                storage.plan(plan);
                let written = write_atomic(&storage, path, b"{\"new\":true}");
                let fired = storage.fired();
                let content = storage.read(path).unwrap();
                match written {
                    Ok(()) => assert_eq!(content, b"{\"new\":true}", "{plan:?}"),
                    Err(_) => assert!(content == b"{\"old\":true}" || content == b"{\"new\":true}", "{plan:?}"),
                }
                storage.heal();
                write_atomic(&storage, path, b"{}").unwrap();
                assert_eq!(storage.files(), [path], "{plan:?}: something was left behind");
                fired
            });
        }
    }
}
