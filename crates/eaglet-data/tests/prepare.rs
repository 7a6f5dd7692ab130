//! From the record of a run to a prepared set, through the files.

#![allow(clippy::unwrap_used)]

use eaglet_core::ids::{ContentHash, PromptId};
use eaglet_core::prompt::{Message, Role};
use eaglet_core::response::{Answer, EarlierTurn, RECORD_VERSION, Response, Status};
use eaglet_core::sampling::Sampling;
use eaglet_core::{Class, Error};
use eaglet_data::outputs::{Format, Split};
use eaglet_data::prepare::{Existing, Keep, Options, Policies, Prepared, Progress, Settings, Summary, prepare};
use eaglet_data::shards::ShardReader;
use eaglet_data::verify::verify_prepared;
use eaglet_data::vocab::VocabPlan;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn answer(prompt: &[u32], ids: &[u32]) -> Answer {
    Answer {
        finish_reason: "stop".into(),
        content: Some("It is\u{2028}so.".into()),
        prompt_token_ids: Some(prompt.to_vec()),
        token_ids: Some(ids.to_vec()),
        latency_s: 0.25,
        ..Answer::default()
    }
}

fn record(row: u64, prompt: &[u32], ids: &[u32]) -> Response {
    Response {
        v: RECORD_VERSION,
        sample_id: PromptId::given(format!("q{row}")),
        prompt_hash: ContentHash(u128::from(row) << 64 | 7),
        status: Status::Ok,
        prompt_tokens: None,
        completion_tokens: Some(ids.len() as u64),
        prompt_bytes: 3,
        row,
        source: None,
        model: "m".into(),
        endpoint: "http://127.0.0.1:1".into(),
        finished_at: "2026-11-29T00:00:00Z".into(),
        attempts: 1,
        sampling: Sampling::default(),
        max_completion_tokens: None,
        messages: vec![Message::text(Role::User, "Why?")],
        tools: None,
        answer: answer(prompt, ids),
        earlier_turns: vec![],
    }
}

/// A place with a record file.
struct Place(tempfile::TempDir);

impl Place {
    fn with_lines(lines: &[Vec<u8>]) -> Self {
        let place = Place(tempfile::tempdir().unwrap());
        std::fs::write(
            place.input(),
            lines.iter().flat_map(|line| [line.as_slice(), b"\n"].concat()).collect::<Vec<u8>>(),
        )
        .unwrap();
        place
    }

    fn with(records: &[Response]) -> Self {
        Self::with_lines(&records.iter().map(Response::to_line).collect::<Vec<_>>())
    }

    fn input(&self) -> PathBuf {
        self.0.path().join("raw_responses.jsonl")
    }

    fn out(&self) -> PathBuf {
        self.0.path().join("prepared")
    }

    fn prepare(&self, settings: &Settings, threads: usize) -> Result<Prepared, Error> {
        let options = Options { threads, existing: Existing::Refuse };
        prepare(&self.input(), &self.out(), settings, options, &Progress::default())
    }

    fn made(&self, settings: &Settings) -> Summary {
        match self.prepare(settings, 2).unwrap() {
            Prepared::Made(summary) => summary,
            Prepared::WasThere(_) => panic!("nothing was there"),
        }
    }

    /// Every file of the prepared set, with its content.
    fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let mut files = BTreeMap::new();
        collect(&self.out(), "", &mut files);
        files
    }

    fn json_lines(&self, name: &str) -> Vec<Value> {
        let text = std::fs::read(self.out().join(name)).unwrap();
        text.split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(|line| serde_json::from_slice(line).unwrap())
            .collect()
    }

    fn dropped(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
        self.json_lines("dropped.jsonl").iter().map(|line| (text(&line["sample_id"]), text(&line["reason"]))).collect()
    }

    fn assert_sound(&self) {
        let report = verify_prepared(&self.out(), Some(&self.input())).unwrap();
        assert_eq!(report.findings, Vec::<String>::new());
    }
}

fn collect(directory: &Path, front: &str, files: &mut BTreeMap<String, Vec<u8>>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{front}{}", entry.file_name().to_str().unwrap());
        if entry.file_type().unwrap().is_dir() {
            collect(&entry.path(), &format!("{name}/"), files);
        } else {
            files.insert(name, std::fs::read(entry.path()).unwrap());
        }
    }
}

