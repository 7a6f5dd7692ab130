//! The engine on a disk that fails: whatever goes wrong, and at whichever operation, what counts as done is on the disk, nothing
//! is there twice, and a later session does the rest.
//!
//! The loops count the operation up until the fault no longer strikes, so they follow the code wherever it goes. The server and
//! the data set are real; the journals lie on a disk in memory.

#![allow(clippy::unwrap_used)]

use eaglet_core::commit::CommitSettings;
use eaglet_core::event::Event;
use eaglet_core::journal::Journal;
use eaglet_core::progress::Snapshot;
use eaglet_core::resume::{Known, RecordIndex, RecordIndexBuilder};
use eaglet_core::storage::Storage;
use eaglet_core::work::Work;
use eaglet_core::{Class, Error};
use eaglet_data::{DatasetSpec, HubSettings};
use eaglet_generate::client::Client;
use eaglet_generate::client::endpoint::Endpoint;
use eaglet_generate::client::request::RequestTemplate;
use eaglet_generate::retry::RetryPolicy;
use eaglet_generate::run::{self, GenerateSettings, Report, RunEnd, RunParts, Stop};
use eaglet_generate::server_info::server_info;
use eaglet_testkit::faulty_storage::{CrashMode, Fault, FaultPlan, FaultyStorage, Operation, Persistence};
use eaglet_testkit::server::{Answer, Rule, Script, ScriptedServer, SeenRequest};
use serde_json::Value;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Prompts of a run: so few, because the whole run is repeated for every operation.
const COUNT: u64 = 6;
/// Of these, prompts that the server refuses, so that both journals are written.
const REFUSED: u64 = 1;
const ANSWERED: u64 = COUNT - REFUSED;
/// More operations than any run here has: a loop that gets here does not end.
const OPERATIONS_MAX: u64 = 300;
/// A run takes milliseconds; longer than this means never.
const DEADLINE: Duration = Duration::from_secs(60);

const RESPONSES: &str = "run/raw_responses.jsonl";
const FAILURES: &str = "run/failures.jsonl";
const CHAT: &str = "/v1/chat/completions";
/// Says which session a request belongs to.
const SESSION_HEADER: &str = "x-session";

/// What a run needs beside its disk.
struct Stage {
    server: ScriptedServer,
    data: tempfile::TempDir,
    sessions: Cell<u64>,
}

/// How a session went.
enum Session {
    /// The journals could not be opened.
    NotOpened(Error),
    /// It ran to an end, after this many requests.
    Ran { end: Box<RunEnd>, sent: u64 },
}

impl Session {
    fn ran(self, what: &str) -> (Box<RunEnd>, u64) {
        match self {
            Session::Ran { end, sent } => (end, sent),
            Session::NotOpened(error) => panic!("{what}: {error}"),
        }
    }
}

impl Stage {
    fn new() -> Self {
        let refusal = r#"{"error": {"message": "the maximum context length is 8 tokens", "code": 400}}"#;
        let script = Script::new()
            .answer(Answer { mean_tokens: 5, ..Answer::default() })
            .rule(Rule::on_chat().contains("boat 2").status(400).text(refusal));
        let data = tempfile::tempdir().unwrap();
        let rows = (0..COUNT).map(|n| format!("{{\"id\": \"p{n}\", \"prompt\": \"Name boat {n}.\"}}\n"));
        std::fs::write(data.path().join("boats.jsonl"), rows.collect::<String>()).unwrap();
        Stage { server: ScriptedServer::start(script), data, sessions: Cell::new(0) }
    }

    /// Requests of one session. Told apart by a header, because what an earlier session gave up may reach the server late.
    fn sent(&self, session: u64) -> u64 {
        let name = session.to_string();
        let of_session = |request: &&SeenRequest| request.header(SESSION_HEADER) == Some(name.as_str());
        self.server.requests_on(CHAT).iter().filter(of_session).count() as u64
    }

