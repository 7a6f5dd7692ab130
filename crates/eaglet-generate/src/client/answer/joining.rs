//! An answer that is put together from several requests: where it may be cut, and how the rest is joined to it.
//!
//! Invariants
//! - A cut is only where an event's text was complete: never inside a character, never after tokens whose text has not come. What lies
//!   behind the cut (a token or two) is dropped and generated again, so no text is lost or doubled at a seam.
//! - Ids, reasoning and content are cut together.

use super::{AnswerBuilder, FINISH_REASONS_TRUNCATED};
use crate::client::AttemptFailure;
use crate::client::markers::{Marker, NoBorder, Splitter};
use eaglet_core::inflight::{Seam, Unfinished};
use eaglet_core::outcome::Cause;
use eaglet_core::response::{ReasoningField, Segment, Usage};
use serde_json::Value;

/// A place where the answer may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Ids before it.
    pub ids: usize,
    /// Bytes of the reasoning before it.
    pub reasoning: usize,
    /// Bytes of the content before it.
    pub content: usize,
    /// Whether ids and texts surely end together.
    pub seam: Seam,
}

/// What a continued answer knows of its beginning.
#[derive(Debug)]
pub(super) struct Joined {
    /// Ids that were there before this request.
    ids_before: usize,
    segments: Vec<Segment>,
    splitter: Splitter,
    field: ReasoningField,
}

/// What came since a mark.
#[derive(Debug, PartialEq, Eq)]
pub struct Since<'a> {
    /// Ids.
    pub token_ids: &'a [u32],
    /// Reasoning.
    pub reasoning: &'a str,
    /// Content.
    pub content: &'a str,
    /// The field of the reasoning.
    pub field: Option<ReasoningField>,
    /// The mark up to which this goes.
    pub mark: Mark,
}

impl AnswerBuilder {
    /// Goes on from the beginning of an answer. `close` ends its reasoning if the cut is inside it.
    pub fn continuing(begun: Unfinished, close: Option<Marker>) -> Self {
        let mark = Mark {
            ids: begun.token_ids.len(),
            reasoning: begun.reasoning.len(),
            content: begun.content.len(),
            seam: begun.seam,
        };
        let field = begun.field.unwrap_or(ReasoningField::Reasoning);
        let joined = Joined {
            ids_before: begun.token_ids.len(),
            segments: begun.segments,
            splitter: Splitter::new(close),
            field,
        };
        let mut builder = AnswerBuilder {
            bytes: begun.reasoning.len() + begun.content.len() + begun.token_ids.len() * size_of::<u32>(),
            content: Some(begun.content).filter(|text| !text.is_empty()),
            prompt_token_ids: Some(begun.prompt_token_ids),
            token_ids: Some(begun.token_ids),
            mark: Some(mark),
            joined: Some(Box::new(joined)),
            ..AnswerBuilder::default()
        };
        builder.add_reasoning(&begun.reasoning, field);
        builder
    }

    /// Ends an answer that has all the tokens it may have.
    pub fn end_at_limit(&mut self) {
        self.finish_reason = Some(FINISH_REASONS_TRUNCATED[0].into());
    }

    /// Tokens that were there before this request.
    pub fn tokens_before(&self) -> u64 {
        self.joined.as_ref().map_or(0, |joined| joined.ids_before as u64)
    }

    pub(super) fn add_reasoning(&mut self, text: &str, field: ReasoningField) {
        if field != ReasoningField::ReasoningContent {
            self.reasoning.push_str(text);
        }
        if matches!(field, ReasoningField::ReasoningContent | ReasoningField::Both) {
            self.reasoning_content.push_str(text);
        }
    }

    /// Takes a piece of a plain completion.
    pub(super) fn take_text(&mut self, text: &str, ids: &[u32]) -> Result<bool, AttemptFailure> {
        let Some(joined) = &mut self.joined else { return Ok(false) };
        let field = joined.field;
        let sides = joined.splitter.push(text, ids).map_err(|NoBorder| {
            AttemptFailure::new(Cause::BadReply, "the end of the reasoning cannot be seen in the continued text")
        })?;
        self.bytes += text.len();
        self.add_reasoning(&sides.reasoning, field);
        if !sides.content.is_empty() {
            self.content.get_or_insert_default().push_str(&sides.content);
        }
        Ok(!text.is_empty())
    }

    /// The prompt as the server understood it: a continuation must have been read as it was sent.
    pub(super) fn take_prompt_ids(&mut self, ids: Vec<u32>) -> Result<(), AttemptFailure> {
        let Some(joined) = &self.joined else {
            self.prompt_token_ids = Some(ids);
            return Ok(());
        };
        let sent = self.prompt_token_ids.as_deref().unwrap_or_default();
        let begun = &self.token_ids.as_deref().unwrap_or_default()[..joined.ids_before];
        if ids.len() == sent.len() + begun.len() && ids.starts_with(sent) && ids.ends_with(begun) {
            return Ok(());
        }
        Err(AttemptFailure::new(Cause::BadReply, "the server changed the ids that an answer was to be continued from"))
    }

