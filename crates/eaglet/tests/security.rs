//! The key goes to the server it is meant for, and nowhere else; nothing the data set or the server says leads eaglet elsewhere.

#![allow(clippy::unwrap_used)]

mod common;

use common::{CHAT, Place, eaglet, piece, text, wait_until};
use eaglet_testkit::server::{Answer, Rule, Script, ScriptedServer};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A made-up key.
const KEY: &str = "sk-Lagoon7Qx9Mb2ZvV4tR8";
/// The forms in which it would be a leak: as it is, without its prefix, and both of these and the header's value in base64.
const KEY_FORMS: [&str; 5] = [
    KEY,
    "Lagoon7Qx9Mb2ZvV4tR8",
    "c2stTGFnb29uN1F4OU1iMlp2VjR0Ujg",
    "TGFnb29uN1F4OU1iMlp2VjR0Ujg",
    "QmVhcmVyIHNrLUxhZ29vbjdReDlNYjJadlY0dFI4",
];
const VARIABLE: &str = "HARBOUR_KEY";
const WITH_KEY: [&str; 2] = ["--api-key-env", VARIABLE];

/// All files below a directory.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found
}

/// Fails if a file of the place (run directory, stdout and stderr) holds one of these texts.
fn assert_nowhere(place: &Place, secrets: &[&str]) {
    let all = files(&place.path(""));
    assert!(all.iter().any(|path| path.ends_with("stderr-0")));
    for path in all {
        let content = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
        for secret in secrets {
            assert!(!content.contains(secret), "{secret} is in {}:\n{content}", path.display());
        }
    }
}

fn keyed(mut command: Command, value: &str) -> Command {
    command.env(VARIABLE, value);
    command
}

/// A server that wants the key and quotes it in whatever goes wrong.
fn quoting_server() -> ScriptedServer {
    let quoted = format!("Incorrect API key provided: {KEY} (Authorization: Bearer {KEY}, short {})", &KEY[3..]);
    let error = json!({"error": {"message": quoted}}).to_string();
    let script = Script::new()
        .answer(Answer { api_key: Some(KEY.to_owned()), ..Answer::default() })
        .rule(Rule::on_chat().contains("error 500").status(500).text(&error))
        .rule(Rule::on_chat().contains("error 422").status(422).text(&error))
        .rule(Rule::on_chat().contains("plain text").status(502).text(&quoted))
        .rule(Rule::on_chat().contains("in the stream").events([piece("so far"), error]))
        .rule(Rule::on_chat().contains("no JSON").events([format!("{{{KEY}")]))
        .rule(Rule::on_chat().contains("wrong type").events([json!({"choices": KEY}).to_string()]));
    ScriptedServer::start(script)
}

#[test]
fn the_key_reaches_the_server_and_no_file() {
    let server = quoting_server();
    let place = Place::with_prompts([
        ("a", "error 500"),
        ("b", "error 422"),
        ("c", "plain text"),
        ("d", "in the stream"),
        ("e", "no JSON"),
        ("f", "wrong type"),
        ("good", "answer well"),
    ]);
    let flags = [&WITH_KEY[..], &["--max-retries", "1", "--json", "--concurrency", "1"]].concat();
    // As a key file has it, with a newline at its end.
    place.run(keyed(place.generate(&server.url(), &flags), &format!("{KEY}\n"))).expect(1);
    assert_eq!(place.ids(), BTreeSet::from(["good".to_owned()]));
    for request in server.requests_on(CHAT) {
        assert_eq!(request.header("authorization"), Some(format!("Bearer {KEY}").as_str()));
    }
    assert_nowhere(&place, &KEY_FORMS);
    // The server's words are kept all the same, so the test would have seen the key.
    for id in ["a", "b", "c", "d", "e", "f"] {
        assert!(text(&place.failure(id)["detail"]).contains("***"), "{}", place.failure(id));
    }
}

/// A long message is cut for the log; a key that lies across the cut must not be left there by half.
#[test]
fn a_key_across_the_cut_of_a_long_message_is_masked_too() {
    for keep in [8, 12, KEY.len() - 1] {
        // Where messages are cut: characters of an error body, of an error object in a stream, bytes of a reply that is no JSON.
        let filler = |cut: usize| "x".repeat(cut - keep);
        let error = |cut: usize| json!({"error": {"message": format!("{}{KEY} was refused", filler(cut))}}).to_string();
        let script = Script::new()
            .rule(Rule::on_chat().contains("as a body").status(500).text(&error(400)))
            .rule(Rule::on_chat().contains("in the stream").events([error(500)]))
            .rule(Rule::on_chat().contains("as garbage").events([format!("{}{KEY}", filler(200))]));
        let server = ScriptedServer::start(script);
        let place = Place::with_prompts([
            ("a", "as a body"),
            ("b", "in the stream"),
            ("c", "as garbage"),
            ("good", "answer well"),
        ]);
        let flags = [&WITH_KEY[..], &["--max-retries", "0"]].concat();
        place.run(keyed(place.generate(&server.url(), &flags), KEY)).expect(1);
        assert_eq!(place.failures().len(), 3);
        assert_nowhere(&place, &[&KEY[..keep]]);
    }
}

