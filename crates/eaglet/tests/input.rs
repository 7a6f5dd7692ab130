//! What of a data set reaches the server, in which form and order, and what is said about the rest.

#![allow(clippy::unwrap_used)]

mod common;

use common::{CHAT, Place, asked, good_stream, text};
use eaglet_testkit::server::{Rule, Script, ScriptedServer};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::Write;

/// One request at a time, so that the order of arrival is the order of sending.
const IN_ORDER: [&str; 2] = ["--concurrency", "1"];

/// The `messages` of each chat request, in order of arrival.
fn sent_messages(server: &ScriptedServer) -> Vec<Value> {
    server.requests_on(CHAT).iter().map(|request| request.json()["messages"].clone()).collect()
}

fn user(content: &str) -> Value {
    json!({"role": "user", "content": content})
}

/// Recipes from two kitchens; `q0` to `q11`.
fn recipes() -> Place {
    let place = Place::new();
    let kitchen = |n: usize| if n.is_multiple_of(3) { "north" } else { "south" };
    let row = |n: usize| json!({"id": format!("q{n}"), "prompt": format!("Recipe {n}?"), "meta": {"kitchen": kitchen(n)}, "spicy": n % 2 == 1});
    place.write_rows("data.jsonl", (0..12).map(row));
    place
}

/// Rows 2 and 5 share an id but not their text; 3 and 4 are the same; 6 and 7 have no id and are the same.
fn repeated() -> Place {
    let place = Place::new();
    place.write_rows(
        "data.jsonl",
        [
            json!({"id": "oak", "prompt": "How tall is an oak?"}),
            json!({"id": "elm", "prompt": "How tall is an elm?"}),
            json!({"id": "fir", "prompt": "How tall is a fir?"}),
            json!({"id": "fir", "prompt": "How tall is a fir?"}),
            json!({"id": "elm", "prompt": "How old is an elm?"}),
            json!({"prompt": "And a birch?"}),
            json!({"prompt": "And a birch?"}),
        ],
    );
    place
}

#[test]
fn one_id_on_two_texts_is_refused_before_anything_is_sent() {
    let server = ScriptedServer::start(Script::new());
    let place = repeated();
    let complaint = place.run(place.generate(&server.url(), &[])).expect(2).complaint();
    assert!(complaint.contains("\"elm\""), "{complaint}");
    assert!(complaint.contains("data.jsonl:2") && complaint.contains("data.jsonl:5"), "{complaint}");
    assert!(complaint.contains("--duplicates keep"), "{complaint}");
    assert!(server.requests_on(CHAT).is_empty());
    assert!(place.records().is_empty());
}

#[test]
fn kept_duplicates_have_a_record_each_and_equal_rows_are_asked_once() {
    let server = ScriptedServer::start(Script::new());
    let place = repeated();
    let keep = ["--duplicates", "keep"];
    place.run(place.generate(&server.url(), &keep)).expect(0);
    let questions: BTreeSet<String> = asked(&server).into_iter().collect();
    assert_eq!((asked(&server).len(), questions.len()), (5, 5), "{questions:?}");
    assert_eq!(place.records().len(), 5);
    let elms: Vec<Value> = place.records().into_iter().filter(|record| record["sample_id"] == "elm").collect();
    assert_eq!(elms.len(), 2);
    assert_ne!(elms[0]["prompt_hash"], elms[1]["prompt_hash"]);
    // No row vanishes without a word: the two repeats are listed with the row they repeat.
    let failures = place.failures();
    let repeats: Vec<(u64, bool)> =
        failures.iter().map(|f| (f["row"].as_u64().unwrap(), f["failed_as"] == "duplicate")).collect();
    assert_eq!(repeats, [(3, true), (6, true)]);
    assert!(
        text(&failures[0]["origin"]).ends_with("data.jsonl:4")
            && text(&failures[0]["detail"]).ends_with("data.jsonl:3")
    );
    // The records tell the two apart, so both are found again.
    place.run(place.generate(&server.url(), &keep)).expect(0);
    assert_eq!(asked(&server).len(), 5);
    assert_eq!(place.failures(), failures, "listed once");
}

