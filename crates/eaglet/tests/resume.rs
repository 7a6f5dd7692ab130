//! The same command again: what was done stays done, what is left is sent, what changed is refused, what is torn is repaired.

#![allow(clippy::unwrap_used)]

mod common;

use common::{CHAT, Place, all_ids, asked, text};
use eaglet_testkit::server::{Rule, Script, ScriptedServer};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

fn question(n: usize) -> String {
    format!("Tell me about the number {n}.")
}

/// A finished run of `count` prompts.
fn finished(count: usize) -> (Place, ScriptedServer) {
    let server = ScriptedServer::start(Script::new());
    let place = Place::with_count(count);
    place.run(place.generate(&server.url(), &[])).expect(0);
    assert_eq!(place.ids(), all_ids(count));
    (place, server)
}

/// The lines of the record file as bytes, each with its line feed, by id.
fn line_of(place: &Place, id: &str) -> Vec<u8> {
    let bytes = std::fs::read(place.responses()).unwrap();
    let line = bytes
        .split_inclusive(|byte| *byte == b'\n')
        .find(|line| serde_json::from_slice::<Value>(line).unwrap()["sample_id"] == id);
    line.unwrap().to_vec()
}

fn torn_files(place: &Place) -> Vec<Vec<u8>> {
    let mut names: Vec<_> = std::fs::read_dir(place.path("run")).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.retain(|path| path.to_str().unwrap().contains(".torn-"));
    names.sort();
    names.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

#[test]
fn exactly_the_missing_prompts_are_sent_whatever_the_order_of_the_records() {
    let (place, server) = finished(12);
    let whole = place.contents();
    // Neither the first ones nor in order; a count or a position would be wrong everywhere.
    let kept = ["q9", "q2", "q11", "q4"].map(|id| line_of(&place, id)).concat();
    std::fs::write(place.responses(), &kept).unwrap();
    let before = server.requests_on(CHAT).len();
    place.run(place.generate(&server.url(), &["--resume"])).expect(0);
    let sent: BTreeSet<String> = asked(&server).into_iter().skip(before).collect();
    assert_eq!(sent, [0, 1, 3, 5, 6, 7, 8, 10].map(question).into());
    assert!(std::fs::read(place.responses()).unwrap().starts_with(&kept), "old records are not rewritten");
    assert_eq!(place.contents(), whole);
    let total = server.requests_on(CHAT).len();
    place.run(place.generate(&server.url(), &[])).expect(0);
    assert_eq!(server.requests_on(CHAT).len(), total, "a complete run sends nothing");
    assert_eq!(place.run_json()["generate"]["state"], "complete");
    assert_eq!(place.run_json()["generate"]["sessions"], 3);
}

/// An id is not enough: the same id on another text is another prompt.
#[test]
fn a_record_counts_for_its_text_not_for_its_id_alone() {
    let (place, server) = finished(3);
    place.write_rows(
        "data.jsonl",
        [json!({"id": "q0", "prompt": question(0)}), json!({"id": "q1", "prompt": "Something else."})],
    );
    let before = server.requests_on(CHAT).len();
    place.run(place.generate(&server.url(), &["--allow-config-change"])).expect(0);
    assert_eq!(asked(&server)[before..], ["Something else."]);
}

#[test]
fn records_of_the_old_script_are_accepted_by_id_and_row() {
    let server = ScriptedServer::start(Script::new());
    let place = Place::new();
    let rows = [
        json!({"prompt": "row nought"}),
        json!({"prompt": "row one"}),
        json!({"id": "named", "prompt": "row two"}),
        json!({"prompt": "row three"}),
        json!({"id": "hurt", "prompt": "row four"}),
    ];
    place.write_rows("data.jsonl", rows);
    let old = [
        json!({"sample_id": 1, "content": "an old answer", "reasoning": null}),
        json!({"sample_id": "named", "content": "", "reasoning": "an old thought", "completion_tokens": 5}),
        json!({"sample_id": "hurt", "content": null, "error": "timed out"}),
    ];
    place.write_rows("run/raw_responses.jsonl", old.clone());
    let end = place.run(place.generate(&server.url(), &["--resume", "--json"])).expect(0);
    assert_eq!(
        asked(&server).into_iter().collect::<BTreeSet<_>>(),
        ["row nought", "row three", "row four"].map(str::to_owned).into()
    );
    assert_eq!(end.json()["done"], 5);
    assert_eq!(place.records()[..3], old, "old lines stay as they are");
    assert!(end.stderr.contains("2 records of the older script"), "{}", end.stderr);
}

#[test]
fn failed_prompts_are_sent_again_only_when_asked_for() {
    let place = Place::with_count(10);
    {
        let server =
            ScriptedServer::start(Script::new().rule(Rule::on_chat().contains("number 4.").status(500).text("no")));
        place.run(place.generate(&server.url(), &["--max-retries", "1"])).expect(1);
        assert_eq!(place.failure("q4")["failed_as"], "exhausted");
    }
    let healthy = ScriptedServer::start(Script::new());
    let end = place.run(place.generate(&healthy.url(), &["--json"])).expect(1);
    assert_eq!((&end.json()["done"], &end.json()["failed"]), (&json!(9), &json!(1)));
    assert!(asked(&healthy).is_empty());
    place.run(place.generate(&healthy.url(), &["--retry-failed"])).expect(0);
    assert_eq!(asked(&healthy), [question(4)]);
    // A record outweighs the old failure.
    place.run(place.generate(&healthy.url(), &[])).expect(0);
    place.run(place.generate(&healthy.url(), &["--retry-failed"])).expect(0);
    assert_eq!(asked(&healthy).len(), 1);
    assert_eq!(place.ids(), all_ids(10));
}

const SETTINGS: [&str; 6] = [
    "--temperature",
    "0.7",
    "--max-completion-tokens",
    "200",
    "--extra-body",
    "{\"chat_template_kwargs\":{\"enable_thinking\":true}}",
];

#[test]
fn another_run_is_refused_in_the_same_directory_naming_what_differs() {
    let server = ScriptedServer::start(Script::new());
    let place = Place::with_count(4);
    place.write_rows("other.jsonl", (0..4).map(|n| json!({"id": format!("q{n}"), "prompt": "all the same"})));
    place.run(place.generate(&server.url(), &SETTINGS)).expect(0);
    let before = std::fs::read(place.responses()).unwrap();
    let requests = server.requests_on(CHAT).len();
    let changed = |at: usize, value: &'static str| {
        let mut settings = SETTINGS;
        settings[at] = value;
        settings.to_vec()
    };
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (changed(1, "0.9"), "sampling.temperature: 0.7 in the run, 0.9 now"),
        (SETTINGS[2..].to_vec(), "sampling.temperature: 0.7 in the run, not set now"),
        (changed(3, "100"), "max_completion_tokens: 200 in the run, 100 now"),
        (
            changed(5, "{\"chat_template_kwargs\":{\"enable_thinking\":false}}"),
            "extra_body.chat_template_kwargs.enable_thinking: true in the run, false now",
        ),
        ([&SETTINGS[..], &["--seed", "1"]].concat(), "sampling.seed: not set in the run, 1 now"),
        ([&SETTINGS[..], &["--max-samples", "3"]].concat(), "dataset.prompts: 4 in the run, 3 now"),
        ([&SETTINGS[..], &["--shuffle", "5"]].concat(), "dataset.content_hash"),
        ([&SETTINGS[..], &["--system", "Be kind."]].concat(), "dataset.content_hash"),
    ];
    for (flags, difference) in cases {
        let end = place.run(place.generate(&server.url(), &flags)).expect(2);
        assert!(
            end.complaint().contains(difference) && end.complaint().contains("--allow-config-change"),
            "{flags:?}: {}",
            end.stderr
        );
    }
    let end = place.run(place.generate_from(&["other.jsonl"], &server.url(), &SETTINGS)).expect(2);
    assert!(end.complaint().contains("dataset.content_hash"), "{}", end.stderr);
    let other = ScriptedServer::start(
        Script::new().answer(eaglet_testkit::server::Answer { model: "new/one".to_owned(), ..Default::default() }),
    );
    let end = place.run(place.generate(&other.url(), &SETTINGS)).expect(2);
    assert!(end.complaint().contains("model: \"fake/model\" in the run, \"new/one\" now"), "{}", end.stderr);
    assert_eq!((std::fs::read(place.responses()).unwrap(), server.requests_on(CHAT).len()), (before, requests));
    assert!(other.requests_on(CHAT).is_empty());
    // Another port, another concurrency and a copied data set are no change.
    place.write("moved/copy.jsonl", std::fs::read(place.path("data.jsonl")).unwrap());
    let moved = ScriptedServer::start(Script::new());
    let more = [&SETTINGS[..], &["--concurrency", "3", "--silence-timeout", "9"]].concat();
    place.run(place.generate_from(&["moved/copy.jsonl"], &moved.url(), &more)).expect(0);
}

