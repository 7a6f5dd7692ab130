//! A training example: token ids, and which of them the target generated.
//!
//! What it is: the one type that everything after an answer deals in, whether its ids came from the server or from a tokenizer. What it is not:
//! a decision about which answers are kept ([`crate::prepare`]), or a file format ([`crate::outputs`]).
//!
//! Invariants
//! - Mask and ids have one length, and the mask is 0 or 1: it is kept as spans, so that nothing else can be said.
//! - At least one token is supervised: a row of zeros trains nothing and looks healthy.
//! - Every id fits into 31 bits, because the formats of the trainers hold signed integers.
//! - The mask is aligned to the ids: 1 says that *this* token is a target. Shifting is the trainer's business.

use eaglet_core::ids::{ContentHash, hash128};
use std::fmt;
use std::ops::Range;

/// The largest token id that the trainers' formats can hold.
pub const TOKEN_ID_MAX: u32 = i32::MAX as u32;

/// Token ids with the spans the target generated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaskedIds {
    ids: Vec<u32>,
    /// Ascending, not empty, not touching each other.
    spans: Vec<Range<usize>>,
}

/// Why ids and spans make no example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskError {
    /// No token is supervised.
    NothingSupervised,
    /// A span is empty, reaches past the ids, or begins before the one before it ends.
    BadSpan,
    /// Mask and ids differ in length, or the mask holds something other than 0 and 1.
    BadMask,
    /// An id above [`TOKEN_ID_MAX`].
    IdTooLarge(u32),
}

impl fmt::Display for MaskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MaskError::NothingSupervised => f.write_str("no token is supervised"),
            MaskError::BadSpan => f.write_str("a supervised span is empty, out of order or past the ids"),
            MaskError::BadMask => f.write_str("the mask is not one 0 or 1 for each id"),
            MaskError::IdTooLarge(id) => write!(f, "token id {id} does not fit into 31 bits"),
        }
    }
}

impl MaskedIds {
    /// Takes ids and the spans of supervised tokens, in order; spans that touch are joined.
    ///
    /// # Errors
    /// They break an invariant of the module.
    pub fn new(ids: Vec<u32>, spans: impl IntoIterator<Item = Range<usize>>) -> Result<Self, MaskError> {
        let mut joined: Vec<Range<usize>> = Vec::new();
        for span in spans {
            let before = joined.last().map_or(0, |last| last.end);
            if span.is_empty() || span.end > ids.len() || span.start < before {
                return Err(MaskError::BadSpan);
            }
            match joined.last_mut() {
                Some(last) if last.end == span.start => last.end = span.end,
                _ => joined.push(span),
            }
        }
        if joined.is_empty() {
            return Err(MaskError::NothingSupervised);
        }
        match ids.iter().find(|id| **id > TOKEN_ID_MAX) {
            Some(id) => Err(MaskError::IdTooLarge(*id)),
            None => Ok(MaskedIds { ids, spans: joined }),
        }
    }

    /// Takes ids and a mask of zeros and ones, as the files hold them.
    ///
    /// # Errors
    /// They break an invariant of the module.
    pub fn from_mask(ids: Vec<u32>, mask: &[u8]) -> Result<Self, MaskError> {
        if mask.len() != ids.len() || mask.iter().any(|bit| *bit > 1) {
            return Err(MaskError::BadMask);
        }
        let mut spans: Vec<Range<usize>> = Vec::new();
        for (at, _) in mask.iter().enumerate().filter(|(_, bit)| **bit == 1) {
            match spans.last_mut() {
                Some(last) if last.end == at => last.end = at + 1,
                _ => spans.push(at..at + 1),
            }
        }
        Self::new(ids, spans)
    }

    /// The first `tokens_max` tokens; `None` when none of them is supervised.
    #[must_use]
    pub fn clipped(mut self, tokens_max: usize) -> Option<Self> {
        self.ids.truncate(tokens_max);
        self.spans.retain_mut(|span| {
            span.end = span.end.min(tokens_max);
            span.start < span.end
        });
        (!self.spans.is_empty()).then_some(self)
    }

    /// The ids.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The supervised spans, ascending.
    pub fn spans(&self) -> &[Range<usize>] {
        &self.spans
    }

