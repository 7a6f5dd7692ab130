//! Replies as the known servers send them, odd ones included: what becomes a record, with which status, and what does not.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Place, chunk, piece};
use eaglet_testkit::server::{Rule, Script, ScriptedServer};
use serde_json::{Value, json};

/// A whole reply with this choice.
fn whole(finish_reason: Value, message: Value, tokens: Option<u64>) -> String {
    let mut reply = json!({"id": "w", "object": "chat.completion", "choices": [{"index": 0, "finish_reason": finish_reason, "message": message}]});
    if let Some(tokens) = tokens {
        reply["usage"] = json!({"prompt_tokens": 5, "completion_tokens": tokens});
    }
    reply.to_string()
}

/// A server that answers the prompt `case NAME.` with the body of that name, and what the run made of it.
fn run(cases: Vec<(&str, Rule)>) -> Place {
    let mut script = Script::new();
    let place = Place::with_prompts(cases.iter().map(|(name, _)| (*name, format!("case {name}."))));
    for (name, rule) in cases {
        script = script.rule(rule.contains(&format!("case {name}.")));
    }
    let server = ScriptedServer::start(script);
    let end = place.run(place.generate(&server.url(), &["--max-retries", "1"]));
    assert!(matches!(end.code, Some(0 | 1)), "{}", end.stderr);
    place
}

fn text(body: String) -> Rule {
    Rule::on_chat().text(&body)
}

fn stream(events: Vec<String>) -> Rule {
    Rule::on_chat().events([events, vec!["[DONE]".to_owned()]].concat())
}

#[test]
fn reasoning_comes_under_either_name_and_is_kept_once() {
    let end = || vec![chunk(json!({}), json!("stop"))];
    let deltas = |fields: &[&str]| {
        let delta = |value: &str| {
            let members: serde_json::Map<String, Value> =
                fields.iter().map(|field| ((*field).to_owned(), json!(value))).collect();
            chunk(Value::Object(members), Value::Null)
        };
        stream([vec![delta("Ducks "), delta("swim."), piece("Yes"), piece(".")], end()].concat())
    };
    let empty_beside = |text: &str| chunk(json!({"reasoning": text, "content": ""}), Value::Null);
    let place = run(vec![
        ("new", deltas(&["reasoning"])),
        ("old", deltas(&["reasoning_content"])),
        ("both", deltas(&["reasoning", "reasoning_content"])),
        ("empty-beside", stream([vec![empty_beside("Ducks "), empty_beside("swim."), piece("Yes.")], end()].concat())),
        (
            "whole",
            text(whole(
                json!("stop"),
                json!({"content": "Yes.", "reasoning": "Ducks swim.", "reasoning_content": null}),
                Some(6),
            )),
        ),
        ("markers", stream([vec![piece("<think>Ducks "), piece("swim.</think>Yes.")], end()].concat())),
        (
            "differ",
            text(whole(
                json!("stop"),
                json!({"content": "Yes.", "reasoning": "Ducks swim.", "reasoning_content": "Geese fly."}),
                Some(6),
            )),
        ),
    ]);
    for record in place.records() {
        assert_eq!((&record["reasoning"], &record["content"]), (&json!("Ducks swim."), &json!("Yes.")), "{record}");
    }
    assert_eq!(place.records().len(), 7);
    let field = |id: &str| place.record(id)["reasoning_field"].clone();
    assert_eq!(
        [field("new"), field("old"), field("both"), field("markers")],
        ["reasoning", "reasoning_content", "both", "markers"]
    );
    let differ = place.record("differ");
    assert_eq!(differ["reasoning_content_differs"], "Geese fly.");
    assert!(differ["flags"].as_array().unwrap().contains(&json!("reasoning_fields_differ")));
}

#[test]
fn no_text_is_truncated_failed_or_empty_and_never_an_empty_answer() {
    let none = json!({"role": "assistant", "content": null, "reasoning": null});
    let thinking = json!({"content": null, "reasoning": "Counting she"});
    let place = run(vec![
        ("cut-in-reasoning", text(whole(json!("length"), thinking, Some(40)))),
        (
            "cut-streamed",
            stream(vec![
                chunk(json!({"content": null, "reasoning": "Counting she"}), Value::Null),
                chunk(json!({}), json!("length")),
            ]),
        ),
        (
            "cut-empty-string",
            text(whole(json!("length"), json!({"content": "", "reasoning_content": "Counting she"}), Some(40))),
        ),
        ("lost", text(whole(json!("stop"), none.clone(), Some(40)))),
        ("empty", text(whole(json!("stop"), none, Some(1)))),
    ]);
    for id in ["cut-in-reasoning", "cut-streamed", "cut-empty-string"] {
        let record = place.record(id);
        assert_eq!((&record["status"], &record["content"]), (&json!("truncated"), &Value::Null), "{record}");
        assert_eq!(record["reasoning"], "Counting she");
    }
    let empty = place.record("empty");
    assert_eq!((&empty["status"], &empty["content"]), (&json!("empty"), &Value::Null));
    let lost = place.failure("lost");
    assert_eq!((&lost["failed_as"], &lost["cause"]), (&json!("exhausted"), &json!("missing_text")));
    assert_eq!(place.records().len(), 4);
}