    /// One process on this disk. `on_event` hears every event and can ask the run to stop.
    fn session(&self, storage: &FaultyStorage, mut on_event: impl FnMut(&Event, &watch::Sender<Stop>)) -> Session {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let local = tokio::task::LocalSet::new();
        let number = self.sessions.get() + 1;
        self.sessions.set(number);
        let (sender, stop) = watch::channel(Stop::No);
        let end = local.block_on(&runtime, async {
            let parts = self.parts(storage, number).await?;
            let observe = |report| match report {
                Report::Event(event) => on_event(&event, &sender),
                Report::Snapshot(snapshot) => assert_conserved(&snapshot),
                Report::Retried { .. } => {}
            };
            let end = tokio::time::timeout(DEADLINE, run::run(parts, stop, observe)).await;
            Ok::<_, Error>(end.expect("the run does not end").expect("a thread can be started"))
        });
        match end {
            Ok(end) => Session::Ran { end: Box::new(end), sent: self.sent(number) },
            Err(error) => Session::NotOpened(error),
        }
    }

    /// What a run is put together from. Opening the journals comes first: nothing else touches the disk under test.
    async fn parts(&self, storage: &FaultyStorage, session: u64) -> Result<RunParts, Error> {
        let shared: Arc<dyn Storage> = Arc::new(storage.clone());
        storage.create_dir_all(Path::new("run")).unwrap();
        let (responses, _) = Journal::open(Arc::clone(&shared), Path::new(RESPONSES))?;
        let (failures, _) = Journal::open(shared, Path::new(FAILURES))?;
        let index = index(storage);
        let (mut done_before, mut failed_before) = (0, 0);
        let spec = DatasetSpec {
            inputs: vec![self.data.path().join("boats.jsonl").display().to_string()],
            ..DatasetSpec::default()
        };
        let mut is_done = |prompt: &eaglet_core::prompt::Prompt, key| {
            match index.known(prompt, key) {
                Known::Done => done_before += 1,
                Known::Failed => failed_before += 1,
                Known::New => return false,
            }
            true
        };
        let plan = eaglet_data::plan(&spec, &HubSettings::default(), self.data.path(), None, &mut is_done, &mut |_| {})
            .unwrap();
        let settings = settings();
        let header = format!("{SESSION_HEADER}: {session}");
        let endpoint = Endpoint::new(&self.server.url(), None, &[header]).unwrap();
        let client = Client::new(Rc::new(endpoint), settings.timeouts).unwrap();
        let server = server_info(&client, None, None).await.unwrap();
        let template =
            RequestTemplate::new(&server.model, &settings.sampling, &settings.extra_body, true, settings.token_ids)
                .unwrap();
        Ok(RunParts {
            settings,
            plan,
            done_before,
            failed_before,
            completion_tokens_before: index.totals.completion_tokens.clone(),
            servers: vec![(client, server)],
            joining: vec![],
            server_list: None,
            template,
            responses,
            failures,
            work: Work::Threads,
            inflight: None,
            row_failures: vec![],
            jitter_seed: 7,
        })
    }

    /// A session without faults on what an earlier one left; afterwards everything must be there once, also after a power cut,
    /// and only what was missing may have been asked.
    fn complete(&self, storage: &FaultyStorage, what: &str) {
        storage.heal();
        let before = found_by_a_new_process(storage);
        let (end, sent) = self.session(storage, |_, _| {}).ran(what);
        assert!(end.error.is_none(), "{what}: {:?}", end.error);
        assert_eq!((end.snapshot.done, end.snapshot.failed), (ANSWERED, REFUSED), "{what}");
        assert_eq!(sent, COUNT - before.total(), "{what}: found {before:?}");
        assert_complete(&found(&storage.crash(CrashMode::Dropped, 0)), what);
    }
}

