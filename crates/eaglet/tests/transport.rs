//! Connections that break, streams that are cut, servers that are busy, slow or silent: what the run makes of them.

#![allow(clippy::unwrap_used)]

mod common;

use common::{CHAT, Place, all_ids, asked, chunk, good_end, good_stream, piece, sse_bytes, text};
use eaglet_testkit::server::{Answer, End, Rule, Script, ScriptedServer};
use serde_json::json;
use std::collections::BTreeSet;

/// No retry is allowed here at all, so a charged one would be a failure.
#[test]
fn resets_of_reused_connections_cost_nothing() {
    let server = ScriptedServer::start(Script { kill_reused: true, ..Script::new() });
    let place = Place::with_count(24);
    let end =
        place.run(place.generate(&server.url(), &["--concurrency", "3", "--max-retries", "0", "--json"])).expect(0);
    assert_eq!(place.ids(), all_ids(24));
    assert!(place.records().iter().all(|record| record["attempts"] == 1));
    assert_eq!(end.json()["retries_by_cause"], json!({}));
    let killed = server.requests_on(CHAT).iter().filter(|request| request.nth_on_connection > 1).count();
    assert!(killed > 0, "no connection was reused, so nothing was tested");
}

#[test]
fn connections_closed_while_idle_cost_nothing() {
    let server = ScriptedServer::start(Script { close_idle_ms: Some(1), ..Script::new() });
    let place = Place::with_count(40);
    place.run(place.generate(&server.url(), &["--concurrency", "2", "--max-retries", "0"])).expect(0);
    assert_eq!(place.ids(), all_ids(40));
    assert!(place.records().iter().all(|record| record["attempts"] == 1));
}

/// Nothing of a stream that did not end is ever an answer; it is kept where people look for failures.
#[test]
fn broken_streams_are_retried_and_their_text_is_no_answer() {
    let half = |marker: &str| vec![piece("The first "), piece(marker)];
    let error = json!({"error": {"message": "engine fault", "code": 500}}).to_string();
    let script = Script::new()
        .rule(Rule::on_chat().contains("orderly").events(half("UNFINISHED-A")))
        .rule(Rule::on_chat().contains("closed").events(half("UNFINISHED-B")).end(End::Cut))
        .rule(Rule::on_chat().contains("reset").events(half("UNFINISHED-C")).end(End::Reset))
        .rule(
            Rule::on_chat()
                .contains("object")
                .events([half("UNFINISHED-D"), vec![error, "[DONE]".to_owned()]].concat()),
        );
    let server = ScriptedServer::start(script);
    let place = Place::with_prompts([
        ("a", "end it orderly, but without a reason"),
        ("b", "get closed in the middle"),
        ("c", "get reset in the middle"),
        ("d", "send an error object"),
        ("good", "answer well"),
    ]);
    let end = place.run(place.generate(&server.url(), &["--max-retries", "2", "--json"])).expect(1);
    assert_eq!(place.ids(), BTreeSet::from(["good".to_owned()]));
    assert!(!std::fs::read_to_string(place.responses()).unwrap().contains("UNFINISHED"));
    for (id, cause, marker) in [
        ("a", "cut_stream", "UNFINISHED-A"),
        ("b", "reset", "UNFINISHED-B"),
        ("c", "reset", "UNFINISHED-C"),
        ("d", "error_in_stream", "UNFINISHED-D"),
    ] {
        let failure = place.failure(id);
        assert_eq!((&failure["failed_as"], &failure["cause"]), (&json!("exhausted"), &json!(cause)), "{failure}");
        assert_eq!(failure["attempts"].as_array().unwrap().len(), 3, "{failure}");
        assert!(text(&failure["partial"]["content"]).ends_with(marker), "{failure}");
    }
    assert_eq!(server.requests_on(CHAT).len(), 4 * 3 + 1);
    assert_eq!((&end.json()["done"], &end.json()["failed"]), (&json!(1), &json!(4)));
}