#[test]
fn conversations_arrive_in_the_form_of_the_api_whatever_they_are_called() {
    let weather = json!({"name": "weather", "description": "Looks outside.", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}});
    let rows = [
        json!({"id": "from-value", "conversations": [
            {"from": "system", "value": "Be short."}, {"from": "human", "value": "Rain?"}, {"from": "gpt", "value": "THEIRS"},
            {"from": "human", "value": "Snow?"}, {"from": "gpt", "value": "THEIRS"}]}),
        // Two model turns in a row, the first of them a call: kept by name, not by place.
        json!({"id": "tools", "tools": json!([weather]).to_string(), "conversations": [
            {"from": "human", "value": "Wind in Brest?"}, {"from": "function_call", "value": "{\"name\": \"weather\", \"arguments\": {\"town\": \"Brest\"}}"},
            {"from": "observation", "value": "gale"}, {"from": "gpt", "value": "THEIRS"}]}),
        json!({"id": "as-text", "messages": "[{\"role\": \"user\", \"content\": \"Fog?\"}, {\"role\": \"assistant\", \"content\": \"THEIRS\"}]"}),
        json!({"id": "instruction", "instruction": "Translate.", "input": "Nebel"}),
        json!({"id": "turns", "turns": ["Hail?", "Since when?"]}),
    ];
    let place = Place::new();
    place.write_rows("data.jsonl", rows);
    let server = ScriptedServer::start(Script::new());
    place.run(place.generate(&server.url(), &IN_ORDER)).expect(0);
    let sent = sent_messages(&server);
    assert!(!json!(sent).to_string().contains("THEIRS\"}]"), "the data set's own last answer is never sent");
    assert_eq!(
        sent[0],
        json!([{"role": "system", "content": "Be short."}, user("Rain?"), {"role": "assistant", "content": "THEIRS"}, user("Snow?")])
    );
    let tools = server.requests_on(CHAT)[1].json()["tools"].clone();
    assert_eq!(tools, json!([{"type": "function", "function": weather}]));
    let roles: Vec<&str> =
        sent[1].as_array().unwrap().iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["user", "assistant", "tool"]);
    let call = &sent[1][1]["tool_calls"][0];
    assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("weather")));
    assert_eq!(serde_json::from_str::<Value>(&text(&call["function"]["arguments"])).unwrap(), json!({"town": "Brest"}));
    assert_eq!((&sent[1][2]["content"], &sent[1][2]["tool_call_id"]), (&json!("gale"), &call["id"]));
    assert_eq!(sent[2..], [json!([user("Fog?")]), json!([user("Translate.\n\nNebel")]), json!([user("Hail?")])]);
    assert_eq!(place.record("from-value")["messages"], sent[0], "the record holds what was sent");
}

#[test]
fn unusable_rows_are_listed_once_with_place_and_reason() {
    let place = Place::new();
    let rows = [
        r#"{"id": "good", "prompt": "Which way is east?"}"#,
        r#"{"id": "cut", "prompt": "Which w"#,
        r#"{"id": "blank", "prompt": "  "}"#,
        r#"["no", "object"]"#,
        r#"{"id": "other", "caption": "a compass"}"#,
        r#"{"id": "half", "prompt": "a broken pair \ud83e here"}"#,
        r#"{"id": "who", "messages": [{"role": "narrator", "content": "Night fell."}]}"#,
        r#"{"id": "alone", "messages": [{"role": "assistant", "content": "I am alone."}]}"#,
    ];
    place.write("data.jsonl", rows.join("\n"));
    let server = ScriptedServer::start(Script::new());
    let end = place.run(place.generate(&server.url(), &[])).expect(0);
    assert_eq!(asked(&server), ["Which way is east?"]);
    let listed = place.failures();
    let told: Vec<(u64, String)> = listed.iter().map(|f| (f["row"].as_u64().unwrap(), text(&f["cause"]))).collect();
    let expected = [
        (1, "invalid_json"),
        (2, "empty_user_text"),
        (3, "not_an_object"),
        (4, "no_prompt_field"),
        (5, "lone_surrogate"),
        (6, "unknown_role"),
        (7, "no_user_message"),
    ];
    assert_eq!(told, expected.map(|(row, cause)| (row, cause.to_owned())));
    for failure in &listed {
        assert_eq!(failure["failed_as"], "unusable");
        let line = failure["row"].as_u64().unwrap() + 1;
        assert!(text(&failure["origin"]).ends_with(&format!("data.jsonl:{line}")), "{failure}");
    }
    assert!(text(&listed[5]["detail"]).contains("narrator"), "{}", listed[5]);
    assert!(text(&listed[3]["detail"]).contains("caption"), "{}", listed[3]);
    assert!(end.stderr.contains("unknown_role 1") && end.stderr.contains("data.jsonl:2"), "{}", end.stderr);
    place.run(place.generate(&server.url(), &[])).expect(0);
    assert_eq!(place.failures(), listed, "the second session lists them again");
    assert_eq!(asked(&server).len(), 1);
}