fn settings() -> GenerateSettings {
    let moment = Duration::from_millis(1);
    GenerateSettings {
        retry: RetryPolicy { backoff_first: moment, ..RetryPolicy::default() },
        commit: CommitSettings {
            interval: moment,
            retry_first: moment,
            retry_max: moment,
            io_retries_max: 3,
            ..CommitSettings::default()
        },
        drain_deadline: DEADLINE,
        ..GenerateSettings::new(NonZeroUsize::new(2).unwrap())
    }
}

fn assert_conserved(snapshot: &Snapshot) {
    let s = snapshot;
    assert_eq!(s.planned, s.done + s.failed + s.in_flight + s.waiting + s.unsynced + s.not_started, "{s:?}");
}

/// The ids in the journals.
#[derive(Debug, Default)]
struct Found {
    answered: BTreeSet<String>,
    failed: BTreeSet<String>,
}

impl Found {
    fn total(&self) -> u64 {
        (self.answered.len() + self.failed.len()) as u64
    }
}

/// Whole lines of a journal; one that is not there has none.
fn lines(storage: &FaultyStorage, path: &str) -> Vec<Vec<u8>> {
    let content = storage.read(Path::new(path)).unwrap_or_default();
    content.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect()
}

fn index(storage: &FaultyStorage) -> RecordIndex {
    let mut index = RecordIndexBuilder::default();
    lines(storage, RESPONSES).iter().for_each(|line| index.add_response_line(line, 0));
    lines(storage, FAILURES).iter().for_each(|line| index.add_failure_line(line));
    index.build()
}

/// What is in the journals: each line must be whole, and no prompt may be there twice.
fn found(storage: &FaultyStorage) -> Found {
    let ids = |path: &str| {
        let mut ids = BTreeSet::new();
        for line in lines(storage, path) {
            let record: Value = serde_json::from_slice(&line)
                .unwrap_or_else(|e| panic!("{path}: {e}: {}", String::from_utf8_lossy(&line)));
            assert!(line.ends_with(b"\n"), "{path} ends inside a line");
            let id = record["sample_id"].as_str().unwrap().to_owned();
            assert!(ids.insert(id), "{path}: doubled: {record}");
        }
        ids
    };
    let found = Found { answered: ids(RESPONSES), failed: ids(FAILURES) };
    assert!(found.answered.is_disjoint(&found.failed), "{found:?}");
    found
}

/// What a new process finds once it has opened, and so repaired, the journals.
fn found_by_a_new_process(storage: &FaultyStorage) -> Found {
    storage.create_dir_all(Path::new("run")).unwrap();
    for path in [RESPONSES, FAILURES] {
        let shared: Arc<dyn Storage> = Arc::new(storage.clone());
        drop(Journal::open(shared, Path::new(path)).unwrap());
    }
    found(storage)
}

fn assert_complete(found: &Found, what: &str) {
    let failed = BTreeSet::from(["p2".to_owned()]);
    let answered: BTreeSet<String> = (0..COUNT).map(|n| format!("p{n}")).filter(|id| !failed.contains(id)).collect();
    assert_eq!((&found.answered, &found.failed), (&answered, &failed), "{what}");
}

/// What the run called done must be found by the next process, and must survive if the power goes now.
fn assert_nothing_acknowledged_is_lost(storage: &FaultyStorage, end: &RunEnd, what: &str) {
    storage.heal();
    for (disk, which) in
        [(storage.crash(CrashMode::Dropped, 0), "after a power cut"), (storage.clone(), "by a new process")]
    {
        let found = found_by_a_new_process(&disk);
        assert!(
            found.answered.len() as u64 >= end.snapshot.done,
            "{what}: {which}: {found:?}, done {}",
            end.snapshot.done
        );
        assert!(found.failed.len() as u64 >= end.snapshot.failed, "{what}: {which}: {found:?}");
    }
}

fn plan(operation: Operation, fault: Fault, persistence: Persistence) -> FaultPlan {
    FaultPlan { operation, nth: 1, fault, persistence }
}