#[test]
fn an_allowed_change_is_recorded_and_the_answers_stay() {
    let (place, server) = finished(6);
    let kept = ["q1", "q5"].map(|id| line_of(&place, id)).concat();
    std::fs::write(place.responses(), &kept).unwrap();
    let end = place.run(place.generate(&server.url(), &["--temperature", "0.3", "--allow-config-change"])).expect(0);
    assert!(end.stderr.contains("sampling.temperature: not set in the run, 0.3 now"), "{}", end.stderr);
    let run = place.run_json();
    assert_eq!(run["config_changes"][0]["differences"], json!(["sampling.temperature: not set in the run, 0.3 now"]));
    assert_eq!(run["fingerprint"]["sampling"]["temperature"], 0.3);
    assert_eq!(place.ids(), all_ids(6));
    let temperatures: BTreeSet<String> = place.records().iter().map(|record| record["sampling"].to_string()).collect();
    assert_eq!(temperatures.len(), 2, "each record says under which settings it came");
    place.run(place.generate(&server.url(), &["--temperature", "0.3"])).expect(0);
}

/// Half a line, half a character, zero bytes, and a whole line that only lacks its end.
#[test]
fn a_torn_tail_is_cut_kept_and_sent_again() {
    let (place, server) = finished(5);
    let whole = place.contents();
    let good = ["q3", "q0"].map(|id| line_of(&place, id)).concat();
    let last = line_of(&place, "q4");
    let half_character = [&br#"{"v":1,"sample_id":"q4","content":"caf"#[..], &[0xC3]].concat();
    let tails: [Vec<u8>; 4] =
        [last[..last.len() / 2].to_vec(), half_character, vec![0; 700], [&last[..90], &[0; 100]].concat()];
    let mut kept = 0;
    for tail in tails {
        std::fs::write(place.responses(), [&good[..], &tail].concat()).unwrap();
        let before = server.requests_on(CHAT).len();
        let end = place.run(place.generate(&server.url(), &[])).expect(0);
        assert!(end.stderr.contains("repaired the torn end"), "{}", end.stderr);
        assert_eq!(asked(&server)[before..].iter().cloned().collect::<BTreeSet<_>>(), [1, 2, 4].map(question).into());
        assert_eq!(place.contents(), whole);
        kept += 1;
        let torn = torn_files(&place);
        assert_eq!(torn.len(), kept);
        assert!(torn.contains(&tail), "the cut bytes are kept");
    }
    std::fs::write(place.responses(), [&good[..], &last[..last.len() - 1]].concat()).unwrap();
    let before = server.requests_on(CHAT).len();
    place.run(place.generate(&server.url(), &[])).expect(0);
    assert_eq!(asked(&server)[before..].iter().cloned().collect::<BTreeSet<_>>(), [1, 2].map(question).into());
    assert_eq!(place.contents(), whole);
}

/// A damaged line in the middle is no torn tail: it is reported, left as it is, and its prompt is answered again.
#[test]
fn a_damaged_line_in_the_middle_is_told_and_left() {
    let (place, server) = finished(3);
    let (first, last) = (line_of(&place, "q0"), line_of(&place, "q2"));
    let bytes = [&first[..], b"{\"v\":1,\"sample_id\":\"q1\",\"prom\n", &last].concat();
    std::fs::write(place.responses(), &bytes).unwrap();
    let before = server.requests_on(CHAT).len();
    let end = place.run(place.generate(&server.url(), &[])).expect(0);
    assert!(end.stderr.contains(&format!("the first at byte {}", first.len())), "{}", end.stderr);
    assert_eq!(asked(&server)[before..], [question(1)]);
    assert!(std::fs::read(place.responses()).unwrap().starts_with(&bytes));
}

const ODD: &str =
    "nul \u{0} ls \u{2028} ps \u{2029} nel \u{85} del \u{7f} bom \u{feff} crab \u{1F980} \u{202E}rtl \\u0000 end";

#[test]
fn odd_characters_go_through_the_run_byte_for_byte() {
    let reply = [vec![common::piece(ODD)], common::good_end(3)].concat();
    let server = ScriptedServer::start(Script::new().rule(Rule::on_chat().contains("echo").events(reply)));
    let place = Place::new();
    place.write_rows(
        "data.jsonl",
        [json!({"id": ODD, "prompt": format!("echo {ODD}")}), json!({"id": "plain", "prompt": "echo"})],
    );
    place.run(place.generate(&server.url(), &[])).expect(0);
    let sent: BTreeSet<String> = asked(&server).into_iter().collect();
    assert!(sent.contains(&format!("echo {ODD}")));
    let record = place.record(ODD);
    assert_eq!(text(&record["content"]), ODD);
    assert_eq!(text(&record["messages"][0]["content"]), format!("echo {ODD}"));
    let bytes = std::fs::read(place.responses()).unwrap();
    assert_eq!(bytes.iter().filter(|byte| **byte == b'\n').count(), 2);
    assert!(!bytes.contains(&0));
    let before = asked(&server).len();
    place.run(place.generate(&server.url(), &[])).expect(0);
    assert_eq!(asked(&server).len(), before, "known again by id and text");
}

/// The same rows with byte-order mark, CRLF, blank lines, as an array, packed: the same prompts, so the same run.
#[test]
fn the_same_rows_in_another_form_resume_the_run() {
    let rows: Vec<Value> = (0..4)
        .map(|n| json!({"id": format!("q{n}"), "messages": [{"role": "user", "content": question(n)}]}))
        .collect();
    let text = |end: &str| rows.iter().map(|row| format!("{row}{end}")).collect::<String>();
    let place = Place::new();
    place.write("data.jsonl", text("\n"));
    place.write("bom.jsonl", format!("\u{feff}{}", text("\n")));
    place.write("crlf.jsonl", text("\r\n"));
    place.write("blank.jsonl", format!("\u{feff}\r\n{}\r\n  \r\n", text(" \r\n\r\n")));
    place.write("array.json", json!(rows).to_string());
    gzip(&place.path("packed.jsonl.gz"), text("\n").as_bytes());
    let server = ScriptedServer::start(Script::new());
    place.run(place.generate(&server.url(), &[])).expect(0);
    for form in ["bom.jsonl", "crlf.jsonl", "blank.jsonl", "array.json", "packed.jsonl.gz"] {
        place.run(place.generate_from(&[form], &server.url(), &[])).expect(0);
    }
    assert_eq!(server.requests_on(CHAT).len(), 4);
    let utf16: Vec<u8> = [0xFF, 0xFE].into_iter().chain(text("\n").encode_utf16().flat_map(u16::to_le_bytes)).collect();
    place.write("wide.jsonl", utf16);
    let end = place.run(place.generate_from(&["wide.jsonl"], &server.url(), &[]));
    assert!(matches!(end.code, Some(2 | 4)), "{end:?}");
    assert!(end.complaint().contains("UTF-16"), "{}", end.stderr);
}

fn gzip(path: &Path, bytes: &[u8]) {
    use std::io::Write;
    let mut packed = flate2::write::GzEncoder::new(std::fs::File::create(path).unwrap(), flate2::Compression::fast());
    packed.write_all(bytes).unwrap();
    packed.finish().unwrap();
}

/// `run.json` lost or damaged: the records alone decide, or the way out is named.
#[test]
fn a_damaged_run_file_names_the_way_out() {
    let (place, server) = finished(3);
    std::fs::write(place.run_file("run.json"), "{\"format_version\": 1,").unwrap();
    let end = place.run(place.generate(&server.url(), &[])).expect(4);
    assert!(end.complaint().contains("run.json") && end.complaint().contains("hint:"), "{}", end.stderr);
    std::fs::remove_file(place.run_file("run.json")).unwrap();
    let before = server.requests_on(CHAT).len();
    place.run(place.generate(&server.url(), &[])).expect(0);
    assert_eq!(server.requests_on(CHAT).len(), before);
}
