//! How a prompt can end, and the books that must balance.
//!
//! Invariant (conservation): planned = done + failed + in flight + waiting + not started, at every instant.

use crate::ids::{ContentHash, PromptId, PromptKey};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Why an attempt failed. The complete list; labels are stable and appear in `failures.jsonl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// No connection: refused, unreachable, name not found, connect time-out.
    Connect,
    /// TLS failed; a certificate that is not trusted will not be trusted in a minute either.
    Tls,
    /// The connection broke before the reply was complete.
    Reset,
    /// A kept-alive connection was closed by the server before it answered: the known keep-alive race.
    IdleReset,
    /// The reply ended in order, but without a finish reason.
    CutStream,
    /// No first token in time.
    FirstByteTimeout,
    /// Tokens stopped coming.
    Silence,
    /// The total time-out, if one is set.
    TotalTimeout,
    /// 429 or 503: too much at once.
    Overloaded,
    /// 500, 502, 504 and other 5xx.
    ServerError,
    /// An error object inside a reply that began as 200.
    ErrorInStream,
    /// The server gave up the request and said so in the finish reason.
    Aborted,
    /// Tokens were generated, but no text and no tool call came.
    MissingText,
    /// The reply is not what the API promises.
    BadReply,
    /// The reply is larger than the bound.
    ReplyTooLarge,
    /// A finish reason nobody knows, or none with an orderly end.
    UnknownFinish,
    /// The prompt does not fit the context.
    ContextTooLong,
    /// 400 and its kin: this request is refused.
    BadRequest,
    /// 401, 403.
    Unauthorized,
    /// 404: no such model or path.
    NotFound,
    /// 3xx: no redirect is followed, so that the key stays here.
    Redirect,
    /// The server is down; the prompt goes back to the queue and nothing is charged to it.
    ServerDown,
}

impl Cause {
    /// The word in records and tables.
    pub fn label(self) -> &'static str {
        match self {
            Cause::Connect => "connect",
            Cause::Tls => "tls",
            Cause::Reset => "reset",
            Cause::IdleReset => "idle_reset",
            Cause::CutStream => "cut_stream",
            Cause::FirstByteTimeout => "first_byte_timeout",
            Cause::Silence => "silence",
            Cause::TotalTimeout => "total_timeout",
            Cause::Overloaded => "overloaded",
            Cause::ServerError => "server_error",
            Cause::ErrorInStream => "error_in_stream",
            Cause::Aborted => "aborted",
            Cause::MissingText => "missing_text",
            Cause::BadReply => "bad_reply",
            Cause::ReplyTooLarge => "reply_too_large",
            Cause::UnknownFinish => "unknown_finish",
            Cause::ContextTooLong => "context_too_long",
            Cause::BadRequest => "bad_request",
            Cause::Unauthorized => "unauthorized",
            Cause::NotFound => "not_found",
            Cause::Redirect => "redirect",
            Cause::ServerDown => "server_down",
        }
    }
}

/// One failed attempt, as it is told in `failures.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FailedAttempt {
    /// When it ended, RFC 3339 in UTC.
    pub at: String,
    /// Why.
    pub cause: Cause,
    /// The HTTP status, if a reply began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http_status: Option<u16>,
    /// In words, secrets taken out.
    pub detail: String,
    /// Seconds it took.
    pub took_s: f64,
    /// Tokens that had arrived and are lost with it.
    pub tokens: u64,
}

/// How a prompt ended without a usable response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailedAs {
    /// The server refused it in a way that would not change.
    Rejected,
    /// Every retry was used up.
    Exhausted,
    /// A reply came whose end nobody can interpret: kept here, not trained on.
    SetAside,
    /// The row of the data set cannot be used; nothing was sent.
    Unusable,
    /// The row repeats an earlier one; nothing was sent, the earlier row's answer counts.
    Duplicate,
}

impl FailedAs {
    /// The word in records and tables.
    pub fn label(self) -> &'static str {
        match self {
            FailedAs::Rejected => "rejected",
            FailedAs::Exhausted => "exhausted",
            FailedAs::SetAside => "set_aside",
            FailedAs::Unusable => "unusable",
            FailedAs::Duplicate => "duplicate",
        }
    }
}

/// Text of an answer that is not one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Partial {
    /// Reasoning so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Content so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// Ids so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// The finish reason as it came, of whatever type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<serde_json::Value>,
}

/// One line of `failures.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// Format version.
    pub v: u32,
    /// The prompt's id; null when the row has none.
    pub sample_id: Option<PromptId>,
    /// Hash of its content; null when it could not be read.
    pub prompt_hash: Option<ContentHash>,
    /// How it ended.
    pub failed_as: FailedAs,
    /// Label of the last cause, or of the reason why the row is unusable.
    pub cause: String,
    /// In words.
    pub detail: String,
    /// Where the row stands (file and line), for unusable and duplicate rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// 0-based row of the data set.
    pub row: u64,
    /// The row's source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// UTF-8 bytes of the prompt's texts.
    pub prompt_bytes: u64,
    /// When, RFC 3339 in UTC.
    pub at: String,
    /// Attempts in order; bounded by the retry settings.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attempts: Vec<FailedAttempt>,
    /// What had come, for people to look at; never counted as an answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partial: Option<Partial>,
}