/// Runs `check` on a new disk with the fault at the first, second, … operation until it does not strike; returns how often it did.
fn for_each_operation(mut plan: FaultPlan, mut check: impl FnMut(&FaultyStorage, &str) -> u64) -> u64 {
    for nth in 1..OPERATIONS_MAX {
        plan.nth = nth;
        let storage = FaultyStorage::new();
        storage.plan(plan);
        if check(&storage, &format!("{plan:?}")) == 0 {
            return nth - 1;
        }
    }
    panic!("the fault never stops to strike: {plan:?}");
}

#[test]
fn after_a_run_a_power_cut_takes_nothing() {
    let stage = Stage::new();
    let storage = FaultyStorage::new();
    let (end, sent) = stage.session(&storage, |_, _| {}).ran("no fault");
    assert!(end.error.is_none() && !end.stopped);
    assert_eq!((end.snapshot.done, end.snapshot.failed, end.unsaved, sent), (ANSWERED, REFUSED, 0, COUNT));
    for seed in 0..4 {
        assert_complete(&found(&storage.crash(CrashMode::Torn, seed)), "torn");
    }
    stage.complete(&storage.crash(CrashMode::Dropped, 0), "again");
}

/// A disk that fails once is outlived: nobody has to do anything, and no answer is asked for a second time.
#[test]
fn a_fault_that_strikes_once_is_outlived() {
    let stage = Stage::new();
    let plans = [
        plan(Operation::Any, Fault::NoSpace, Persistence::Once),
        plan(Operation::Any, Fault::Io, Persistence::Once),
        plan(Operation::Write, Fault::ShortWrite, Persistence::Once),
        plan(Operation::Write, Fault::ShortThenNoSpace, Persistence::Once),
    ];
    for plan in plans {
        let mut ran = 0;
        for_each_operation(plan, |storage, what| {
            let session = stage.session(storage, |_, _| {});
            let fired = storage.fired();
            match session {
                Session::NotOpened(error) => assert_eq!(error.class(), Class::Environment, "{what}"),
                Session::Ran { end, sent } => {
                    ran += u64::from(fired > 0);
                    assert!(end.error.is_none(), "{what}: {:?}", end.error);
                    assert_eq!((end.snapshot.done, end.snapshot.failed, sent), (ANSWERED, REFUSED, COUNT), "{what}");
                    assert_complete(&found(&storage.crash(CrashMode::Dropped, 0)), what);
                }
            }
            stage.complete(storage, what);
            fired
        });
        assert!(ran > 0, "{plan:?} never struck a run");
    }
}

#[test]
fn a_broken_disk_ends_the_run_and_what_was_done_is_safe() {
    let stage = Stage::new();
    let (mut failed, mut refused) = (0, 0);
    for operation in [Operation::Any, Operation::Write, Operation::Sync] {
        for_each_operation(plan(operation, Fault::Io, Persistence::Sticky), |storage, what| {
            let session = stage.session(storage, |_, _| {});
            let fired = storage.fired();
            storage.heal();
            // Where not even cutting the file works, the cache keeps records that a failed sync has lost, and no later process can
            // tell: such a disk is looked at after a restart of the machine.
            let disk = if operation == Operation::Any { storage.crash(CrashMode::Dropped, 0) } else { storage.clone() };
            match session {
                Session::NotOpened(error) => {
                    refused += 1;
                    assert_eq!(error.class(), Class::Environment, "{what}");
                }
                Session::Ran { end, .. } => {
                    if fired > 0 {
                        failed += 1;
                        let error = end.error.as_ref().unwrap_or_else(|| panic!("{what}: no error"));
                        assert_eq!(error.class(), Class::Environment, "{what}: {error}");
                        assert!(error.to_string().contains(".jsonl") && error.hint_text().is_some(), "{what}: {error}");
                        assert!(end.snapshot.done + end.snapshot.failed < COUNT, "{what}");
                    }
                    assert_nothing_acknowledged_is_lost(&disk, &end, what);
                }
            }
            stage.complete(&disk, what);
            fired
        });
    }
    assert!(failed > 0 && refused > 0, "{failed} runs failed, {refused} did not begin");
}

