//! Which answers become examples, and why the others do not. Pure: from a [`Turn`] and [`Policies`] to a [`Verdict`].
//!
//! What it is not: what depends on other answers (duplicates: [`super::books`]) or on the file (lines that are no records: [`super::index`]).
//!
//! The ids of an answer come from one place, [`ids_of`]. An answer without them is dropped with a reason; rendering it with a template and a tokenizer
//! instead would begin there, and nothing behind it would change.

use super::record::{Turn, parse_ids};
use super::repetition;
use crate::example::{Marks, MaskError, MaskedIds};
use eaglet_core::response::Status;
use serde::Serialize;
use std::collections::BTreeSet;

/// What happens to answers of some kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Keep {
    /// They are kept, and counted.
    Keep,
    /// They are dropped, with the reason.
    Drop,
}

/// What happens to an example longer than `max_seq_len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TooLong {
    /// Its end is cut off. What is left is exact: a token depends only on those before it.
    Clip,
    /// It is dropped.
    Drop,
}

/// Ids between which the target thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ThinkMarkers {
    /// Opens the reasoning, in the answer or at the end of the prompt; `None` = the prompt always opens it.
    pub open: Option<u32>,
    /// Closes it.
    pub close: u32,
}

/// Everything that decides about a single answer. Part of the fingerprint of a prepared set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Policies {
    /// Tokens of an answer, at least.
    pub min_completion_tokens: usize,
    /// Tokens of prompt and answer, at most; `None` = any.
    pub max_seq_len: Option<usize>,
    /// What happens to longer ones.
    pub too_long: TooLong,
    /// Supervised tokens that are left after clipping, at least (never below 1).
    pub min_supervised_tokens: usize,
    /// Finish reasons that are kept; `None` = all (the run kept only good ones).
    pub finish_reasons: Option<BTreeSet<String>>,
    /// Ids of the reasoning's markers; `None` = judged by the record's texts.
    pub think_markers: Option<ThinkMarkers>,
    /// Answers that ended within their reasoning.
    pub cut_in_thought: Keep,
    /// Answers that run in circles.
    pub repetition: Keep,
    /// Examples with the ids and mask of another one.
    pub duplicates: Keep,
    /// Answers that are almost those of another example: see `sketch`. They are looked for only to be dropped.
    pub near_duplicates: Keep,
    /// Answers whose number of ids is not what the server counted.
    pub ids_and_usage_differ: Keep,
    /// Rows of the target's embedding: ids are below it; `None` = unknown.
    pub vocab_size: Option<u32>,
}

impl Default for Policies {
    fn default() -> Self {
        Policies {
            min_completion_tokens: 1,
            max_seq_len: None,
            too_long: TooLong::Clip,
            min_supervised_tokens: 1,
            finish_reasons: None,
            think_markers: None,
            cut_in_thought: Keep::Keep,
            repetition: Keep::Keep,
            duplicates: Keep::Drop,
            near_duplicates: Keep::Keep,
            ids_and_usage_differ: Keep::Drop,
            vocab_size: None,
        }
    }
}

/// Why something in the record became no example. The complete list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DropReason {
    /// The line is no JSON object, or no record although it looks like one.
    Unreadable,
    /// The line is a record of a failure (the older script wrote such).
    NotAnAnswer,
    /// The prompt has an earlier record, which counts.
    SecondRecord,
    /// The answer has no ids of its own.
    NoTokenIds,
    /// The answer has no ids of its prompt.
    NoPromptTokenIds,
    /// The ids are no list of token ids.
    BadTokenIds,
    /// An id is not below the size of the vocabulary.
    IdOutOfRange,
    /// The number of ids is not what the server counted.
    IdsAndUsageDiffer,
    /// The target generated nothing, or only its end token.
    EmptyAnswer,
    /// The finish reason is not among those that are kept.
    FinishReason,
    /// The answer is shorter than `min_completion_tokens`.
    BelowMinCompletionTokens,
    /// Prompt and answer are longer than `max_seq_len`.
    AboveMaxSeqLen,
    /// Clipped to `max_seq_len`, too few supervised tokens are left.
    TooFewSupervisedTokens,
    /// The answer ended within its reasoning.
    CutInThought,
    /// The answer runs in circles.
    Repetition,
    /// Another example has the same ids and mask.
    Duplicate,
    /// Another example has almost the same answer.
    NearDuplicate,
}