#[test]
fn a_refused_key_is_not_shown() {
    let server = ScriptedServer::start(
        Script::new()
            .rule(Rule::on("/v1/models").status(401).text(&json!({"error": format!("who is {KEY}?")}).to_string())),
    );
    let place = Place::with_count(2);
    let complaint = place.run(keyed(place.generate(&server.url(), &WITH_KEY), KEY)).expect(3).complaint();
    assert!(complaint.contains("401") && complaint.contains("--api-key-env"), "{complaint}");
    assert_nowhere(&place, &KEY_FORMS);
}

#[test]
fn a_broken_or_missing_key_is_refused_without_its_value() {
    let server = ScriptedServer::start(Script::new());
    let place = Place::with_count(1);
    for broken in ["sk-Lagoon7\nQx9Mb2ZvV4tR8", "sk-Lagoon7 Qx9Mb2ZvV4tR8", "sk-Lagoon7\u{1}Qx9Mb2ZvV4tR8"] {
        let complaint = place.run(keyed(place.generate(&server.url(), &WITH_KEY), broken)).expect(2).complaint();
        assert!(complaint.contains(VARIABLE), "{complaint}");
        assert_nowhere(&place, &["Lagoon7", "Qx9Mb2ZvV4tR8"]);
    }
    let complaint = place.run(place.generate(&server.url(), &WITH_KEY)).expect(2).complaint();
    assert!(complaint.contains(VARIABLE) && complaint.contains("no such environment variable"), "{complaint}");
    assert!(server.requests().is_empty());
}

#[test]
fn a_password_in_the_url_is_sent_and_not_recorded() {
    let (password, basic) = ("Tide5Rope7Knot", "bWFyaWE6VGlkZTVSb3BlN0tub3Q=");
    let quoted = json!({"error": {"message": format!("maria:{password} and {basic} are not welcome")}}).to_string();
    let server = ScriptedServer::start(Script::new().rule(Rule::on_chat().times(1).status(500).text(&quoted)));
    let place = Place::with_count(2);
    let url = format!("http://maria:{password}@127.0.0.1:{}/v1", server.port());
    place.run(place.generate(&url, &[])).expect(0);
    for request in server.requests_on(CHAT) {
        assert_eq!(request.header("authorization"), Some(format!("Basic {basic}").as_str()));
        assert!(!request.path.contains("maria"));
    }
    assert_eq!(place.records().len(), 2);
    assert!(place.records().iter().all(|record| record["endpoint"] == server.url()), "{:?}", place.records());
    server.stop_resetting();
    // The same run again, with something left to do and nobody there.
    std::fs::remove_file(place.responses()).unwrap();
    let complaint = place.run(place.generate(&url, &[])).expect(3).complaint();
    assert!(complaint.contains(&server.url()), "{complaint}");
    let bad = place.run(place.generate(&format!("ftp://maria:{password}@localhost"), &[])).expect(2).complaint();
    assert!(bad.contains("expected http or https"), "{bad}");
    assert_nowhere(&place, &[password, basic, basic.trim_end_matches('=')]);
}

#[test]
fn a_secret_header_is_sent_and_not_recorded() {
    let secret = "Mooring-44-Beacon";
    let quoted = json!({"error": {"message": format!("{secret} is unknown")}}).to_string();
    let server = ScriptedServer::start(Script::new().rule(Rule::on_chat().times(1).status(500).text(&quoted)));
    let place = Place::with_count(2);
    place.run(place.generate(&server.url(), &["--header", &format!("X-Api-Key: {secret}")])).expect(0);
    assert!(server.requests_on(CHAT).iter().all(|request| request.header("x-api-key") == Some(secret)));
    assert!(place.run_json().to_string().contains("X-Api-Key: ***"), "{}", place.run_json());
    assert_nowhere(&place, &[secret]);
}

/// Any user of a machine can read any command line.
#[test]
fn the_key_is_on_no_command_line() {
    let server = ScriptedServer::start(Script::new().rule(Rule::on_chat().delay_ms(600_000)));
    let place = Place::with_count(1);
    let running = place.start(keyed(place.generate(&server.url(), &WITH_KEY), KEY));
    wait_until("a request arrives", || !server.requests_on(CHAT).is_empty());
    let command_line = std::fs::read(format!("/proc/{}/cmdline", running.pid())).unwrap();
    let command_line = String::from_utf8_lossy(&command_line).into_owned();
    assert!(command_line.contains(VARIABLE));
    assert!(KEY_FORMS.iter().all(|form| !command_line.contains(form)), "{command_line}");
    // Nor is there an option that would invite people to put it there.
    let help = place.run(eaglet(&["generate", "--help"])).expect(0).stdout;
    let options = help.split_whitespace().filter(|word| word.starts_with("--")).collect::<BTreeSet<_>>();
    assert!(options.contains("--api-key-env") && !options.contains("--api-key"), "{options:?}");
}

