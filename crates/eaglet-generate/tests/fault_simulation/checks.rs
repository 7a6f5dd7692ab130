//! What must hold: at every look, and at the end.

use super::case::{Case, Temper};
use super::common::{FAILURES, RESPONSES, index_of};
use eaglet_core::event::Event;
use eaglet_core::outcome::{Cause, FailedAs, Failure};
use eaglet_core::progress::Snapshot;
use eaglet_core::response::{Answer, Response};
use eaglet_core::storage::Storage;
use eaglet_data::Turns;
use eaglet_generate::retry::{Verdict, verdict};
use eaglet_generate::run::{Concurrency, GenerateSettings, Report};
use eaglet_serve::answer::{AnswerRule, Finish, Length, Limits, Plan};
use eaglet_serve::simulate::profile::Lengths;
use eaglet_serve::vocabulary::{EOS, THINK_CLOSE, decode};
use eaglet_testkit::faulty_storage::{CrashMode, FaultyStorage};
use std::collections::BTreeSet;
use std::path::Path;
use tokio::time::Instant;

/// A disk is looked at so often: at each of so many snapshots.
const LOOKS_AT_DISK: u64 = 8;

/// Hears what a run reports.
pub(crate) struct Watch {
    trace: Vec<String>,
    seen: BTreeSet<String>,
    concurrency: Concurrency,
    began: Instant,
    disk: FaultyStorage,
    /// What was told as done or failed so far.
    told: u64,
    looks: u64,
}

impl Watch {
    pub(crate) fn new(settings: &GenerateSettings) -> Self {
        let disk = FaultyStorage::new();
        let concurrency = settings.concurrency;
        // A clock that is not running yet: set anew when a session begins.
        Watch { trace: vec![], seen: BTreeSet::new(), concurrency, began: Instant::now(), disk, told: 0, looks: 0 }
    }

    /// What was reported, and of what kinds it was.
    pub(crate) fn take(&mut self) -> (Vec<String>, BTreeSet<String>) {
        (std::mem::take(&mut self.trace), std::mem::take(&mut self.seen))
    }

    pub(crate) fn begins(&mut self, disk: &FaultyStorage, done_before: u64) {
        if self.trace.is_empty() {
            self.began = Instant::now();
        }
        assert!(done_before <= records_on(disk));
        self.disk = disk.clone();
        self.told = 0;
    }

    /// The process is gone; this is what is left of its disk.
    pub(crate) fn died(&mut self, left: &FaultyStorage) {
        assert!(
            records_on(left) >= self.told,
            "{} records are left, {} were told as safe",
            records_on(left),
            self.told
        );
    }

    pub(crate) fn hear(&mut self, report: &Report) {
        let now = self.began.elapsed().as_millis();
        match report {
            Report::Snapshot(snapshot) => {
                let s = snapshot;
                let counts = [s.done, s.failed, s.in_flight, s.waiting, s.unsynced, s.not_started, s.tokens];
                self.trace.push(format!("{now} {counts:?}"));
                self.look(snapshot);
            }
            Report::Event(event) => {
                let told = format!("{event:?}");
                let kind = told.split(' ').next().unwrap_or_default();
                self.seen.insert(kind.to_owned());
                self.trace.push(format!("{now} {told}"));
                self.event(event);
            }
            Report::Retried { sample_id, detail } => {
                self.seen.insert(detail.split(':').next().unwrap_or_default().to_owned());
                self.trace.push(format!("{now} {sample_id}: {detail}"));
            }
        }
    }

    fn event(&self, event: &Event) {
        if let Event::LimitChanged { to, .. } = event {
            assert!((1..=self.concurrency.max() as u64).contains(to), "{event:?}");
        }
    }

    fn look(&mut self, s: &Snapshot) {
        let sum = s.done + s.failed + s.in_flight + s.waiting + s.unsynced + s.not_started;
        assert_eq!(sum, s.planned, "{s:?}");
        let max = self.concurrency.max() as u64;
        for server in &s.servers {
            assert!((1..=max).contains(&server.limit) && server.in_flight <= max, "{server:?}");
        }
        let leases: u64 = s.servers.iter().map(|server| server.in_flight).sum();
        assert!(s.in_flight <= leases, "{} requests out on {leases} leases: {s:?}", s.in_flight);
        assert!(s.done + s.failed >= self.told, "what has ended does not come back: {s:?}");
        self.told = s.done + s.failed;
        self.looks += 1;
        if self.looks.is_multiple_of(LOOKS_AT_DISK) {
            let safe = records_on(&self.disk.crash(CrashMode::Dropped, 0));
            assert!(safe >= self.told, "{safe} records are safe, {} are told as that", self.told);
        }
    }
}

fn lines(disk: &FaultyStorage, path: &str) -> Vec<Vec<u8>> {
    let bytes = disk.read(Path::new(path)).unwrap_or_default();
    // What follows the last newline is no record.
    bytes.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n")).map(<[u8]>::to_vec).collect()
}

