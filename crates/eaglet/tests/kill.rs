//! The program is killed, interrupted or told to go, at any moment: no whole answer is lost, none is there twice, and what it says of
//! itself on the way adds up. The operating system lives on here; what a power cut takes is tested on a disk made for that.

#![allow(clippy::unwrap_used)]

mod common;

use common::{CHAT, Place, Running, all_ids, asked, eaglet, last_message, piece, text, wait_until};
use eaglet_testkit::server::{Answer, End, Rule, Script, ScriptedServer};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Kills when the environment does not say how many.
const KILLS: u64 = 25;
/// Kills of one run at most; more go to further runs, because every start reads all records again.
const KILLS_PER_RUN: u64 = 25;
/// More than a run answers between so many kills, most of the time; if not, another run takes the rest of the kills.
const PROMPTS: usize = 300;

fn question(n: usize) -> String {
    // Longer than a page of the disk cache, so that a record may be cut by a kill inside one write.
    let before = if n.is_multiple_of(7) { "Long, \u{1F9C1} and sweet. ".repeat(250) } else { String::new() };
    format!("{before}Tell me about the number {n}.")
}

/// Slow enough that a kill always finds requests out.
fn paced() -> Script {
    Script::new().answer(Answer { mean_tokens: 12, token_ms: 4.0, max_model_len: 1 << 16, ..Answer::default() })
}

fn place_of_questions() -> Place {
    Place::with_prompts((0..PROMPTS).map(|n| (format!("q{n}"), question(n))))
}

/// Moments that are the same in each run of the tests (SplitMix64).
struct Moments(u64);

impl Moments {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed ^ (mixed >> 29)) % end
    }

    /// Waits for the moment of a kill: some time after the start, or some time after so many more records. The sleep is the moment itself,
    /// nothing is expected to have happened in it.
    fn wait(&mut self, place: &Place, running: &mut Running) {
        if self.below(3) > 0 {
            let wanted = place.record_lines() + self.below(9) as usize;
            wait_until("more records, or the end", || {
                let _ = balanced_snapshot(place);
                place.record_lines() >= wanted || running.has_ended()
            });
        } else {
            std::thread::sleep(Duration::from_micros(self.below(150_000)));
        }
        std::thread::sleep(Duration::from_micros(self.below(25_000)));
    }
}

/// The state that the program last told, if it told any: whole JSON at any moment, and every prompt is in one place.
fn balanced_snapshot(place: &Place) -> Option<Value> {
    let bytes = std::fs::read(place.run_file("progress.json")).ok()?;
    let snapshot: Value =
        serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&bytes)));
    let count = |name: &str| snapshot[name].as_u64().unwrap_or_else(|| panic!("no count {name} in {snapshot:#}"));
    let places = ["done", "failed", "in_flight", "waiting", "unsynced", "not_started"];
    assert_eq!(count("planned"), places.map(count).iter().sum::<u64>(), "{snapshot:#}");
    assert!(count("in_flight") <= count("concurrency"), "{snapshot:#}");
    Some(snapshot)
}

/// The record file up to its last line feed, and the ids in it. Only what comes after may be torn.
fn whole_records(place: &Place) -> (Vec<u8>, BTreeSet<String>) {
    let mut bytes = std::fs::read(place.responses()).unwrap_or_default();
    bytes.truncate(bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1));
    let mut ids = BTreeSet::new();
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        let record: Value =
            serde_json::from_slice(line).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(line)));
        assert!(ids.insert(text(&record["sample_id"])), "{} has two records", record["sample_id"]);
    }
    (bytes, ids)
}

/// What must be the same whether a run was interrupted or not.
fn answers(place: &Place) -> BTreeMap<String, (String, String)> {
    let answer = |record: &Value| (text(&record["content"]), record["token_ids"].to_string());
    place.records().iter().map(|record| (text(&record["sample_id"]), answer(record))).collect()
}

