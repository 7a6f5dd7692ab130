//! `eaglet simulate` as a program, and `eaglet generate` against it.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Place, Running, all_ids, eaglet, text, wait_until};
use rustix::process::Signal;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;

/// A simulated server that runs, and its URL.
struct Simulated {
    running: Running,
    url: String,
}

impl Simulated {
    fn start(place: &Place, more: &[&str]) -> Self {
        let mut command = eaglet(&["simulate", "--port", "0"]);
        command.args(more);
        let running = place.start(command);
        let mut line = Value::Null;
        wait_until("the simulator says where it listens", || {
            line = serde_json::from_str(&running.printed()).unwrap_or_default();
            line.is_object()
        });
        Simulated { running, url: text(&line["url"]) }
    }

    fn connect(&self) -> std::io::Result<TcpStream> {
        TcpStream::connect(self.url.strip_prefix("http://").unwrap())
    }

    fn get(&self, path: &str) -> String {
        let mut socket = self.connect().unwrap();
        write!(socket, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut reply = String::new();
        socket.read_to_string(&mut reply).unwrap();
        reply
    }
}

/// Prompts that were answered, with none twice.
fn assert_all_answered(place: &Place, count: usize) {
    assert_eq!(place.ids(), all_ids(count));
    assert!(place.failures().is_empty(), "{:?}", place.failures());
}

#[test]
fn a_run_against_a_simulated_server_answers_every_prompt() {
    let place = Place::with_count(60);
    let server = Simulated::start(&place, &["--profile", "small", "--speed", "50"]);
    assert!(server.running.said().contains("simulating small at http://127.0.0.1:"), "{}", server.running.said());
    place.run(place.generate(&server.url, &["--concurrency", "32"])).expect(0);
    assert_all_answered(&place, 60);
    let lengths: BTreeSet<String> =
        place.records().iter().map(|record| record["completion_tokens"].to_string()).collect();
    assert!(lengths.len() > 20, "lengths differ: {lengths:?}");
    for record in place.records() {
        assert_eq!(record["completion_tokens"].as_u64(), record["token_ids"].as_array().map(|ids| ids.len() as u64));
    }
}

#[test]
fn a_run_through_accidents_answers_every_prompt() {
    let place = Place::with_count(40);
    place.write(
        "faults.toml",
        "[[fault]]\nkind = \"restart\"\nat = \"40s\"\nfor = \"20s\"\n\
         [[fault]]\nkind = \"refuse\"\nstatus = 429\nretry-after = 1\nprobability = 0.1\ntimes = 5\n\
         [[fault]]\nkind = \"cut\"\nprobability = 0.1\ntimes = 4\n",
    );
    let faults = ["--faults", "faults.toml", "--fault", "kind=reset probability=0.1 times=3"];
    let server = Simulated::start(&place, &[&["--speed", "50"], &faults[..]].concat());
    place.run(place.generate(&server.url, &["--concurrency", "16"])).expect(0);
    assert_all_answered(&place, 40);
}

#[test]
fn on_sigterm_it_refuses_new_connections_and_leaves_when_the_clients_have() {
    let place = Place::new();
    let mut server = Simulated::start(&place, &[]);
    assert!(server.get("/health").starts_with("HTTP/1.1 200"));
    let open = server.connect().unwrap();
    // Answered on a second connection accepted after the first, so the first is being served.
    server.get("/health");
    server.running.signal(Signal::TERM);
    wait_until("new connections are refused", || server.connect().is_err());
    assert!(!server.running.has_ended(), "an open connection keeps it");
    drop(open);
    server.running.ended().expect(0);
}

#[test]
fn on_ctrl_c_it_ends_at_once() {
    let place = Place::new();
    let server = Simulated::start(&place, &[]);
    let _open = server.connect().unwrap();
    server.running.signal(Signal::INT);
    server.running.ended().expect(0);
}

#[test]
fn a_printed_profile_can_be_changed_and_given_back() {
    let place = Place::new();
    let printed = place.run(eaglet(&["simulate", "--profile", "small", "--print-profile"])).expect(0).stdout;
    place.write("mine.toml", printed.replace("model = \"small\"", "model = \"mine\""));
    let server = Simulated::start(&place, &["--profile", "mine.toml"]);
    assert!(server.get("/v1/models").contains("\"id\":\"mine\""));
}

#[test]
fn what_cannot_be_simulated_is_said() {
    let place = Place::new();
    place.write("bad.toml", "name = 3");
    let cases: [(&[&str], &str); 4] = [
        (&["--profile", "huge"], "\"huge\" is neither a built-in profile nor a file"),
        (&["--profile", "bad.toml"], "bad.toml: not a profile"),
        (&["--fault", "kind=explode"], "not a fault"),
        (&["--speed", "0"], "expected a number from"),
    ];
    for (arguments, said) in cases {
        let ended = place.run(eaglet(&[&["simulate"], arguments].concat())).expect(2);
        assert!(ended.stderr.contains(said), "{arguments:?}: {}", ended.stderr);
    }
}
