//! The hub, played by a server of this test: listing, download, cache, refusals.
#![allow(clippy::unwrap_used)]

mod common;

use common::texts;
use eaglet_core::{Class, Result};
use eaglet_data::{DatasetSpec, HubSettings, Plan, Token, plan};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

const DATA: &str = "{\"prompt\": \"from afar\"}\n{\"prompt\": \"and again\"}\n";
const LISTING: &str = r#"{"sha": "c0ffee", "siblings": [{"rfilename": "README.md"}, {"rfilename": "data/train 1.jsonl"}, {"rfilename": "data/test.jsonl"}]}"#;

/// Serves the listing and the file until the test ends; notes every request's head.
struct Hub {
    endpoint: String,
    heads: Arc<Mutex<Vec<String>>>,
}

fn serve(mut cut_first_download: bool) -> Hub {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let heads = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&heads);
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(std::io::Result::ok) {
            let head = read_head(&stream);
            answer(stream, &head, &mut cut_first_download);
            noted.lock().unwrap().push(head);
        }
    });
    Hub { endpoint, heads }
}

fn read_head(stream: &TcpStream) -> String {
    BufReader::new(stream)
        .lines()
        .map_while(std::io::Result::ok)
        .take_while(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join("\n")
}

fn answer(mut stream: TcpStream, head: &str, cut: &mut bool) {
    let path = head.split(' ').nth(1).unwrap_or("");
    let range = head.lines().find_map(|line| {
        line.to_ascii_lowercase().strip_prefix("range: bytes=")?.strip_suffix('-')?.parse::<usize>().ok()
    });
    let (status, body) = match path {
        "/api/datasets/far/away/revision/main" => ("200 OK", LISTING),
        "/datasets/far/away/resolve/c0ffee/data/train%201.jsonl" => match range {
            Some(from) => ("206 Partial Content", &DATA[from..]),
            None => ("200 OK", DATA),
        },
        "/api/datasets/far/gated/revision/main" => ("403 Forbidden", ""),
        _ => ("404 Not Found", ""),
    };
    let sent = if path.contains("/resolve/") && std::mem::take(cut) { &body[..10] } else { body };
    // A client that went away is that client's affair.
    let _ = write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{sent}", body.len());
}

fn plan_from(name: &str, home: &Path, endpoint: &str, offline: bool) -> Result<Plan> {
    let work = tempfile::tempdir().unwrap();
    let spec = DatasetSpec { inputs: vec![name.to_owned()], ..DatasetSpec::default() };
    let hub = HubSettings {
        endpoint: Some(endpoint.to_owned()),
        token: Some(Token::new("t0k")),
        home: Some(home.to_owned()),
        offline,
    };
    plan(&spec, &hub, work.path(), None, &mut |_, _| false, &mut |_| {})
}

#[test]
fn a_data_set_is_downloaded_once_and_then_found_offline() {
    let home = tempfile::tempdir().unwrap();
    let hub = serve(false);
    let online = plan_from("far/away", home.path(), &hub.endpoint, false).unwrap();
    assert_eq!(texts(&online), ["from afar", "and again"]);
    assert_eq!(online.origin(1).unwrap(), "far/away/data/train 1.jsonl:2");
    plan_from("far/away", home.path(), &hub.endpoint, false).unwrap();
    let downloads = hub.heads.lock().unwrap().iter().filter(|head| head.contains("/resolve/")).count();
    assert_eq!(downloads, 1, "the second plan used the cache");
    assert!(
        hub.heads
            .lock()
            .unwrap()
            .iter()
            .all(|head| { head.to_ascii_lowercase().contains("authorization: bearer t0k") })
    );
    let repository = home.path().join("hub/datasets--far--away");
    assert_eq!(std::fs::read_to_string(repository.join("refs/main")).unwrap(), "c0ffee");
    assert_eq!(std::fs::read_to_string(repository.join("snapshots/c0ffee/data/train 1.jsonl")).unwrap(), DATA);
    let offline = plan_from("far/away", home.path(), "http://127.0.0.1:9", true).unwrap();
    assert_eq!(offline.fingerprint(), online.fingerprint());
}

#[test]
fn a_download_that_breaks_off_goes_on_where_it_stopped() {
    let home = tempfile::tempdir().unwrap();
    let hub = serve(true);
    let plan = plan_from("far/away", home.path(), &hub.endpoint, false).unwrap();
    assert_eq!(texts(&plan), ["from afar", "and again"]);
    let ranges: Vec<bool> = hub
        .heads
        .lock()
        .unwrap()
        .iter()
        .filter(|head| head.contains("/resolve/"))
        .map(|head| head.to_ascii_lowercase().contains("range: bytes=10-"))
        .collect();
    assert_eq!(ranges, [false, true]);
}

#[test]
fn refusals_say_what_to_do() {
    let home = tempfile::tempdir().unwrap();
    let hub = serve(false);
    for (name, offline, class, hint) in [
        ("far/gated", false, Class::Environment, "HF_TOKEN"),
        ("far/nowhere", false, Class::Usage, "spelling"),
        ("far/away:validation", false, Class::Usage, "data/test.jsonl"),
        ("far/away", true, Class::Environment, "fetch it once"),
    ] {
        let error = plan_from(name, home.path(), &hub.endpoint, offline).err().unwrap();
        assert_eq!(error.class(), class, "{name}: {error}");
        assert!(error.hint_text().unwrap().contains(hint), "{name}: {:?}", error.hint_text());
        assert!(!format!("{error:?}").contains("t0k"));
    }
    let error = plan_from("far/away", home.path(), "http://127.0.0.1:9", false).err().unwrap();
    assert!(error.to_string().contains("cannot reach the hub"), "{error}");
}