#[test]
fn a_stream_that_breaks_once_is_answered_the_second_time() {
    let script = Script::new()
        .rule(Rule::on_chat().times(1).events([piece("WRONG")]).end(End::Reset))
        .rule(Rule::on_chat().times(1).reset_before_reply())
        .rule(Rule::on_chat().events(good_stream("right ", "answer")));
    let server = ScriptedServer::start(script);
    let place = Place::with_count(1);
    place.run(place.generate(&server.url(), &[])).expect(0);
    let record = place.record("q0");
    assert_eq!((&record["content"], &record["attempts"]), (&json!("right answer"), &json!(3)));
}

#[test]
fn a_finish_reason_is_enough_even_if_nothing_follows() {
    let events = [piece("whole "), piece("answer"), chunk(json!({}), json!("stop"))];
    let script = Script::new()
        .rule(Rule::on_chat().contains("hang").events(events.clone()).end(End::Hang))
        .rule(Rule::on_chat().contains("cut").events(events.clone()).end(End::Cut))
        .rule(Rule::on_chat().contains("close").events(events));
    let server = ScriptedServer::start(script);
    let place = Place::with_prompts([("open", "then hang"), ("cut", "then cut"), ("closed", "then close")]);
    place.run(place.generate(&server.url(), &["--max-retries", "0"])).expect(0);
    for record in place.records() {
        assert_eq!((&record["content"], &record["attempts"]), (&json!("whole answer"), &json!(1)));
        assert_eq!(record["flags"], json!(["usage_unknown"]));
    }
    assert_eq!(place.records().len(), 3);
}

/// Four slots, eight refusals with a wait: without giving its slot back, no fifth prompt could be asked before the first repeat.
#[test]
fn who_is_told_to_wait_gives_the_slot_to_others() {
    let script = Script::new().rule(
        Rule::on_chat()
            .nth(1..=8)
            .status(429)
            .header("Retry-After", "2")
            .text("{\"error\": {\"message\": \"slow down\"}}"),
    );
    let server = ScriptedServer::start(script);
    let place = Place::with_count(40);
    let end =
        place.run(place.generate(&server.url(), &["--concurrency", "4", "--max-retries", "0", "--json"])).expect(0);
    assert_eq!(place.ids(), all_ids(40));
    assert_eq!(end.json()["retries_by_cause"], json!({"overloaded": 8}));
    let mut seen = BTreeSet::new();
    let before_first_repeat = asked(&server).into_iter().take_while(|question| seen.insert(question.clone())).count();
    assert!(before_first_repeat > 4, "only {before_first_repeat}");
    assert!(server.max_in_flight() <= 4);
}

#[test]
fn silence_is_not_slowness() {
    let script = Script::new()
        .rule(Rule::on_chat().contains("fall silent").times(1).events([piece("SILENT")]).end(End::Hang))
        .rule(Rule::on_chat().contains("take your time").delay_ms(2500).events(good_stream("late ", "but whole")));
    let server = ScriptedServer::start(script);
    let place = Place::with_prompts([("silent", "fall silent"), ("slow", "take your time")]);
    let end = place.run(place.generate(&server.url(), &["--silence-timeout", "1", "--json"])).expect(0);
    assert_eq!(place.record("silent")["attempts"], 2);
    assert!(!text(&place.record("silent")["content"]).contains("SILENT"));
    let slow = place.record("slow");
    assert_eq!((&slow["content"], &slow["attempts"]), (&json!("late but whole"), &json!(1)));
    assert_eq!(end.json()["retries_by_cause"], json!({"silence": 1}));
}

#[test]
fn a_request_without_any_answer_is_sent_again() {
    // No gauges: nothing else could tell that the server is alive.
    let script = Script::new().rule(Rule::on("/metrics").status(404)).rule(Rule::on_chat().times(1).end(End::Hang));
    let server = ScriptedServer::start(script);
    let place = Place::with_count(1);
    let end = place.run(place.generate(&server.url(), &["--first-byte-timeout", "1", "--json"])).expect(0);
    assert_eq!(place.record("q0")["attempts"], 2);
    assert_eq!(end.json()["retries_by_cause"], json!({"first_byte_timeout": 1}));
}

