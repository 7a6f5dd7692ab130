//! From chunks to an answer: accumulation, then one verdict.
//!
//! The content is the product, so nothing is guessed: success needs a finish reason on the list of known good ones, and text (or a tool call) for
//! the tokens that were generated. Everything else is a failed attempt, and says which.

mod joining;

pub use joining::{Mark, Since};

use super::wire::{Choice, Reply, TokenIds, Turn};
use crate::client::AttemptFailure;
use crate::client::id_lists::{self, Lifted};
use crate::client::tool_calls::ToolCalls;
use eaglet_core::outcome::{Cause, Partial};
use eaglet_core::redacted::Scrubber;
use eaglet_core::response::{Answer, ReasoningField, Status, Usage};
use eaglet_data::json_text::repair_lone_surrogates;
use serde_json::Value;
use serde_json::value::RawValue;

/// What to accept and how to read it.
#[derive(Clone, Debug)]
pub struct AnswerPolicy {
    /// Finish reasons that end an answer well.
    pub accepted: Vec<String>,
    /// Finish reasons that mean the token limit.
    pub truncated: Vec<String>,
    /// Markers around reasoning inside the content, e.g. `<think>` and `</think>`; `None` leaves the content as it is.
    pub reasoning_markers: Option<(String, String)>,
    /// Largest reply, in bytes of text and ids.
    pub reply_bytes_max: usize,
}

/// Finish reasons of an answer that the target ended itself, as the known servers spell them.
pub const FINISH_REASONS_ACCEPTED: [&str; 8] =
    ["stop", "eos", "eos_token", "end_turn", "stop_sequence", "stop_token", "tool_calls", "function_call"];
/// Finish reasons of an answer cut at the token limit.
pub const FINISH_REASONS_TRUNCATED: [&str; 3] = ["length", "max_tokens", "max_length"];
/// Finish reasons of a request that the server gave up.
const FINISH_REASONS_ABORTED: [&str; 6] = ["abort", "aborted", "error", "cancelled", "canceled", "timeout"];

impl Default for AnswerPolicy {
    fn default() -> Self {
        AnswerPolicy {
            accepted: FINISH_REASONS_ACCEPTED.map(str::to_owned).to_vec(),
            truncated: FINISH_REASONS_TRUNCATED.map(str::to_owned).to_vec(),
            reasoning_markers: Some(("<think>".to_owned(), "</think>".to_owned())),
            reply_bytes_max: 64 << 20,
        }
    }
}

/// An answer in the making.
#[derive(Debug, Default)]
pub struct AnswerBuilder {
    content: Option<String>,
    reasoning: String,
    reasoning_content: String,
    tool_calls: ToolCalls,
    prompt_token_ids: Option<Vec<u32>>,
    token_ids: Option<Vec<u32>>,
    finish_reason: Option<Value>,
    stop_reason: Option<Value>,
    usage: Option<Usage>,
    server_id: Option<String>,
    repaired: bool,
    chunks_with_text: u64,
    bytes: usize,
    done_marker: bool,
    mark: Option<Mark>,
    /// Text came in an event without ids, so nobody knows which ids it belongs to.
    ids_and_text_apart: bool,
    joined: Option<Box<joining::Joined>>,
    /// Lists that were taken out of the reply before it was parsed.
    lists: Vec<Vec<u32>>,
}

/// How a reply ended on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireEnd {
    /// In order: `[DONE]`, or the end of a whole reply.
    Orderly,
    /// The body ended without `[DONE]`.
    NoDone,
}

impl AnswerBuilder {
    /// Takes the data of one event.
    ///
    /// # Errors
    /// The data is not a chunk, holds an error object, or the reply grows over the bound.
    pub fn push_event(
        &mut self,
        data: &[u8],
        policy: &AnswerPolicy,
        scrubber: &Scrubber,
    ) -> Result<(), AttemptFailure> {
        if data == b"[DONE]" {
            self.done_marker = true;
            return Ok(());
        }
        self.push_json(data, policy, scrubber)
    }

