//! The product: one finished answer, and its line in `raw_responses.jsonl`.
//!
//! The order of fields is part of the format: identity and accounting come first, so that a run of a million
//! records is opened for resume by reading the head of each line ([`RecordHead`]) and skipping the rest.

use crate::ids::{ContentHash, PromptId};
use crate::prompt::Message;
use crate::sampling::Sampling;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Version of the record format; see `docs/formats.md`.
pub const RECORD_VERSION: u32 = 1;

/// What became of an answered prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The target ended the answer itself.
    Ok,
    /// Cut at the token limit: kept and marked; whether it is trained on is decided by `eaglet prepare --finish-reasons`.
    Truncated,
    /// The target generated nothing but its end token.
    Empty,
}

impl Status {
    /// The word in the record.
    pub fn label(self) -> &'static str {
        match self {
            Status::Ok => "ok",
            Status::Truncated => "truncated",
            Status::Empty => "empty",
        }
    }

    fn from_label(label: &[u8]) -> Option<Self> {
        [Status::Ok, Status::Truncated, Status::Empty].into_iter().find(|s| s.label().as_bytes() == label)
    }
}

/// Where the reasoning was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReasoningField {
    /// `reasoning` (vLLM since 2026, others).
    Reasoning,
    /// `reasoning_content` (older vLLM, SGLang, DeepSeek).
    ReasoningContent,
    /// Both fields with the same text.
    Both,
    /// Between markers inside the content.
    Markers,
}

/// Token counts as the server reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the rendered prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    /// Tokens generated, end token included where the server counts it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_tokens: Option<u64>,
    /// Of these, tokens of the reasoning (0 from servers that do not count them).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_tokens: Option<u64>,
}

/// A part of an answer that was put together from several requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// How many of the answer's `token_ids` it gave.
    pub tokens: u64,
    /// Server, without credentials.
    pub endpoint: String,
    /// Why it ended: the label of a cause, `session_ended`, or the finish reason.
    pub why: String,
}

/// One answer of the target, mostly to one request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// The server's reason, word for word.
    pub finish_reason: String,
    /// Reasoning apart from the content; absent when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Which field or marker the reasoning came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_field: Option<ReasoningField>,
    /// Text of `reasoning_content` where it differed from `reasoning` (which is the one kept above).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content_differs: Option<String>,
    /// The answer proper; null when the server sent none.
    pub content: Option<String>,
    /// Tool calls as the API has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Value>,
    /// Exact ids of the rendered prompt, where the server gives them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Exact ids sampled, end token included, where the server gives them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// The stop string or stop token that ended the answer, if the server says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<Value>,
    /// Token counts; absent = the server did not say, never 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// The server's id of the reply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_id: Option<String>,
    /// Seconds from sending the request to the first token; absent for whole replies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_token_s: Option<f64>,
    /// Seconds from sending the request to the end of the reply.
    pub latency_s: f64,
    /// The parts of an answer that was interrupted and continued, in order; empty for an answer to one request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub segments: Vec<Segment>,
    /// What is odd about the answer, as labels (see `docs/formats.md`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flags: Vec<String>,
}

impl Answer {
    /// Tokens generated: as the server counts them, else the number of ids.
    pub fn completion_tokens(&self) -> Option<u64> {
        self.usage.and_then(|u| u.completion_tokens).or(self.token_ids.as_ref().map(|ids| ids.len() as u64))
    }

    /// Tokens of the prompt: as the server counts them, else the number of ids.
    pub fn prompt_tokens(&self) -> Option<u64> {
        self.usage.and_then(|u| u.prompt_tokens).or(self.prompt_token_ids.as_ref().map(|ids| ids.len() as u64))
    }
}

/// An earlier turn of a regenerated conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EarlierTurn {
    /// How many of the record's `messages` had been sent when this answer was given.
    pub messages_sent: usize,
    /// The answer; its content is the assistant message that follows in `messages`.
    #[serde(flatten)]
    pub answer: Answer,
}