#[test]
fn a_total_timeout_ends_even_a_stream_that_flows() {
    let endless =
        Rule { repeat: Some(-1), gap_ms: 20, ..Rule::on_chat().contains("for ever").events([piece("on and on ")]) };
    let server = ScriptedServer::start(Script::new().rule(endless));
    let place = Place::with_prompts([("endless", "talk for ever"), ("good", "be brief")]);
    place.run(place.generate(&server.url(), &["--total-timeout", "1", "--max-retries", "1"])).expect(1);
    assert_eq!(place.failure("endless")["cause"], "total_timeout");
    assert_eq!(place.ids(), BTreeSet::from(["good".to_owned()]));
}

#[test]
fn a_large_event_is_read_and_one_without_end_is_not() {
    let large = "word ".repeat(150_000);
    let unending = Rule { repeat: Some(-1), ..Rule::on_chat().contains("unending").chunks([vec![b'x'; 64 << 10]]) };
    let script = Script::new()
        .rule(Rule::on_chat().contains("large").events([vec![piece(&large)], good_end(1)].concat()))
        .rule(unending);
    let server = ScriptedServer::start(script);
    let place = Place::with_prompts([("large", "a large event"), ("unending", "an unending line")]);
    place.run(place.generate(&server.url(), &[])).expect(1);
    assert_eq!(text(&place.record("large")["content"]), large);
    let failure = place.failure("unending");
    assert_eq!((&failure["failed_as"], &failure["cause"]), (&json!("rejected"), &json!("reply_too_large")));
    assert_eq!(failure["attempts"].as_array().unwrap().len(), 1);
}

#[test]
fn a_reply_over_the_bound_is_refused_once() {
    let torrent =
        Rule { repeat: Some(-1), ..Rule::on_chat().contains("torrent").events([piece(&"drop ".repeat(100_000))]) };
    let server = ScriptedServer::start(Script::new().rule(torrent));
    let place = Place::with_prompts([("torrent", "a torrent"), ("good", "a drop")]);
    place.run(place.generate(&server.url(), &[])).expect(1);
    let failure = place.failure("torrent");
    assert_eq!((&failure["failed_as"], &failure["cause"]), (&json!("rejected"), &json!("reply_too_large")));
    assert_eq!(failure["attempts"].as_array().unwrap().len(), 1);
    assert_eq!(place.ids(), BTreeSet::from(["good".to_owned()]));
}

#[test]
fn faults_of_the_server_pass() {
    let mut script = Script::new();
    for status in [500, 502, 503, 504, 408, 529] {
        script = script
            .rule(Rule::on_chat().contains(&format!("status {status}.")).times(1).status(status).text("out of order"));
    }
    let server = ScriptedServer::start(script);
    let place = Place::with_prompts([500, 502, 503, 504, 408, 529].map(|s| (s.to_string(), format!("status {s}."))));
    place.run(place.generate(&server.url(), &[])).expect(0);
    assert_eq!(place.records().len(), 6);
    assert!(place.records().iter().all(|record| record["attempts"] == 2), "{:?}", place.records());
}

#[test]
fn a_reply_that_is_not_http_is_retried_then_listed() {
    let script = Script::new()
        .rule(Rule::on_chat().contains("garbage").wire([b"220 mail.example ready\r\n".to_vec()]))
        .rule(Rule::on_chat().contains("page").text("<html>welcome</html>"));
    let server = ScriptedServer::start(script);
    let place = Place::with_prompts([("garbage", "garbage"), ("page", "a page"), ("good", "well")]);
    place.run(place.generate(&server.url(), &["--max-retries", "1"])).expect(1);
    assert_eq!(place.failure("garbage")["cause"], "bad_reply");
    assert_eq!(place.failure("page")["attempts"].as_array().unwrap().len(), 2);
    assert_eq!(place.ids(), BTreeSet::from(["good".to_owned()]));
}