    /// Takes one chunk or one whole reply.
    ///
    /// # Errors
    /// As [`AnswerBuilder::push_event`].
    pub fn push_json(&mut self, json: &[u8], policy: &AnswerPolicy, scrubber: &Scrubber) -> Result<(), AttemptFailure> {
        match serde_json::from_slice::<Reply<'_>>(json) {
            Ok(reply) => self.take(reply, scrubber)?,
            // A lone half of a surrogate pair is not worth the whole answer: it becomes U+FFFD, and the answer says so.
            Err(error) => {
                let repaired = repair(json).ok_or_else(|| bad_json(&error, json, scrubber))?;
                let reply = serde_json::from_slice::<Reply<'_>>(&repaired).map_err(|e| bad_json(&e, json, scrubber))?;
                self.repaired = true;
                self.take(reply, scrubber)?;
            }
        }
        self.within_bound(policy)
    }

    /// Takes one whole reply.
    ///
    /// # Errors
    /// As [`AnswerBuilder::push_event`].
    pub fn push_whole(
        &mut self,
        json: &[u8],
        policy: &AnswerPolicy,
        scrubber: &Scrubber,
    ) -> Result<(), AttemptFailure> {
        let Some(Lifted { json: rest, lists }) = id_lists::lift(json) else {
            return self.push_json(json, policy, scrubber);
        };
        let Ok(reply) = serde_json::from_slice::<Reply<'_>>(&rest) else {
            return self.push_json(json, policy, scrubber);
        };
        self.lists = lists;
        self.take(reply, scrubber)?;
        self.within_bound(policy)
    }

    fn within_bound(&self, policy: &AnswerPolicy) -> Result<(), AttemptFailure> {
        if self.bytes > policy.reply_bytes_max {
            let detail = format!("the reply is larger than {} bytes", policy.reply_bytes_max);
            return Err(AttemptFailure::new(Cause::ReplyTooLarge, detail));
        }
        Ok(())
    }

    fn lifted(&mut self, list: usize) -> Result<Vec<u32>, AttemptFailure> {
        let list = self.lists.get_mut(list).map(std::mem::take);
        list.ok_or_else(|| AttemptFailure::new(Cause::BadReply, "token ids that are no ids: a text"))
    }

    fn read_ids(&mut self, list: &TokenIds<'_>) -> Result<Vec<u32>, AttemptFailure> {
        if let Some(list) = list.lifted() {
            return self.lifted(list);
        }
        let mut ids = Vec::new();
        list.append_to(&mut ids).map_err(|error| bad_ids(&error))?;
        Ok(ids)
    }

    fn take(&mut self, reply: Reply<'_>, scrubber: &Scrubber) -> Result<(), AttemptFailure> {
        if let Some(error) = reply.error.filter(|e| e.get() != "null") {
            return Err(AttemptFailure::new(Cause::ErrorInStream, error_text(error, scrubber)));
        }
        if let Some(ids) = reply.prompt_token_ids {
            let ids = self.read_ids(&ids)?;
            self.take_prompt_ids(ids)?;
        }
        if let Some(usage) = reply.usage {
            self.usage = Some(usage.into());
        }
        if self.server_id.is_none() {
            self.server_id = reply.id.map(|id| id.0.into_owned());
        }
        if let Some(ext) = reply.sglext {
            self.prompt_token_ids = ext.input_ids.or(self.prompt_token_ids.take());
            if let Some(ids) = ext.output_ids.and_then(|choices| choices.into_iter().next()) {
                self.token_ids = Some(ids);
            }
        }
        if let Some(ids) = reply.verbose.and_then(|v| v.tokens) {
            self.bytes += ids.len() * size_of::<u32>();
            self.token_ids.get_or_insert_default().extend(ids);
        }
        match reply.choices.and_then(|choices| choices.into_iter().next()) {
            Some(choice) => self.take_choice(choice),
            None => Ok(()),
        }
    }

    fn take_choice(&mut self, choice: Choice<'_>) -> Result<(), AttemptFailure> {
        if let Some(ids) = choice.prompt_token_ids {
            let ids = self.read_ids(&ids)?;
            self.take_prompt_ids(ids)?;
        }
        let ids_before = self.token_ids.as_ref().map_or(0, Vec::len);
        if let Some(ids) = choice.token_ids {
            match ids.lifted() {
                Some(list) if ids_before == 0 => self.token_ids = Some(self.lifted(list)?),
                Some(list) => {
                    let list = self.lifted(list)?;
                    self.token_ids.get_or_insert_default().extend(list);
                }
                // One id a chunk: keep the room for many.
                None => {
                    let all = self.token_ids.get_or_insert_with(|| Vec::with_capacity(64));
                    ids.append_to(all).map_err(|error| bad_ids(&error))?;
                }
            }
            self.bytes += (self.token_ids.as_ref().map_or(0, Vec::len) - ids_before) * size_of::<u32>();
        }
        let event_ids = self.token_ids.as_ref().map_or(0, Vec::len) - ids_before;
        let mut text_ends = None;
        if let Some(text) = choice.text.filter(|_| self.joined.is_some()) {
            let ids = self.token_ids.as_ref().map_or(vec![], |all| all[ids_before..].to_vec());
            let had_text = self.take_text(&text.0, &ids)?;
            self.chunks_with_text += u64::from(had_text);
            text_ends = text.0.chars().next_back();
        }
        if let Some(reason) = choice.finish_reason.filter(|r| r.get() != "null") {
            self.finish_reason = serde_json::from_str(reason.get()).ok();
        }
        if let Some(reason) = choice.stop_reason.filter(|r| r.get() != "null") {
            self.stop_reason = serde_json::from_str(reason.get()).ok();
        }
        if let Some(turn) = choice.delta.or(choice.message) {
            text_ends = self.take_turn(turn)?.or(text_ends);
        }
        self.move_mark(event_ids, text_ends);
        Ok(())
    }

    /// Returns the end of its text, if it has any.
    fn take_turn(&mut self, turn: Turn<'_>) -> Result<Option<char>, AttemptFailure> {
        let mut had_text = false;
        let parts = [&turn.reasoning_content, &turn.reasoning, &turn.content];
        let text_ends = parts.into_iter().flatten().filter_map(|text| text.0.chars().next_back()).next_back();
        if let Some(text) = turn.content {
            had_text |= !text.0.is_empty();
            self.bytes += text.0.len();
            self.content.get_or_insert_default().push_str(&text.0);
        }
        if let Some(text) = turn.reasoning {
            had_text |= !text.0.is_empty();
            self.bytes += text.0.len();
            self.reasoning.push_str(&text.0);
        }
        if let Some(text) = turn.reasoning_content {
            had_text |= !text.0.is_empty();
            self.bytes += text.0.len();
            self.reasoning_content.push_str(&text.0);
        }
        if let Some(calls) = turn.tool_calls.filter(|c| c.get() != "null") {
            had_text = true;
            self.bytes += calls.get().len();
            self.tool_calls.push(calls).map_err(|detail| AttemptFailure::new(Cause::BadReply, detail))?;
        }
        self.chunks_with_text += u64::from(had_text);
        Ok(text_ends)
    }

    /// Tokens that arrived so far; chunks with text where the server gives no ids.
    pub fn tokens(&self) -> u64 {
        self.token_ids.as_ref().map_or(self.chunks_with_text, |ids| ids.len() as u64)
    }

    /// Whether a finish reason has come.
    pub fn has_finish_reason(&self) -> bool {
        self.finish_reason.is_some()
    }

    /// Whether it ended at the token limit.
    pub fn is_cut_at_limit(&self, policy: &AnswerPolicy) -> bool {
        let reason = self.finish_reason.as_ref().map(|r| r.get("type").unwrap_or(r));
        reason.and_then(Value::as_str).is_some_and(|reason| policy.truncated.iter().any(|known| known == reason))
    }

    /// Whether `[DONE]` has come.
    pub fn is_done(&self) -> bool {
        self.done_marker
    }

    /// What had come, for the failure record.
    pub fn into_partial(self) -> Option<Partial> {
        let has_any = self.tokens() > 0 || self.finish_reason.is_some();
        has_any.then(|| Partial {
            reasoning: [self.reasoning, self.reasoning_content].into_iter().find(|t| !t.is_empty()),
            content: self.content.filter(|t| !t.is_empty()),
            token_ids: self.token_ids,
            finish_reason: self.finish_reason,
        })
    }

    /// The reply ended: the answer, or why it is none. Times are left to the caller.
    ///
    /// # Errors
    /// The answer is not one, with what had come inside.
    pub fn finish(
        mut self,
        end: WireEnd,
        policy: &AnswerPolicy,
        endpoint: &str,
    ) -> Result<(Answer, Status), AttemptFailure> {
        self.finish_joined()?;
        let end = if self.done_marker { WireEnd::Orderly } else { end };
        let reason = match self.judge_reason(end, policy) {
            Ok(reason) => reason,
            Err((cause, detail)) => return Err(self.fail(cause, detail, endpoint)),
        };
        let is_truncated = policy.truncated.contains(&reason);
        let tokens =
            self.usage.and_then(|u| u.completion_tokens).or(self.token_ids.as_ref().map(|ids| ids.len() as u64));
        let has_text = [self.content.as_deref(), Some(&self.reasoning), Some(&self.reasoning_content)]
            .into_iter()
            .flatten()
            .any(|text| !text.is_empty())
            || !self.tool_calls.is_empty();
        // One token without text is the end token itself.
        let status = match (has_text, tokens.unwrap_or(0)) {
            (true, _) if is_truncated => Status::Truncated,
            (true, _) => Status::Ok,
            (false, 0 | 1) => Status::Empty,
            (false, tokens) => {
                let detail = format!("{tokens} tokens were generated, but no text came");
                return Err(self.fail(Cause::MissingText, detail, endpoint));
            }
        };
        Ok((self.into_answer(reason, policy, endpoint), status))
    }

    fn judge_reason(&self, end: WireEnd, policy: &AnswerPolicy) -> Result<String, (Cause, String)> {
        // SGLang's native form is an object whose `type` is the reason.
        let reason = self.finish_reason.as_ref().map(|r| r.get("type").unwrap_or(r));
        match (reason, end) {
            (Some(Value::String(reason)), _)
                if policy.accepted.contains(reason) || policy.truncated.contains(reason) =>
            {
                Ok(reason.clone())
            }
            (Some(Value::String(reason)), _) if FINISH_REASONS_ABORTED.contains(&reason.as_str()) => {
                Err((Cause::Aborted, format!("the server gave the request up (finish_reason {reason:?})")))
            }
            (Some(other), _) => {
                Err((Cause::UnknownFinish, format!("finish_reason {other} is not on the list of known ones")))
            }
            (None, WireEnd::Orderly) => {
                Err((Cause::UnknownFinish, "the reply ended in order, but without a finish_reason".to_owned()))
            }
            (None, WireEnd::NoDone) => Err((Cause::CutStream, "the reply ended without a finish_reason".to_owned())),
        }
    }

    fn fail(self, cause: Cause, detail: String, endpoint: &str) -> AttemptFailure {
        let tokens = self.tokens() - self.tokens_before();
        let unfinished = self.unfinished(endpoint).map(Box::new);
        let partial = self.into_partial().map(Box::new);
        AttemptFailure { tokens, partial, unfinished, ..AttemptFailure::new(cause, detail) }
    }

    fn into_answer(mut self, finish_reason: String, policy: &AnswerPolicy, endpoint: &str) -> Answer {
        let segments = self.segments(endpoint, &finish_reason);
        let mut flags = Vec::new();
        let mut flag = |on: bool, label: &str| {
            if on {
                flags.push(label.to_owned());
            }
        };
        let (reasoning, field, differs) = join_reasoning(self.reasoning, self.reasoning_content);
        flag(differs.is_some(), "reasoning_fields_differ");
        flag(self.repaired, "text_repaired");
        flag(self.usage.is_none(), "usage_unknown");
        let counted = self.usage.and_then(|u| u.completion_tokens);
        let ids = self.token_ids.as_ref().map(|ids| ids.len() as u64);
        flag(matches!((counted, ids), (Some(a), Some(b)) if a != b), "ids_and_usage_differ");
        let mut answer = Answer {
            finish_reason,
            reasoning,
            reasoning_field: field,
            reasoning_content_differs: differs,
            // An empty string beside reasoning or a tool call is "none", not an answer.
            content: self.content.filter(|text| !text.is_empty()),
            tool_calls: self.tool_calls.finish(),
            prompt_token_ids: self.prompt_token_ids,
            token_ids: self.token_ids,
            stop_reason: self.stop_reason,
            usage: self.usage,
            server_id: self.server_id,
            first_token_s: None,
            latency_s: 0.0,
            segments,
            flags,
        };
        if let (None, Some(markers)) = (&answer.reasoning, &policy.reasoning_markers) {
            split_at_markers(&mut answer, markers);
        }
        answer
    }
}

