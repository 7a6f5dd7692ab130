//! The commit thread on a disk that fills up, breaks, and is mended.
//!
//! No test sleeps: each waits for the event it is about, and the long wait is only there to end a test that would hang.

#![allow(clippy::unwrap_used)]

use eaglet_core::Class;
use eaglet_core::commit::{BlockKind, CommitEvent, CommitSettings, Committer, Finished, Stream};
use eaglet_core::journal::Journal;
use eaglet_core::storage::Storage;
use eaglet_testkit::faulty_storage::{CrashMode, Fault, FaultPlan, FaultyStorage, Operation, Persistence};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const RESPONSES: &str = "run/answers.jsonl";
const FAILURES: &str = "run/failures.jsonl";
const HANGING: Duration = Duration::from_secs(60);

fn quick() -> CommitSettings {
    CommitSettings {
        interval: Duration::from_millis(1),
        retry_first: Duration::from_millis(1),
        retry_max: Duration::from_millis(2),
        ..CommitSettings::default()
    }
}

/// Syncs only when asked.
fn patient() -> CommitSettings {
    CommitSettings { interval: Duration::from_secs(3600), ..quick() }
}

fn start(storage: &FaultyStorage, settings: CommitSettings) -> (Committer, Receiver<CommitEvent>) {
    storage.create_dir_all(Path::new("run")).unwrap();
    let open = |path| {
        let shared: Arc<dyn Storage> = Arc::new(storage.clone());
        Journal::open(shared, Path::new(path)).unwrap().0
    };
    let (sender, events) = channel();
    let on_event = move |event| drop(sender.send(event));
    (Committer::start(open(RESPONSES), open(FAILURES), settings, on_event).unwrap(), events)
}

fn sticky(operation: Operation, fault: Fault) -> FaultPlan {
    FaultPlan { operation, nth: 1, fault, persistence: Persistence::Sticky }
}

fn soon() -> Instant {
    Instant::now() + HANGING
}

fn record(n: u64) -> Vec<u8> {
    format!("{{\"n\":{n}}}").into_bytes()
}

fn text(storage: &FaultyStorage, path: &str) -> String {
    String::from_utf8(storage.read(Path::new(path)).unwrap()).unwrap()
}

/// All tickets reported durable in the events that have come so far.
fn durable_in(events: &Receiver<CommitEvent>) -> Vec<u64> {
    let mut all = Vec::new();
    for event in events.try_iter() {
        if let CommitEvent::Durable { tickets } = event {
            all.extend(tickets);
        }
    }
    all
}

#[test]
fn records_become_durable_together_and_each_in_its_file() {
    let storage = FaultyStorage::new();
    let (committer, events) = start(&storage, patient());
    let handle = committer.handle();
    let before = storage.operations();
    for n in 0..100 {
        let stream = if n % 10 == 0 { Stream::Failures } else { Stream::Responses };
        handle.submit(stream, record(n), n).unwrap();
    }
    assert_eq!(handle.pending_bytes(), (0..100).map(|n| record(n).len() as u64 + 1).sum::<u64>());
    handle.flush();
    let CommitEvent::Durable { tickets } = events.recv_timeout(HANGING).unwrap() else { panic!("not durable") };
    assert_eq!(tickets.len(), 100);
    assert_eq!(handle.pending_bytes(), 0);
    assert_eq!(storage.operations() - before, 4, "one write and one sync for each file");
    let after_power_cut = storage.crash(CrashMode::Dropped, 0);
    assert_eq!(text(&after_power_cut, RESPONSES).lines().count(), 90);
    assert_eq!(text(&after_power_cut, FAILURES).lines().next().unwrap(), "{\"n\":0}");
    assert_eq!(committer.finish(soon()).unwrap(), Finished { durable: 100, unsaved: vec![] });
}

#[test]
fn the_interval_alone_makes_a_record_durable() {
    let storage = FaultyStorage::new();
    let (_committer, events) = start(&storage, quick());
    _committer.handle().submit(Stream::Responses, record(7), 7).unwrap();
    assert!(matches!(events.recv_timeout(HANGING).unwrap(), CommitEvent::Durable { tickets } if tickets == [7]));
}

#[test]
fn a_full_disk_blocks_and_room_unblocks() {
    let storage = FaultyStorage::new();
    let (committer, events) = start(&storage, quick());
    let handle = committer.handle();
    storage.plan(sticky(Operation::Write, Fault::NoSpace));
    for n in 0..5 {
        handle.submit(Stream::Responses, record(n), n).unwrap();
    }
    match events.recv_timeout(HANGING).unwrap() {
        CommitEvent::Blocked { reason, path, kind } => {
            assert_eq!((reason.as_str(), kind), ("no space left on device", BlockKind::DiskFull));
            assert_eq!(path, Path::new(RESPONSES));
        }
        other => panic!("expected to be blocked, got {other:?}"),
    }
    // Many attempts later it is still one episode, and nothing has been reported durable.
    while storage.fired() < 20 {
        std::thread::yield_now();
    }
    assert!(events.try_recv().is_err());
    handle.submit(Stream::Failures, record(5), 5).unwrap();
    storage.heal();
    let mut durable = Vec::new();
    loop {
        match events.recv_timeout(HANGING).unwrap() {
            CommitEvent::Durable { tickets } => durable.extend(tickets),
            CommitEvent::Unblocked => break,
            other => panic!("unexpected {other:?}"),
        }
    }
    let finished = committer.finish(soon()).unwrap();
    durable.extend(durable_in(&events));
    durable.sort_unstable();
    assert_eq!(durable, [0, 1, 2, 3, 4, 5]);
    assert_eq!(finished, Finished { durable: 6, unsaved: vec![] });
    assert_eq!(text(&storage, RESPONSES).lines().count(), 5);
}

