//! The server goes away while requests are out, stays away, comes back as itself or as another one; or refuses everybody. Nothing is
//! lost, nothing is doubled, and no prompt pays for it.

#![allow(clippy::unwrap_used)]

mod common;

use common::{CHAT, Place, Running, all_ids, model_list, wait_until};
use eaglet_testkit::server::{Answer, Rule, Script, ScriptedServer};
use serde_json::json;
use std::collections::BTreeSet;

const PROMPTS: usize = 48;
const COMPLETIONS: &str = "/v1/completions";
const CONCURRENCY: usize = 8;

/// Paced so that a run takes a few seconds and requests are always out.
fn paced() -> Script {
    Script::new().answer(Answer { mean_tokens: 20, token_ms: 15.0, ..Answer::default() })
}

/// A run in the middle: some prompts done, as many as allowed out. Not one retry is granted.
fn in_the_middle(place: &Place, server: &ScriptedServer) -> Running {
    let concurrency = CONCURRENCY.to_string();
    let running =
        place.start(place.generate(&server.url(), &["--concurrency", &concurrency, "--max-retries", "0", "--json"]));
    wait_until("some answers, and many requests out", || {
        place.record_lines() >= CONCURRENCY && server.in_flight() >= CONCURRENCY / 2
    });
    running
}

fn wait_for_event(place: &Place, event: &str) {
    wait_until(event, || place.events().iter().any(|found| found == event));
}

fn went_well(place: &Place, running: Running) {
    let end = running.ended().expect(0);
    assert_eq!(place.ids(), all_ids(PROMPTS));
    assert!(place.failures().is_empty(), "{:?}", place.failures());
    let snapshot = end.json();
    let causes: Vec<&String> = snapshot["retries_by_cause"].as_object().unwrap().keys().collect();
    assert_eq!(causes, ["server_down"], "nothing else may have been counted");
    let events = place.events();
    assert!(events.contains(&"server_down".to_owned()) && events.contains(&"server_up".to_owned()), "{events:?}");
}

#[test]
fn a_killed_server_that_comes_back_costs_nothing() {
    let place = Place::with_count(PROMPTS);
    let server = ScriptedServer::start(paced());
    let running = in_the_middle(&place, &server);
    server.stop_resetting();
    let before = place.ids();
    wait_for_event(&place, "server_down");
    let port = server.port();
    drop(server);
    let back = ScriptedServer::start_on(port, paced());
    went_well(&place, running);
    let again: BTreeSet<String> = common::asked(&back).into_iter().collect();
    let texts = |id: &String| format!("Tell me about the number {}.", &id[1..]);
    assert!(before.iter().map(texts).all(|done| !again.contains(&done)), "what was done is asked again");
}

/// As vLLM does on SIGTERM: the listener is closed, the open streams stay open and silent.
#[test]
fn a_server_that_hangs_and_comes_back_costs_nothing() {
    let place = Place::with_count(PROMPTS);
    let server = ScriptedServer::start(paced());
    let running = in_the_middle(&place, &server);
    server.stop_hanging();
    wait_for_event(&place, "server_down");
    // The old one still holds its connections open, and silent.
    let back = ScriptedServer::start_on(server.port(), paced());
    went_well(&place, running);
    assert!(back.requests_on(CHAT).len() >= CONCURRENCY);
}

#[test]
fn another_model_on_the_same_port_ends_the_run_and_loses_nothing() {
    let place = Place::with_count(PROMPTS);
    let server = ScriptedServer::start(paced());
    let running = in_the_middle(&place, &server);
    server.stop_resetting();
    wait_for_event(&place, "server_down");
    let port = server.port();
    drop(server);
    let mut other = paced();
    other.answer.model = "someone/else".to_owned();
    let other = ScriptedServer::start_on(port, other);
    let end = running.ended().expect(3);
    assert!(end.complaint().contains("someone/else") && end.complaint().contains("hint:"), "{}", end.stderr);
    assert!(place.failures().is_empty(), "{:?}", place.failures());
    let done = place.ids();
    drop(other);
    let right = ScriptedServer::start_on(port, paced());
    place.run(place.generate(&right.url(), &[])).expect(0);
    assert_eq!(place.ids(), all_ids(PROMPTS));
    let sent = right.requests_on(CHAT).len() + right.requests_on(COMPLETIONS).len();
    assert_eq!(sent, PROMPTS - done.len(), "what was begun goes on, the rest is asked");
}

