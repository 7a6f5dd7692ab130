use super::answer::{AnswerBuilder, AnswerPolicy, WireEnd};
use super::*;
use eaglet_core::redacted::Secret;
use eaglet_core::response::{Answer, ReasoningField, Status};
use serde_json::json;

fn endpoint() -> Endpoint {
    let key = Secret::new("KEY", "sk-test-key-000111222").unwrap();
    Endpoint::new("http://server:8000/v1", Some(&key), &[]).unwrap()
}

fn failure(status: u16, headers: &[(&'static str, &str)], body: &str) -> AttemptFailure {
    let mut map = hyper::HeaderMap::new();
    for (name, value) in headers {
        map.insert(*name, HeaderValue::from_str(value).unwrap());
    }
    status_failure(StatusCode::from_u16(status).unwrap(), &map, body.as_bytes(), &endpoint())
}

/// Streams events, then judges.
fn stream(events: &[Value], done: bool) -> Result<(Answer, Status), AttemptFailure> {
    let (mut builder, policy, scrubber) = (AnswerBuilder::default(), AnswerPolicy::default(), Scrubber::default());
    for event in events {
        builder.push_event(event.to_string().as_bytes(), &policy, &scrubber)?;
    }
    if done {
        builder.push_event(b"[DONE]", &policy, &scrubber)?;
    }
    builder.finish(WireEnd::NoDone, &policy, "http://h:1")
}

fn whole(reply: Value) -> Result<(Answer, Status), AttemptFailure> {
    let mut builder = AnswerBuilder::default();
    builder.push_json(reply.to_string().as_bytes(), &AnswerPolicy::default(), &Scrubber::default())?;
    builder.finish(WireEnd::Orderly, &AnswerPolicy::default(), "http://h:1")
}

fn delta(delta: Value) -> Value {
    json!({"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": null}]})
}

