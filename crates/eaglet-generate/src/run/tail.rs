//! The end of a run: long answers first, so that it is not a few stragglers.
//!
//! What it is: what a run learns about lengths, and the order of the last prompts. What it is not: a forecast of one answer; where prompts do not
//! tell, the order stays that of the plan. Prompts keep the plan's order until few are left, so that what is finished is a fair sample all along.
//! Pure.

use eaglet_core::progress::Tail;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

/// The order changes when so many prompts a slot are left (measured: `docs/design/0005-the-end-of-a-run.md`).
pub(super) const PROMPTS_PER_SLOT: usize = 8;
/// The order is looked at again after so many starts.
const STARTS_PER_LOOK: usize = 32;
/// With fewer answers nothing is known, and the plan's order stays.
const ANSWERS_MIN: f64 = 32.0;
/// A group counts as much as all prompts together once it has so many answers.
const PRIOR_ANSWERS: f64 = 8.0;

/// What is known about a prompt before it is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Known {
    /// Its place in the plan.
    pub(super) index: usize,
    /// Which of the plan's sources.
    pub(super) source: usize,
    pub(super) prompt_bytes: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    answers: f64,
    tokens: f64,
}

impl Mean {
    fn add(&mut self, tokens: u64) {
        self.answers += 1.0;
        self.tokens += tokens as f64;
    }

    /// The mean, drawn towards `prior` while there are few answers.
    fn towards(self, prior: f64) -> f64 {
        (self.tokens + PRIOR_ANSWERS * prior) / (self.answers + PRIOR_ANSWERS)
    }
}

/// Lengths of the answers so far, by source and by length of the prompt.
#[derive(Debug, Default)]
pub(super) struct Lengths {
    all: Mean,
    by_source: HashMap<usize, (Mean, BTreeMap<u32, Mean>)>,
}

/// Prompts within a factor of two of each other's length are alike.
fn bucket(prompt_bytes: u64) -> u32 {
    prompt_bytes.max(1).ilog2()
}

impl Lengths {
    /// An answer of so many tokens came.
    pub(super) fn add(&mut self, source: usize, prompt_bytes: u64, tokens: u64) {
        self.all.add(tokens);
        let (of_source, of_lengths) = self.by_source.entry(source).or_default();
        of_source.add(tokens);
        of_lengths.entry(bucket(prompt_bytes)).or_default().add(tokens);
    }

    /// Tokens that an answer to this prompt is likely to have; 0 while nothing is known.
    fn expected(&self, prompt: &Known) -> f64 {
        if self.all.answers < ANSWERS_MIN {
            return 0.0;
        }
        let all = self.all.towards(0.0);
        let Some((of_source, of_lengths)) = self.by_source.get(&prompt.source) else { return all };
        let of_source = of_source.towards(all);
        of_lengths.get(&bucket(prompt.prompt_bytes)).map_or(of_source, |mean| mean.towards(of_source))
    }
}

/// The last prompts, and which is next.
#[derive(Debug, Default)]
pub(super) struct LastPrompts {
    /// The next one is the last.
    left: Vec<Known>,
    starts: usize,
}

impl LastPrompts {
    /// From prompts in the plan's order.
    pub(super) fn new(left: Vec<Known>) -> Self {
        LastPrompts { left, starts: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// The prompt to start next: the one whose answer is likely to be the longest, of equals the first in the plan.
    pub(super) fn next(&mut self, lengths: &Lengths) -> Option<usize> {
        if self.starts.is_multiple_of(STARTS_PER_LOOK) {
            // Whole tokens: what differs by less does not differ.
            self.left.sort_by_cached_key(|known| (lengths.expected(known) as u64, Reverse(known.index)));
        }
        self.starts += 1;
        self.left.pop().map(|known| known.index)
    }
}

/// What the end of a run costs: from the start of the last prompt on, slots become empty.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TailMeter {
    seconds: f64,
    used: f64,
    open: f64,
}

impl TailMeter {
    /// So many requests were out for so long, where so many could have been.
    pub(super) fn add(&mut self, seconds: f64, in_flight: u64, limit: u64) {
        self.seconds += seconds;
        self.used += seconds * in_flight.min(limit) as f64;
        self.open += seconds * limit as f64;
    }

    pub(super) fn tail(&self) -> Option<Tail> {
        (self.open > 0.0).then(|| Tail { seconds: self.seconds, slots_used: self.used / self.open })
    }
}

#[cfg(test)]
mod tests;