#[test]
fn usage_is_taken_from_wherever_it_stands_and_unknown_is_not_zero() {
    let words = || vec![piece("Fine "), piece("day"), chunk(json!({}), json!("stop"))];
    let with = |more: Value| stream([words(), vec![more.to_string()]].concat());
    let running = |content: &str, tokens: u64, reason: Value| {
        json!({"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": reason}],
            "usage": {"prompt_tokens": 3, "completion_tokens": tokens}})
        .to_string()
    };
    let place = run(vec![
        ("no-choices", with(json!({"usage": {"prompt_tokens": 3, "completion_tokens": 2}}))),
        ("empty-choices", with(json!({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}))),
        (
            "running",
            stream(vec![
                running("Fine ", 1, Value::Null),
                running("day", 2, Value::Null),
                running("", 2, json!("stop")),
            ]),
        ),
        ("null", with(json!({"choices": [], "usage": null}))),
    ]);
    for id in ["no-choices", "empty-choices", "running"] {
        assert_eq!(place.record(id)["completion_tokens"], 2, "{id}");
    }
    let unknown = place.record("null");
    assert_eq!((&unknown["completion_tokens"], &unknown["content"]), (&Value::Null, &json!("Fine day")));
    assert!(unknown["flags"].as_array().unwrap().contains(&json!("usage_unknown")));
}

#[test]
fn only_known_good_finish_reasons_make_an_answer() {
    let one = |reason: Value| text(whole(reason, json!({"content": "one token"}), Some(1)));
    let place = run(vec![
        ("abort", one(json!("abort"))),
        ("object", one(json!({"type": "abort", "message": "queue full"}))),
        ("unheard", one(json!("meteor"))),
        ("null", stream(vec![piece("no reason at all"), chunk(json!({}), Value::Null)])),
        ("eos", one(json!("eos_token"))),
    ]);
    assert_eq!(place.ids().into_iter().collect::<Vec<_>>(), ["eos"]);
    for id in ["abort", "object"] {
        let failure = place.failure(id);
        assert_eq!((&failure["failed_as"], &failure["cause"]), (&json!("exhausted"), &json!("aborted")), "{failure}");
        assert_eq!(failure["attempts"].as_array().unwrap().len(), 2);
    }
    for id in ["unheard", "null"] {
        let failure = place.failure(id);
        assert_eq!(
            (&failure["failed_as"], &failure["cause"]),
            (&json!("set_aside"), &json!("unknown_finish")),
            "{failure}"
        );
        assert_eq!(failure["attempts"].as_array().unwrap().len(), 1, "not sent again: {failure}");
    }
}

/// Half a surrogate pair from the server costs one character, not the answer, nor the run.
#[test]
fn a_lone_surrogate_in_a_reply_is_repaired_and_flagged() {
    let broken = chunk(json!({"content": "HALF"}), Value::Null).replace("HALF", "left \\ud83e right");
    let place = run(vec![
        ("half", stream(vec![broken, chunk(json!({}), json!("stop"))])),
        ("nul", stream(vec![piece("a\u{0}b"), chunk(json!({}), json!("stop"))])),
    ]);
    let record = place.record("half");
    assert_eq!(record["content"], "left \u{FFFD} right");
    assert!(record["flags"].as_array().unwrap().contains(&json!("text_repaired")));
    assert_eq!(place.record("nul")["content"], "a\u{0}b");
    assert!(!std::fs::read(place.responses()).unwrap().contains(&0));
}

/// The ids are the server's own, all of them, and agree with its count.
#[test]
fn exact_token_ids_are_kept() {
    let server = ScriptedServer::start(Script::new());
    let place = Place::with_count(3);
    place.run(place.generate(&server.url(), &[])).expect(0);
    for record in place.records() {
        let ids = record["token_ids"].as_array().unwrap();
        assert_eq!(json!(ids.len()), record["completion_tokens"]);
        assert_eq!(json!(record["prompt_token_ids"].as_array().unwrap().len()), record["prompt_tokens"]);
    }
    let without = Place::with_count(3);
    without.run(without.generate(&server.url(), &["--no-token-ids"])).expect(0);
    assert!(without.records().iter().all(|record| record.get("token_ids").is_none()));
    assert_eq!(without.contents(), place.contents());
}
