//! From a server to training examples, with the real program: generate, prepare, verify, show.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Place, eaglet, lines, text, wait_until};
use eaglet_testkit::server::{Answer, Reasoning, Script, ScriptedServer};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

const ALL_FORMATS: &str = "shards,specforge,specforge-conversations,speculators,speculators-jsonl,parquet";

fn server(answer: Answer) -> ScriptedServer {
    ScriptedServer::start(Script::new().answer(answer))
}

fn thinking() -> Answer {
    Answer { reasoning: Reasoning::Reasoning, think_token: true, ..Answer::default() }
}

/// Every file below a directory, with its content.
fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            found.extend(files(&path).into_iter().map(|(below, content)| (format!("{name}/{below}"), content)));
        } else {
            found.insert(name, std::fs::read(&path).unwrap());
        }
    }
    found
}

/// Ids and mask of a record's answers by the rule: the prompt is not trained, the answer is.
fn expected(record: &Value) -> Vec<(Value, Value)> {
    let earlier = record["earlier_turns"].as_array().cloned().unwrap_or_default();
    let answers = earlier.iter().chain([record]);
    answers
        .map(|answer| {
            let ids = |name: &str| answer[name].as_array().unwrap().clone();
            let (prompt, sampled) = (ids("prompt_token_ids"), ids("token_ids"));
            let mask = [vec![json!(0); prompt.len()], vec![json!(1); sampled.len()]].concat();
            (Value::Array([prompt, sampled].concat()), Value::Array(mask))
        })
        .collect()
}

#[test]
fn what_the_server_sampled_is_what_the_trainers_read() {
    let (place, server) = (Place::with_count(40), server(thinking()));
    place.run(place.generate(&server.url(), &[])).expect(0);
    let end = place
        .run(eaglet(&["prepare", "run", "--format", ALL_FORMATS, "--json", "--validation-share", "0.25"]))
        .expect(0);
    let summary = end.json();
    assert_eq!((&summary["kept"], &summary["input"]["items"]), (&json!(40), &json!(40)), "{summary}");
    assert!(end.stderr.contains("answers     40 in 40 lines: 40 kept, 0 dropped"), "{}", end.stderr);
    let rows =
        ["train", "validation"].map(|split| lines(&place.run_file(&format!("prepared/specforge/{split}.jsonl"))));
    assert!(rows.iter().all(|rows| !rows.is_empty()), "both sides have rows");
    for row in rows.iter().flatten() {
        let wanted = expected(&place.record(&text(&row["id"])));
        assert_eq!((row["input_ids"].clone(), row["loss_mask"].clone()), wanted[0]);
    }
    let verified = place.run(eaglet(&["verify", "run", "--json"])).expect(0).json();
    assert_eq!(verified["prepared"]["checked"]["examples compared with the run's answers"], 40);
    assert_eq!(verified["run"]["checked"]["answers with ids"], 40);

    let again = place.run(eaglet(&["prepare", "run", "--format", ALL_FORMATS, "--validation-share", "0.25"])).expect(0);
    assert!(again.stderr.contains("was there already"), "{}", again.stderr);
    let other = place.run(eaglet(&["prepare", "run"])).expect(2);
    assert!(other.complaint().contains("holds another prepared set"), "{}", other.complaint());
    place.run(eaglet(&["prepare", "run", "--overwrite"])).expect(0);
    assert!(!place.run_file("prepared/parquet").exists() && place.run_file("prepared/specforge").exists());
}

#[test]
fn each_turn_of_a_conversation_is_an_example() {
    let (place, server) = (Place::new(), server(thinking()));
    place.write_rows("data.jsonl", (0..6).map(|n| {
        let say = |role: &str, text: String| json!({"role": role, "content": text});
        json!({"id": format!("q{n}"), "messages": [say("user", format!("First {n}.")), say("assistant", "theirs".into()),
            say("user", format!("Second {n}."))]})
    }));
    place.run(place.generate(&server.url(), &["--turns", "all"])).expect(0);
    place
        .run(eaglet(&[
            "prepare",
            "run",
            "--out",
            "examples",
            "--format",
            "shards,specforge",
            "--validation-share",
            "0",
        ]))
        .expect(0);
    let rows = lines(&place.path("examples/specforge/train.jsonl"));
    assert_eq!(rows.len(), 12);
    for row in rows {
        let wanted = expected(&place.record(&text(&row["id"])));
        assert_eq!(
            (row["input_ids"].clone(), row["loss_mask"].clone()),
            wanted[row["turn"].as_u64().unwrap() as usize]
        );
    }
    place.run(eaglet(&["verify", "examples"])).expect(0);
    let shown = place.run(eaglet(&["show", "examples", "q3", "--turn", "1"])).expect(0).stdout;
    assert!(shown.starts_with("\"q3\" turn 1, row 3, train: ") && shown.contains("\n["), "{shown}");
    let both = place.run(eaglet(&["show", "examples", "q3"])).expect(0).stdout;
    assert!(both.contains("turn 0") && both.contains("turn 1"), "{both}");
    let none = place.run(eaglet(&["show", "examples", "q99"])).expect(2);
    assert!(none.complaint().contains("no example \"q99\""), "{}", none.complaint());
}