/// `reasoning` wins; both and equal is one; both and different is kept and flagged.
fn join_reasoning(reasoning: String, older: String) -> (Option<String>, Option<ReasoningField>, Option<String>) {
    match (reasoning.is_empty(), older.is_empty()) {
        (true, true) => (None, None, None),
        (false, true) => (Some(reasoning), Some(ReasoningField::Reasoning), None),
        (true, false) => (Some(older), Some(ReasoningField::ReasoningContent), None),
        (false, false) if reasoning == older => (Some(reasoning), Some(ReasoningField::Both), None),
        (false, false) => (Some(reasoning), Some(ReasoningField::Reasoning), Some(older)),
    }
}

/// Takes reasoning out of content that begins with the opening marker, or whose template opened it already and that holds the closing
/// marker exactly once. Anything else is left alone: a marker quoted in the middle of an answer is text.
fn split_at_markers(answer: &mut Answer, (open, close): &(String, String)) {
    let Some(content) = &answer.content else { return };
    let opened = content.trim_start().strip_prefix(open.as_str());
    let body = opened.unwrap_or(content);
    let (reasoning, rest) = match body.split_once(close.as_str()) {
        Some((reasoning, rest))
            if opened.is_some() || !rest.contains(close.as_str()) && !reasoning.contains(open.as_str()) =>
        {
            (reasoning, rest)
        }
        None if opened.is_some() => (body, ""),
        _ => return,
    };
    let (reasoning, rest) = (reasoning.to_owned(), rest.to_owned());
    answer.reasoning = Some(reasoning);
    answer.reasoning_field = Some(ReasoningField::Markers);
    answer.content = Some(rest).filter(|text| !text.is_empty());
}