#[test]
fn a_broken_disk_is_given_up_and_says_so() {
    let storage = FaultyStorage::new();
    let (committer, events) = start(&storage, quick());
    let handle = committer.handle();
    storage.plan(sticky(Operation::Sync, Fault::Io));
    handle.submit(Stream::Responses, record(1), 1).unwrap();
    assert!(matches!(events.recv_timeout(HANGING).unwrap(), CommitEvent::Blocked { kind: BlockKind::Io, .. }));
    let CommitEvent::Failed(error) = events.recv_timeout(HANGING).unwrap() else { panic!("not given up") };
    assert_eq!(error.class(), Class::Environment);
    assert!(error.to_string().contains(RESPONSES), "{error}");
    assert_eq!(storage.fired(), 4, "once and three times again");
    assert!(handle.submit(Stream::Responses, record(2), 2).is_err());
    storage.heal();
    assert_eq!(committer.finish(soon()).unwrap(), Finished { durable: 0, unsaved: vec![1] });
    assert_eq!(text(&storage, RESPONSES), "", "what was not acknowledged is cut off again");
}

#[test]
fn one_bad_sync_is_survived_without_doubling() {
    let storage = FaultyStorage::new();
    let (committer, _events) = start(&storage, patient());
    storage.plan(FaultPlan { persistence: Persistence::Once, ..sticky(Operation::Sync, Fault::Io) });
    committer.handle().submit(Stream::Responses, record(1), 1).unwrap();
    assert_eq!(committer.finish(soon()).unwrap(), Finished { durable: 1, unsaved: vec![] });
    assert_eq!(text(&storage.crash(CrashMode::Dropped, 0), RESPONSES), "{\"n\":1}\n");
}

#[test]
fn a_failing_file_does_not_hold_up_the_other() {
    let storage = FaultyStorage::new();
    let (committer, events) = start(&storage, patient());
    let handle = committer.handle();
    handle.submit(Stream::Responses, record(1), 1).unwrap();
    handle.submit(Stream::Failures, record(2), 2).unwrap();
    storage.plan(FaultPlan { nth: 2, ..sticky(Operation::Write, Fault::NoSpace) });
    let finished = committer.finish(Instant::now()).unwrap();
    assert_eq!(finished, Finished { durable: 1, unsaved: vec![2] });
    assert_eq!(durable_in(&events), [1]);
}

#[test]
fn finishing_on_a_full_disk_tries_once_more_and_names_what_is_not_saved() {
    let storage = FaultyStorage::new();
    let (committer, events) = start(&storage, CommitSettings { retry_first: HANGING, retry_max: HANGING, ..quick() });
    let handle = committer.handle();
    storage.plan(sticky(Operation::Write, Fault::ShortThenNoSpace));
    handle.submit(Stream::Responses, record(1), 1).unwrap();
    assert!(matches!(events.recv_timeout(HANGING).unwrap(), CommitEvent::Blocked { .. }));
    handle.submit(Stream::Responses, record(2), 2).unwrap();
    let before = storage.fired();
    assert_eq!(committer.finish(Instant::now()).unwrap(), Finished { durable: 0, unsaved: vec![1, 2] });
    assert!(storage.fired() > before, "no last attempt was made");
    assert_eq!(text(&storage, RESPONSES), "");
    assert!(handle.submit(Stream::Responses, record(3), 3).is_err());
}

#[test]
fn a_committer_that_is_only_dropped_still_saves() {
    let storage = FaultyStorage::new();
    let (committer, _events) = start(&storage, patient());
    committer.handle().submit(Stream::Responses, record(1), 1).unwrap();
    drop(committer);
    assert_eq!(text(&storage.crash(CrashMode::Dropped, 0), RESPONSES), "{\"n\":1}\n");
}

#[test]
fn a_malformed_record_is_refused_where_it_is_submitted() {
    let storage = FaultyStorage::new();
    let (committer, _events) = start(&storage, patient());
    let error = committer.handle().submit(Stream::Responses, b"{\"a\":1}\n{\"b\":2}".to_vec(), 1).unwrap_err();
    assert_eq!(error.class(), Class::Bug);
    assert_eq!(committer.finish(soon()).unwrap(), Finished::default());
}