fn records_on(disk: &FaultyStorage) -> u64 {
    [RESPONSES, FAILURES].iter().map(|path| lines(disk, path).len() as u64).sum()
}

/// Checks the records of a run that is complete. How many prompts failed, and how many answers were joined.
pub(crate) fn records(case: &Case, disk: &FaultyStorage) -> (usize, usize) {
    let index = index_of(disk);
    assert_eq!((index.totals.doubled, index.totals.unreadable), (0, 0));
    let responses: Vec<Response> =
        lines(disk, RESPONSES).iter().map(|line| serde_json::from_slice(line).unwrap()).collect();
    let failures: Vec<Failure> =
        lines(disk, FAILURES).iter().map(|line| serde_json::from_slice(line).unwrap()).collect();
    let ids: BTreeSet<String> = responses
        .iter()
        .map(|response| response.sample_id.to_string())
        .chain(failures.iter().map(|failure| failure.sample_id.as_ref().unwrap().to_string()))
        .collect();
    assert_eq!((ids.len(), responses.len() + failures.len()), (case.prompts, case.prompts), "each prompt once");
    let expect = Expect::of(case);
    for response in &responses {
        response.earlier_turns.iter().for_each(|turn| expect.check(&turn.answer, &response.sample_id.to_string()));
        expect.check(&response.answer, &response.sample_id.to_string());
    }
    failures.iter().for_each(|failure| legitimate(case, failure));
    let joined = responses.iter().filter(|response| response.answer.segments.len() > 1).count();
    (failures.len(), joined)
}

/// A prompt failed: the script must give the reason.
fn legitimate(case: &Case, failure: &Failure) {
    if case.settings.turns == Turns::All && failure.cause == Cause::ContextTooLong.label() {
        // The answers to its earlier turns have filled the context.
        return;
    }
    assert_eq!(case.temper, Temper::Strict, "{failure:?}");
    let charged = failure.attempts.iter().filter(|attempt| verdict(attempt.cause) == Verdict::Retry).count();
    match failure.failed_as {
        // More where an attempt brought so much that the count began anew.
        FailedAs::Exhausted => assert!(charged > case.settings.retry.retries_max as usize, "{failure:?}"),
        FailedAs::Rejected => {
            let refuses = case.scripts.iter().flatten().any(|line| line.contains("status=400"));
            let last = failure.attempts.last().map(|attempt| attempt.cause);
            assert!(refuses && last == Some(Cause::BadRequest), "{failure:?}");
        }
        other => panic!("failed as {other:?}: {failure:?}"),
    }
}

/// What a server says that nothing interrupts.
struct Expect<'a> {
    case: &'a Case,
    rule: AnswerRule,
}

impl<'a> Expect<'a> {
    fn of(case: &'a Case) -> Self {
        let share = case.profile.answers.reasoning_share;
        let length = Length::HeavyTailed(Lengths::new(&case.profile.answers));
        Expect { case, rule: AnswerRule { length, reasoning_share: share, think_token: share > 0.0, seed: case.seed } }
    }

    fn plan(&self, prompt: &[u32], max_tokens: usize) -> Plan {
        let room = self.case.profile.max_model_len - prompt.len();
        let max_tokens = max_tokens.min(room);
        self.rule.plan(prompt, Limits { max_tokens, min_tokens: 0, ignore_eos: false, choice: 0, seed: 0 })
    }

    fn check(&self, answer: &Answer, id: &str) {
        let prompt = answer.prompt_token_ids.as_deref().unwrap();
        let ids = answer.token_ids.as_deref().unwrap();
        let limit = self.case.settings.max_completion_tokens.map_or(usize::MAX, |limit| limit as usize);
        let rounds = self.case.settings.continuation.truncated_rounds as usize;
        // A server that is away, or refuses, may have kept a truncated answer from being made longer.
        let plans = (1..=rounds + 1).rev().map(|times| self.plan(prompt, limit.saturating_mul(times)));
        let plan = plans.into_iter().find(|plan| plan.ids == ids);
        let plan = plan.unwrap_or_else(|| panic!("{id} is not what the server would say: {answer:?}"));
        assert_eq!(answer.finish_reason, plan.finish.name(), "{id}: {answer:?}");
        assert!(answer.flags.is_empty(), "{id}: {:?}", answer.flags);
        let part = |range: &[u32]| {
            let text: Vec<u32> = range.iter().copied().filter(|id| ![EOS, THINK_CLOSE].contains(id)).collect();
            decode(&text)
        };
        let reasoning = plan.reasoning.min(ids.len());
        let (thought, said) = (part(&ids[..reasoning]), part(&ids[reasoning..]));
        let shown = |text: &Option<String>| text.clone().unwrap_or_default();
        if plan.finish == Finish::Stop {
            assert_eq!((shown(&answer.reasoning), shown(&answer.content)), (thought, said), "{id}: {answer:?}");
        }
        let told: u64 = answer.segments.iter().map(|segment| segment.tokens).sum();
        assert!(answer.segments.is_empty() || told == ids.len() as u64, "{id}: {:?}", answer.segments);
    }
}