#[test]
fn rows_can_be_made_usable_by_saying_how_to_read_them() {
    let place = Place::new();
    place.write(
        "data.jsonl",
        concat!(
            "{\"key\": {\"n\": 7}, \"messages\": [{\"role\": \"narrator\", \"content\": \"Night fell.\"}]}\n",
            "{\"key\": {\"n\": 8}, \"prompt\": \"a broken pair \\ud83e here\"}\n",
        ),
    );
    let server = ScriptedServer::start(Script::new());
    let flags = ["--map-role", "narrator=user", "--bad-text", "repair", "--id-field", "key.n"];
    place.run(place.generate(&server.url(), &flags)).expect(0);
    assert_eq!(place.ids(), BTreeSet::from(["7".to_owned(), "8".to_owned()]));
    assert!(asked(&server).contains(&"a broken pair \u{fffd} here".to_owned()));
}

/// A hint must name a flag that exists.
#[test]
fn a_data_set_of_unknown_roles_is_told_which_flag_helps() {
    let place = Place::new();
    place.write_rows("data.jsonl", [json!({"messages": [{"role": "pirate", "content": "Arr?"}]})]);
    let server = ScriptedServer::start(Script::new());
    let complaint = place.run(place.generate(&server.url(), &[])).expect(4).complaint();
    assert!(
        complaint.contains("unknown role \"pirate\"") && complaint.contains("--map-role pirate=user"),
        "{complaint}"
    );
}

#[test]
fn filters_choose_rows() {
    let server = ScriptedServer::start(Script::new());
    let place = recipes();
    let flags = [&IN_ORDER[..], &["--where", "meta.kitchen!=north", "--where", "spicy=true"]].concat();
    place.run(place.generate(&server.url(), &flags)).expect(0);
    assert_eq!(asked(&server), [1, 5, 7, 11].map(|n| format!("Recipe {n}?")));
    assert!(place.failures().is_empty(), "what was not asked for has not failed");
    let other = recipes();
    let complaint = other.run(other.generate(&server.url(), &["--where", "meta.cook=anna"])).expect(2).complaint();
    assert!(complaint.contains("meta.cook"), "{complaint}");
}

#[test]
fn a_seed_decides_the_order_and_fewer_samples_are_its_beginning() {
    let order = |flags: &[&str]| {
        let server = ScriptedServer::start(Script::new());
        let place = recipes();
        place.run(place.generate(&server.url(), &[&IN_ORDER[..], flags].concat())).expect(0);
        assert_eq!(place.records().len(), asked(&server).len());
        asked(&server)
    };
    let plain = order(&[]);
    let shuffled = order(&["--shuffle", "5"]);
    assert_eq!(plain, (0..12).map(|n| format!("Recipe {n}?")).collect::<Vec<_>>());
    assert_ne!(shuffled, plain);
    assert_eq!(shuffled.iter().collect::<BTreeSet<_>>(), plain.iter().collect::<BTreeSet<_>>());
    assert_eq!(order(&["--shuffle", "5"]), shuffled);
    assert_ne!(order(&["--shuffle", "6"]), shuffled);
    assert_eq!(order(&["--shuffle", "5", "--max-samples", "4"]), shuffled[..4]);
    assert_eq!(order(&["--max-samples", "4"]), plain[..4]);
}

#[test]
fn the_system_message_replaces_the_data_sets_own() {
    let place = Place::new();
    place.write_rows(
        "data.jsonl",
        [
            json!({"id": "own", "messages": [{"role": "system", "content": "Rhyme."}, user("Sea?")]}),
            json!({"id": "none", "prompt": "Land?"}),
        ],
    );
    let server = ScriptedServer::start(Script::new());
    place.run(place.generate(&server.url(), &[&IN_ORDER[..], &["--system", "Speak plainly."]].concat())).expect(0);
    let system = json!({"role": "system", "content": "Speak plainly."});
    assert_eq!(sent_messages(&server), [json!([system, user("Sea?")]), json!([system, user("Land?")])]);
}