    /// After each event: moves the mark if the answer may be cut here. `text_ends` is the end of the event's text.
    pub(super) fn move_mark(&mut self, event_ids: usize, text_ends: Option<char>) {
        let is_cut_at_limit = |reason: &Value| reason.as_str().is_some_and(|r| FINISH_REASONS_TRUNCATED.contains(&r));
        let Some(last) = text_ends else { return };
        if event_ids == 0 {
            // The ids of this text came earlier or will come later; nobody knows which belong to which.
            self.ids_and_text_apart = true;
            return;
        }
        let ended = self.finish_reason.as_ref().is_some_and(|reason| !is_cut_at_limit(reason));
        let held = self.joined.as_ref().is_some_and(|joined| !joined.splitter.is_clean());
        if last == '\u{fffd}' || held || ended {
            return;
        }
        self.mark = Some(Mark {
            ids: self.token_ids.as_ref().map_or(0, Vec::len),
            reasoning: self.reasoning_so_far().len(),
            content: self.content.as_ref().map_or(0, String::len),
            seam: if event_ids == 1 { Seam::Clean } else { Seam::Unsure },
        });
    }

    fn reasoning_so_far(&self) -> &str {
        if self.reasoning.is_empty() { &self.reasoning_content } else { &self.reasoning }
    }

    fn field_so_far(&self) -> Option<ReasoningField> {
        match (self.reasoning.is_empty(), self.reasoning_content.is_empty()) {
            (true, true) => None,
            (false, true) => Some(ReasoningField::Reasoning),
            (true, false) => Some(ReasoningField::ReasoningContent),
            (false, false) => Some(ReasoningField::Both),
        }
    }

    /// Where the answer may be cut; `None` when it cannot be continued (no ids, tool calls, nothing there yet).
    fn cut(&self) -> Option<Mark> {
        let differs = !self.reasoning.is_empty()
            && !self.reasoning_content.is_empty()
            && self.reasoning != self.reasoning_content;
        let possible = self.prompt_token_ids.is_some()
            && self.tool_calls.is_empty()
            && !self.ids_and_text_apart
            && !self.repaired
            && !differs;
        self.mark.filter(|mark| possible && mark.ids > 0)
    }

    /// What came after `from` and before the cut, for a checkpoint; `None` when there is nothing new. After the finish reason there is
    /// nothing to save any more: the answer itself follows.
    pub fn since(&self, from: Mark) -> Option<Since<'_>> {
        let mark = self.cut().filter(|mark| mark.ids > from.ids && self.finish_reason.is_none())?;
        Some(Since {
            token_ids: self.token_ids.as_deref()?.get(from.ids..mark.ids)?,
            reasoning: self.reasoning_so_far().get(from.reasoning..mark.reasoning)?,
            content: self.content.as_deref().unwrap_or_default().get(from.content..mark.content)?,
            field: self.field_so_far().filter(|_| mark.reasoning > 0),
            mark,
        })
    }

    /// The answer up to the cut, its last segment still open.
    pub fn unfinished(&self, endpoint: &str) -> Option<Unfinished> {
        let mark = self.cut()?;
        Some(Unfinished {
            prompt_token_ids: self.prompt_token_ids.clone()?,
            token_ids: self.token_ids.as_deref()?.get(..mark.ids)?.to_vec(),
            reasoning: self.reasoning_so_far().get(..mark.reasoning)?.to_owned(),
            content: self.content.as_deref().unwrap_or_default().get(..mark.content)?.to_owned(),
            field: self.field_so_far().filter(|_| mark.reasoning > 0),
            seam: mark.seam,
            segments: self.joined.as_ref().map_or(vec![], |joined| joined.segments.clone()),
            endpoint: endpoint.to_owned(),
        })
    }

    /// The reply ended: what the splitter held back is text, and usage counts the whole answer.
    pub(super) fn finish_joined(&mut self) -> Result<(), AttemptFailure> {
        let Some(joined) = &mut self.joined else { return Ok(()) };
        let (held, field, before) = (joined.splitter.finish(), joined.field, joined.ids_before as u64);
        self.add_reasoning(&held, field);
        let new = self.token_ids.as_ref().map_or(0, |ids| ids.len() as u64) - before;
        if new == 0 && self.chunks_with_text > 0 {
            return Err(AttemptFailure::new(Cause::BadReply, "the rest of the answer came without token ids"));
        }
        let prompt = self.prompt_token_ids.as_ref().map(|ids| ids.len() as u64);
        self.usage = self.usage.map(|usage| Usage {
            prompt_tokens: prompt,
            completion_tokens: usage.completion_tokens.map(|tokens| tokens + before),
            reasoning_tokens: None,
        });
        Ok(())
    }

    /// All segments of a joined answer, the last one with its finish reason; none of an answer to one request.
    pub(super) fn segments(&mut self, endpoint: &str, finish_reason: &str) -> Vec<Segment> {
        let Some(joined) = self.joined.take() else { return vec![] };
        let mut segments = joined.segments;
        let told: u64 = segments.iter().map(|segment| segment.tokens).sum();
        let tokens = self.token_ids.as_ref().map_or(0, |ids| ids.len() as u64).saturating_sub(told);
        if tokens > 0 {
            segments.push(Segment { tokens, endpoint: endpoint.to_owned(), why: finish_reason.to_owned() });
        }
        segments
    }
}