fn end(reason: &str) -> Value {
    json!({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
}

fn message(message: Value, reason: Value, completion_tokens: u64) -> Value {
    json!({"choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 4, "completion_tokens": completion_tokens}})
}

fn cause(result: Result<(Answer, Status), AttemptFailure>) -> Cause {
    result.unwrap_err().cause
}

#[test]
fn error_bodies_of_the_known_servers_are_classified() {
    let vllm_context = r#"{"error":{"message":"This model's maximum context length is 4096 tokens. However, ...","type":"BadRequestError","param":"input_tokens","code":400}}"#;
    let llama_context = r#"{"error":{"code":400,"message":"the request exceeds the available context size","type":"exceed_context_size_error"}}"#;
    let cases = [
        (400, vllm_context, Cause::ContextTooLong),
        (400, llama_context, Cause::ContextTooLong),
        (400, r#"{"error":{"message":"temperature must be non-negative","code":400}}"#, Cause::BadRequest),
        (422, r#"{"detail":[{"msg":"field required"}]}"#, Cause::BadRequest),
        (401, "{}", Cause::Unauthorized),
        (403, "", Cause::Unauthorized),
        (404, r#"{"detail":"Not Found"}"#, Cause::NotFound),
        (405, r#"{"detail":"Method Not Allowed"}"#, Cause::NotFound),
        (408, "", Cause::ServerError),
        (429, "", Cause::Overloaded),
        (500, "<html>oops</html>", Cause::ServerError),
        (502, "", Cause::ServerError),
        (503, "", Cause::Overloaded),
        (504, "", Cause::ServerError),
        (529, "", Cause::ServerError),
    ];
    for (status, body, expected) in cases {
        assert_eq!(failure(status, &[], body).cause, expected, "{status} {body}");
    }
    assert_eq!(failure(404, &[], r#"{"detail":"Not Found"}"#).detail, "HTTP 404: Not Found");
    assert_eq!(failure(500, &[], " ").detail, "HTTP 500: (empty body)");
}

#[test]
fn a_key_echoed_by_the_server_is_scrubbed() {
    let failure = failure(401, &[], r#"{"error":{"message":"wrong key sk-test-key-000111222"}}"#);
    assert_eq!(failure.detail, "HTTP 401: wrong key ***");
}

/// Shown texts are shortened; a key that lies across the cut must not leave its first half behind.
#[test]
fn a_key_across_the_end_of_a_shortened_text_leaves_no_part() {
    let scrubber = &endpoint().scrubber;
    for filler in 150..520 {
        let text = format!("{}sk-test-key-000111222 and more{}", "x".repeat(filler), " y".repeat(300));
        let error = json!({"error": {"message": text}}).to_string();
        let not_json =
            AnswerBuilder::default().push_json(text.as_bytes(), &AnswerPolicy::default(), scrubber).unwrap_err();
        let in_stream =
            AnswerBuilder::default().push_json(error.as_bytes(), &AnswerPolicy::default(), scrubber).unwrap_err();
        for failure in [failure(400, &[], &error), failure(500, &[], &text), not_json, in_stream] {
            assert!(
                !failure.detail.contains("sk-") && !failure.detail.contains("key-0"),
                "{filler}: {}",
                failure.detail
            );
        }
    }
}

#[test]
fn a_redirect_names_the_targets_origin_and_nothing_else_of_it() {
    let cases = [
        ("http://other:9/v1/chat?token=abc", "http://other:9"),
        ("/v1/chat", "http://server:8000 (the same server)"),
        ("file:///etc/passwd", "file:"),
    ];
    for (location, shown) in cases {
        let failure = failure(307, &[("location", location)], "");
        assert_eq!(
            (failure.cause, failure.detail.as_str()),
            (Cause::Redirect, format!("HTTP 307: redirect to {shown} not followed").as_str())
        );
    }
}

#[test]
fn retry_after_is_read_as_seconds_and_as_a_date() {
    assert_eq!(failure(429, &[("retry-after", "7")], "").retry_after, Some(Duration::from_secs(7)));
    assert_eq!(failure(503, &[("retry-after", "0.5")], "").retry_after, Some(Duration::from_millis(500)));
    assert_eq!(failure(429, &[("retry-after", "99999999")], "").retry_after, Some(RETRY_AFTER_MAX));
    assert_eq!(failure(429, &[("retry-after", "Wed, 21 Oct 2015 07:28:00 GMT")], "").retry_after, Some(Duration::ZERO));
    let soon = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(60);
    let date = soon.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string();
    let wait = failure(429, &[("retry-after", &date)], "").retry_after.unwrap();
    assert!((58..=60).contains(&wait.as_secs()), "{wait:?} from {date}");
    for nonsense in ["soon", "-3", "nan", "inf"] {
        assert_eq!(failure(429, &[("retry-after", nonsense)], "").retry_after, None, "{nonsense}");
    }
}

/// The chain of thought went missing when a server renamed the field.
#[test]
fn reasoning_is_read_under_both_names_once() {
    let pieces = |names: &[&str]| -> Vec<Value> {
        ["Seven ", "eights."]
            .iter()
            .map(|text| {
                delta(
                    names
                        .iter()
                        .map(|name| ((*name).to_owned(), json!(text)))
                        .collect::<serde_json::Map<_, _>>()
                        .into(),
                )
            })
            .chain([delta(json!({"content": "56", "reasoning": null})), end("stop")])
            .collect()
    };
    let cases = [
        (vec!["reasoning"], ReasoningField::Reasoning),
        (vec!["reasoning_content"], ReasoningField::ReasoningContent),
        (vec!["reasoning", "reasoning_content"], ReasoningField::Both),
    ];
    for (names, field) in cases {
        let (answer, status) = stream(&pieces(&names), true).unwrap();
        assert_eq!((answer.reasoning.as_deref(), answer.content.as_deref()), (Some("Seven eights."), Some("56")));
        assert_eq!((answer.reasoning_field, status), (Some(field), Status::Ok));
        assert_eq!(answer.reasoning_content_differs, None);
    }
    let (answer, _) =
        whole(message(json!({"content": "56", "reasoning": "A", "reasoning_content": "B"}), json!("stop"), 3)).unwrap();
    assert_eq!((answer.reasoning.as_deref(), answer.reasoning_content_differs.as_deref()), (Some("A"), Some("B")));
    assert!(answer.flags.contains(&"reasoning_fields_differ".to_owned()));
}

#[test]
fn reasoning_between_markers_is_split_only_where_it_is_reasoning() {
    let split = |content: &str| {
        let (answer, _) = whole(message(json!({"content": content}), json!("stop"), 9)).unwrap();
        (answer.reasoning, answer.content)
    };
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(split("<think>why</think>because"), (some("why"), some("because")));
    assert_eq!(split("\n<think>never closed"), (some("never closed"), None));
    assert_eq!(split("opened by the template</think>yes"), (some("opened by the template"), some("yes")));
    assert_eq!(split("write <think> and </think> around it"), (None, some("write <think> and </think> around it")));
    assert_eq!(split("a</think>b</think>c"), (None, some("a</think>b</think>c")));
}

#[test]
fn a_cut_answer_is_kept_and_marked_even_inside_its_reasoning() {
    let replies = [
        message(json!({"content": null, "reasoning": "At first"}), json!("length"), 64),
        message(json!({"content": "", "reasoning_content": "a b"}), json!("length"), 3),
    ];
    for reply in replies {
        let (answer, status) = whole(reply).unwrap();
        assert_eq!((status, answer.content), (Status::Truncated, None));
    }
    let events =
        [delta(json!({"content": null, "reasoning": "At "})), delta(json!({"reasoning": "first"})), end("length")];
    let (answer, status) = stream(&events, true).unwrap();
    assert_eq!((status, answer.reasoning.as_deref(), answer.content), (Status::Truncated, Some("At first"), None));
}

#[test]
fn tokens_without_text_are_a_failed_capture_and_no_tokens_are_an_empty_answer() {
    let hollow = |tokens| whole(message(json!({"content": null, "reasoning": null}), json!("stop"), tokens));
    assert_eq!(cause(hollow(57)), Cause::MissingText);
    for tokens in [0, 1] {
        let (answer, status) = hollow(tokens).unwrap();
        assert_eq!((status, answer.content), (Status::Empty, None));
    }
}

#[test]
fn usage_is_taken_from_whichever_chunk_has_it_and_unknown_is_not_zero() {
    let text = [delta(json!({"content": "Good "})), delta(json!({"content": "evening"})), end("stop")];
    let usage = json!({"prompt_tokens": 5, "completion_tokens": 2});
    let running = |n: u64| {
        let mut chunk = delta(json!({"content": "x"}));
        chunk["usage"] = json!({"completion_tokens": n});
        chunk
    };
    let with = |last: Value| stream(&[text.to_vec(), vec![last]].concat(), true).unwrap().0.completion_tokens();
    assert_eq!(with(json!({"choices": [], "usage": usage})), Some(2));
    assert_eq!(with(json!({"usage": usage})), Some(2));
    assert_eq!(with(json!({"choices": [], "usage": null})), None);
    let (answer, _) = stream(&[running(1), running(2), running(3), end("stop")], true).unwrap();
    assert_eq!(answer.completion_tokens(), Some(3), "the last one counts, never the sum");
    assert_eq!(stream(&text, true).unwrap().0.flags, ["usage_unknown"]);
}

#[test]
fn only_known_good_finish_reasons_are_answers() {
    let ended = |reason: Value| whole(message(json!({"content": "Some words."}), reason, 3));
    assert_eq!(ended(json!("stop")).unwrap().1, Status::Ok);
    assert_eq!(ended(json!({"type": "stop", "matched": 2})).unwrap().0.finish_reason, "stop");
    assert_eq!(cause(ended(json!("abort"))), Cause::Aborted);
    assert_eq!(cause(ended(json!({"type": "abort", "message": "too long"}))), Cause::Aborted);
    assert_eq!(cause(ended(json!("budget_hold"))), Cause::UnknownFinish);
    assert_eq!(cause(ended(Value::Null)), Cause::UnknownFinish);
    let words = [delta(json!({"content": "Some "})), delta(json!({"content": "words."}))];
    assert_eq!(cause(stream(&words, true)), Cause::UnknownFinish);
    let cut = stream(&words, false).unwrap_err();
    assert_eq!((cut.cause, cut.partial.unwrap().content.as_deref()), (Cause::CutStream, Some("Some words.")));
    assert_eq!(
        stream(&[words.to_vec(), vec![end("stop")]].concat(), false).unwrap().1,
        Status::Ok,
        "[DONE] may be missing"
    );
}

#[test]
fn an_error_object_in_a_stream_is_a_failed_attempt() {
    let events = [delta(json!({"content": "half"})), json!({"error": {"message": "engine gone", "code": 500}})];
    let failure = stream(&events, true).unwrap_err();
    assert_eq!((failure.cause, failure.detail.as_str()), (Cause::ErrorInStream, "engine gone"));
}

#[test]
fn broken_unicode_in_a_reply_is_repaired_and_flagged() {
    let policy = AnswerPolicy::default();
    let mut builder = AnswerBuilder::default();
    for data in [
        br#"{"choices":[{"delta":{"content":"a\ud83d b"}}]}"#.as_slice(),
        b"{\"choices\":[{\"delta\":{\"content\":\"c\xff\\u0000\"}}]}",
        "{\"choices\":[{\"delta\":{\"content\":\"\u{2028}\"},\"finish_reason\":\"stop\"}]}".as_bytes(),
    ] {
        builder.push_event(data, &policy, &Scrubber::default()).unwrap();
    }
    let (answer, _) = builder.finish(WireEnd::Orderly, &policy, "http://h:1").unwrap();
    assert_eq!(answer.content.as_deref(), Some("a\u{fffd} bc\u{fffd}\0\u{2028}"));
    assert!(answer.flags.contains(&"text_repaired".to_owned()));
}

#[test]
fn what_is_no_chunk_is_a_bad_reply() {
    assert_eq!(cause(stream(&[json!([1, 2])], true)), Cause::BadReply);
    assert_eq!(cause(stream(&[json!({"choices": "x"})], true)), Cause::BadReply);
}

/// Where each server puts its ids.
#[test]
fn token_ids_are_found_wherever_a_server_puts_them() {
    let reply = |extra: Value, choice: Value| {
        let mut reply = message(json!({"content": "ok"}), json!("stop"), 2);
        reply.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        reply["choices"][0].as_object_mut().unwrap().extend(choice.as_object().unwrap().clone());
        let (answer, _) = whole(reply).unwrap();
        (answer.prompt_token_ids, answer.token_ids)
    };
    let expected = (Some(vec![1, 2]), Some(vec![3, 4]));
    assert_eq!(reply(json!({"prompt_token_ids": [1, 2]}), json!({"token_ids": [3, 4]})), expected, "vLLM");
    assert_eq!(reply(json!({}), json!({"prompt_token_ids": [1, 2], "token_ids": [3, 4]})), expected, "SGLang");
    assert_eq!(
        reply(json!({"sglext": {"input_ids": [1, 2], "output_ids": [[3, 4]]}}), json!({})),
        expected,
        "SGLang, extension"
    );
    assert_eq!(reply(json!({"__verbose": {"tokens": [3, 4]}}), json!({})).1, expected.1, "llama.cpp");
    let mut chunks = vec![
        delta(json!({"role": "assistant", "content": ""})),
        delta(json!({"content": "o"})),
        delta(json!({"content": "k"})),
        end("stop"),
    ];
    chunks[0]["prompt_token_ids"] = json!([1, 2]);
    chunks[1]["choices"][0]["token_ids"] = json!([3]);
    chunks[3]["choices"][0]["token_ids"] = json!([4]);
    let (answer, _) = stream(&chunks, true).unwrap();
    assert_eq!((answer.prompt_token_ids, answer.token_ids), expected, "vLLM, streamed");
}

#[test]
fn a_reply_is_bounded() {
    let policy = AnswerPolicy { reply_bytes_max: 10, ..AnswerPolicy::default() };
    let mut builder = AnswerBuilder::default();
    let chunk = delta(json!({"content": "12345678"})).to_string();
    assert!(builder.push_event(chunk.as_bytes(), &policy, &Scrubber::default()).is_ok());
    let failure = builder.push_event(chunk.as_bytes(), &policy, &Scrubber::default()).unwrap_err();
    assert_eq!(failure.cause, Cause::ReplyTooLarge);
}

/// A chunk with text and the ids it is made of.
fn piece(text: &str, ids: &[u32]) -> Value {
    let mut chunk = delta(json!({"content": text}));
    chunk["choices"][0]["token_ids"] = json!(ids);
    chunk
}

/// Ids and content up to where an answer of these chunks may be cut.
fn cut_of(chunks: &[Value]) -> Option<(Vec<u32>, String)> {
    let policy = AnswerPolicy::default();
    let mut builder = AnswerBuilder::default();
    let mut first = delta(json!({"role": "assistant", "content": ""}));
    first["prompt_token_ids"] = json!([1, 2]);
    for chunk in std::iter::once(&first).chain(chunks) {
        builder.push_event(chunk.to_string().as_bytes(), &policy, &Scrubber::default()).unwrap();
    }
    builder.unfinished("http://h:1").map(|unfinished| (unfinished.token_ids, unfinished.content))
}

#[test]
fn an_answer_is_cut_only_where_its_text_is_complete() {
    let cut = |chunks: &[Value]| cut_of(chunks).map(|(ids, text)| (ids.len(), text));
    let (a, half, whole) = (piece("a", &[5]), piece("", &[6]), piece("é", &[7]));
    assert_eq!(cut(&[]), None, "nothing is there");
    assert_eq!(cut(&[a.clone(), half.clone()]), Some((1, "a".into())), "half a character is dropped");
    assert_eq!(cut(&[a.clone(), half.clone(), whole]), Some((3, "aé".into())));
    assert_eq!(cut(&[a.clone(), piece("b\u{fffd}", &[6])]), Some((1, "a".into())));
    assert_eq!(cut(&[a.clone(), delta(json!({"content": "b"}))]), None, "text without ids belongs nowhere");
    let mut ended = piece("", &[2]);
    ended["choices"][0]["finish_reason"] = json!("stop");
    assert_eq!(cut(&[a.clone(), ended]), Some((1, "a".into())), "the end token is left to be generated again");
    let calls = delta(json!({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}));
    assert_eq!(cut(&[a, calls]), None, "a tool call cannot be continued");
}

#[test]
fn text_of_completions_means_nothing_on_the_chat_api() {
    let mut chunk = delta(json!({"content": "a"}));
    chunk["choices"][0]["text"] = json!("a");
    let (answer, _) = stream(&[chunk, end("stop")], true).unwrap();
    assert_eq!(answer.content.as_deref(), Some("a"));
}