impl Failure {
    /// The key of the prompt, when it is one that was sent.
    pub fn key(&self) -> Option<PromptKey> {
        matches!(self.failed_as, FailedAs::Rejected | FailedAs::Exhausted | FailedAs::SetAside)
            .then(|| Some(PromptKey::new(self.sample_id.as_ref()?.as_str(), self.prompt_hash?)))?
    }

    /// The record's line, without the newline.
    pub fn to_line(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a failure is plain JSON with string keys")
    }
}

/// The books of a run: where each planned prompt is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    planned: u64,
    done: u64,
    failed: u64,
    in_flight: u64,
    waiting: u64,
    unsynced: u64,
    failed_by_cause: BTreeMap<String, u64>,
    retries_by_cause: BTreeMap<Cause, u64>,
}

/// Where a prompt can be before it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Not sent yet.
    NotStarted,
    /// A request is out.
    InFlight,
    /// Between two attempts.
    Waiting,
    /// Its record is written but not synced.
    Unsynced,
}

impl Tally {
    /// Books of a run in which `planned` prompts exist, of which `done` and `failed` ended in earlier sessions.
    pub fn new(planned: u64, done: u64, failed: u64) -> Self {
        assert!(done + failed <= planned, "more prompts ended than were planned");
        Tally { planned, done, failed, ..Tally::default() }
    }

    fn count(&mut self, place: Place) -> Option<&mut u64> {
        match place {
            Place::NotStarted => None,
            Place::InFlight => Some(&mut self.in_flight),
            Place::Waiting => Some(&mut self.waiting),
            Place::Unsynced => Some(&mut self.unsynced),
        }
    }

    fn leave(&mut self, place: Place) {
        match self.count(place) {
            Some(count) => *count = count.checked_sub(1).expect("a prompt leaves only where it was"),
            None => assert!(self.not_started() > 0, "no prompt is left to start"),
        }
    }

    /// A prompt goes from one place to another.
    pub fn step(&mut self, from: Place, to: Place) {
        self.leave(from);
        if let Some(count) = self.count(to) {
            *count += 1;
        }
        self.check();
    }

    /// Conservation, at every instant: nobody is counted who was not planned.
    fn check(&self) {
        debug_assert!(
            self.done + self.failed + self.in_flight + self.waiting + self.unsynced <= self.planned,
            "more prompts than were planned: {self:?}"
        );
    }

    /// A prompt's record is synced.
    pub fn done(&mut self, from: Place) {
        self.leave(from);
        self.done += 1;
        self.check();
    }

    /// A prompt's failure is synced.
    pub fn failed(&mut self, from: Place, cause: &str) {
        self.leave(from);
        self.failed += 1;
        self.check();
        *self.failed_by_cause.entry(cause.to_owned()).or_default() += 1;
    }

    /// An attempt failed and will be repeated.
    pub fn retried(&mut self, cause: Cause) {
        *self.retries_by_cause.entry(cause).or_default() += 1;
    }

    /// Prompts in all.
    pub fn planned(&self) -> u64 {
        self.planned
    }

    /// Prompts whose record is durable, earlier sessions included.
    pub fn done_count(&self) -> u64 {
        self.done
    }

    /// Prompts that ended without one, earlier sessions included.
    pub fn failed_count(&self) -> u64 {
        self.failed
    }

    /// Requests out now.
    pub fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Prompts between two attempts.
    pub fn waiting(&self) -> u64 {
        self.waiting
    }

    /// Prompts whose record waits for its sync.
    pub fn unsynced(&self) -> u64 {
        self.unsynced
    }

    /// Prompts not sent yet.
    pub fn not_started(&self) -> u64 {
        self.planned - self.done - self.failed - self.in_flight - self.waiting - self.unsynced
    }

    /// Failures of this session by cause.
    pub fn failed_by_cause(&self) -> &BTreeMap<String, u64> {
        &self.failed_by_cause
    }

    /// Retries of this session by cause.
    pub fn retries_by_cause(&self) -> &BTreeMap<Cause, u64> {
        &self.retries_by_cause
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Random legal moves never unbalance the books.
        #[test]
        fn the_books_balance(moves in proptest::collection::vec(0u8..6, 0..200)) {
            let mut tally = Tally::new(20, 3, 2);
            for step in moves {
                match step {
                    0 if tally.not_started() > 0 => tally.step(Place::NotStarted, Place::InFlight),
                    1 if tally.in_flight() > 0 => tally.step(Place::InFlight, Place::Waiting),
                    2 if tally.waiting() > 0 => tally.step(Place::Waiting, Place::InFlight),
                    3 if tally.in_flight() > 0 => tally.step(Place::InFlight, Place::Unsynced),
                    4 if tally.unsynced() > 0 => tally.done(Place::Unsynced),
                    5 if tally.waiting() > 0 => tally.failed(Place::Waiting, "reset"),
                    _ => {}
                }
                let sum = tally.done_count() + tally.failed_count() + tally.in_flight()
                    + tally.waiting() + tally.unsynced() + tally.not_started();
                prop_assert_eq!(sum, tally.planned());
            }
        }
    }

    #[test]
    #[should_panic(expected = "a prompt leaves only where it was")]
    fn a_prompt_cannot_leave_where_it_is_not() {
        Tally::new(1, 0, 0).step(Place::InFlight, Place::Waiting);
    }
}