/// The name is the same, what is behind it is not: not one prompt may be answered by it.
#[test]
fn another_model_under_the_same_name_answers_nothing() {
    let place = Place::with_count(PROMPTS);
    let server = ScriptedServer::start(paced().rule(model_list("fake/model", "/models/one")));
    let running = in_the_middle(&place, &server);
    server.stop_resetting();
    wait_for_event(&place, "server_down");
    let port = server.port();
    drop(server);
    let other = ScriptedServer::start_on(port, paced().rule(model_list("fake/model", "/models/two")));
    let end = running.ended().expect(3);
    assert!(end.complaint().contains("/models/one before, /models/two now"), "{}", end.stderr);
    assert_eq!(other.requests_on(CHAT).len(), 0, "prompts went to another model");
    assert!(place.failures().is_empty());
}

#[test]
fn a_wrong_key_for_all_stops_the_run_and_burns_no_prompt() {
    for prompts in [3, 60] {
        let refusal = json!({"error": {"message": "invalid key", "code": 401}}).to_string();
        let server = ScriptedServer::start(Script::new().rule(Rule::on_chat().status(401).text(&refusal)));
        let place = Place::with_count(prompts);
        let end = place.run(place.generate(&server.url(), &["--concurrency", "4"])).expect(3);
        assert!(end.complaint().contains("401") && end.complaint().contains("hint:"), "{}", end.stderr);
        assert!(place.failures().is_empty() && place.records().is_empty());
        assert!(
            server.requests_on(CHAT).len() <= 16,
            "{} prompts were sent into a wall",
            server.requests_on(CHAT).len()
        );
        drop(server);
        let healthy = ScriptedServer::start(Script::new());
        place.run(place.generate(&healthy.url(), &[])).expect(0);
        assert_eq!(place.ids(), all_ids(prompts));
    }
}

#[test]
fn a_model_nobody_knows_and_a_server_that_fails_all_stop_the_run_too() {
    for (status, body, retries) in [
        (404, "{\"error\": {\"message\": \"no such model\"}}", "0"),
        (500, "oops", "0"),
        (400, "{\"detail\": \"unknown field\"}", "0"),
    ] {
        let server = ScriptedServer::start(Script::new().rule(Rule::on_chat().status(status).text(body)));
        let place = Place::with_count(80);
        let end = place.run(place.generate(&server.url(), &["--concurrency", "4", "--max-retries", retries])).expect(3);
        assert!(end.complaint().contains(&status.to_string()) && end.complaint().contains("hint:"), "{}", end.stderr);
        assert!(place.failures().is_empty(), "{status}: {:?}", place.failures());
        assert!(server.requests_on(CHAT).len() < 80);
    }
}

#[test]
fn a_probe_finds_a_wrong_key_before_any_prompt_is_sent() {
    let server =
        ScriptedServer::start(Script::new().rule(Rule::on_chat().status(401).text("{\"error\": \"Unauthorized\"}")));
    let place = Place::with_count(5);
    let mut command =
        common::eaglet(&["generate", "--output-dir", "run", "--dataset", "data.jsonl", "--url", &server.url()]);
    command.args(["--concurrency", "4"]);
    let end = place.run(command).expect(3);
    assert!(end.complaint().contains("--api-key-env"), "{}", end.stderr);
    assert_eq!(server.requests_on(CHAT).len(), 1);
    assert!(place.records().is_empty() && place.failures().is_empty());
}

/// One prompt refused among many that are answered is that prompt's own trouble.
#[test]
fn a_prompt_that_alone_is_refused_is_listed_and_the_run_goes_on() {
    let server = ScriptedServer::start(
        Script::new().rule(Rule::on_chat().contains("number 7.").status(400).text("{\"detail\": \"not this one\"}")),
    );
    let place = Place::with_count(20);
    place.run(place.generate(&server.url(), &["--concurrency", "2"])).expect(1);
    let failure = place.failure("q7");
    assert_eq!((&failure["failed_as"], &failure["cause"]), (&json!("rejected"), &json!("bad_request")));
    assert_eq!(place.records().len(), 19);
    let tolerant = Place::with_count(20);
    tolerant.run(tolerant.generate(&server.url(), &["--failure-tolerance", "0.05"])).expect(0);
    assert_eq!(tolerant.failures().len(), 1);
}
