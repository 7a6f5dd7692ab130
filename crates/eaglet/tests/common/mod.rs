//! What the tests of the binary share: a place with a data set and a run directory, the program started on it, and what it
//! left behind. No test here knows how eaglet works inside.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code)]

use eaglet_testkit::server::{Rule, ScriptedServer, SeenRequest};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The chat API.
pub(crate) const CHAT: &str = "/v1/chat/completions";
/// Longest wait for anything: far beyond what a loaded machine needs, so that reaching it means "never".
const DEADLINE: Duration = Duration::from_secs(120);
/// Between two looks at a condition.
const LOOK_INTERVAL: Duration = Duration::from_millis(4);

/// Waits until `condition` holds.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < until, "never happened: {what}");
        std::thread::sleep(LOOK_INTERVAL);
    }
}

/// The program with this command line, cut off from the caller's environment variables of eaglet's own.
pub(crate) fn eaglet(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_eaglet"));
    command.args(args).stdin(Stdio::null());
    for name in ["EAGLET_API_KEY", "HF_TOKEN", "HF_ENDPOINT", "EAGLET_DETACHED_CHILD"] {
        command.env_remove(name);
    }
    command
}

/// How a process ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Its exit code; `None` when a signal killed it.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    /// Fails with what the program said unless it ended with this code.
    pub(crate) fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// The JSON on stdout.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {}", self.stdout))
    }

    /// The lines that begin with `error:` and `hint:`.
    pub(crate) fn complaint(&self) -> String {
        let wanted = |line: &&str| line.starts_with("error:") || line.starts_with("hint:");
        self.stderr.lines().filter(wanted).collect::<Vec<_>>().join("\n")
    }
}

/// A process that runs. Dropping it kills it.
pub(crate) struct Running {
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Running {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.pid()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// What it has said on stderr so far.
    pub(crate) fn said(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.stderr).unwrap()).into_owned()
    }

    /// What it has printed on stdout so far.
    pub(crate) fn printed(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.stdout).unwrap()).into_owned()
    }

    /// Waits for its end.
    pub(crate) fn ended(mut self) -> Ended {
        let until = Instant::now() + DEADLINE;
        let code = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status.code();
            }
            assert!(Instant::now() < until, "the program does not end; it said:\n{}", self.said());
            std::thread::sleep(LOOK_INTERVAL);
        };
        let text = |path: &Path| String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
        Ended { code, stdout: text(&self.stdout), stderr: text(&self.stderr) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A directory with a data set, a run directory and what processes say.
pub(crate) struct Place {
    root: tempfile::TempDir,
    processes: std::cell::Cell<u32>,
}

impl Place {
    pub(crate) fn new() -> Self {
        Place { root: tempfile::tempdir().unwrap(), processes: std::cell::Cell::new(0) }
    }

    /// A place whose data set `data.jsonl` has these prompts: id and text.
    pub(crate) fn with_prompts<I: AsRef<str>, T: AsRef<str>>(prompts: impl IntoIterator<Item = (I, T)>) -> Self {
        let place = Place::new();
        let rows = prompts.into_iter().map(|(id, text)| json!({"id": id.as_ref(), "prompt": text.as_ref()}));
        place.write_rows("data.jsonl", rows);
        place
    }

    /// A place with `count` prompts, `q0` and so on.
    pub(crate) fn with_count(count: usize) -> Self {
        Self::with_prompts((0..count).map(|n| (format!("q{n}"), format!("Tell me about the number {n}."))))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }

    pub(crate) fn write_rows(&self, name: &str, rows: impl IntoIterator<Item = Value>) -> PathBuf {
        self.write(name, rows.into_iter().map(|row| format!("{row}\n")).collect::<String>())
    }

    /// A file of the run directory.
    pub(crate) fn run_file(&self, name: &str) -> PathBuf {
        self.path("run").join(name)
    }

    pub(crate) fn responses(&self) -> PathBuf {
        self.run_file("raw_responses.jsonl")
    }

    /// `eaglet generate` on `data.jsonl` into the run directory, with waits short enough for tests and without a probe.
    pub(crate) fn generate(&self, url: &str, more: &[&str]) -> Command {
        self.generate_from(&["data.jsonl"], url, more)
    }

    /// The same on these inputs.
    pub(crate) fn generate_from(&self, inputs: &[&str], url: &str, more: &[&str]) -> Command {
        let mut command = eaglet(&["generate", "--output-dir", "run", "--url", url, "--no-probe"]);
        command.args(["--retry-backoff", "20ms", "--sync-interval", "50ms"]);
        for input in inputs {
            command.args(["--dataset", input]);
        }
        command.args(more).current_dir(self.root.path());
        command
    }

    pub(crate) fn start(&self, mut command: Command) -> Running {
        let number = self.processes.get();
        self.processes.set(number + 1);
        let (stdout, stderr) = (self.path(&format!("stdout-{number}")), self.path(&format!("stderr-{number}")));
        let child = command
            .current_dir(self.root.path())
            .stdout(File::create(&stdout).unwrap())
            .stderr(File::create(&stderr).unwrap())
            .spawn()
            .unwrap();
        Running { child, stdout, stderr }
    }

    pub(crate) fn run(&self, command: Command) -> Ended {
        self.start(command).ended()
    }

    /// The records, each line parsed strictly.
    pub(crate) fn records(&self) -> Vec<Value> {
        lines(&self.responses())
    }

    pub(crate) fn record(&self, id: &str) -> Value {
        let found: Vec<Value> = self.records().into_iter().filter(|record| record["sample_id"] == id).collect();
        assert_eq!(found.len(), 1, "records of {id}");
        found.into_iter().next().unwrap()
    }

    pub(crate) fn failures(&self) -> Vec<Value> {
        lines(&self.run_file("failures.jsonl"))
    }

    pub(crate) fn failure(&self, id: &str) -> Value {
        let found: Vec<Value> = self.failures().into_iter().filter(|failure| failure["sample_id"] == id).collect();
        assert_eq!(found.len(), 1, "failures of {id} in {:?}", self.failures());
        found.into_iter().next().unwrap()
    }

    /// Ids of the records; fails if one is there twice.
    pub(crate) fn ids(&self) -> BTreeSet<String> {
        let ids: Vec<String> = self.records().iter().map(|record| text(&record["sample_id"])).collect();
        let set: BTreeSet<String> = ids.iter().cloned().collect();
        assert_eq!(ids.len(), set.len(), "doubled in {ids:?}");
        set
    }

    /// Id and content of each record.
    pub(crate) fn contents(&self) -> BTreeMap<String, String> {
        assert_eq!(self.ids().len(), self.records().len());
        self.records().iter().map(|record| (text(&record["sample_id"]), text(&record["content"]))).collect()
    }

    /// The kinds of events so far.
    pub(crate) fn events(&self) -> Vec<String> {
        let bytes = std::fs::read(self.run_file("events.jsonl")).unwrap_or_default();
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        let lines = bytes[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        lines.map(|line| text(&serde_json::from_slice::<Value>(line).unwrap()["event"])).collect()
    }

    pub(crate) fn progress(&self) -> Option<Value> {
        serde_json::from_slice(&std::fs::read(self.run_file("progress.json")).ok()?).ok()
    }

    pub(crate) fn run_json(&self) -> Value {
        serde_json::from_slice(&std::fs::read(self.run_file("run.json")).unwrap()).unwrap()
    }

    /// How many whole lines the record file has just now.
    pub(crate) fn record_lines(&self) -> usize {
        std::fs::read(self.responses()).unwrap_or_default().iter().filter(|byte| **byte == b'\n').count()
    }
}

/// A JSON string's text.
pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("expected text, got {value}")).to_owned()
}

