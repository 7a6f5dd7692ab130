//! The program or its server is killed while long answers are out: they go on from where they were, the records are those of a run
//! without accidents, and hardly a token is generated twice.

#![allow(clippy::unwrap_used)]

mod common;

use common::{CHAT, Place, all_ids, asked, text, wait_until};
use eaglet_testkit::server::{Answer, Reasoning, Rule, Script, ScriptedServer};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;

const COMPLETIONS: &str = "/v1/completions";

fn answers(mean_tokens: usize, token_ms: f64) -> Answer {
    Answer {
        mean_tokens,
        token_ms,
        spread: 0.2,
        reasoning: Reasoning::Reasoning,
        think_token: true,
        ..Answer::default()
    }
}

fn server(answer: Answer) -> ScriptedServer {
    ScriptedServer::start(Script::new().answer(answer))
}

/// Tokens that a server has generated in all, as its gauges tell.
fn generated(server: &ScriptedServer) -> u64 {
    let mut stream = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let line = reply.lines().find(|line| line.starts_with("vllm:generation_tokens_total")).unwrap();
    line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64
}

/// What must be the same whether a run was interrupted or not.
fn essence(place: &Place) -> BTreeMap<String, Value> {
    let essence = |record: &Value| {
        json!([
            record["status"],
            record["finish_reason"],
            record["reasoning"],
            record["content"],
            record["prompt_token_ids"],
            record["token_ids"],
            record["completion_tokens"],
            record["earlier_turns"]
                .as_array()
                .map(|turns| turns.iter().map(|t| t["token_ids"].clone()).collect::<Vec<_>>())
        ])
    };
    assert_eq!(place.ids().len(), place.records().len());
    place.records().iter().map(|record| (text(&record["sample_id"]), essence(record))).collect()
}

fn uninterrupted(count: usize, answer: &Answer, more: &[&str]) -> BTreeMap<String, Value> {
    let (place, server) =
        (Place::with_count(count), server(Answer { token_ms: 0.0, first_token_ms: 0.0, ..answer.clone() }));
    place.run(place.generate(&server.url(), more)).expect(0);
    essence(&place)
}

fn ids_in(records: &[Value]) -> u64 {
    records.iter().map(|record| record["token_ids"].as_array().unwrap().len() as u64).sum()
}

#[test]
fn a_run_killed_in_the_middle_of_long_answers_generates_hardly_a_token_twice() {
    const STREAMS: usize = 64;
    let answer = answers(900, 16.0);
    let expected = uninterrupted(STREAMS, &answer, &["--concurrency", "64"]);
    let (place, server) = (Place::with_count(STREAMS), server(answer));
    let more = ["--concurrency", "64", "--checkpoint-interval", "200ms"];
    let running = place.start(place.generate(&server.url(), &more));
    wait_until("two thirds of all tokens", || generated(&server) >= (STREAMS * 600) as u64);
    running.signal(Signal::KILL);
    assert_eq!(running.ended().code, None);
    wait_until("the server has seen it", || server.in_flight() == 0);
    let streamed = generated(&server);
    let end = place.run(place.generate(&server.url(), &[&more[..], &["--json"]].concat())).expect(0);
    assert_eq!(place.ids(), all_ids(STREAMS), "each prompt once");
    assert_eq!(essence(&place), expected);
    let again = generated(&server) - ids_in(&place.records());
    assert!(again * 100 < streamed * 3, "{again} of {streamed} tokens were generated again");
    let continued = end.json()["continued"].clone();
    assert!(continued["tokens_kept"].as_u64().unwrap() * 100 > streamed * 90, "{continued}");
    assert!(end.stderr.contains("unfinished answers") && end.stderr.contains("\ncontinued "), "{}", end.stderr);
    assert!(!place.run_file("inflight.bin").exists(), "nothing is unfinished any more");
    for record in place.records() {
        let flags = record["flags"].as_array().cloned().unwrap_or_default();
        assert!(flags.is_empty(), "{flags:?}");
        let why = |n: usize| record["segments"][n]["why"].as_str().map(str::to_owned);
        if record["segments"].is_array() {
            assert_eq!((why(0).as_deref(), why(1).as_deref()), (Some("session_ended"), Some("stop")));
        }
    }
}

