//! What a scripted server is told to do: rules tried in order, flags, and the answer for whatever no rule takes.
//!
//! Plain data, buildable in Rust and readable from JSON, and the pure decision about one request ([`RuleBook::decide`]). No
//! socket and no clock here. Unknown keys in a script file are errors.

use std::collections::HashMap;

use serde::Deserialize;

use eaglet_serve::http::Request;

use super::{answer::Answer, bench::Bench};

/// Everything a scripted server does.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Script {
    /// Tried in order; the first that matches acts.
    pub rules: Vec<Rule>,
    /// Every second request on a connection is reset before it is answered, and is not counted.
    pub kill_reused: bool,
    /// A connection that stays silent this long after its first request is closed, in milliseconds.
    pub close_idle_ms: Option<u64>,
    /// What `{other}` stands for in header values: the port of another server.
    pub other: Option<u16>,
    /// What answers when no rule does.
    pub answer: Answer,
    /// Pre-rendered replies for measuring clients, in place of `answer` on chat completions.
    pub bench: Option<Bench>,
    /// How many requests are kept for [`requests`](super::ScriptedServer::requests); later ones are served and not kept.
    pub keep_requests: usize,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            rules: Vec::new(),
            kill_reused: false,
            close_idle_ms: None,
            other: None,
            answer: Answer::default(),
            bench: None,
            keep_requests: 100_000,
        }
    }
}

impl Script {
    /// A script without rules: every request gets the default answer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a rule after those already there.
    #[must_use]
    pub fn rule(mut self, rule: Rule) -> Self {
        self.rules.push(rule);
        self
    }

    /// Replaces the default answer.
    #[must_use]
    pub fn answer(mut self, answer: Answer) -> Self {
        self.answer = answer;
        self
    }

    /// Reads a script from JSON.
    ///
    /// # Errors
    /// When the text is no JSON of a script; the message names the place.
    pub fn from_json(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }
}

/// When to act, and how. Everything that is not said matches, or is an empty reply with status 200.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rule {
    /// The path, without a query.
    pub path: Option<String>,
    /// 1-based numbers of the requests on that path; empty is any.
    pub nth: Vec<usize>,
    /// Text that must occur in the request body.
    pub contains: Option<String>,
    /// 1-based numbers of the request on its connection; empty is any.
    pub nth_on_connection: Vec<usize>,
    /// Only a request on a connection that already carried one.
    pub reused: bool,
    /// Acts at most so many times, then no longer matches.
    pub times: Option<usize>,
    /// Silence before the head, in milliseconds.
    pub delay_ms: u64,
    /// The status; 200 when not said.
    pub status: Option<u16>,
    /// Header values may hold `{port}` (this server) and `{other}` (see [`Script::other`]).
    pub headers: Vec<(String, String)>,
    /// What follows the head.
    pub body: Body,
    /// Silence after each piece of the body, in milliseconds.
    pub gap_ms: u64,
    /// How often the pieces are sent; absent is once, -1 is until the client leaves.
    pub repeat: Option<i64>,
    /// How the reply ends.
    pub end: End,
    /// Resets the connection (after `delay_ms`) instead of replying.
    pub reset_before_reply: bool,
}

impl Rule {
    /// A rule for every request on `path`.
    pub fn on(path: &str) -> Self {
        Self { path: Some(path.to_owned()), ..Self::default() }
    }

    /// A rule for chat completions.
    pub fn on_chat() -> Self {
        Self::on("/v1/chat/completions")
    }

    /// Only these 1-based requests on the path.
    #[must_use]
    pub fn nth(mut self, numbers: impl IntoIterator<Item = usize>) -> Self {
        self.nth = numbers.into_iter().collect();
        self
    }

    /// Only requests whose body holds `text`.
    #[must_use]
    pub fn contains(mut self, text: &str) -> Self {
        self.contains = Some(text.to_owned());
        self
    }

    /// Only on a connection that already carried a request.
    #[must_use]
    pub fn reused(mut self) -> Self {
        self.reused = true;
        self
    }

    /// At most `count` times.
    #[must_use]
    pub fn times(mut self, count: usize) -> Self {
        self.times = Some(count);
        self
    }

    /// Silence before the head.
    #[must_use]
    pub fn delay_ms(mut self, delay: u64) -> Self {
        self.delay_ms = delay;
        self
    }