#[test]
fn no_redirect_is_followed() {
    const CODES: [u16; 5] = [301, 302, 303, 307, 308];
    let elsewhere = ScriptedServer::start(Script::new());
    let redirect = |code: u16, location: &str| {
        Rule::on_chat().contains(&format!("code {code} ")).status(code).header("Location", location)
    };
    let mut script = Script { other: Some(elsewhere.port()), ..Script::new() };
    for code in CODES {
        script = script.rule(redirect(code, "http://127.0.0.1:{other}/v1/chat/completions?ticket=Buoy88Lamp"));
    }
    // Also not to another path of the same server: what answers there is not what was asked.
    script = script.rule(redirect(300, "/login?ticket=Buoy88Lamp"));
    let server = ScriptedServer::start(script);
    let prompts = CODES.iter().chain(&[300]).map(|code| (format!("r{code}"), format!("code {code} please")));
    let place = Place::with_prompts(prompts.chain([("good".to_owned(), "answer well".to_owned())]));
    place.run(keyed(place.generate(&server.url(), &WITH_KEY), KEY)).expect(1);
    assert!(elsewhere.requests().is_empty(), "{:?}", elsewhere.requests());
    assert!(server.requests().iter().all(|request| request.path != "/login"));
    assert_eq!(server.requests_on(CHAT).len(), CODES.len() + 2, "a redirect was tried again");
    for code in CODES {
        let failure = place.failure(&format!("r{code}"));
        assert_eq!((&failure["failed_as"], &failure["cause"]), (&json!("rejected"), &json!("redirect")), "{failure}");
        assert_eq!(failure["attempts"].as_array().unwrap().len(), 1);
        let detail = text(&failure["detail"]);
        assert!(detail.contains(&code.to_string()) && detail.contains(&elsewhere.url()), "{detail}");
    }
    assert!(text(&place.failure("r300")["detail"]).contains(&server.url()));
    assert_eq!(place.ids(), BTreeSet::from(["good".to_owned()]));
    assert_nowhere(&place, &[&KEY_FORMS[..], &["Buoy88Lamp"]].concat());
}

#[test]
fn a_redirected_model_list_is_refused() {
    let elsewhere = ScriptedServer::start(Script::new());
    let moved = Rule::on("/v1/models").status(308).header("Location", "http://127.0.0.1:{other}/v1/models");
    let server = ScriptedServer::start(Script { other: Some(elsewhere.port()), ..Script::new() }.rule(moved));
    let place = Place::with_count(1);
    let complaint = place.run(keyed(place.generate(&server.url(), &WITH_KEY), KEY)).expect(3).complaint();
    assert!(complaint.contains("308") && complaint.contains("hint:"), "{complaint}");
    assert!(elsewhere.requests().is_empty());
    assert!(server.requests_on(CHAT).is_empty());
}

/// Ids are names in records and never names of files.
#[test]
fn sample_ids_never_become_paths() {
    let long = "deep/".repeat(1000);
    let ids = [
        "../../etc/passwd",
        "/etc/shadow",
        "..",
        "a/../../../b",
        "nul\u{0}byte",
        "line\nbreak",
        "$(touch x)",
        long.as_str(),
    ];
    let script = || Script::new().rule(Rule::on_chat().contains("refuse").status(500));
    // The same run with ids that mean nothing shows which files belong there.
    let run = |ids: &[String]| {
        let server = ScriptedServer::start(script());
        let place = Place::with_prompts(ids.iter().map(|id| (id.clone(), format!("Who is {}?", id.len()))));
        let rows = ids.iter().map(|id| json!({"id": format!("{id}!"), "prompt": format!("refuse {}", id.len())}));
        place.write_rows("more.jsonl", rows);
        let inputs = ["data.jsonl", "more.jsonl"];
        place.run(place.generate_from(&inputs, &server.url(), &["--max-retries", "1"])).expect(1);
        let root = place.path("");
        let names: BTreeSet<PathBuf> =
            files(&root).into_iter().map(|path| path.strip_prefix(&root).unwrap().to_owned()).collect();
        (place, names)
    };
    let (_, expected) = run(&(0..ids.len()).map(|n| "t".repeat(n + 1)).collect::<Vec<_>>());
    let ids = ids.map(str::to_owned);
    let (place, names) = run(&ids);
    assert_eq!(names, expected);
    assert_eq!(place.ids(), BTreeSet::from(ids.clone()));
    let failed: BTreeSet<String> = place.failures().iter().map(|failure: &Value| text(&failure["sample_id"])).collect();
    assert_eq!(failed, ids.iter().map(|id| format!("{id}!")).collect());
}
