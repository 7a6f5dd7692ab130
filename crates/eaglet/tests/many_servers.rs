//! Several servers behind one run: they share the load, one may die, another model is refused, the list may change. And one server that
//! asks for less.

#![allow(clippy::unwrap_used)]

mod common;

use common::{CHAT, Place, all_ids, model_list, wait_until};
use eaglet_testkit::server::{Answer, Rule, Script, ScriptedServer};
use serde_json::Value;
use std::collections::BTreeSet;

const PROMPTS: usize = 60;

/// Paced so that a run takes a few seconds and requests are always out.
fn paced() -> Script {
    Script::new().answer(Answer { mean_tokens: 20, token_ms: 15.0, ..Answer::default() })
}

/// The servers that records name.
fn endpoints(place: &Place) -> BTreeSet<String> {
    place.records().iter().map(|record| common::text(&record["endpoint"])).collect()
}

fn wait_for_event(place: &Place, event: &str) {
    wait_until(event, || place.events().iter().any(|found| found == event));
}

#[test]
fn two_servers_share_the_load() {
    let (one, two) = (ScriptedServer::start(paced()), ScriptedServer::start(paced()));
    let place = Place::with_count(PROMPTS);
    let end = place.run(place.generate(&one.url(), &["--url", &two.url(), "--concurrency", "4", "--json"])).expect(0);
    assert_eq!(place.ids(), all_ids(PROMPTS));
    assert_eq!(endpoints(&place), BTreeSet::from([one.url(), two.url()]));
    for server in [&one, &two] {
        let share = server.requests_on(CHAT).len();
        assert!((PROMPTS / 4..=PROMPTS * 3 / 4).contains(&share), "{share} of {PROMPTS}");
        assert!(server.max_in_flight() <= 4, "the number is for each server: {}", server.max_in_flight());
    }
    let servers = end.json()["servers"].as_array().unwrap().clone();
    let limits: Vec<&Value> = servers.iter().map(|server| &server["limit"]).collect();
    assert_eq!(limits, [4, 4]);
}

#[test]
fn a_server_killed_in_the_middle_loses_nothing() {
    let (one, two) = (ScriptedServer::start(paced()), ScriptedServer::start(paced()));
    let place = Place::with_count(PROMPTS);
    let flags = ["--url", &two.url(), "--concurrency", "4", "--max-retries", "0", "--json"];
    let running = place.start(place.generate(&one.url(), &flags));
    wait_until("both are at work", || one.in_flight() > 0 && two.in_flight() > 0 && place.record_lines() > 4);
    one.stop_resetting();
    let end = running.ended().expect(0);
    assert_eq!(place.ids(), all_ids(PROMPTS));
    assert!(place.failures().is_empty(), "{:?}", place.failures());
    assert!(two.requests_on(CHAT).len() > PROMPTS / 2);
    assert!(end.stderr.contains("its prompts go to the other servers"), "{}", end.stderr);
    assert!(!end.stderr.contains("paused"), "one server is enough to go on: {}", end.stderr);
}

#[test]
fn all_servers_down_pause_the_run() {
    let (one, two) = (ScriptedServer::start(paced()), ScriptedServer::start(paced()));
    let place = Place::with_count(PROMPTS);
    let flags = ["--url", &two.url(), "--concurrency", "4", "--max-retries", "0"];
    let running = place.start(place.generate(&one.url(), &flags));
    wait_until("both are at work", || one.in_flight() > 0 && two.in_flight() > 0 && place.record_lines() > 4);
    one.stop_resetting();
    two.stop_resetting();
    wait_until("it says that it waits", || place.progress().is_some_and(|progress| progress["phase"] == "server_down"));
    let port = two.port();
    drop(two);
    let back = ScriptedServer::start_on(port, paced());
    running.ended().expect(0);
    assert_eq!(place.ids(), all_ids(PROMPTS));
    assert!(place.failures().is_empty(), "{:?}", place.failures());
    assert!(!back.requests_on(CHAT).is_empty());
}

#[test]
fn a_server_that_cannot_be_reached_at_the_start_joins_later() {
    let one = ScriptedServer::start(paced());
    let free = ScriptedServer::start(Script::new());
    let port = free.port();
    drop(free);
    let place = Place::with_count(PROMPTS * 4);
    let late = format!("http://127.0.0.1:{port}");
    let running = place.start(place.generate(&one.url(), &["--url", &late, "--concurrency", "3"]));
    wait_until("it began", || place.record_lines() > 2);
    let two = ScriptedServer::start_on(port, paced());
    wait_for_event(&place, "server_added");
    let end = running.ended().expect(0);
    assert_eq!(place.ids(), all_ids(PROMPTS * 4));
    assert!(!two.requests_on(CHAT).is_empty());
    assert!(end.stderr.contains("it joins the run when it can be reached"), "{}", end.stderr);
}