/// A full disk pauses the run; room that somebody makes ends the pause.
#[test]
fn a_full_disk_is_waited_for() {
    let stage = Stage::new();
    let mut waited = 0;
    for operation in [Operation::Write, Operation::Sync] {
        for_each_operation(plan(operation, Fault::NoSpace, Persistence::Sticky), |storage, what| {
            let (mut blocked, mut unblocked) = (0, 0);
            let session = stage.session(storage, |event, _| match event {
                Event::DiskBlocked { reason } => {
                    assert!(reason.contains(".jsonl"), "{reason}");
                    blocked += 1;
                    storage.heal();
                }
                Event::DiskUnblocked => unblocked += 1,
                _ => {}
            });
            let fired = storage.fired();
            match session {
                Session::NotOpened(error) => assert_eq!((error.class(), blocked), (Class::Environment, 0), "{what}"),
                Session::Ran { end, sent } => {
                    waited += blocked;
                    assert_eq!(blocked, u64::from(fired > 0), "{what}");
                    assert_eq!(blocked, unblocked, "{what}");
                    assert!(end.error.is_none(), "{what}: {:?}", end.error);
                    assert_eq!((end.snapshot.done, end.snapshot.failed, sent), (ANSWERED, REFUSED, COUNT), "{what}");
                    assert_complete(&found(&storage.crash(CrashMode::Dropped, 0)), what);
                }
            }
            stage.complete(storage, what);
            fired
        });
    }
    assert!(waited > 0, "no run was ever blocked");
}

fn ask_to_leave(sender: &watch::Sender<Stop>) {
    // Nobody hears it only when the run has ended.
    let _ = sender.send(Stop::Abort);
}

/// Whoever does not want to wait for a full disk can leave: the run says how many answers it could not save, and counts none as done.
#[test]
fn leaving_a_full_disk_tells_what_could_not_be_saved() {
    let stage = Stage::new();
    let storage = FaultyStorage::new();
    // Both journals are there and have their names: what fails from now on is the writing of records.
    stage.session(&storage, |_, sender| ask_to_leave(sender)).ran("stopped at once");
    let before = found(&storage).total();
    storage.plan(plan(Operation::Write, Fault::NoSpace, Persistence::Sticky));
    let (end, _) = stage
        .session(&storage, |event, sender| {
            if matches!(event, Event::DiskBlocked { .. }) {
                ask_to_leave(sender);
            }
        })
        .ran("full");
    let error = end.error.as_ref().unwrap();
    assert_eq!((error.class(), end.stopped), (Class::Environment, true));
    assert!(
        end.unsaved > 0 && error.to_string().contains(&end.unsaved.to_string()),
        "{error}, unsaved {}",
        end.unsaved
    );
    assert_eq!(end.snapshot.done + end.snapshot.failed, before);
    assert_nothing_acknowledged_is_lost(&storage, &end, "full");
    stage.complete(&storage, "room again");
}

#[test]
fn a_power_cut_at_any_operation_loses_nothing_that_counted() {
    let stage = Stage::new();
    let mut cut = 0;
    for_each_operation(plan(Operation::Any, Fault::PowerCut, Persistence::Sticky), |storage, what| {
        let session = stage.session(storage, |_, _| {});
        let fired = storage.fired();
        for (seed, mode) in
            [CrashMode::Dropped, CrashMode::Kept, CrashMode::Torn, CrashMode::Torn].into_iter().enumerate()
        {
            let what = format!("{what}, {mode:?} {seed}");
            let disk = storage.crash(mode, seed as u64);
            if let Session::Ran { end, .. } = &session {
                assert_nothing_acknowledged_is_lost(&disk, end, &what);
            }
            stage.complete(&disk, &what);
        }
        cut += u64::from(fired > 0);
        fired
    });
    assert!(cut > 8, "the power went only {cut} times");
}
