//! The books balance at every look: planned = done + failed + in flight + waiting + unsynced + not started.

#![allow(clippy::unwrap_used)]

mod common;

use common::{data_set, session, settings};
use eaglet_core::progress::{Phase, Snapshot};
use eaglet_generate::run::{Report, Stop};
use eaglet_testkit::faulty_storage::FaultyStorage;
use eaglet_testkit::server::{Answer, End, Rule, Script, ScriptedServer};

/// Everything that moves a prompt from one place to another: refusals, resets, requests to slow down, failures.
fn eventful(token_ms: f64) -> ScriptedServer {
    let answer = Answer { mean_tokens: 20, token_ms, ..Answer::default() };
    let busy = Rule::on_chat().nth((1..200).filter(|n| n % 5 == 0)).status(429).header("Retry-After", "1").text("busy");
    let reset = Rule::on_chat().nth((1..200).filter(|n| n % 7 == 0)).events(["{\"choices\": []}"]).end(End::Reset);
    let refused = Rule::on_chat().contains("item 3.").status(400).text("no");
    ScriptedServer::start(Script::new().answer(answer).rule(refused).rule(busy).rule(reset))
}

fn balanced(snapshot: &Snapshot) {
    let s = snapshot;
    let sum = s.done + s.failed + s.in_flight + s.waiting + s.unsynced + s.not_started;
    assert_eq!(sum, s.planned, "{s:?}");
    assert!(s.in_flight <= s.concurrency, "{s:?}");
}

#[test]
fn the_books_balance_at_every_look() {
    let server = eventful(15.0);
    let data = data_set(90);
    let (mut looks, mut last_done) = (0, 0);
    let end = session(&FaultyStorage::new(), &server.url(), data.path(), settings(8), |report, _| {
        if let Report::Snapshot(snapshot) = report {
            balanced(snapshot);
            assert!(snapshot.done >= last_done, "done prompts do not come back");
            last_done = snapshot.done;
            looks += 1;
        }
    })
    .unwrap();
    assert!(looks >= 3, "{looks} looks");
    assert!(server.max_in_flight() <= 8, "{}", server.max_in_flight());
    let last = end.snapshot;
    assert_eq!((last.phase, last.in_flight, last.waiting, last.unsynced, last.not_started), (Phase::Ended, 0, 0, 0, 0));
    assert_eq!(last.done + last.failed, 90);
    assert!(last.failed_by_cause.values().sum::<u64>() == last.failed && last.failed >= 1, "{last:?}");
    assert_eq!(last.by_status.values().sum::<u64>(), last.done);
    assert!(last.retries_by_cause.contains_key("overloaded"), "{:?}", last.retries_by_cause);
}

#[test]
fn an_aborted_run_puts_what_was_out_back() {
    let server = eventful(40.0);
    let data = data_set(60);
    let storage = FaultyStorage::new();
    let end = session(&storage, &server.url(), data.path(), settings(8), |report, stop| {
        if let Report::Snapshot(snapshot) = report {
            balanced(snapshot);
            if snapshot.done > 0 {
                stop.send_replace(Stop::Abort);
            }
        }
    })
    .unwrap();
    let last = end.snapshot;
    balanced(&last);
    assert_eq!((last.in_flight, last.unsynced), (0, 0), "{last:?}");
    assert!(end.stopped && end.error.is_none() && last.not_started > 0);
    let end = session(&storage, &server.url(), data.path(), settings(8), |_, _| {}).unwrap();
    assert_eq!(end.snapshot.done + end.snapshot.failed, 60);
}

/// What the breaker holds back when it stops a run is left for the next session: nobody waits for it.
#[test]
fn prompts_held_back_when_a_run_stops_are_as_if_never_sent() {
    let server = ScriptedServer::start(Script::new().rule(Rule::on_chat().status(401).text("no")));
    let data = data_set(20);
    let end = session(&FaultyStorage::new(), &server.url(), data.path(), settings(4), |_, _| {}).unwrap();
    let last = end.snapshot;
    balanced(&last);
    assert!(end.error.is_some());
    assert_eq!((last.waiting, last.in_flight, last.not_started), (0, 0, 20), "{last:?}");
}
