//! Answers that are interrupted at every possible place, and joined: the records are those of a run without accidents.

#![allow(clippy::unwrap_used)]

mod common;

use common::{INFLIGHT, RESPONSES, data_set, session, settings};
use eaglet_core::response::{Answer as Recorded, Response, Status};
use eaglet_core::storage::Storage;
use eaglet_generate::run::{GenerateSettings, Interrupted, Report, RunEnd, Stop};
use eaglet_testkit::faulty_storage::FaultyStorage;
use eaglet_testkit::server::{Answer, End, Reasoning, Rule, Script, ScriptedServer};
use std::collections::BTreeMap;
use std::path::Path;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
/// More than the longest answer below has, so that every place is cut.
const PROMPTS: usize = 48;

/// Short answers in which every tenth character is spelled over several tokens, with a token at the end of the reasoning.
fn answers() -> Answer {
    Answer { mean_tokens: 40, spread: 0.1, reasoning: Reasoning::Reasoning, think_token: true, ..Answer::default() }
}

/// One after the other, so that the n-th break strikes the n-th prompt.
fn one_by_one() -> GenerateSettings {
    let mut settings = settings(1);
    settings.retry.retries_max = 60;
    settings.retry.backoff_max = settings.retry.backoff_first;
    settings
}

fn records(storage: &FaultyStorage) -> BTreeMap<String, Response> {
    let bytes = storage.read(Path::new(RESPONSES)).unwrap();
    let lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let records: Vec<Response> = lines.map(|line| serde_json::from_slice(line).unwrap()).collect();
    let count = records.len();
    let by_id: BTreeMap<String, Response> = records.into_iter().map(|r| (r.sample_id.to_string(), r)).collect();
    assert_eq!(by_id.len(), count, "a prompt has two records");
    by_id
}

/// What must be the same however often an answer was interrupted.
fn essence(response: &Response) -> (Status, Recorded) {
    let answer = response.answer.clone();
    let plain = Recorded { server_id: None, first_token_s: None, latency_s: 0.0, segments: vec![], ..answer };
    (response.status, plain)
}

fn run(server: &ScriptedServer, prompts: usize, settings: GenerateSettings) -> (RunEnd, BTreeMap<String, Response>) {
    let (data, storage) = (data_set(prompts), FaultyStorage::new());
    let end = session(&storage, &server.url(), data.path(), settings, |_, _| {}).unwrap();
    (end, records(&storage))
}

fn assert_same(joined: &BTreeMap<String, Response>, expected: &BTreeMap<String, Response>) {
    assert_eq!(joined.len(), expected.len());
    for (id, response) in joined {
        assert_eq!(essence(response), essence(&expected[id]), "{id} with segments {:?}", response.answer.segments);
        let told: u64 = response.answer.segments.iter().map(|segment| segment.tokens).sum();
        let ids = response.answer.token_ids.as_ref().unwrap().len() as u64;
        assert!(response.answer.segments.is_empty() || told == ids, "{id}: {:?}", response.answer.segments);
    }
}

/// Breaks the n-th chat stream after n tokens.
fn cut_everywhere(answer: Answer, end: End) -> Script {
    (0..PROMPTS).fold(Script::new().answer(answer), |script, n| script.breaks(CHAT, n, end))
}

/// Each kind of server: one id an event or several, the marker a special token or not, none at all, reasoning in the older field.
fn kinds() -> Vec<Answer> {
    vec![
        answers(),
        Answer { think_special: true, ..answers() },
        Answer { tokens_per_chunk: 3, ..answers() },
        Answer { tokens_per_chunk: 5, think_special: true, ..answers() },
        Answer { reasoning: Reasoning::None, ..answers() },
        Answer { reasoning: Reasoning::ReasoningContent, ..answers() },
    ]
}

#[test]
fn an_answer_cut_anywhere_is_joined_exactly() {
    for answer in kinds() {
        let expected = run(&ScriptedServer::start(Script::new().answer(answer.clone())), PROMPTS, one_by_one()).1;
        for end in [End::Cut, End::Reset] {
            let server = ScriptedServer::start(cut_everywhere(answer.clone(), end));
            let (end, joined) = run(&server, PROMPTS, one_by_one());
            assert_same(&joined, &expected);
            let continued = end.snapshot.continued;
            let in_segments = joined.values().filter(|r| r.answer.segments.len() > 1).count();
            assert!(in_segments * 3 > PROMPTS, "{in_segments} joined of {answer:?}");
            assert_eq!(continued.answers, in_segments as u64);
            assert!(continued.tokens_kept > 3 * continued.tokens_lost, "{continued:?} of {answer:?}");
            assert_eq!(continued.started_again, 0, "{answer:?}");
        }
    }
}