/// One line of `raw_responses.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Response {
    /// Format version.
    pub v: u32,
    /// The prompt's id.
    pub sample_id: PromptId,
    /// Hash of the prompt's messages and tools.
    pub prompt_hash: ContentHash,
    /// What became of it.
    pub status: Status,
    /// Tokens of the last request's prompt; null = unknown.
    pub prompt_tokens: Option<u64>,
    /// Tokens generated, over all turns; null = unknown.
    pub completion_tokens: Option<u64>,
    /// UTF-8 bytes of the prompt's message texts.
    pub prompt_bytes: u64,
    /// 0-based row of the data set.
    pub row: u64,
    /// The row's source, if it names one.
    pub source: Option<String>,
    /// Model name sent.
    pub model: String,
    /// Server, without credentials.
    pub endpoint: String,
    /// When the answer was complete, RFC 3339 in UTC.
    pub finished_at: String,
    /// Requests sent for the last turn, the good one included.
    pub attempts: u32,
    /// Sampling settings sent.
    pub sampling: Sampling,
    /// The token limit sent; null = none.
    pub max_completion_tokens: Option<u64>,
    /// Messages of the last request.
    pub messages: Vec<Message>,
    /// Tool definitions sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<Value>>,
    /// The (last) answer.
    #[serde(flatten)]
    pub answer: Answer,
    /// Answers of earlier turns, in order, when a conversation was regenerated turn by turn.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier_turns: Vec<EarlierTurn>,
}

impl Response {
    /// The record's line, without the newline. U+0000 and other control characters leave as escapes, so the line holds
    /// no byte 0x0A.
    pub fn to_line(&self) -> Vec<u8> {
        let ids = self.answer.token_ids.as_ref().map_or(0, Vec::len);
        let text = self.answer.content.as_ref().map_or(0, String::len)
            + self.answer.reasoning.as_ref().map_or(0, String::len)
            + self.prompt_bytes as usize;
        let mut line = Vec::with_capacity(1024 + ids * 7 + text + text / 8);
        serde_json::to_writer(&mut line, self).expect("a response is plain JSON with string keys");
        line
    }
}

/// The head of a record: all that resume and the totals need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordHead<'a> {
    /// The prompt's id (borrowed unless it holds escapes).
    pub sample_id: std::borrow::Cow<'a, str>,
    /// Hash of the prompt's content.
    pub prompt_hash: ContentHash,
    /// What became of it.
    pub status: Status,
    /// Tokens of the prompt, if known.
    pub prompt_tokens: Option<u64>,
    /// Tokens generated, if known.
    pub completion_tokens: Option<u64>,
    /// 0-based row of the data set; `None` where another program moved the field (then parse the line whole).
    pub row: Option<u64>,
}

impl<'a> RecordHead<'a> {
    /// Reads the head of a line that [`Response::to_line`] wrote; `None` for any other line (then parse it whole).
    pub fn parse(line: &'a [u8]) -> Option<Self> {
        let rest = line.strip_prefix(b"{\"v\":1,\"sample_id\":\"")?;
        let (sample_id, rest) = json_string(rest)?;
        let rest = rest.strip_prefix(b",\"prompt_hash\":\"")?;
        let prompt_hash = std::str::from_utf8(rest.get(..32)?).ok()?.parse().ok()?;
        let rest = rest[32..].strip_prefix(b"\",\"status\":\"")?;
        let end = memchr::memchr(b'"', &rest[..rest.len().min(16)])?;
        let status = Status::from_label(&rest[..end])?;
        let rest = rest[end + 1..].strip_prefix(b",\"prompt_tokens\":")?;
        let (prompt_tokens, rest) = json_count(rest)?;
        let rest = rest.strip_prefix(b",\"completion_tokens\":")?;
        let (completion_tokens, rest) = json_count(rest)?;
        let row = row_of(rest);
        line.ends_with(b"}").then_some(RecordHead {
            sample_id,
            prompt_hash,
            status,
            prompt_tokens,
            completion_tokens,
            row,
        })
    }
}