/// Starts the run and kills it; false when it ended before its moment came.
fn start_and_kill(place: &Place, server: &ScriptedServer, moments: &mut Moments) -> bool {
    let (bytes_before, done_before) = whole_records(place);
    let requests_before = server.requests_on(CHAT).len();
    let interval = ["5ms", "50ms", "400ms"][moments.below(3) as usize];
    let mut command =
        eaglet(&["generate", "--output-dir", "run", "--dataset", "data.jsonl", "--no-probe", "--concurrency", "4"]);
    command.args(["--url", &server.url(), "--sync-interval", interval]);
    let mut running = place.start(command);
    moments.wait(place, &mut running);
    let was_killed = !running.has_ended();
    if was_killed {
        running.signal(Signal::KILL);
    }
    let end = running.ended();
    assert_eq!(end.code, if was_killed { None } else { Some(0) }, "{}", end.stderr);
    let (bytes, done) = whole_records(place);
    assert!(bytes.starts_with(&bytes_before), "a record that was whole has changed");
    if let Some(snapshot) = balanced_snapshot(place) {
        let told = snapshot["done"].as_u64().unwrap();
        assert!(told <= done.len() as u64, "{told} are told as done, {} are there", done.len());
    }
    assert!(place.failures().is_empty(), "{:?}", place.failures());
    let done_texts: BTreeSet<String> = done_before.iter().map(|id| question(id[1..].parse().unwrap())).collect();
    let again: Vec<String> = server.requests_on(CHAT)[requests_before..]
        .iter()
        .map(last_message)
        .filter(|t| done_texts.contains(t))
        .collect();
    assert!(again.is_empty(), "asked again: {again:?}");
    was_killed
}

#[test]
fn a_run_killed_again_and_again_ends_as_one_that_never_was() {
    let kills = std::env::var("EAGLET_KILLS").map_or(KILLS, |number| number.parse().expect("EAGLET_KILLS is a number"));
    let expected = {
        let (place, server) = (place_of_questions(), ScriptedServer::start(paced()));
        place.run(place.generate(&server.url(), &[])).expect(0);
        assert_eq!(place.ids(), all_ids(PROMPTS));
        answers(&place)
    };
    let mut moments = Moments(20);
    let mut killed = 0;
    while killed < kills {
        let (place, server) = (place_of_questions(), ScriptedServer::start(paced()));
        let until = kills.min(killed + KILLS_PER_RUN);
        while killed < until && start_and_kill(&place, &server, &mut moments) {
            killed += 1;
        }
        place.run(place.generate(&server.url(), &["--concurrency", "16"])).expect(0);
        assert_eq!(place.ids(), all_ids(PROMPTS), "each prompt once");
        assert_eq!(answers(&place), expected);
        assert!(place.failures().is_empty(), "{:?}", place.failures());
        assert_eq!(place.run_json()["generate"]["state"], "complete");
    }
}

#[test]
fn snapshots_of_a_run_with_trouble_add_up() {
    let script = Script::new()
        .answer(Answer { mean_tokens: 20, token_ms: 25.0, ..Answer::default() })
        .rule(Rule::on_chat().contains("number 5.").status(500).text("oops"))
        .rule(Rule::on_chat().contains("number 11.").events([piece("half")]).end(End::Cut))
        .rule(Rule::on_chat().contains("number 2.").times(2).status(429).header("Retry-After", "1").text("later"));
    let (place, server) = (Place::with_count(40), ScriptedServer::start(script));
    let mut running =
        place.start(place.generate(&server.url(), &["--concurrency", "8", "--max-retries", "3", "--json"]));
    let mut seen = BTreeMap::new();
    wait_until("the end of the run", || {
        if let Some(snapshot) = balanced_snapshot(&place) {
            seen.insert(text(&snapshot["at"]), text(&snapshot["phase"]));
        }
        running.has_ended()
    });
    let end = running.ended().expect(1);
    let last = balanced_snapshot(&place).unwrap();
    assert!(seen.values().any(|phase| phase == "running"), "{seen:?}");
    assert_eq!(last["phase"], "ended");
    assert_eq!(last, end.json(), "the file and --json tell the same end");
    assert_eq!((&last["done"], &last["failed"], &last["planned"]), (&json!(38), &json!(2), &json!(40)));
    assert_eq!((place.records().len(), place.failures().len()), (38, 2));
}