    /// The status of the reply.
    #[must_use]
    pub fn status(mut self, status: u16) -> Self {
        self.status = Some(status);
        self
    }

    /// Adds a header to the reply.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// A body of this text, with a `Content-Length`.
    #[must_use]
    pub fn text(mut self, text: &str) -> Self {
        self.body = Body::Text(text.to_owned());
        self
    }

    /// An event stream with one `data:` event per item.
    #[must_use]
    pub fn events<T: Into<String>>(mut self, events: impl IntoIterator<Item = T>) -> Self {
        self.body = Body::Events(events.into_iter().map(Into::into).collect());
        self
    }

    /// These bytes, each piece a chunk and a write of its own.
    #[must_use]
    pub fn chunks<T: Into<Vec<u8>>>(mut self, chunks: impl IntoIterator<Item = T>) -> Self {
        self.body = Body::Chunks(chunks.into_iter().map(Into::into).collect());
        self
    }

    /// These bytes as they are, without any head: whatever HTTP is meant must be in them.
    #[must_use]
    pub fn wire<T: Into<Vec<u8>>>(mut self, pieces: impl IntoIterator<Item = T>) -> Self {
        self.body = Body::Wire(pieces.into_iter().map(Into::into).collect());
        self
    }

    /// Silence after each piece of the body.
    #[must_use]
    pub fn gap_ms(mut self, gap: u64) -> Self {
        self.gap_ms = gap;
        self
    }

    /// How the reply ends.
    #[must_use]
    pub fn end(mut self, end: End) -> Self {
        self.end = end;
        self
    }

    /// Resets the connection instead of replying.
    #[must_use]
    pub fn reset_before_reply(mut self) -> Self {
        self.reset_before_reply = true;
        self
    }

    fn matches(&self, request: &Request, nth: usize, nth_on_connection: usize) -> bool {
        let one_of = |numbers: &[usize], number| numbers.is_empty() || numbers.contains(&number);
        let holds = |text: &String| memchr::memmem::find(&request.body, text.as_bytes()).is_some();
        self.path.as_ref().is_none_or(|path| *path == request.path)
            && one_of(&self.nth, nth)
            && one_of(&self.nth_on_connection, nth_on_connection)
            && (!self.reused || nth_on_connection > 1)
            && self.contains.as_ref().is_none_or(holds)
    }

    /// Whether the rule is meant to send nothing at all: it hangs and names neither status nor body.
    pub(super) fn is_silent(&self) -> bool {
        self.end == End::Hang && self.status.is_none() && matches!(self.body, Body::Empty)
    }
}

/// What follows the head of a scripted reply.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Body {
    /// Nothing.
    #[default]
    Empty,
    /// One piece with a `Content-Length`; sent by half when the end is not `ok` or `close`.
    Text(String),
    /// One `data:` event per item, chunked, `text/event-stream`.
    Events(Vec<String>),
    /// Each item one chunk of a chunked body.
    Chunks(#[serde(deserialize_with = "bytes_from_hex")] Vec<Vec<u8>>),
    /// Each item as it is, in place of head and body.
    Wire(#[serde(deserialize_with = "bytes_from_hex")] Vec<Vec<u8>>),
}

/// How a scripted reply ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The body is complete and the connection stays.
    #[default]
    Ok,
    /// The body is complete and the connection is closed without a word about it.
    Close,
    /// The connection is closed inside the body.
    Cut,
    /// The connection is reset inside the body.
    Reset,
    /// The body stays unfinished and the connection open and silent.
    Hang,
}

/// In a script file raw bytes are either text (`"text:..."`) or hexadecimal digits.
fn bytes_from_hex<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<Vec<u8>>, D::Error> {
    let items = Vec::<String>::deserialize(deserializer)?;
    items.iter().map(|item| piece(item).ok_or_else(|| serde::de::Error::custom(no_piece(item)))).collect()
}

fn no_piece(item: &str) -> String {
    format!("raw bytes are \"text:...\" or pairs of hexadecimal digits, got {item:?}")
}

fn piece(item: &str) -> Option<Vec<u8>> {
    if let Some(text) = item.strip_prefix("text:") {
        return Some(text.as_bytes().to_vec());
    }
    let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let even = item.len().is_multiple_of(2) && item.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !even {
        return None;
    }
    item.as_bytes().chunks(2).map(pair).collect()
}