/// The row, in what follows `completion_tokens`.
fn row_of(rest: &[u8]) -> Option<u64> {
    let (_, rest) = json_count(rest.strip_prefix(b",\"prompt_bytes\":")?)?;
    json_count(rest.strip_prefix(b",\"row\":")?)?.0
}

/// The string whose opening quote was just read, and what follows its closing quote.
fn json_string(text: &[u8]) -> Option<(std::borrow::Cow<'_, str>, &[u8])> {
    let mut end = memchr::memchr2(b'"', b'\\', text)?;
    if text[end] == b'"' {
        return Some((std::str::from_utf8(&text[..end]).ok()?.into(), &text[end + 1..]));
    }
    while text.get(end)? != &b'"' {
        end += if text[end] == b'\\' { 2 } else { 1 };
    }
    let quoted = [b"\"", &text[..=end]].concat();
    Some((serde_json::from_slice::<String>(&quoted).ok()?.into(), &text[end + 1..]))
}

/// A count or `null`, and what follows.
fn json_count(text: &[u8]) -> Option<(Option<u64>, &[u8])> {
    if let Some(rest) = text.strip_prefix(b"null") {
        return Some((None, rest));
    }
    let digits = text.iter().take_while(|b| b.is_ascii_digit()).count();
    let number = std::str::from_utf8(&text[..digits]).ok()?.parse().ok()?;
    Some((Some(number), &text[digits..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::Role;
    use proptest::prelude::*;

    fn response(id: &str, content: &str) -> Response {
        Response {
            v: RECORD_VERSION,
            sample_id: PromptId::given(id),
            prompt_hash: ContentHash(42),
            status: Status::Truncated,
            prompt_tokens: Some(5),
            completion_tokens: None,
            prompt_bytes: 3,
            row: 1,
            source: Some("gsm".into()),
            model: "m".into(),
            endpoint: "http://127.0.0.1:1".into(),
            finished_at: "2026-11-29T00:00:00Z".into(),
            attempts: 1,
            sampling: Sampling { temperature: Some(0.7), ..Sampling::default() },
            max_completion_tokens: Some(16),
            messages: vec![Message::text(Role::User, "why")],
            tools: None,
            answer: Answer {
                finish_reason: "length".into(),
                content: Some(content.into()),
                token_ids: Some(vec![1, 2, 3]),
                latency_s: 0.5,
                ..Answer::default()
            },
            earlier_turns: vec![],
        }
    }

    proptest! {
        #[test]
        fn the_head_of_a_written_record_reads_back(id in any::<String>(), content in any::<String>()) {
            let record = response(&id, &content);
            let line = record.to_line();
            prop_assert!(!line.contains(&b'\n'));
            let head = RecordHead::parse(&line).expect("the fast path must take our own lines");
            prop_assert_eq!(head.sample_id.as_ref(), id.as_str());
            prop_assert_eq!(head.prompt_hash, record.prompt_hash);
            prop_assert_eq!(head.status, Status::Truncated);
            prop_assert_eq!((head.prompt_tokens, head.completion_tokens), (Some(5), None));
            prop_assert_eq!(head.row, Some(1));
            prop_assert_eq!(serde_json::from_slice::<Response>(&line).unwrap(), record);
        }

        #[test]
        fn a_head_never_panics(line in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = RecordHead::parse(&line);
            let _ = RecordHead::parse(&[b"{\"v\":1,\"sample_id\":\"".as_slice(), &line].concat());
        }
    }

    #[test]
    fn a_cut_record_has_no_head() {
        let line = response("a", "b").to_line();
        assert_eq!(RecordHead::parse(&line[..line.len() - 1]), None);
    }
}