impl DropReason {
    /// All of them, in the order in which they are looked for.
    pub const ALL: [DropReason; 17] = [
        DropReason::Unreadable,
        DropReason::NotAnAnswer,
        DropReason::SecondRecord,
        DropReason::NoTokenIds,
        DropReason::NoPromptTokenIds,
        DropReason::BadTokenIds,
        DropReason::IdOutOfRange,
        DropReason::IdsAndUsageDiffer,
        DropReason::EmptyAnswer,
        DropReason::FinishReason,
        DropReason::BelowMinCompletionTokens,
        DropReason::AboveMaxSeqLen,
        DropReason::TooFewSupervisedTokens,
        DropReason::CutInThought,
        DropReason::Repetition,
        DropReason::Duplicate,
        DropReason::NearDuplicate,
    ];

    /// The word in `dropped.jsonl` and `summary.json`.
    pub fn label(self) -> &'static str {
        match self {
            DropReason::Unreadable => "unreadable",
            DropReason::NotAnAnswer => "not_an_answer",
            DropReason::SecondRecord => "second_record",
            DropReason::NoTokenIds => "no_token_ids",
            DropReason::NoPromptTokenIds => "no_prompt_token_ids",
            DropReason::BadTokenIds => "bad_token_ids",
            DropReason::IdOutOfRange => "id_out_of_range",
            DropReason::IdsAndUsageDiffer => "ids_and_usage_differ",
            DropReason::EmptyAnswer => "empty_answer",
            DropReason::FinishReason => "finish_reason",
            DropReason::BelowMinCompletionTokens => "below_min_completion_tokens",
            DropReason::AboveMaxSeqLen => "above_max_seq_len",
            DropReason::TooFewSupervisedTokens => "too_few_supervised_tokens",
            DropReason::CutInThought => "cut_in_thought",
            DropReason::Repetition => "repetition",
            DropReason::Duplicate => "duplicate",
            DropReason::NearDuplicate => "near_duplicate",
        }
    }
}

/// Why an answer is dropped: the reason, and the particulars in words (perhaps none).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// The reason.
    pub reason: DropReason,
    /// What was found, in words.
    pub detail: String,
}

impl Dropped {
    pub(crate) fn new(reason: DropReason, detail: impl Into<String>) -> Self {
        Dropped { reason, detail: detail.into() }
    }
}

/// An answer with its ids.
pub(crate) type Verdict = Result<(MaskedIds, Marks), Dropped>;

/// The label with which the run marks answers whose ids are not as many as the server counted.
const IDS_AND_USAGE_DIFFER_FLAG: &str = "ids_and_usage_differ";

/// Decides about one answer. `status` is that of its record, for its last turn; earlier turns of a conversation were answered well, or there would be no later ones.
pub(crate) fn judge(turn: &Turn<'_>, status: Option<Status>, policies: &Policies) -> Verdict {
    let drop = |reason, detail: String| Err(Dropped { reason, detail });
    let (prompt, answer) = ids_of(turn)?;
    if let Some(size) = policies.vocab_size
        && let Some(id) = prompt.iter().chain(&answer).find(|id| **id >= size)
    {
        return drop(DropReason::IdOutOfRange, format!("token id {id}, the vocabulary has {size}"));
    }
    if policies.ids_and_usage_differ == Keep::Drop
        && let Some(detail) = miscounted(turn, answer.len())
    {
        return drop(DropReason::IdsAndUsageDiffer, detail);
    }
    if answer.is_empty() || status == Some(Status::Empty) {
        return drop(DropReason::EmptyAnswer, format!("{} tokens", answer.len()));
    }
    if policies.finish_reasons.as_ref().is_some_and(|kept| !kept.contains(turn.finish_reason.as_ref())) {
        return drop(DropReason::FinishReason, turn.finish_reason.to_string());
    }
    if answer.len() < policies.min_completion_tokens {
        let detail = format!("{} tokens, at least {} wanted", answer.len(), policies.min_completion_tokens);
        return drop(DropReason::BelowMinCompletionTokens, detail);
    }
    let mut marks = Marks { cut_at_limit: turn.finish_reason == "length", ..Marks::default() };
    marks.cut_in_thought = is_cut_in_thought(turn, &prompt, &answer, policies.think_markers);
    if marks.cut_in_thought && policies.cut_in_thought == Keep::Drop {
        return drop(DropReason::CutInThought, format!("{} tokens", answer.len()));
    }
    if let Some(found) = repetition::longest_loop(&answer) {
        marks.repetition = true;
        if policies.repetition == Keep::Drop {
            let detail = format!(
                "{} tokens with period {} from token {} of the answer",
                found.tokens, found.period, found.start
            );
            return drop(DropReason::Repetition, detail);
        }
    }
    let tokens = masked(prompt, &answer).map_err(|error| Dropped::new(DropReason::BadTokenIds, error.to_string()))?;
    fit(tokens, policies, &mut marks).map(|tokens| (tokens, marks))
}