/// Every way to cut the bytes of one stream into chunks, two bytes apart, with both line ends.
#[test]
fn bytes_may_be_cut_anywhere() {
    let events = good_stream("née \u{1F980} ", "\u{2028}line\u{0085}end");
    let mut script = Script::new();
    let mut prompts = Vec::new();
    for (name, line_end) in [("lf", "\n"), ("crlf", "\r\n")] {
        for size in [1, 2, 3, 7] {
            let id = format!("{name}-{size}");
            let bytes = sse_bytes(&events, line_end);
            script = script.rule(Rule::on_chat().contains(&format!("cut {id}.")).chunks(bytes.chunks(size)));
            prompts.push((id.clone(), format!("cut {id}.")));
        }
    }
    let server = ScriptedServer::start(script);
    let place = Place::with_prompts(prompts);
    place.run(place.generate(&server.url(), &["--max-retries", "0"])).expect(0);
    assert_eq!(place.records().len(), 8);
    for record in place.records() {
        assert_eq!(text(&record["content"]), "née \u{1F980} \u{2028}line\u{0085}end", "{record}");
    }
}

#[test]
fn comments_and_empty_lines_between_events_are_no_data() {
    let mut bytes = b": warming up\n\n\nevent: message\n".to_vec();
    bytes.extend(sse_bytes(&good_stream("a", "b"), "\n"));
    let server = ScriptedServer::start(Script::new().rule(Rule::on_chat().chunks([bytes])));
    let place = Place::with_count(1);
    place.run(place.generate(&server.url(), &["--max-retries", "0"])).expect(0);
    assert_eq!(place.record("q0")["content"], "ab");
}

#[test]
fn a_whole_reply_is_taken_when_asked_for_and_when_not() {
    let whole = json!({"id": "w", "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "in one piece"}}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 3}});
    let server =
        ScriptedServer::start(Script::new().rule(Rule::on_chat().contains("stubborn").text(&whole.to_string())));
    let place = Place::with_prompts([("s", "be stubborn")]);
    place.run(place.generate(&server.url(), &[])).expect(0);
    assert_eq!(place.record("s")["content"], "in one piece");
    assert_eq!(server.requests_on(CHAT)[0].json()["stream"], true);

    let other = Place::with_count(5);
    other.run(other.generate(&server.url(), &["--no-stream"])).expect(0);
    assert_eq!(other.ids(), all_ids(5));
    assert!(server.requests_on(CHAT)[1..].iter().all(|request| request.json().get("stream").is_none()));
    let streamed = Place::with_count(5);
    streamed.run(streamed.generate(&server.url(), &[])).expect(0);
    assert_eq!(streamed.contents(), other.contents());
}

/// What goes out: the exact settings under their own names, and nothing that was not asked for.
#[test]
fn the_request_says_what_the_flags_say() {
    let server = ScriptedServer::start(Script::new().answer(Answer { mean_tokens: 8, ..Answer::default() }));
    let place = Place::with_count(1);
    let flags = [
        "--temperature",
        "0.7",
        "--top-p",
        "0.9",
        "--top-k",
        "-1",
        "--seed",
        "11",
        "--stop",
        "END",
        "--max-completion-tokens",
        "77",
        "--extra-body",
        "{\"chat_template_kwargs\": {\"enable_thinking\": false}}",
    ];
    place.run(place.generate(&server.url(), &flags)).expect(0);
    let body = server.requests_on(CHAT)[0].json();
    let sent: BTreeSet<&str> = body.as_object().unwrap().keys().map(String::as_str).collect();
    let expected = BTreeSet::from([
        "model",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "max_completion_tokens",
        "chat_template_kwargs",
        "stream",
        "stream_options",
        "return_token_ids",
        "return_tokens",
        "messages",
    ]);
    assert_eq!(sent, expected);
    assert_eq!((&body["top_k"], &body["max_completion_tokens"]), (&json!(-1), &json!(77)));
    let record = place.record("q0");
    assert_eq!(record["sampling"], json!({"temperature": 0.7, "top_p": 0.9, "top_k": -1, "seed": 11, "stop": ["END"]}));
    assert!(matches!(&server.requests_on(CHAT)[0].header("host"), Some(host) if host.contains("127.0.0.1")));
}