/// Repairs lone surrogates and bytes that are not UTF-8; `None` when neither was the trouble.
fn repair(json: &[u8]) -> Option<Vec<u8>> {
    if let Ok(text) = std::str::from_utf8(json) {
        return repair_lone_surrogates(text.as_bytes());
    }
    let text = String::from_utf8_lossy(json).into_owned().into_bytes();
    Some(repair_lone_surrogates(&text).unwrap_or(text))
}

/// Of a reply that is no JSON so much is searched for secrets; far more than is shown.
const BAD_JSON_BYTES_SEARCHED: usize = 16 << 10;

fn bad_json(error: &serde_json::Error, json: &[u8], scrubber: &Scrubber) -> AttemptFailure {
    // Shortened only after the secrets are out: half a secret would no longer be known as one.
    let text = scrubber.scrub(&String::from_utf8_lossy(&json[..json.len().min(BAD_JSON_BYTES_SEARCHED)]));
    let shown: String = text.chars().take(200).collect();
    AttemptFailure::new(
        Cause::BadReply,
        scrubber.scrub(&format!("the reply is not what the chat API sends ({error}): {shown}")),
    )
}

fn bad_ids(error: &serde_json::Error) -> AttemptFailure {
    AttemptFailure::new(Cause::BadReply, format!("token ids that are no ids: {error}"))
}

/// The message of an error object, or the object itself.
pub fn error_text(error: &RawValue, scrubber: &Scrubber) -> String {
    let value: Value = serde_json::from_str(error.get()).unwrap_or_default();
    let message = value.get("message").and_then(Value::as_str).or(value.as_str());
    let text = message.map_or_else(|| error.get().to_owned(), str::to_owned);
    scrubber.scrub(&text).chars().take(500).collect()
}