#[test]
fn an_answer_cut_again_and_again_is_joined_exactly() {
    let answer = answers();
    let expected = run(&ScriptedServer::start(Script::new().answer(answer.clone())), 4, one_by_one()).1;
    let mut script = (0..4).fold(Script::new().answer(answer), |script, n| script.breaks(CHAT, 5 + n, End::Cut));
    for n in 0..12 {
        script = script.breaks(COMPLETIONS, 3 + n % 4, End::Reset);
    }
    let server = ScriptedServer::start(script);
    let (_, joined) = run(&server, 4, one_by_one());
    assert_same(&joined, &expected);
    let most = joined.values().map(|r| r.answer.segments.len()).max().unwrap();
    assert!(most >= 4, "{most} segments at most");
    let whys: Vec<&str> = joined["q0"].answer.segments.iter().map(|segment| segment.why.as_str()).collect();
    assert_eq!((whys[0], whys[1], *whys.last().unwrap()), ("reset", "reset", "stop"));
}

#[test]
fn what_was_generated_before_the_cut_is_not_generated_again() {
    let server = ScriptedServer::start(Script::new().answer(answers()).breaks(CHAT, 20, End::Cut));
    let (_, joined) = run(&server, 1, one_by_one());
    let request = server.requests_on(COMPLETIONS)[0].json();
    let answer = &joined["q0"].answer;
    let (prompt, ids) = (answer.prompt_token_ids.clone().unwrap(), answer.token_ids.clone().unwrap());
    let kept = request["prompt"].as_array().unwrap().len() - prompt.len();
    assert!(kept >= 16, "{kept} of 20 kept");
    let sent: Vec<u32> = serde_json::from_value(request["prompt"].clone()).unwrap();
    assert_eq!(sent, [&prompt[..], &ids[..kept]].concat());
    assert_eq!(request["max_tokens"], 8192 - prompt.len() - kept, "what the context leaves");
    assert_eq!(server.requests_on(CHAT).len(), 1);
}

#[test]
fn a_server_that_refuses_gets_the_prompt_again_from_the_beginning() {
    let expected = run(&ScriptedServer::start(Script::new().answer(answers())), 6, one_by_one()).1;
    for status in [404, 400] {
        let script = cut_everywhere(answers(), End::Cut).rule(Rule::on(COMPLETIONS).status(status).text("no"));
        let server = ScriptedServer::start(script);
        let (end, again) = run(&server, 6, one_by_one());
        assert_same(&again, &expected);
        assert!(again.values().all(|r| r.answer.segments.is_empty()));
        // One 404 says enough; three refusals in a row do.
        let tried = server.requests_on(COMPLETIONS).len();
        assert_eq!(tried, if status == 404 { 1 } else { 3 });
        assert!(end.snapshot.continued.started_again >= tried as u64);
    }
}

#[test]
fn a_server_that_changes_the_prompt_or_gives_no_ids_is_not_continued_on() {
    let expected = run(&ScriptedServer::start(Script::new().answer(answers())), 3, one_by_one()).1;
    let other_prompt =
        r#"{"choices":[{"index":0,"text":" zo","finish_reason":null,"token_ids":[700],"prompt_token_ids":[1,1,6]}]}"#;
    let no_ids = r#"{"choices":[{"index":0,"text":" zo","finish_reason":"stop"}]}"#;
    for event in [other_prompt, no_ids] {
        let rule = Rule::on(COMPLETIONS).events([event, "[DONE]"]);
        let server = ScriptedServer::start(cut_everywhere(answers(), End::Cut).rule(rule));
        let (_, again) = run(&server, 3, one_by_one());
        assert_same(&again, &expected);
        assert!(!server.requests_on(COMPLETIONS).is_empty());
    }
}