/// The ids of prompt and answer, as the server gave them.
fn ids_of(turn: &Turn<'_>) -> Result<(Vec<u32>, Vec<u32>), Dropped> {
    let Some(answer) = turn.token_ids else {
        return Err(Dropped::new(DropReason::NoTokenIds, "the server gave no token_ids"));
    };
    let Some(prompt) = turn.prompt_token_ids else {
        return Err(Dropped::new(DropReason::NoPromptTokenIds, "the server gave no prompt_token_ids"));
    };
    let parsed = |json: &serde_json::value::RawValue, what: &str| {
        parse_ids(json.get())
            .ok_or_else(|| Dropped::new(DropReason::BadTokenIds, format!("{what} is no list of token ids")))
    };
    let prompt = parsed(prompt, "prompt_token_ids")?;
    if prompt.is_empty() {
        // Without its prompt an answer is another text.
        return Err(Dropped::new(DropReason::NoPromptTokenIds, "prompt_token_ids is empty"));
    }
    Ok((prompt, parsed(answer, "token_ids")?))
}

/// Prompt and answer as the target saw them, the answer supervised.
fn masked(mut prompt: Vec<u32>, answer: &[u32]) -> Result<MaskedIds, MaskError> {
    let start = prompt.len();
    prompt.extend_from_slice(answer);
    let end = prompt.len();
    MaskedIds::new(prompt, std::iter::once(start..end))
}

/// In words, if the server counted other than it gave.
fn miscounted(turn: &Turn<'_>, ids: usize) -> Option<String> {
    let counted = turn.usage.and_then(|usage| usage.completion_tokens);
    match counted {
        Some(counted) if counted != ids as u64 => Some(format!("{ids} ids, usage counts {counted}")),
        _ if turn.flags.iter().any(|flag| flag == IDS_AND_USAGE_DIFFER_FLAG) => Some("flagged by the run".to_owned()),
        _ => None,
    }
}

/// Whether the answer ended before its reasoning did. With the markers' ids: the reasoning was opened, by the answer or at the end of the prompt, and never closed.
/// Without: the record has reasoning and nothing after it, and the answer was cut.
fn is_cut_in_thought(turn: &Turn<'_>, prompt: &[u32], answer: &[u32], markers: Option<ThinkMarkers>) -> bool {
    let Some(ThinkMarkers { open, close }) = markers else {
        return turn.finish_reason == "length" && turn.has_reasoning && !turn.has_content && !turn.has_tool_calls;
    };
    let Some(open) = open else { return !answer.contains(&close) };
    let last = prompt.iter().chain(answer).rev().find(|id| **id == open || **id == close);
    last == Some(&open)
}

/// Brings an example to the length that is wanted.
fn fit(tokens: MaskedIds, policies: &Policies, marks: &mut Marks) -> Result<MaskedIds, Dropped> {
    let (length, supervised_min) = (tokens.len(), policies.min_supervised_tokens.max(1));
    let tokens = match policies.max_seq_len.filter(|max| length > *max) {
        None => Some(tokens),
        Some(max) if policies.too_long == TooLong::Drop => {
            return Err(Dropped::new(DropReason::AboveMaxSeqLen, format!("{length} tokens, at most {max} wanted")));
        }
        Some(max) => {
            marks.clipped = true;
            tokens.clipped(max)
        }
    };
    let supervised = tokens.as_ref().map_or(0, MaskedIds::supervised);
    tokens.filter(|_| supervised >= supervised_min).ok_or_else(|| {
        let detail = format!("{supervised} supervised tokens of {length}, at least {supervised_min} wanted");
        Dropped::new(DropReason::TooFewSupervisedTokens, detail)
    })
}

#[cfg(test)]
mod tests;