    /// Runs of the mask in order: how many tokens, and whether they are supervised.
    pub fn runs(&self) -> impl Iterator<Item = (usize, bool)> + '_ {
        let mut at = 0;
        let ends = self.spans.iter().flat_map(|span| [(span.start, false), (span.end, true)]);
        ends.chain([(self.ids.len(), false)]).filter_map(move |(end, supervised)| {
            let tokens = end - at;
            at = end;
            (tokens > 0).then_some((tokens, supervised))
        })
    }

    /// The mask, one byte for each id.
    pub fn mask(&self) -> Vec<u8> {
        let mut mask = vec![0; self.ids.len()];
        for span in &self.spans {
            mask[span.clone()].fill(1);
        }
        mask
    }

    /// Tokens in all.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Never: an example has a supervised token.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// How many tokens are supervised.
    pub fn supervised(&self) -> usize {
        self.spans.iter().map(ExactSizeIterator::len).sum()
    }

    /// The supervised tokens, in order.
    pub fn supervised_ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.spans.iter().flat_map(|span| self.ids[span.clone()].iter().copied())
    }

    /// 128 bits that stand for these ids with this mask.
    pub fn content_hash(&self) -> u128 {
        let mut bytes = Vec::with_capacity(self.ids.len() * 4 + self.spans.len() * 16);
        self.ids.iter().for_each(|id| bytes.extend_from_slice(&id.to_le_bytes()));
        for span in &self.spans {
            bytes.extend_from_slice(&(span.start as u64).to_le_bytes());
            bytes.extend_from_slice(&(span.end as u64).to_le_bytes());
        }
        hash128(&bytes)
    }
}

/// Which answer an example is: a prompt's answer, or one turn of a conversation answered turn by turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExampleId {
    /// The prompt's id.
    pub sample_id: String,
    /// Hash of the prompt's content.
    pub prompt_hash: ContentHash,
    /// 0-based row of the data set; `None` where the record does not say.
    pub row: Option<u64>,
    /// 0-based turn of the conversation; 0 for a prompt answered once.
    pub turn: u32,
}

impl ExampleId {
    /// The side of the split, decided by the prompt's content alone: all turns of a conversation, and rows with the same prompt, fall together.
    /// `share` is 0 (none) to 1 (all).
    pub fn is_validation(&self, share: f64) -> bool {
        let salted = [b"eaglet split 1".as_slice(), &self.prompt_hash.0.to_be_bytes()].concat();
        let place = (hash128(&salted) >> 96) as f64 / 2f64.powi(32);
        place < share
    }
}

/// A training example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// Which answer it is.
    pub id: ExampleId,
    /// What is trained on.
    pub tokens: MaskedIds,
    /// What is to be known about it.
    pub marks: Marks,
}

/// What is to be known about an example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// The server cut the answer at its token limit.
    pub cut_at_limit: bool,
    /// It was clipped to `--max-seq-len`.
    pub clipped: bool,
    /// The answer ended within its reasoning.
    pub cut_in_thought: bool,
    /// Part of the answer repeats itself.
    pub repetition: bool,
}

impl Marks {
    /// As bits, in the order of the fields, from the lowest.
    pub fn bits(self) -> u32 {
        [self.cut_at_limit, self.clipped, self.cut_in_thought, self.repetition]
            .iter()
            .enumerate()
            .map(|(at, set)| u32::from(*set) << at)
            .sum()
    }