/// Three user turns: the data set's answers are replaced by the target's, and the conversation is one record.
#[test]
fn all_turns_are_answered_on_the_targets_own_answers() {
    let answers = [("mine, ", "first"), ("mine, ", "second"), ("mine, ", "third")];
    let script = answers
        .iter()
        .zip(1..)
        .fold(Script::new(), |script, ((a, b), nth)| script.rule(Rule::on_chat().nth([nth]).events(good_stream(a, b))));
    let server = ScriptedServer::start(script);
    let place = Place::new();
    let theirs = json!({"role": "assistant", "content": "THEIRS"});
    let messages = json!([user("One?"), theirs, user("Two?"), theirs, user("Three?"), theirs]);
    place.write_rows("data.jsonl", [json!({"id": "chat", "messages": messages})]);
    place.run(place.generate(&server.url(), &["--turns", "all"])).expect(0);
    let mine = |content: &str| json!({"role": "assistant", "content": content});
    let whole = json!([user("One?"), mine("mine, first"), user("Two?"), mine("mine, second"), user("Three?")]);
    let whole_list = whole.as_array().unwrap();
    assert_eq!(sent_messages(&server), [json!(whole_list[..1]), json!(whole_list[..3]), whole.clone()]);
    let record = place.record("chat");
    assert_eq!((&record["messages"], &record["content"]), (&whole, &json!("mine, third")));
    let earlier: Vec<(u64, String)> = record["earlier_turns"]
        .as_array()
        .unwrap()
        .iter()
        .map(|turn| (turn["messages_sent"].as_u64().unwrap(), text(&turn["content"])))
        .collect();
    assert_eq!(earlier, [(1, "mine, first".to_owned()), (3, "mine, second".to_owned())]);
    assert_eq!(place.records().len(), 1);
    place.run(place.generate(&server.url(), &["--turns", "all"])).expect(0);
    assert_eq!(server.requests_on(CHAT).len(), 3, "a finished conversation is not asked again");
}

#[test]
fn the_first_turn_alone_can_be_asked() {
    let server = ScriptedServer::start(Script::new());
    let place = Place::new();
    let messages = json!([{"role": "system", "content": "Hum."}, user("One?"), {"role": "assistant", "content": "THEIRS"}, user("Two?")]);
    place.write_rows("data.jsonl", [json!({"id": "chat", "messages": messages})]);
    place.run(place.generate(&server.url(), &["--turns", "first"])).expect(0);
    assert_eq!(sent_messages(&server), [json!([{"role": "system", "content": "Hum."}, user("One?")])]);
}

/// A pipe can be read once only; the run must not need it a second time.
#[test]
fn standard_input_is_read_once_and_resumed_without_it() {
    let server = ScriptedServer::start(Script::new());
    let place = recipes();
    let mut command = place.generate_from(&["-"], &server.url(), &[]);
    command.stdin(std::fs::File::open(place.path("data.jsonl")).unwrap());
    place.run(command).expect(0);
    assert_eq!((place.ids(), asked(&server).len()), (common::all_ids(12), 12));
    // The last record goes; nothing comes through the pipe any more.
    let bytes = std::fs::read(place.responses()).unwrap();
    let kept = bytes.split_inclusive(|byte| *byte == b'\n').take(11).collect::<Vec<_>>().concat();
    std::fs::write(place.responses(), kept).unwrap();
    place.run(place.generate_from(&["-"], &server.url(), &[])).expect(0);
    assert_eq!((place.ids(), asked(&server).len()), (common::all_ids(12), 13));
}

#[test]
fn compressed_and_several_inputs_are_one_data_set() {
    let server = ScriptedServer::start(Script::new());
    let place = recipes();
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packer.write_all(b"{\"id\": \"packed\", \"prompt\": \"Bread?\"}\n").unwrap();
    place.write("set/a.jsonl.gz", packer.finish().unwrap());
    place.write("set/b.csv", "id,prompt\ncsv,\"Salt, or\nnot?\"\n");
    place.write("set/c.json", "[{\"id\": \"list\", \"prompt\": \"Soup?\"}]");
    place.run(place.generate_from(&["data.jsonl", "set"], &server.url(), &IN_ORDER)).expect(0);
    assert_eq!(asked(&server)[12..], ["Bread?", "Salt, or\nnot?", "Soup?"]);
    assert_eq!(place.records().len(), 15);
    assert_eq!(place.record("list")["row"], 14);
}