/// The lines of a JSONL file, split at line feeds only; a file that is not there has none.
pub(crate) fn lines(path: &Path) -> Vec<Value> {
    let bytes = std::fs::read(path).unwrap_or_default();
    assert!(bytes.is_empty() || bytes.ends_with(b"\n"), "{} ends inside a line", path.display());
    let lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines
        .map(|line| serde_json::from_slice(line).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(line))))
        .collect()
}

/// The ids `q0` to `q(count-1)`.
pub(crate) fn all_ids(count: usize) -> BTreeSet<String> {
    (0..count).map(|n| format!("q{n}")).collect()
}

/// The last message of each chat request, in the order of arrival.
pub(crate) fn asked(server: &ScriptedServer) -> Vec<String> {
    server.requests_on(CHAT).iter().map(last_message).collect()
}

pub(crate) fn last_message(request: &SeenRequest) -> String {
    let body = request.json();
    text(
        &body["messages"].as_array().and_then(|messages| messages.last()).expect("a chat request has messages")["content"],
    )
}

/// A chunk of a stream with some text.
pub(crate) fn piece(content: &str) -> String {
    chunk(json!({"content": content}), Value::Null)
}

/// A chunk of a stream.
pub(crate) fn chunk(delta: Value, finish_reason: Value) -> String {
    json!({"id": "chatcmpl-t", "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}).to_string()
}

/// The last three events of a good stream.
pub(crate) fn good_end(tokens: u64) -> Vec<String> {
    let usage = json!({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}});
    vec![chunk(json!({}), json!("stop")), usage.to_string(), "[DONE]".to_owned()]
}

/// A good stream in two pieces.
pub(crate) fn good_stream(first: &str, second: &str) -> Vec<String> {
    [vec![piece(first), piece(second)], good_end(3)].concat()
}

/// The bytes of a stream with this line end.
pub(crate) fn sse_bytes(events: &[String], line_end: &str) -> Vec<u8> {
    events.iter().flat_map(|event| format!("data: {event}{line_end}{line_end}").into_bytes()).collect()
}

/// A model list with one model.
pub(crate) fn model_list(id: &str, root: &str) -> Rule {
    let list = json!({"object": "list", "data": [{"id": id, "object": "model", "owned_by": "vllm", "root": root, "max_model_len": 8192}]});
    Rule::on("/v1/models").text(&list.to_string())
}