#[test]
fn a_server_that_dies_and_comes_back_goes_on_with_what_was_out() {
    for dies in [ScriptedServer::stop_resetting as fn(&ScriptedServer), ScriptedServer::stop_hanging] {
        let answer = answers(120, 10.0);
        let expected = uninterrupted(16, &answer, &[]);
        let (place, first) = (Place::with_count(16), server(answer.clone()));
        let running = place.start(place.generate(&first.url(), &["--concurrency", "16", "--json"]));
        wait_until("half of the tokens", || generated(&first) >= 16 * 60);
        dies(&first);
        wait_until("it is down", || place.events().contains(&"server_down".to_owned()));
        let back = ScriptedServer::start_on(first.port(), Script::new().answer(answer));
        let end = running.ended().expect(0);
        assert_eq!(essence(&place), expected);
        assert!(back.requests_on(COMPLETIONS).len() >= 14, "{}", back.requests_on(COMPLETIONS).len());
        let kept = end.json()["continued"]["tokens_kept"].as_u64().unwrap();
        assert!(kept > 16 * 50, "{kept}");
        let told = place.records().iter().filter(|record| record["segments"][0]["why"] == "server_down").count();
        assert!(told >= 14, "{told}");
    }
}

/// A conversation is taken up at the turn where it was, with the turns before it.
#[test]
fn a_conversation_killed_in_its_second_turn_is_not_asked_for_its_first_again() {
    let place = Place::new();
    let rows = (0..4).map(|n| {
        let say = |role: &str, text: String| json!({"role": role, "content": text});
        json!({"id": format!("q{n}"), "messages": [say("user", format!("First {n}.")), say("assistant", "theirs".into()),
            say("user", format!("Second {n}."))]})
    });
    place.write_rows("data.jsonl", rows.clone());
    let more = ["--turns", "all", "--concurrency", "4", "--checkpoint-interval", "50ms"];
    let expected = {
        let (calm, fast) = (Place::new(), server(answers(60, 0.0)));
        calm.write_rows("data.jsonl", rows);
        calm.run(calm.generate(&fast.url(), &more)).expect(0);
        essence(&calm)
    };
    let slow = server(answers(60, 20.0));
    let running = place.start(place.generate(&slow.url(), &more));
    wait_until("all are in their second turn, and well in it", || {
        asked(&slow).iter().filter(|text| text.starts_with("Second")).count() == 4 && generated(&slow) > 4 * 90
    });
    running.signal(Signal::KILL);
    running.ended();
    let fast = server(answers(60, 0.0));
    place.run(place.generate(&fast.url(), &more)).expect(0);
    assert_eq!(essence(&place), expected);
    assert!(asked(&fast).iter().all(|text| text.starts_with("Second")), "{:?}", asked(&fast));
    assert!(!fast.requests_on(COMPLETIONS).is_empty());
}

/// A session that is killed with answers out; returns the place.
fn killed(more: &[&str]) -> Place {
    let (place, slow) = (Place::with_count(4), server(answers(80, 20.0)));
    let running = place.start(place.generate(&slow.url(), &[&["--checkpoint-interval", "50ms"], more].concat()));
    wait_until("answers that are well under way", || generated(&slow) > 4 * 30);
    running.signal(Signal::KILL);
    running.ended();
    place
}

#[test]
fn answers_of_other_settings_are_not_continued() {
    let place = killed(&["--temperature", "0.5"]);
    let fast = server(answers(80, 0.0));
    place.run(place.generate(&fast.url(), &["--temperature", "0.7", "--allow-config-change"])).expect(0);
    assert_eq!((fast.requests_on(COMPLETIONS).len(), fast.requests_on(CHAT).len()), (0, 4));
}