fn wait_for_event(place: &Place, event: &str) {
    wait_until(event, || place.events().iter().any(|found| found == event));
}

fn is_unfinished(place: &Place) {
    assert_eq!(place.run_json()["generate"]["state"], "unfinished");
    assert!(place.failures().is_empty(), "what was not answered has not failed: {:?}", place.failures());
}

#[test]
fn one_interrupt_lets_the_answers_that_are_out_arrive() {
    const COUNT: usize = 80;
    let script = Script::new().answer(Answer { mean_tokens: 20, token_ms: 30.0, ..Answer::default() });
    let (place, server) = (Place::with_count(COUNT), ScriptedServer::start(script));
    let running = place.start(place.generate(&server.url(), &["--concurrency", "4"]));
    wait_until("some answers, and requests out", || place.record_lines() >= 4 && server.in_flight() > 1);
    running.signal(Signal::INT);
    running.ended().expect(130);
    let sent = server.requests_on(CHAT).len();
    assert!(sent < COUNT, "the interrupt came too late to test anything");
    assert_eq!(place.ids().len(), sent, "whatever was sent is saved");
    is_unfinished(&place);
    assert_eq!(balanced_snapshot(&place).unwrap()["not_started"], COUNT - sent);
    assert!(place.events().contains(&"draining".to_owned()));
    place.run(place.generate(&server.url(), &["--concurrency", "16"])).expect(0);
    assert_eq!(place.ids(), all_ids(COUNT));
    assert_eq!(server.requests_on(CHAT).len(), COUNT, "each prompt was sent once in all");
}

/// A run of twelve prompts, two of which begin to be answered and then hang for ever; all the others are saved.
fn hanging(more: &[&str]) -> (Place, ScriptedServer, Running) {
    let hang = |number: &str| Rule::on_chat().contains(number).events([piece("HALF AN ANSWER")]).end(End::Hang);
    let server = ScriptedServer::start(Script::new().rule(hang("number 3.")).rule(hang("number 7.")));
    let place = Place::with_count(12);
    let running = place.start(place.generate(&server.url(), &[&["--concurrency", "4"], more].concat()));
    wait_until("all answers but those that hang", || {
        place.record_lines() == 10 && server.requests_on(CHAT).len() == 12
    });
    (place, server, running)
}

/// The ten answers are there, the two halves are not, and the same command sends just these two.
fn only_the_hanging_ones_are_left(place: &Place) {
    let mut ids = all_ids(12);
    assert!(ids.remove("q3") && ids.remove("q7"));
    assert_eq!(place.ids(), ids);
    assert!(!std::fs::read_to_string(place.responses()).unwrap().contains("HALF AN ANSWER"));
    is_unfinished(place);
    assert_eq!(balanced_snapshot(place).unwrap()["phase"], "ended");
    let healthy = ScriptedServer::start(Script::new());
    place.run(place.generate(&healthy.url(), &[])).expect(0);
    let mut sent = asked(&healthy);
    sent.sort();
    assert_eq!(sent, ["Tell me about the number 3.", "Tell me about the number 7."]);
    assert_eq!(place.ids(), all_ids(12));
}

#[test]
fn a_second_interrupt_gives_up_what_is_out_and_saves_the_rest() {
    let (place, _server, running) = hanging(&[]);
    running.signal(Signal::INT);
    wait_for_event(&place, "draining");
    running.signal(Signal::INT);
    running.ended().expect(130);
    assert!(place.events().contains(&"aborting".to_owned()), "{:?}", place.events());
    only_the_hanging_ones_are_left(&place);
}

/// Nobody may be there to ask a second time.
#[test]
fn terminate_and_hang_up_wait_for_the_drain_deadline_only() {
    for signal in [Signal::TERM, Signal::HUP] {
        let (place, _server, running) = hanging(&["--drain-deadline", "100ms"]);
        running.signal(signal);
        running.ended().expect(130);
        let events = place.events();
        let at = |event: &str| {
            events.iter().position(|found| found == event).unwrap_or_else(|| panic!("no {event} in {events:?}"))
        };
        assert!(at("draining") < at("aborting"), "{events:?}");
        only_the_hanging_ones_are_left(&place);
    }
}
