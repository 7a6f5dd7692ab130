//! Checkpoints of answers that are not finished: `inflight.bin`.
//!
//! What it is: a log of frames from which a killed run takes up each answer where it was. What it is not: a record. It is only an
//! optimisation: whatever is wrong with it costs tokens that are generated again, and never stops a run.
//!
//! Invariants
//! - [`InflightLog::open`] does not fail; a torn or damaged end is cut silently to the last whole frame.
//! - A frame that does not follow on what came before it (a gap, an unknown generation) changes nothing: what is read back of an answer
//!   is always a beginning of it, with ids and texts that belong together.
//! - Nothing here waits on the caller's thread: frames go to a thread of their own over a bounded queue, or are refused.
//! - The file is written, not synced, on the way: that is enough against `kill -9`. A sync every few seconds is for a power cut.
//!
//! A generation gets one [`Frame::Whole`], then a [`Frame::More`] with what is new for each further checkpoint. When dead bytes outweigh
//! live ones the file is read back and replaced by its live part.

mod budget;
mod frame;
mod replay;
mod writer;

pub use budget::Budget;
pub use frame::{Frame, MAGIC, append_framed};
pub use replay::{Replayed, compact, replay, should_compact};
pub use writer::{InflightHandle, InflightLog, InflightSettings, Taken};

use crate::response::{Answer, ReasoningField, Segment, Status};

/// Whether the text of an answer so far ends exactly where its ids end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seam {
    /// It does: the last id completed the text.
    Clean,
    /// The last ids came in one piece with others and may hold the beginning of a character that the text does not show yet.
    Unsure,
}

/// An answer so far, cut where it can be continued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// Ids of the rendered prompt.
    pub prompt_token_ids: Vec<u32>,
    /// Ids sampled so far, up to the cut.
    pub token_ids: Vec<u32>,
    /// Text of the reasoning so far.
    pub reasoning: String,
    /// Text of the content so far.
    pub content: String,
    /// The field that the reasoning came in; `None` while there is none.
    pub field: Option<ReasoningField>,
    /// Whether ids and texts end together.
    pub seam: Seam,
    /// Segments that have ended. Their tokens are the first of `token_ids`.
    pub segments: Vec<Segment>,
    /// Server of the segment that has not ended.
    pub endpoint: String,
}

impl Unfinished {
    /// Ends the last segment, for this reason. One without a token is not told.
    pub fn end_segment(&mut self, why: &str) {
        let told: u64 = self.segments.iter().map(|segment| segment.tokens).sum();
        let tokens = (self.token_ids.len() as u64).saturating_sub(told);
        if tokens > 0 {
            self.segments.push(Segment { tokens, endpoint: self.endpoint.clone(), why: why.to_owned() });
        }
    }
}

/// What a run finds of one prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Saved {
    /// The number of its generation in the file; frames of a later session go on under it.
    pub generation: u64,
    /// Answers of the conversation's earlier turns, in order.
    pub turns: Vec<(Answer, Status)>,
    /// The answer to the turn after those, as far as it had come.
    pub unfinished: Option<Unfinished>,
}

#[cfg(test)]
mod tests;
