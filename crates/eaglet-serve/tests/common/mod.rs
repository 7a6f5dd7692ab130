//! A client over a pipe inside the process, for servers on a stopped clock.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code)]

use std::time::Duration;

use eaglet_serve::http;
use eaglet_serve::simulate::profile::{Answers, StepCost};
use eaglet_serve::simulate::{FaultScript, Profile, Settings, Simulator};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::time::Instant;

pub const CHAT: &str = "/v1/chat/completions";
pub const COMPLETIONS: &str = "/v1/completions";

/// A server with a step of 100 ms, whatever is in it, and answers of 20 tokens that reason for a half.
pub fn profile() -> Profile {
    Profile {
        name: "test".to_owned(),
        model: "test/model".to_owned(),
        max_model_len: 400,
        max_num_seqs: 4,
        max_batched_tokens: 512,
        block_tokens: 16,
        kv_blocks: 100,
        max_queued: None,
        warm_up_s: 0.0,
        step: StepCost { base_s: 0.1, per_running_s: 0.0, per_prefill_token_s: 0.0 },
        answers: Answers { mean_tokens: 20.0, sigma: 0.0, max_tokens: 100, reasoning_share: 0.5 },
    }
}

/// A server that moves while the test waits.
pub fn start(settings: Settings) -> Simulator {
    let simulator = Simulator::new(settings);
    let running = simulator.clone();
    tokio::spawn(async move { running.run().await });
    simulator
}

pub fn start_with_faults(faults: &str) -> Simulator {
    let faults = FaultScript::from_toml(faults).map_err(|e| e.to_string()).unwrap();
    start(Settings { faults, ..Settings::new(profile()) })
}

pub fn chat(text: &str) -> Value {
    json!({"model": "test/model", "messages": [{"role": "user", "content": text}], "return_token_ids": true})
}

pub fn streamed(body: Value) -> Value {
    with(body, json!({"stream": true, "stream_options": {"include_usage": true}}))
}

pub fn with(mut body: Value, changes: Value) -> Value {
    for (name, value) in changes.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

pub fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap_or_else(|e| panic!("{e}: {value}"))
}

/// A reply; of one that broke off, what came.
#[derive(Debug)]
pub struct Got {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
    /// Whether it came to its end.
    pub whole: bool,
}

impl Got {
    pub fn json(&self) -> Value {
        assert!(self.whole, "{}", String::from_utf8_lossy(&self.body));
        serde_json::from_slice(&self.body).unwrap()
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    /// The payloads of the events so far; the last one of a whole stream is `[DONE]` and left out.
    pub fn events(&self) -> Vec<Value> {
        let text = self.text();
        let payloads = text.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap());
        let parsed: Vec<Value> =
            payloads.filter(|p| *p != "[DONE]").map(|payload| serde_json::from_str(payload).unwrap()).collect();
        assert_eq!(text.ends_with("data: [DONE]\n\n"), self.whole);
        parsed
    }

    /// The ids of the answer in a stream.
    pub fn streamed_ids(&self) -> Vec<u32> {
        self.events().iter().filter_map(|event| event["choices"].get(0)?.get("token_ids").map(ids)).flatten().collect()
    }
}

/// A keep-alive client that understands just enough.
pub struct Client {
    stream: DuplexStream,
    unread: Vec<u8>,
}

impl Client {
    pub fn to(simulator: &Simulator) -> Self {
        Self { stream: simulator.connect().unwrap(), unread: Vec::new() }
    }

    pub async fn write(&mut self, method: &str, path: &str, body: &str) {
        let request = format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        self.stream.write_all(request.as_bytes()).await.unwrap();
    }

    /// Reads more; false at the end.
    async fn more(&mut self) -> bool {
        matches!(self.stream.read_buf(&mut self.unread).await, Ok(1..))
    }

    /// The next reply, or what came of it before the connection ended; `None` when nothing did.
    pub async fn read(&mut self) -> Option<Got> {
        let head_length = loop {
            match memchr::memmem::find(&self.unread, b"\r\n\r\n") {
                Some(length) => break length + 4,
                None if self.more().await => {}
                None => return None,
            }
        };
        let head = String::from_utf8(self.unread.drain(..head_length).collect()).unwrap();
        let status = head[9..12].parse().unwrap();
        let mut got = Got { status, head, body: Vec::new(), whole: true };
        if got.header("transfer-encoding") == Some("chunked") {
            // A chunked reply has the form of a chunked request.
            let front = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n";
            loop {
                let wire = [front.as_slice(), &self.unread].concat();
                if let Some((whole, used)) = http::parse(&wire).unwrap() {
                    self.unread.drain(..used - front.len());
                    got.body = whole.body.to_vec();
                    return Some(got);
                }
                if !self.more().await {
                    let wire = [front.as_slice(), &self.unread, http::LAST_CHUNK].concat();
                    got.body =
                        http::parse(&wire).unwrap().map(|(request, _)| request.body.to_vec()).unwrap_or_default();
                    got.whole = false;
                    return Some(got);
                }
            }
        }
        let length: usize = got.header("content-length").unwrap().parse().unwrap();
        while self.unread.len() < length {
            if !self.more().await {
                got.whole = false;
                got.body = std::mem::take(&mut self.unread);
                return Some(got);
            }
        }
        got.body = self.unread.drain(..length).collect();
        Some(got)
    }

    /// Everything that comes within `span`: how many bytes, and whether the connection ended.
    pub async fn listen(&mut self, span: Duration) -> (usize, bool) {
        let before = self.unread.len();
        let until = Instant::now() + span;
        loop {
            match tokio::time::timeout_at(until, self.more()).await {
                Ok(true) => {}
                Ok(false) => return (self.unread.len() - before, true),
                Err(_) => return (self.unread.len() - before, false),
            }
        }
    }

    pub async fn get(&mut self, path: &str) -> Got {
        self.write("GET", path, "").await;
        self.read().await.unwrap()
    }

    pub async fn post(&mut self, path: &str, body: &Value) -> Got {
        self.write("POST", path, &body.to_string()).await;
        self.read().await.unwrap()
    }
}

/// The value of a metric.
pub async fn metric(simulator: &Simulator, name: &str) -> Option<f64> {
    let text = Client::to(simulator).get("/metrics").await.text();
    let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")))?.to_owned();
    line.rsplit(' ').next().unwrap().parse().ok()
}

pub fn seconds(count: f64) -> Duration {
    Duration::from_secs_f64(count)
}