/// What is to be done with a request.
#[derive(Clone, Debug)]
pub(super) enum Decision {
    /// Reset the connection; the request does not count.
    Kill,
    /// Play this rule.
    Play(Box<Rule>),
    /// Give the default answer.
    Answer,
}

/// The rules with their counters.
#[derive(Debug)]
pub(super) struct RuleBook {
    rules: Vec<Rule>,
    kill_reused: bool,
    applied: Vec<usize>,
    per_path: HashMap<String, usize>,
}

impl RuleBook {
    pub(super) fn new(script: &Script) -> Self {
        Self {
            rules: script.rules.clone(),
            kill_reused: script.kill_reused,
            applied: vec![0; script.rules.len()],
            per_path: HashMap::new(),
        }
    }

    /// The decision, and the number of this request on its path (of the one before it when it is killed).
    pub(super) fn decide(&mut self, request: &Request, nth_on_connection: usize) -> (Decision, usize) {
        let count = self.per_path.entry(request.path.clone()).or_default();
        if self.kill_reused && nth_on_connection > 1 {
            return (Decision::Kill, *count);
        }
        *count += 1;
        let nth = *count;
        for (rule, applied) in self.rules.iter().zip(&mut self.applied) {
            let left = rule.times.is_none_or(|times| *applied < times);
            if left && rule.matches(request, nth, nth_on_connection) {
                *applied += 1;
                return (Decision::Play(Box::new(rule.clone())), nth);
            }
        }
        (Decision::Answer, nth)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn post(path: &str, body: &'static str) -> Request {
        Request {
            method: "POST".to_owned(),
            path: path.to_owned(),
            headers: Vec::new(),
            body: body.into(),
            keep_alive: true,
        }
    }

    fn status_of(decision: &Decision) -> Option<u16> {
        match decision {
            Decision::Play(rule) => rule.status,
            Decision::Kill | Decision::Answer => None,
        }
    }

    #[test]
    fn the_first_matching_rule_acts_and_wears_out() {
        let script = Script::new()
            .rule(Rule::on("/a").nth([2]).status(500))
            .rule(Rule::on("/a").contains("pear").times(1).status(429))
            .rule(Rule::on("/a").reused().status(502));
        let mut book = RuleBook::new(&script);
        let mut status = |path, body, on_connection| status_of(&book.decide(&post(path, body), on_connection).0);
        assert_eq!(status("/a", "a pear", 1), Some(429));
        assert_eq!(status("/a", "a pear", 1), Some(500), "the second on its path");
        assert_eq!(status("/a", "a pear", 1), None, "429 is used up");
        assert_eq!(status("/a", "", 2), Some(502));
        assert_eq!(status("/b", "a pear", 2), None);
    }

    #[test]
    fn a_killed_request_is_not_counted() {
        let script = Script { kill_reused: true, ..Script::new() };
        let mut book = RuleBook::new(&script);
        assert!(matches!(book.decide(&post("/a", ""), 1), (Decision::Answer, 1)));
        assert!(matches!(book.decide(&post("/a", ""), 2), (Decision::Kill, 1)));
        assert!(matches!(book.decide(&post("/a", ""), 1), (Decision::Answer, 2)));
    }

    #[test]
    fn a_script_is_read_from_json() {
        let script = Script::from_json(
            r#"{"rules": [{"path": "/p", "nth": [1, 3], "headers": [["Location", "http://h:{port}/"]], "end": "cut",
                          "body": {"chunks": ["text:ab", "00fF"]}},
                         {"body": {"events": ["{}", "[DONE]"]}, "repeat": -1, "gap_ms": 2}],
                "close_idle_ms": 50, "answer": {"mean_tokens": 12, "reasoning": "reasoning_content"}}"#,
        )
        .unwrap();
        assert!(matches!(&script.rules[0].body, Body::Chunks(chunks) if *chunks == [b"ab".to_vec(), vec![0, 255]]));
        assert_eq!(script.rules[0].end, End::Cut);
        assert_eq!(script.rules[1].repeat, Some(-1));
        assert_eq!(script.answer.mean_tokens, 12);
    }

    #[test]
    fn a_script_with_an_unknown_key_or_odd_bytes_is_refused() {
        for text in
            [r#"{"rule": []}"#, r#"{"rules": [{"stauts": 500}]}"#, r#"{"rules": [{"body": {"chunks": ["abc"]}}]}"#]
        {
            assert!(Script::from_json(text).is_err(), "{text}");
        }
    }
}