fn settings(formats: &[Format]) -> Settings {
    Settings {
        policies: Policies::default(),
        formats: formats.iter().copied().collect(),
        validation_share: 0.3,
        draft_vocab: None,
    }
}

fn all_formats() -> Settings {
    Settings { draft_vocab: Some(VocabPlan::new(9, 64, vec![1, 63]).unwrap()), ..settings(&Format::ALL) }
}

/// Of a prompt and its answer.
type Ids = (Vec<u32>, Vec<u32>);

fn some_records() -> impl Strategy<Value = Vec<Response>> {
    let ids = || proptest::collection::vec(0u32..64, 1..12);
    proptest::collection::vec(((ids(), ids()), proptest::collection::vec((ids(), ids()), 0..3)), 0..12).prop_map(
        |all| {
            let build = |(row, ((prompt, ids), earlier)): (usize, (Ids, Vec<Ids>))| {
                let mut record = record(row as u64, &prompt, &ids);
                for (turn, (prompt, ids)) in earlier.iter().enumerate() {
                    let sent = 2 * turn + 1;
                    record.messages.push(Message::text(Role::Assistant, "It is\u{2028}so."));
                    record.messages.push(Message::text(Role::User, "And?"));
                    record.earlier_turns.push(EarlierTurn { messages_sent: sent, answer: answer(prompt, ids) });
                }
                record
            };
            all.into_iter().enumerate().map(build).collect()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The whole in one: exact ids, any order of lines, any number of threads, sums that add up, all formats alike.
    #[test]
    fn the_order_of_lines_never_matters_and_the_sums_add_up(
        records in some_records(), order in any::<u64>(), threads in 1usize..4, keep in any::<bool>(),
    ) {
        let mut settings = all_formats();
        settings.policies.duplicates = if keep { Keep::Keep } else { Keep::Drop };
        let place = Place::with(&records);
        let summary = place.made(&settings);
        prop_assert_eq!(summary.input.lines, records.len() as u64);
        prop_assert_eq!(summary.input.records, records.len() as u64);
        let turns: usize = records.iter().map(|record| record.earlier_turns.len() + 1).sum();
        prop_assert_eq!(summary.kept + summary.dropped_total(), turns as u64);
        prop_assert!(!keep || summary.dropped.is_empty());
        place.assert_sound();

        let mut shuffled = records;
        shuffled.sort_by_key(|record| (order.rotate_left(record.row as u32 * 7) ^ order).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let other = Place::with(&shuffled);
        other.prepare(&settings, threads).unwrap();
        prop_assert_eq!(place.files(), other.files());
    }
}

#[test]
fn examples_are_the_servers_ids_in_the_order_of_the_data_set() {
    let place = Place::with(&[record(2, &[5], &[6, 7]), record(0, &[1, 2], &[3]), record(1, &[4], &[9, 9, 2])]);
    place.made(&Settings { validation_share: 0.0, ..settings(&[Format::Specforge, Format::SpeculatorsJsonl]) });
    assert_eq!(
        place.json_lines("specforge/train.jsonl"),
        [
            json!({"id": "q0", "turn": 0, "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}),
            json!({"id": "q1", "turn": 0, "input_ids": [4, 9, 9, 2], "loss_mask": [0, 1, 1, 1]}),
            json!({"id": "q2", "turn": 0, "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}),
        ]
    );
    let first = json!({"id": "q0_gen0", "primary_id": "q0", "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]});
    assert_eq!(place.json_lines("speculators-jsonl/train.jsonl")[0], first);
    assert!(!place.out().join("specforge/validation.jsonl").exists(), "an empty file stops some loaders");
}

/// A template that drops the reasoning of earlier turns gives each turn another history: each is trained as the target saw it.
#[test]
fn each_turn_is_an_example_with_its_own_prompt() {
    let mut conversation = record(0, &[1, 20, 30, 1], &[40, 2]);
    conversation.earlier_turns = vec![EarlierTurn { messages_sent: 1, answer: answer(&[1], &[7, 8, 20, 2]) }];
    conversation.earlier_turns[0].answer.reasoning = Some("hm".into());
    conversation.messages = vec![
        Message::text(Role::User, "Why?"),
        Message::text(Role::Assistant, "It is\u{2028}so."),
        Message::text(Role::User, "And?"),
    ];
    let place = Place::with(&[conversation]);
    let summary = place.made(&Settings {
        validation_share: 0.0,
        ..settings(&[Format::Shards, Format::Specforge, Format::SpecforgeConversations])
    });
    assert_eq!((summary.input.records, summary.input.items, summary.kept), (1, 2, 2));
    assert_eq!(
        place.json_lines("specforge/train.jsonl"),
        [
            json!({"id": "q0", "turn": 0, "input_ids": [1, 7, 8, 20, 2], "loss_mask": [0, 1, 1, 1, 1]}),
            json!({"id": "q0", "turn": 1, "input_ids": [1, 20, 30, 1, 40, 2], "loss_mask": [0, 0, 0, 0, 1, 1]}),
        ]
    );
    let said = |role: &str, content: &str| json!({"role": role, "content": content});
    let mut thought = said("assistant", "It is\u{2028}so.");
    thought["reasoning_content"] = "hm".into();
    let turns = [said("user", "Why?"), thought, said("user", "And?"), said("assistant", "It is\u{2028}so.")];
    assert_eq!(place.json_lines("specforge-conversations/train.jsonl"), [json!({"id": "q0", "conversations": turns})]);
    place.assert_sound();
}

#[test]
fn conversations_that_specforge_would_train_wrongly_are_left_out() {
    let mut cut = record(0, &[1], &[2]);
    cut.answer.finish_reason = "length".into();
    let mut foreign = record(1, &[1], &[3]);
    foreign.messages.push(Message::text(Role::Assistant, "written by somebody else"));
    foreign.messages.push(Message::text(Role::User, "And?"));
    let mut half = record(2, &[1, 4], &[5]);
    half.earlier_turns =
        vec![EarlierTurn { messages_sent: 1, answer: Answer { token_ids: None, ..answer(&[1], &[4]) } }];
    let mut silent = record(3, &[1], &[6]);
    silent.answer.content = None;
    let place = Place::with(&[cut, foreign, half, silent, record(4, &[1], &[7])]);
    let summary = place.made(&Settings { validation_share: 0.0, ..settings(&[Format::SpecforgeConversations]) });
    let rows = &summary.outputs[&Format::SpecforgeConversations];
    let left_out: Vec<(&str, u64)> = rows.left_out.iter().map(|(why, n)| (why.as_str(), *n)).collect();
    assert_eq!(left_out, [("cut_answer", 1), ("no_text", 1), ("other_assistant", 1), ("turn_dropped", 1)]);
    assert_eq!((rows.train, summary.kept), (1, 5));
    place.assert_sound();
}

#[test]
fn every_line_is_kept_or_dropped_with_its_reason() {
    let mut without_ids = record(1, &[1], &[2]);
    without_ids.answer.token_ids = None;
    let lines = [
        record(0, &[1], &[2]).to_line(),
        without_ids.to_line(),
        record(0, &[1], &[9]).to_line(),
        b"not json".to_vec(),
        b"".to_vec(),
        br#"{"id": "old", "content": "answered"}"#.to_vec(),
        br#"{"id": "bad", "error": "timeout"}"#.to_vec(),
        record(5, &[1], &[2]).to_line(),
        record(6, &[1], &[6]).to_line()[..40].to_vec(),
    ];
    let place = Place::with_lines(&lines);
    let summary = place.made(&settings(&[Format::Shards]));
    assert_eq!((summary.input.lines, summary.kept, summary.dropped_total()), (8, 1, 7));
    let mut dropped = place.dropped();
    dropped.sort();
    let expected = [
        ("-", "not_an_answer"),
        ("-", "unreadable"),
        ("-", "unreadable"),
        ("old", "no_token_ids"),
        ("q0", "second_record"),
        ("q1", "no_token_ids"),
        ("q5", "duplicate"),
    ];
    assert_eq!(dropped, expected.map(|(id, reason)| (id.to_owned(), reason.to_owned())));
    place.assert_sound();
}

#[test]
fn a_record_whose_fields_somebody_reordered_is_the_same_record() {
    let Value::Object(fields) = serde_json::to_value(record(3, &[1], &[2])).unwrap() else { unreachable!() };
    let reordered: serde_json::Map<String, Value> = fields.into_iter().rev().collect();
    let (one, other) =
        (Place::with(&[record(3, &[1], &[2])]), Place::with_lines(&[serde_json::to_vec(&reordered).unwrap()]));
    one.made(&settings(&[Format::Shards]));
    other.made(&settings(&[Format::Shards]));
    let shards =
        |place: &Place| place.files().into_iter().filter(|(name, _)| name.starts_with("shards")).collect::<Vec<_>>();
    assert_eq!(shards(&one), shards(&other));
}

/// More than one batch for each thread, and lines longer than a batch.
#[test]
fn many_threads_give_the_bytes_of_one() {
    let long = |row: u64| {
        let ids: Vec<u32> = (0..50).map(|n| (n * row as u32) % 1000).collect();
        let mut record = record(row, &[1, 2], &ids);
        record.answer.content = Some("x".repeat(if row.is_multiple_of(9) { 1_500_000 } else { 200_000 }));
        record
    };
    let place = Place::with(&(0..60).rev().map(long).collect::<Vec<_>>());
    let settings = settings(&[Format::Shards, Format::Specforge]);
    place.prepare(&settings, 1).unwrap();
    let one = place.files();
    for threads in [2, 3, 16] {
        std::fs::rename(place.out(), place.0.path().join(format!("before-{threads}"))).unwrap();
        place.prepare(&settings, threads).unwrap();
        assert!(place.files() == one, "{threads} threads");
    }
    place.assert_sound();
}

#[test]
fn the_split_is_by_prompt_and_every_format_has_it() {
    let place = Place::with(&(0..200).map(|row| record(row, &[1], &[row as u32, 2])).collect::<Vec<_>>());
    let summary = place.made(&settings(&[Format::Shards, Format::Specforge]));
    let share = summary.splits[&Split::Validation].examples;
    assert!((30..90).contains(&share), "{share} of 200");
    assert_eq!(place.json_lines("specforge/validation.jsonl").len() as u64, share);
    let shard = ShardReader::open(&place.out().join("shards/validation-00000.examples")).unwrap();
    assert_eq!(shard.entries().len() as u64, share);
    assert!(shard.entries().iter().all(|entry| entry.id.is_validation(0.3)));
}

#[test]
fn a_finished_set_is_not_made_again_and_another_one_not_overwritten() {
    let place = Place::with(&[record(0, &[1], &[2])]);
    let shards = settings(&[Format::Shards]);
    let made = place.made(&shards);
    let before = place.files();
    assert_eq!(place.prepare(&shards, 1).unwrap(), Prepared::WasThere(made));
    assert_eq!(place.files(), before);

    let other = Settings { validation_share: 0.5, ..shards.clone() };
    let error = place.prepare(&other, 1).unwrap_err();
    assert_eq!(error.class(), Class::Usage);
    assert!(error.to_string().contains("settings.validation_share: 0.3 there, 0.5 now"), "{error}");
    assert_eq!(place.files(), before);

    let replace = Options { threads: 1, existing: Existing::Replace };
    let specforge = settings(&[Format::Specforge]);
    prepare(&place.input(), &place.out(), &specforge, replace, &Progress::default()).unwrap();
    assert!(place.files().keys().all(|name| !name.starts_with("shards")), "nothing of the old set is left");
    place.assert_sound();
    // More answers are another input.
    std::fs::write(place.input(), [record(0, &[1], &[2]).to_line(), record(1, &[1], &[3]).to_line()].join(&b'\n'))
        .unwrap();
    assert!(place.prepare(&specforge, 1).unwrap_err().to_string().contains("input.lines: 1 there, 2 now"));
}

#[test]
fn a_set_with_a_file_missing_or_cut_is_not_taken_for_finished() {
    let place = Place::with(&[record(0, &[1], &[2])]);
    let settings = settings(&[Format::Specforge]);
    place.made(&settings);
    let file = place.out().join("specforge/train.jsonl");
    let file = if file.exists() { file } else { place.out().join("specforge/validation.jsonl") };
    std::fs::write(&file, b"{}").unwrap();
    assert_eq!(place.prepare(&settings, 1).unwrap_err().class(), Class::Data);
    std::fs::remove_file(&file).unwrap();
    assert_eq!(place.prepare(&settings, 1).unwrap_err().class(), Class::Data);
    let replace = Options { threads: 1, existing: Existing::Replace };
    prepare(&place.input(), &place.out(), &settings, replace, &Progress::default()).unwrap();
    place.assert_sound();
}

#[test]
fn what_a_crash_left_is_begun_again_and_what_others_left_stays() {
    let place = Place::with(&[record(0, &[1], &[2])]);
    let unfinished = place.0.path().join("prepared.unfinished");
    std::fs::create_dir_all(unfinished.join("parquet")).unwrap();
    std::fs::write(unfinished.join("parquet/train.parquet"), b"half").unwrap();
    std::fs::write(unfinished.join("dropped.jsonl"), b"{\"half").unwrap();
    place.made(&settings(&[Format::Shards]));
    assert!(!unfinished.exists() && !place.out().join("parquet").exists());
    place.assert_sound();

    let place = Place::with(&[record(0, &[1], &[2])]);
    std::fs::create_dir_all(place.out()).unwrap();
    std::fs::write(place.out().join("thesis.txt"), b"mine").unwrap();
    let error = place.prepare(&settings(&[Format::Shards]), 1).unwrap_err();
    assert!(error.class() == Class::Usage && error.to_string().contains("thesis.txt"), "{error}");
    let replace = Options { threads: 1, existing: Existing::Replace };
    prepare(&place.input(), &place.out(), &settings(&[Format::Shards]), replace, &Progress::default()).unwrap_err();
    assert_eq!(std::fs::read(place.out().join("thesis.txt")).unwrap(), b"mine");
}

#[test]
fn two_processes_do_not_write_one_set() {
    let place = Place::with(&[record(0, &[1], &[2])]);
    let unfinished = place.0.path().join("prepared.unfinished");
    std::fs::create_dir_all(&unfinished).unwrap();
    let lock = std::fs::File::open(&unfinished).unwrap();
    lock.lock().unwrap();
    let error = place.prepare(&settings(&[Format::Shards]), 1).unwrap_err();
    assert!(error.class() == Class::Environment && error.to_string().contains("another process"), "{error}");
    drop(lock);
    place.made(&settings(&[Format::Shards]));
}

#[test]
fn verify_finds_any_changed_byte() {
    let place = Place::with(&(0..20).map(|row| record(row, &[1, 3], &[row as u32, 2])).collect::<Vec<_>>());
    place.made(&all_formats());
    for (name, content) in
        place.files().into_iter().filter(|(name, content)| name != "summary.json" && !content.is_empty())
    {
        let path = place.out().join(&name);
        let mut damaged = content.clone();
        damaged[content.len() / 2] ^= 1;
        std::fs::write(&path, &damaged).unwrap();
        let report = verify_prepared(&place.out(), None).unwrap();
        assert!(report.findings.iter().any(|finding| finding.contains(&name)), "{name}: {:?}", report.findings);
        std::fs::remove_file(&path).unwrap();
        let report = verify_prepared(&place.out(), None).unwrap();
        assert!(report.findings.iter().any(|finding| finding.contains(&name)), "{name}: {:?}", report.findings);
        std::fs::write(&path, &content).unwrap();
    }
    std::fs::write(place.out().join("specforge/more.jsonl"), b"").unwrap();
    let report = verify_prepared(&place.out(), None).unwrap();
    assert_eq!(report.findings, ["specforge/more.jsonl: is not in the summary"]);
}

/// Somebody changes a file, and the summary so that the hashes fit: the content is looked at as well.
#[test]
fn verify_looks_at_the_content_and_not_at_hashes_alone() {
    let lines =
        |mask: &str, ids: &str| format!("{{\"id\":\"q0\",\"turn\":0,\"input_ids\":{ids},\"loss_mask\":{mask}}}\n");
    for (line, finding) in [
        (lines("[0,0]", "[1,2]"), "no token is supervised"),
        (lines("[0,2]", "[1,2]"), "mask"),
        (lines("[0]", "[1,2]"), "mask"),
        (lines("[0,1]", "[1,64]"), "holds id 64"),
        (lines("[0,1]", "[1,-2]"), "invalid value"),
        (lines("[1,1]", "[1,2]"), "supervised tokens: 2, expected 1"),
        (lines("[0,1]", "[1,3]"), "hold different examples"),
        (String::new(), "rows: 0, expected 1"),
    ] {
        let place = Place::with(&[record(0, &[1], &[2])]);
        let mut settings = Settings { validation_share: 0.0, ..settings(&[Format::Shards, Format::Specforge]) };
        settings.policies.vocab_size = Some(64);
        let mut summary = place.made(&settings);
        std::fs::write(place.out().join("specforge/train.jsonl"), &line).unwrap();
        let entry = summary.files.iter_mut().find(|file| file.path == "specforge/train.jsonl").unwrap();
        (entry.bytes, entry.blake3) = (line.len() as u64, blake3::hash(line.as_bytes()).to_hex().to_string());
        std::fs::write(place.out().join("summary.json"), serde_json::to_vec(&summary).unwrap()).unwrap();
        let report = verify_prepared(&place.out(), None).unwrap();
        assert!(report.findings.iter().any(|found| found.contains(finding)), "{line}: {:?}", report.findings);
    }
}

#[test]
fn verify_compares_with_the_run() {
    let place = Place::with(&[record(0, &[1], &[2, 3]), record(1, &[1], &[4])]);
    place.made(&settings(&[Format::Shards]));
    place.assert_sound();
    // The record was changed behind our back, its identity in the summary too.
    let changed = Place::with(&[record(0, &[1], &[2, 5]), record(1, &[1], &[4])]);
    let other = changed.made(&settings(&[Format::Shards]));
    let mut summary = Summary::read(&place.out()).unwrap().unwrap();
    summary.fingerprint = other.fingerprint;
    std::fs::write(place.out().join("summary.json"), serde_json::to_vec(&summary).unwrap()).unwrap();
    let report = verify_prepared(&place.out(), Some(&changed.input())).unwrap();
    let expected =
        ["q0: turn 0: the example is not what the server gave", "examples that are answers of the run: 1, expected 2"];
    assert_eq!(report.findings, expected);
    // A run that has gone on since.
    std::fs::write(place.input(), record(2, &[1], &[4]).to_line()).unwrap();
    let report = verify_prepared(&place.out(), Some(&place.input())).unwrap();
    assert!(report.findings[0].contains("is not what was prepared"), "{:?}", report.findings);
}

#[test]
fn near_duplicates_are_dropped_where_that_is_asked_for() {
    let long: Vec<u32> = (0..600u32).map(|n| n.wrapping_mul(2_654_435_761) % 50_000).collect();
    // The same answer to another prompt, and with one token more.
    let more = [long.as_slice(), &[7]].concat();
    let different: Vec<u32> = long.iter().map(|id| id ^ 1).collect();
    let place = Place::with(&[
        record(0, &[1], &long),
        record(1, &[2], &long),
        record(2, &[1], &more),
        record(3, &[1], &different),
    ]);
    let kept = place.made(&settings(&[Format::Shards]));
    assert_eq!(kept.kept, 4, "by default they stay");
    let mut settings = settings(&[Format::Shards]);
    settings.policies.near_duplicates = Keep::Drop;
    let replace = Options { threads: 2, existing: Existing::Replace };
    prepare(&place.input(), &place.out(), &settings, replace, &Progress::default()).unwrap();
    let near = |id: &str| (id.to_owned(), "near_duplicate".to_owned());
    assert_eq!(place.dropped(), [near("q1"), near("q2")]);
    place.assert_sound();
}

#[test]
fn nothing_to_keep_is_a_set_without_examples() {
    let mut without_ids = record(0, &[1], &[2]);
    without_ids.answer.token_ids = None;
    let place = Place::with(&[without_ids]);
    let summary = place.made(&all_formats());
    assert_eq!((summary.kept, summary.dropped_total()), (0, 1));
    let names: Vec<String> = place.files().into_keys().collect();
    assert_eq!(names, ["d2t-9.npy", "dropped.jsonl", "summary.json", "t2d-9.npy"]);
    place.assert_sound();
}