#[test]
fn another_model_is_refused_before_anything_is_sent() {
    let other = Answer { model: "someone/else".to_owned(), ..Answer::default() };
    let by_name = Script::new().answer(other);
    let by_root = Script::new().rule(model_list("fake/model", "/models/two"));
    for script in [by_name, by_root] {
        let one = ScriptedServer::start(Script::new().rule(model_list("fake/model", "/models/one")));
        let two = ScriptedServer::start(script);
        let place = Place::with_count(3);
        let end = place.run(place.generate(&one.url(), &["--url", &two.url()])).expect(3);
        let complaint = end.complaint();
        assert!(complaint.contains(&two.url()) && complaint.contains("serve"), "{complaint}");
        assert_eq!(complaint.lines().filter(|line| line.starts_with("error:")).count(), 1, "{complaint}");
        assert!(one.requests_on(CHAT).is_empty() && two.requests_on(CHAT).is_empty());
    }
}

#[test]
fn the_list_of_servers_may_change_while_the_run_goes_on() {
    let (one, two) = (ScriptedServer::start(paced()), ScriptedServer::start(paced()));
    let place = Place::with_count(PROMPTS * 4);
    let list = place.write("servers", format!("# ours\n{}\n", one.url()));
    let mut command = common::eaglet(&["generate", "--output-dir", "run", "--dataset", "data.jsonl", "--no-probe"]);
    command.args(["--sync-interval", "50ms", "--concurrency", "3", "--max-retries", "0", "--url-file"]).arg(&list);
    let running = place.start(command);
    wait_until("it began", || place.record_lines() > 2);
    std::fs::write(&list, format!("{}\n{}  # new\n", one.url(), two.url())).unwrap();
    wait_until("the new one is at work", || two.in_flight() > 0);
    std::fs::write(&list, format!("{}\n", two.url())).unwrap();
    wait_for_event(&place, "server_removed");
    let asked = one.requests_on(CHAT);
    assert!(asked.iter().all(|request| request.answered), "what was out was finished");
    running.ended().expect(0);
    assert_eq!(place.ids(), all_ids(PROMPTS * 4));
    assert_eq!(one.requests_on(CHAT).len(), asked.len(), "nothing was sent after it was taken off the list");
    assert!(place.failures().is_empty(), "{:?}", place.failures());
}

#[test]
fn an_empty_or_missing_list_is_a_usage_error() {
    let place = Place::with_count(1);
    place.write("empty", "# nobody\n");
    for (file, said) in [("empty", "lists no server"), ("nowhere", "cannot read")] {
        let mut command = common::eaglet(&["generate", "--output-dir", "run", "--dataset", "data.jsonl", "--no-probe"]);
        command.args(["--url-file", file]);
        let end = place.run(command);
        assert!(matches!(end.code, Some(2 | 3)) && end.complaint().contains(said), "{end:?}");
    }
}

/// Auto is the default: it climbs, and what it did stands in the events with its reason.
#[test]
fn auto_climbs_and_says_why() {
    let server = ScriptedServer::start(paced());
    let place = Place::with_count(600);
    let end = place.run(place.generate(&server.url(), &["--json"])).expect(0);
    assert_eq!(place.ids(), all_ids(600));
    assert!(server.max_in_flight() > 16, "it never left its first limit");
    let events = common::lines(&place.run_file("events.jsonl"));
    let change = events.iter().find(|event| event["event"] == "limit_changed").unwrap();
    assert_eq!((&change["from"], &change["to"]), (&Value::from(16), &Value::from(32)), "{change}");
    assert!(common::text(&change["reason"]).contains("the rate still grows"), "{change}");
    assert!(!end.stderr.contains("limit 16 -> 32"), "the screen shows the limit, not its history: {}", end.stderr);
    let log = std::fs::read_to_string(place.run_file("inference.log")).unwrap();
    assert!(log.contains("limit 16 -> 32"), "{log}");
}

#[test]
fn a_burst_of_refusals_lowers_the_limit_and_loses_nothing() {
    let busy = Rule::on_chat().nth(40..50).status(429).text("busy");
    let server = ScriptedServer::start(paced().rule(busy));
    let place = Place::with_count(300);
    place.run(place.generate(&server.url(), &["--concurrency-max", "16"])).expect(0);
    assert_eq!(place.ids(), all_ids(300));
    assert!(place.failures().is_empty(), "{:?}", place.failures());
    let events = common::lines(&place.run_file("events.jsonl"));
    let lowered = events
        .iter()
        .find(|event| common::text(event.get("reason").unwrap_or(&Value::from(""))).contains("asked for less"));
    assert!(lowered.is_some_and(|change| change["to"].as_u64() >= Some(8)), "{events:?}");
    assert!(server.max_in_flight() <= 16);
}