#[test]
fn no_continue_starts_again_and_a_damaged_file_stops_nobody() {
    let place = killed(&[]);
    let fast = server(answers(80, 0.0));
    place.run(place.generate(&fast.url(), &["--no-continue"])).expect(0);
    assert_eq!((fast.requests_on(COMPLETIONS).len(), fast.requests_on(CHAT).len()), (0, 4));
    for damage in [b"nonsense".to_vec(), vec![], vec![0; 4096]] {
        let place = killed(&[]);
        std::fs::write(place.run_file("inflight.bin"), damage).unwrap();
        let fast = server(answers(80, 0.0));
        place.run(place.generate(&fast.url(), &[])).expect(0);
        assert_eq!((fast.requests_on(COMPLETIONS).len(), fast.requests_on(CHAT).len()), (0, 4));
        assert_eq!(place.ids(), all_ids(4));
    }
}

#[test]
fn a_prompt_with_tools_or_an_image_starts_again() {
    let place = Place::new();
    let tool = json!([{"type": "function", "function": {"name": "clock", "parameters": {}}}]);
    let image = json!([{"type": "text", "text": "See."}, {"type": "image_url", "image_url": {"url": "data:,"}}]);
    place.write_rows(
        "data.jsonl",
        [
            json!({"id": "q0", "messages": [{"role": "user", "content": "What time is it?"}], "tools": tool}),
            json!({"id": "q1", "messages": [{"role": "user", "content": image}]}),
        ],
    );
    let broken = Script::new().answer(answers(40, 0.0));
    let broken = broken.breaks(CHAT, 20, eaglet_testkit::server::End::Cut);
    let server = ScriptedServer::start(broken.breaks(CHAT, 20, eaglet_testkit::server::End::Cut));
    place.run(place.generate(&server.url(), &[])).expect(0);
    assert_eq!((server.requests_on(COMPLETIONS).len(), server.requests_on(CHAT).len()), (0, 4));
}

#[test]
fn truncated_answers_are_made_longer_and_the_flag_is_checked() {
    let expected = uninterrupted(6, &answers(100, 0.0), &["--max-completion-tokens", "60"]);
    let (place, fast) = (Place::with_count(6), server(answers(100, 0.0)));
    place.run(place.generate(&fast.url(), &["--max-completion-tokens", "20", "--continue-truncated", "2"])).expect(0);
    assert_eq!(essence(&place), expected);
    let record = place.record("q0");
    let tokens: Vec<u64> =
        record["segments"].as_array().unwrap().iter().map(|s| s["tokens"].as_u64().unwrap()).collect();
    assert_eq!(tokens.iter().sum::<u64>(), 60, "{tokens:?}");
    assert_eq!(place.run_json()["fingerprint"]["continue_truncated"], 2);
    let end = Place::with_count(1);
    let end = end.run(end.generate(&fast.url(), &["--no-stream", "--continue-truncated", "1"])).expect(2);
    assert!(end.complaint().contains("--continue-truncated needs streamed answers"), "{}", end.stderr);
}

/// Markers may be given as token ids, as for models whose markers nobody can type.
#[test]
fn reasoning_markers_may_be_token_ids() {
    let reply = json!({"choices": [{"message": {"role": "assistant", "content": "<think>why</think>because"}, "finish_reason": "stop"}]});
    let rule = Rule::on_chat().header("content-type", "application/json").text(&reply.to_string());
    let server = ScriptedServer::start(Script::new().rule(rule));
    let place = Place::with_count(1);
    place.run(place.generate(&server.url(), &["--reasoning-markers", "3,4"])).expect(0);
    assert_eq!((&place.record("q0")["reasoning"], &place.record("q0")["content"]), (&json!("why"), &json!("because")));
}