#[test]
fn without_ids_or_when_told_so_answers_start_again() {
    let expected = run(&ScriptedServer::start(Script::new().answer(answers())), 3, one_by_one()).1;
    let script = || Script::new().answer(answers()).breaks(CHAT, 20, End::Cut);
    let mut told = one_by_one();
    told.continuation.interrupted = Interrupted::StartAgain;
    let server = ScriptedServer::start(script());
    assert_same(&run(&server, 3, told).1, &expected);
    assert!(server.requests_on(COMPLETIONS).is_empty());
    let mut no_ids = script();
    no_ids.answer.knows_token_ids = false;
    let server = ScriptedServer::start(no_ids);
    assert_eq!(run(&server, 3, one_by_one()).1.len(), 3);
    assert!(server.requests_on(COMPLETIONS).is_empty());
}

#[test]
fn answers_cut_at_the_limit_are_made_longer_as_often_as_asked() {
    let limited = |limit, rounds| {
        let mut settings = one_by_one();
        settings.max_completion_tokens = Some(limit);
        settings.continuation.truncated_rounds = rounds;
        settings
    };
    for answer in kinds() {
        let server = || ScriptedServer::start(Script::new().answer(answer.clone()));
        for (limit, rounds) in [(7, 1), (7, 2), (9, 8), (33, 1)] {
            let whole = run(&server(), PROMPTS, limited(limit * (u64::from(rounds) + 1), 0)).1;
            let (end, joined) = run(&server(), PROMPTS, limited(limit, rounds));
            assert_same(&joined, &whole);
            assert_eq!(end.snapshot.continued.tokens_kept, 0, "nothing was interrupted");
            assert!(joined.values().any(|r| r.answer.segments.len() > 1));
        }
    }
}

#[test]
fn a_longer_answer_that_cannot_be_had_leaves_the_shorter_one() {
    let mut settings = one_by_one();
    settings.max_completion_tokens = Some(10);
    let server = ScriptedServer::start(Script::new().answer(answers()));
    let expected = run(&server, 3, settings.clone()).1;
    settings.continuation.truncated_rounds = 2;
    for status in [404, 500] {
        let script = Script::new().answer(answers()).rule(Rule::on(COMPLETIONS).status(status).text("no"));
        let (end, records) = run(&ScriptedServer::start(script), 3, settings.clone());
        assert_same(&records, &expected);
        assert_eq!(end.snapshot.failed, 0);
    }
}

/// Twice interrupted as by Ctrl-C: the second session begins with what is begun, and asks for the rest only.
#[test]
fn an_aborted_session_goes_on_where_it_was() {
    let slow = Answer { mean_tokens: 60, token_ms: 20.0, ..answers() };
    let fast = || ScriptedServer::start(Script::new().answer(Answer { token_ms: 0.0, ..slow.clone() }));
    let expected = run(&fast(), 30, settings(8)).1;
    let (data, storage) = (data_set(30), FaultyStorage::new());
    let server = ScriptedServer::start(Script::new().answer(slow.clone()));
    session(&storage, &server.url(), data.path(), settings(8), |report, stop| {
        if let Report::Snapshot(snapshot) = report
            && snapshot.tokens > 200
        {
            stop.send_replace(Stop::Abort);
        }
    })
    .unwrap();
    assert!(storage.len(Path::new(INFLIGHT)).unwrap().unwrap() > 500);
    let before = records(&storage).len();
    let second = fast();
    let end = session(&storage, &second.url(), data.path(), settings(8), |_, _| {}).unwrap();
    assert_same(&records(&storage), &expected);
    assert!(end.snapshot.continued.tokens_kept > 100, "{:?}", end.snapshot.continued);
    let continued = second.requests_on(COMPLETIONS).len();
    assert!(continued >= 6, "{continued}");
    assert_eq!(second.requests_on(CHAT).len(), 30 - before - continued);
    let generations = |path: &str| path == CHAT || path == COMPLETIONS;
    let first: Vec<String> =
        second.requests().iter().filter(|r| generations(&r.path)).map(|r| r.path.clone()).take(4).collect();
    assert_eq!(first, [COMPLETIONS; 4], "what is begun goes first");
    assert_eq!(storage.len(Path::new(INFLIGHT)).unwrap(), None, "nothing is unfinished");
}