#[test]
fn answers_without_ids_are_listed_and_a_set_of_nothing_is_a_failure() {
    let (place, server) = (Place::with_count(3), server(Answer { knows_token_ids: false, ..Answer::default() }));
    place.run(place.generate(&server.url(), &[])).expect(0);
    let end = place.run(eaglet(&["prepare", "run"])).expect(1);
    assert!(end.stderr.contains("0 kept, 3 dropped") && end.stderr.contains("no_token_ids 3"), "{}", end.stderr);
    let dropped = lines(&place.run_file("prepared/dropped.jsonl"));
    let told: Vec<_> = dropped.iter().map(|line| (text(&line["sample_id"]), text(&line["reason"]))).collect();
    assert_eq!(told, ["q0", "q1", "q2"].map(|id| (id.to_owned(), "no_token_ids".to_owned())));
    place.run(eaglet(&["verify", "run"])).expect(0);
}

#[test]
fn damage_is_found_and_named() {
    let (place, server) = (Place::with_count(5), server(Answer::default()));
    place.run(place.generate(&server.url(), &[])).expect(0);
    place.run(eaglet(&["prepare", "run", "--validation-share", "0"])).expect(0);
    let shard = place.run_file("prepared/shards/train-00000.examples");
    let mut bytes = std::fs::read(&shard).unwrap();
    bytes[20] ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    let end = place.run(eaglet(&["verify", "run"])).expect(4);
    assert!(end.stdout.contains("WRONG: shards/train-00000.examples"), "{}", end.stdout);
    place.run(eaglet(&["show", "run", "q0"])).expect(4);

    let mut records = std::fs::read(place.responses()).unwrap();
    let first: Vec<u8> = records.split_inclusive(|byte| *byte == b'\n').next().unwrap().to_vec();
    records.extend(first);
    std::fs::write(place.responses(), records).unwrap();
    let end = place.run(eaglet(&["verify", "run"])).expect(4);
    assert!(end.stdout.contains("has another record"), "{}", end.stdout);
    place.run(eaglet(&["verify", "nowhere"])).expect(2);
}

#[test]
fn a_draft_vocabulary_needs_the_targets_size_and_takes_it_from_its_config() {
    let (place, server) = (Place::with_count(5), server(Answer::default()));
    place.run(place.generate(&server.url(), &[])).expect(0);
    let end = place.run(eaglet(&["prepare", "run", "--draft-vocab-size", "64"])).expect(2);
    assert!(end.complaint().contains("--vocab-size N"), "{}", end.complaint());
    place.write("model/config.json", r#"{"text_config": {"vocab_size": 70000}}"#);
    let made =
        ["prepare", "run", "--draft-vocab-size", "64", "--model-path", "model", "--special-ids", "5,69999", "--json"];
    let vocabulary = place.run(eaglet(&made)).expect(0).json()["vocabulary"].clone();
    assert_eq!((&vocabulary["draft"], &vocabulary["target"]), (&json!(64), &json!(70000)));
    let t2d = std::fs::read(place.run_file("prepared/t2d-64.npy")).unwrap();
    let t2d = &t2d[t2d.len() - 70_000..];
    assert_eq!((t2d[5], t2d[69_999], t2d.iter().filter(|one| **one == 1).count()), (1, 1, 64));
    place.run(eaglet(&["verify", "run"])).expect(0);
}

/// A record as `generate` writes it.
fn record(row: usize) -> Value {
    let ids: Vec<usize> = (0..400).map(|n| (n * (row + 3)) % 5000).collect();
    json!({"v": 1, "sample_id": format!("q{row}"), "prompt_hash": format!("{row:032x}"), "status": "ok", "prompt_tokens": 3,
           "completion_tokens": 400, "prompt_bytes": 3, "row": row, "finish_reason": "stop", "content": "x".repeat(500),
           "prompt_token_ids": [1, 2, row], "token_ids": ids})
}

#[test]
fn killed_at_any_moment_it_is_made_whole_by_the_same_command() {
    let place = Place::new();
    place.write_rows("run/raw_responses.jsonl", (0..4000).map(record));
    let command = ["prepare", "run", "--format", ALL_FORMATS, "--threads", "2"];
    place.run(eaglet(&command)).expect(0);
    let whole = files(&place.run_file("prepared"));
    let again = [&command[..], &["--out", "other"]].concat();
    for moment in [
        "other.unfinished/specforge/train.jsonl",
        "other.unfinished/parquet/train.parquet",
        "other.unfinished/summary.json",
    ] {
        let mut running = place.start(eaglet(&again));
        // It may be through before we look: then there is nothing left to be killed.
        wait_until("the file is there or it is through", || place.path(moment).exists() || running.has_ended());
        if !running.has_ended() {
            running.signal(Signal::KILL);
        }
        running.ended();
        if place.path("other").exists() {
            assert!(files(&place.path("other")) == whole, "a directory with the final name is whole");
            std::fs::rename(place.path("other"), place.path(&format!("done-{}", moment.len()))).unwrap();
        }
    }
    place.run(eaglet(&again)).expect(0);
    assert!(files(&place.path("other")) == whole);
    assert!(!place.path("other.unfinished").exists());
}
