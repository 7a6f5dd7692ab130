//! What people read: one clear line and a way out for each common mistake, with the right exit code; and what `status`, `stop` and
//! `--detach` show. Ports, process ids and times are taken out before texts are compared.

#![allow(clippy::unwrap_used)]

mod common;

use common::{CHAT, Ended, Place, Running, all_ids, asked, eaglet, piece, text, wait_until};
use eaglet_testkit::server::{Answer, End, Rule, Script, ScriptedServer};
use insta::assert_snapshot;
use rustix::process::{Pid, Signal, getsid, kill_process};
use serde_json::{Value, json};
use std::net::TcpListener;
use std::process::Command;

/// Exit code and complaint; fails unless there is one error, told in one line.
fn mistake(end: &Ended) -> String {
    let count = |start: &str| end.stderr.lines().filter(|line| line.starts_with(start)).count();
    assert!(count("error:") == 1 && count("hint:") <= 1 && !end.stderr.contains("panicked"), "{}", end.stderr);
    assert_eq!(end.stdout, "", "stdout is for results");
    format!("exit {}\n{}", end.code.expect("not killed"), end.complaint())
}

fn mistake_of(place: &Place, command: Command) -> String {
    mistake(&place.run(command))
}

#[test]
fn a_server_that_cannot_be_used() {
    let place = Place::with_count(2);
    let nobody = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    };
    let shown = |port: u16, more: &[&str]| {
        let command = place.generate(&format!("http://127.0.0.1:{port}"), more);
        mistake_of(&place, command).replace(&port.to_string(), "PORT")
    };
    assert_snapshot!(shown(nobody, &[]), @r"
    exit 3
    error: cannot reach http://127.0.0.1:PORT: connection refused
    hint: is the server started, and is this its host and port? vLLM's default is http://127.0.0.1:8000
    ");
    let elsewhere = ScriptedServer::start(Script::new().rule(Rule::on("/v1/models").status(404).text("not here")));
    assert_snapshot!(shown(elsewhere.port(), &[]), @r"
    exit 3
    error: http://127.0.0.1:PORT/v1/models answers HTTP 404, expected 200
    hint: check the URL; if the server has no model list, name the model with --model
    ");
    let website = ScriptedServer::start(Script::new().rule(Rule::on("/v1/models").text("<html>Welcome</html>")));
    assert_snapshot!(shown(website.port(), &[]), @r"
    exit 3
    error: http://127.0.0.1:PORT/v1/models does not answer as an OpenAI-compatible server does
    hint: check the URL: is this port the inference server's?
    ");
    let server = ScriptedServer::start(Script::new());
    assert_snapshot!(shown(server.port(), &["--model", "other/model"]), @r#"
    exit 3
    error: http://127.0.0.1:PORT does not serve "other/model"; it serves fake/model
    hint: leave --model out to take the served one, or start the server with that model
    "#);
    for server in [elsewhere, website, server] {
        assert!(server.requests_on(CHAT).is_empty());
    }
}

#[test]
fn a_data_set_that_cannot_be_used() {
    let place = Place::with_count(2);
    place.write("empty.jsonl", "");
    place.write_rows("strange.jsonl", [json!({"colour": "red"}), json!({"colour": "blue"})]);
    let server = ScriptedServer::start(Script::new());
    let shown = |input: &str, more: &[&str]| mistake_of(&place, place.generate_from(&[input], &server.url(), more));
    assert_snapshot!(shown("nothing-like-it.jsonl", &[]), @r"
    exit 2
    error: nothing-like-it.jsonl: no such file
    hint: a data set on the hub is written owner/name
    ");
    assert_snapshot!(shown("daat.jsonl", &[]), @r"
    exit 2
    error: daat.jsonl: no such file
    hint: did you mean data.jsonl?
    ");
    assert_snapshot!(shown("empty.jsonl", &[]), @r"
    exit 4
    error: empty.jsonl: no rows
    hint: the file is empty; a download or an export may have failed
    ");
    assert_snapshot!(shown("strange.jsonl", &[]), @r"
    exit 4
    error: none of 2 rows can be used: no_prompt_field 2; first: strange.jsonl:1: no field that holds a prompt (has: colour)
    hint: expected a field messages, conversations, prompt, question, problem, query or instruction
    ");
    assert_snapshot!(shown("data.jsonl", &["--where", "colour=green"]), @r#"
    exit 2
    error: none of 2 rows passes the filters (colour=green)
    hint: no row has a field "colour"
    "#);
    assert!(server.requests_on(CHAT).is_empty());
    // The directory is as good as new afterwards.
    place.run(place.generate(&server.url(), &[])).expect(0);
    assert_eq!(place.ids(), all_ids(2));
}

#[test]
fn flags_that_cannot_be_used() {
    let place = Place::with_count(2);
    let server = ScriptedServer::start(Script::new());
    let shown = |more: &[&str]| mistake_of(&place, place.generate(&server.url(), more));
    assert_snapshot!(shown(&["--extra-body", "{\"top_k\": 5"]), @r#"
    exit 2
    error: --extra-body is not JSON: EOF while parsing an object at line 1 column 11
    hint: give one JSON object, e.g. --extra-body '{"chat_template_kwargs": {"thinking": true}}'
    "#);
    assert_snapshot!(shown(&["--extra-body", "[5]"]), @r#"
    exit 2
    error: --extra-body is JSON, but not an object
    hint: give one JSON object, e.g. --extra-body '{"chat_template_kwargs": {"thinking": true}}'
    "#);
    assert_snapshot!(shown(&["--where", "colour"]), @r#"
    exit 2
    error: filter "colour": no '=' in it
    hint: write field=value or field!=value, for example source=math or meta.lang!=de
    "#);
    assert_snapshot!(shown(&["--max-completion-tokens", "0"]), @r"
    exit 2
    error: --max-completion-tokens must be at least 1
    hint: leave it out for no limit of eaglet's own
    ");
    let unknown = place.run(place.generate(&server.url(), &["--concurency", "4"]));
    assert_snapshot!(mistake(&unknown), @r"
    exit 2
    error: unexpected argument '--concurency' found
    ");
    assert!(unknown.stderr.contains("tip: a similar argument exists: '--concurrency'"), "{}", unknown.stderr);
    let nonsense = place.run(place.generate(&server.url(), &["--temperature", "warm"]));
    assert_snapshot!(mistake(&nonsense), @r"
    exit 2
    error: invalid value 'warm' for '--temperature <T>': expected a number
    ");
    assert!(!place.path("run").exists() && server.requests().is_empty(), "nothing was begun");
}

#[test]
fn a_directory_that_cannot_be_used() {
    let place = Place::with_count(2);
    place.write("notes.txt", "not a directory");
    let server = ScriptedServer::start(Script::new());
    let shown = |dir: &str| {
        let mut command = eaglet(&["generate", "--dataset", "data.jsonl", "--url", &server.url(), "--output-dir", dir]);
        command.arg("--no-probe");
        mistake_of(&place, command)
    };
    assert_snapshot!(shown("notes.txt"), @r"
    exit 2
    error: notes.txt is a file, not a directory
    hint: choose a directory you may write to with --output-dir
    ");
    assert_snapshot!(shown("notes.txt/run"), @r"
    exit 3
    error: cannot create the run directory notes.txt/run: not a directory
    hint: choose a directory you may write to with --output-dir
    ");
    // Nobody may make a directory there, root neither.
    #[cfg(target_os = "linux")]
    assert_snapshot!(shown("/proc/eaglet-run"), @r"
    exit 3
    error: cannot create the run directory /proc/eaglet-run: no such file or directory
    hint: choose a directory you may write to with --output-dir
    ");
    let status = place.run(eaglet(&["status", "nowhere"]));
    assert_snapshot!(mistake(&status), @r"
    exit 2
    error: nowhere holds no run
    hint: give the directory that was the --output-dir of eaglet generate
    ");
    assert!(server.requests().is_empty());
}

/// Four prompts, two of them answered and two that hang for ever.
fn hanging_run() -> (Place, ScriptedServer, Running) {
    let hang = |number: &str| Rule::on_chat().contains(number).events([piece("half")]).end(End::Hang);
    let server = ScriptedServer::start(Script::new().rule(hang("number 1.")).rule(hang("number 2.")));
    let place = Place::with_count(4);
    let running = place.start(place.generate(&server.url(), &[]));
    wait_until("two answers", || {
        place.record_lines() == 2 && server.requests_on(CHAT).len() == 4 && place.progress().is_some()
    });
    (place, server, running)
}

fn status_json(place: &Place) -> Value {
    place.run(eaglet(&["status", "run", "--json"])).expect(0).json()
}

/// `eaglet status` without what is never the same twice. Only the lines that stand still while a run goes on.
fn status_text(place: &Place) -> String {
    let holder = &status_json(place)["holder"];
    let mut out =
        place.run(eaglet(&["status", "run"])).expect(0).stdout.replace(&text(&place.run_json()["created_at"]), "BEGUN");
    if let Some(pid) = holder["pid"].as_u64() {
        let shown = format!("process {pid} on {} since {}", text(&holder["host"]), text(&holder["started_at"]));
        out = out.replace(&shown, "process PID on HOST since TIME");
    }
    let still =
        |line: &&str| ["state", "records", "model", "begun", "failed"].iter().any(|start| line.starts_with(start));
    out.lines().filter(still).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_run_that_goes_on_is_shown_kept_from_others_and_stopped() {
    let (place, server, running) = hanging_run();
    assert_snapshot!(status_text(&place), @r"
    state       running: process PID on HOST since TIME
    records     2 of 4 (50 %)
    model       fake/model
    begun       BEGUN, session 1
    ");
    let shown = place.run(eaglet(&["status", "run"])).expect(0).stdout;
    for start in ["phase       running, ", "rate        ", "ETA         ", "server      "] {
        assert!(shown.lines().any(|line| line.starts_with(start)), "no {start:?} in\n{shown}");
    }
    let json = status_json(&place);
    let pid = u64::from(running.pid());
    assert_eq!((&json["holder"]["pid"], &json["progress"]["pid"]), (&json!(pid), &json!(pid)));
    assert_eq!((&json["records"], &json["run"]["generate"]["planned"]), (&json!(2), &json!(4)));

    let holder = &json["holder"];
    for more in [&[][..], &["--detach"]] {
        let second = mistake_of(&place, place.generate(&server.url(), more));
        assert!(
            second.starts_with("exit 3\n") && second.contains("hint: ") && second.contains("eaglet stop"),
            "{second}"
        );
        assert!(second.contains(&format!("process {pid}")) && second.contains(&text(&holder["host"])), "{second}");
    }
    assert_eq!(server.requests_on(CHAT).len(), 4, "the second process sends nothing");

    let stop = place.run(eaglet(&["stop", "run", "--now"])).expect(0);
    assert_eq!(
        stop.stderr,
        format!(
            "asked process {pid} to stop; waiting for it\nstopped; the command that began the run goes on with it\n"
        )
    );
    running.ended().expect(130);
    assert_snapshot!(status_text(&place), @r"
    state       not running, unfinished: the same command goes on
    records     2 of 4 (50 %)
    model       fake/model
    begun       BEGUN, session 1
    failed      0
    ");
    let again = place.run(eaglet(&["stop", "run"])).expect(0);
    assert_eq!(again.stderr, "nothing runs in run\n");
}

#[test]
fn a_killed_run_is_shown_as_unfinished() {
    let (place, _server, running) = hanging_run();
    running.signal(Signal::KILL);
    assert_eq!(running.ended().code, None);
    assert_snapshot!(status_text(&place), @r"
    state       not running, unfinished: the same command goes on
    records     2 of 4 (50 %)
    model       fake/model
    begun       BEGUN, session 1
    failed      0
    ");
    let json = status_json(&place);
    assert_eq!(
        (&json["holder"], &json["progress"]),
        (&Value::Null, &Value::Null),
        "what a dead process said of itself is no news"
    );
    let healthy = ScriptedServer::start(Script::new());
    place.run(place.generate(&healthy.url(), &[])).expect(0);
    assert_eq!(asked(&healthy).len(), 2);
    assert_snapshot!(status_text(&place), @r"
    state       complete
    records     4 of 4 (100 %)
    model       fake/model
    begun       BEGUN, session 2
    failed      0
    ");
    assert_eq!(status_json(&place)["state"], "complete");
}

#[test]
fn stop_waits_for_what_is_out() {
    const COUNT: usize = 80;
    let (place, server) = (Place::with_count(COUNT), ScriptedServer::start(paced()));
    let running = place.start(place.generate(&server.url(), &["--concurrency", "4"]));
    wait_until("some answers, and requests out", || place.record_lines() >= 4 && server.in_flight() > 1);
    place.run(eaglet(&["stop", "run"])).expect(0);
    running.ended().expect(130);
    let sent = server.requests_on(CHAT).len();
    assert!(sent < COUNT, "the stop came too late to test anything");
    assert_eq!(place.ids().len(), sent);
    assert!(place.failures().is_empty());
}

/// Paced so that a run takes a few seconds.
fn paced() -> Script {
    Script::new().answer(Answer { mean_tokens: 20, token_ms: 30.0, ..Answer::default() })
}

/// A process that is nobody's child any more, killed if the test fails.
struct Detached(Pid);

impl Drop for Detached {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = kill_process(self.0, Signal::KILL);
        }
    }
}

#[test]
fn a_detached_run_goes_on_alone() {
    let (place, server) = (Place::with_count(24), ScriptedServer::start(paced()));
    let end = place.run(place.generate(&server.url(), &["--concurrency", "4", "--detach"])).expect(0);
    let pid = end.stdout.strip_prefix("running in the background, process ").and_then(|rest| rest.lines().next());
    let pid: i32 = pid.unwrap_or_else(|| panic!("{}{}", end.stdout, end.stderr)).parse().unwrap();
    let detached = Detached(Pid::from_raw(pid).unwrap());
    assert_snapshot!(end.stdout.replace(&pid.to_string(), "PID"), @r"
    running in the background, process PID
      eaglet status run
      eaglet stop run
      log: run/inference.log
    ");
    assert_eq!(getsid(Some(detached.0)).unwrap(), detached.0, "in a session of its own");
    assert_eq!(status_json(&place)["holder"]["pid"], pid);
    wait_until("its end", || status_json(&place)["holder"].is_null());
    assert_eq!(status_json(&place)["state"], "complete");
    assert_eq!(place.ids(), all_ids(24));
    let log = std::fs::read_to_string(place.run_file("inference.log")).unwrap();
    assert!(log.contains("ended: 24 done, 0 failed, 0 left"), "{log}");
}

#[test]
fn a_detached_run_that_cannot_begin_says_so_on_the_terminal() {
    let place = Place::with_count(2);
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{nobody}");
    let here = mistake_of(&place, place.generate(&url, &[]));
    let detached = mistake_of(&place, place.generate(&url, &["--detach"]));
    assert_eq!(detached, here);
    assert!(detached.starts_with("exit 3\n"), "{detached}");
    let stdin = mistake_of(&place, place.generate_from(&["-"], &url, &["--detach"]));
    assert_snapshot!(stdin, @r"
    exit 2
    error: --detach cannot read the data set from stdin
    hint: give a file, or leave --detach out
    ");
}