    /// From [`Marks::bits`]; bits of later versions are ignored.
    pub fn from_bits(bits: u32) -> Self {
        let set = |at: u32| bits >> at & 1 == 1;
        Marks { cut_at_limit: set(0), clipped: set(1), cut_in_thought: set(2), repetition: set(3) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn arbitrary_mask() -> impl Strategy<Value = (Vec<u32>, Vec<u8>)> {
        proptest::collection::vec((0..=TOKEN_ID_MAX, 0u8..2), 0..40).prop_map(|tokens| tokens.into_iter().unzip())
    }

    proptest! {
        #[test]
        fn mask_and_ids_have_one_length_and_the_mask_reads_back((ids, mask) in arbitrary_mask()) {
            match MaskedIds::from_mask(ids.clone(), &mask) {
                Ok(tokens) => {
                    prop_assert_eq!(tokens.mask(), mask.clone());
                    prop_assert_eq!(tokens.ids(), ids.as_slice());
                    prop_assert_eq!(tokens.supervised(), mask.iter().filter(|bit| **bit == 1).count());
                    let wanted: Vec<u32> = ids.iter().zip(&mask).filter(|(_, bit)| **bit == 1).map(|(id, _)| *id).collect();
                    prop_assert_eq!(tokens.supervised_ids().collect::<Vec<_>>(), wanted);
                    let runs: Vec<u8> = tokens.runs().flat_map(|(n, on)| vec![u8::from(on); n]).collect();
                    prop_assert_eq!(runs, mask);
                }
                Err(error) => {
                    prop_assert_eq!(error, MaskError::NothingSupervised);
                    prop_assert!(mask.iter().all(|bit| *bit == 0));
                }
            }
        }

        #[test]
        fn clipping_is_clipping_ids_and_mask_alike((ids, mask) in arbitrary_mask(), cut in 0usize..50) {
            let Ok(tokens) = MaskedIds::from_mask(ids.clone(), &mask) else { return Ok(()) };
            let kept = cut.min(ids.len());
            let expected = MaskedIds::from_mask(ids[..kept].to_vec(), &mask[..kept]).ok();
            prop_assert_eq!(tokens.clipped(cut), expected);
        }

        #[test]
        fn the_hash_tells_masks_apart((ids, mask) in arbitrary_mask(), at in any::<prop::sample::Index>()) {
            let Ok(tokens) = MaskedIds::from_mask(ids.clone(), &mask) else { return Ok(()) };
            let mut other = mask;
            let at = at.index(other.len());
            other[at] ^= 1;
            if let Ok(changed) = MaskedIds::from_mask(ids, &other) {
                prop_assert_ne!(changed.content_hash(), tokens.content_hash());
            }
        }

        #[test]
        fn the_split_follows_the_prompt_and_its_share(hash in any::<u128>(), turn in any::<u32>(), share in 0f64..=1.0) {
            let id = |sample: &str, turn| ExampleId { sample_id: sample.into(), prompt_hash: ContentHash(hash), row: None, turn };
            prop_assert_eq!(id("a", 0).is_validation(share), id("b", turn).is_validation(share));
            prop_assert!(!id("a", 0).is_validation(0.0));
            prop_assert!(id("a", 0).is_validation(1.0));
            prop_assert!(!id("a", 0).is_validation(share) || id("a", 0).is_validation((share + 0.1).min(1.0)));
        }

        #[test]
        fn marks_read_back_from_their_bits(bits in 0u32..16) {
            prop_assert_eq!(Marks::from_bits(bits).bits(), bits);
        }
    }

    #[test]
    fn what_breaks_an_invariant_is_no_example() {
        let new = |ids: &[u32], spans: &[(usize, usize)]| {
            MaskedIds::new(ids.to_vec(), spans.iter().map(|(start, end)| *start..*end))
        };
        assert_eq!(new(&[1, 2], &[]), Err(MaskError::NothingSupervised));
        assert_eq!(new(&[1, 2], &[(1, 3)]), Err(MaskError::BadSpan));
        assert_eq!(new(&[1, 2, 3], &[(1, 3), (0, 1)]), Err(MaskError::BadSpan));
        assert_eq!(new(&[1, 2, 3], &[(2, 1)]), Err(MaskError::BadSpan));
        assert_eq!(new(&[1 << 31], &[(0, 1)]), Err(MaskError::IdTooLarge(1 << 31)));
        assert_eq!(MaskedIds::from_mask(vec![1, 2], &[1]), Err(MaskError::BadMask));
        assert_eq!(MaskedIds::from_mask(vec![1], &[2]), Err(MaskError::BadMask));
        let touching = new(&[1, 2, 3], &[(0, 1), (1, 2)]).unwrap();
        assert_eq!(touching.spans().iter().map(|span| (span.start, span.end)).collect::<Vec<_>>(), [(0, 2)]);
    }

    #[test]
    fn about_a_twentieth_of_many_prompts_is_validation() {
        let id = |n: u128| ExampleId { sample_id: String::new(), prompt_hash: ContentHash(n), row: None, turn: 0 };
        let validation = (0..10_000).filter(|n| id(*n).is_validation(0.05)).count();
        assert!((400..600).contains(&validation), "{validation}");
    }
}
