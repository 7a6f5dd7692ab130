//! The drafter's vocabulary: which of the target's tokens it can draft, and the two maps between the vocabularies.
//!
//! Pure, but for the two `.npy` files. The rule: special ids first, then the most frequent supervised ids (ties: the lower id), then the lowest ids that are left;
//! the chosen ids are sorted. `d2t[j]` is the *offset* from draft id `j` to its target id, `t2d[v]` says whether target id `v` was chosen. The target's size is
//! the number of rows of its embedding (`vocab_size` in its config.json), not what its tokenizer knows.
//!
//! Invariants
//! - `d2t` has exactly the wanted size, `t2d` as many ones, and each is the inverse of the other.
//! - The choice depends on the counts alone, not on the order in which tokens were seen.

use eaglet_core::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::Path;

/// Ids below this are counted in a list, the few above it in a map.
const LISTED_IDS: usize = 1 << 20;

/// How often each id was supervised.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenCounts {
    listed: Vec<u64>,
    others: HashMap<u32, u64>,
}

impl TokenCounts {
    /// Counts one token.
    pub fn add(&mut self, id: u32) {
        let at = id as usize;
        if at >= LISTED_IDS {
            *self.others.entry(id).or_default() += 1;
            return;
        }
        if at >= self.listed.len() {
            self.listed.resize((at + 1).next_power_of_two(), 0);
        }
        self.listed[at] += 1;
    }

    /// Ids that were seen, ascending, with their counts.
    pub fn seen(&self) -> Vec<(u32, u64)> {
        let listed = self.listed.iter().enumerate().map(|(id, count)| (id as u32, *count));
        let mut seen: Vec<_> =
            listed.chain(self.others.iter().map(|(id, count)| (*id, *count))).filter(|(_, count)| *count > 0).collect();
        seen.sort_unstable();
        seen
    }

    /// All tokens counted.
    pub fn total(&self) -> u64 {
        self.listed.iter().chain(self.others.values()).sum()
    }
}

/// How large the drafter's vocabulary is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DraftVocabSize {
    /// As large as the target's: no maps.
    Full,
    /// So many tokens.
    Tokens(u32),
}

/// The wish for a draft vocabulary, found to be possible.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VocabPlan {
    draft: u32,
    target: u32,
    special_ids: Vec<u32>,
}

impl VocabPlan {
    /// A draft vocabulary of `draft` of `target` tokens, with these ids in it whatever is counted.
    ///
    /// # Errors
    /// Usage: the sizes or the special ids do not fit each other.
    pub fn new(draft: u32, target: u32, mut special_ids: Vec<u32>) -> Result<Self> {
        special_ids.sort_unstable();
        special_ids.dedup();
        if draft == 0 || draft > target {
            return Err(Error::usage(format!("a draft vocabulary of {draft} of {target} tokens is not possible"))
                .hint(format!("choose 1 to {target}; `full` writes no map")));
        }
        if let Some(id) = special_ids.iter().find(|id| **id >= target) {
            return Err(Error::usage(format!("special id {id} is not in the target's vocabulary of {target} tokens")));
        }
        if special_ids.len() > draft as usize {
            let special = special_ids.len();
            return Err(Error::usage(format!("{special} special ids do not fit into a draft vocabulary of {draft}")));
        }
        Ok(VocabPlan { draft, target, special_ids })
    }

    /// Tokens of the target.
    pub fn target(&self) -> u32 {
        self.target
    }
}

/// The chosen tokens, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftVocab {
    chosen: Vec<u32>,
    target: u32,
}

impl DraftVocab {
    /// Chooses by the rule of the module. Ids that the target does not have are not chosen.
    pub fn choose(plan: &VocabPlan, counts: &TokenCounts) -> Self {
        let mut is_chosen = vec![false; plan.target as usize];
        let mut by_count = counts.seen();
        by_count.retain(|(id, _)| *id < plan.target);
        by_count.sort_unstable_by_key(|(id, count)| (std::cmp::Reverse(*count), *id));
        let wished = plan.special_ids.iter().copied();
        let mut left = plan.draft;
        for id in wished.chain(by_count.into_iter().map(|(id, _)| id)).chain(0..plan.target) {
            if left == 0 {
                break;
            }
            let place = &mut is_chosen[id as usize];
            left -= u32::from(!*place);
            *place = true;
        }
        let chosen = (0..plan.target).filter(|id| is_chosen[*id as usize]).collect();
        DraftVocab { chosen, target: plan.target }
    }

    /// Rebuilds the vocabulary from its two maps.
    ///
    /// # Errors
    /// In words: the maps do not fit each other.
    pub fn from_maps(d2t: &[i64], t2d: &[bool]) -> Result<Self, String> {
        let target = u32::try_from(t2d.len()).map_err(|_| format!("t2d has {} entries", t2d.len()))?;
        let mut chosen = Vec::with_capacity(d2t.len());
        for (draft, offset) in d2t.iter().enumerate() {
            let id =
                (draft as i64).checked_add(*offset).and_then(|id| u32::try_from(id).ok()).filter(|id| *id < target);
            let Some(id) = id else {
                return Err(format!("d2t leads from draft id {draft} out of the target's {target} tokens"));
            };
            if chosen.last().is_some_and(|last| *last >= id) {
                return Err(format!("d2t does not ascend at draft id {draft}"));
            }
            if !t2d[id as usize] {
                return Err(format!("d2t leads from draft id {draft} to target id {id}, which t2d denies"));
            }
            chosen.push(id);
        }
        let ones = t2d.iter().filter(|one| **one).count();
        if ones != chosen.len() {
            return Err(format!("t2d has {ones} ones, d2t {} entries", chosen.len()));
        }
        Ok(DraftVocab { chosen, target })
    }

    /// From draft id to target id: the offset that is added.
    pub fn d2t(&self) -> Vec<i64> {
        self.chosen.iter().enumerate().map(|(draft, id)| i64::from(*id) - draft as i64).collect()
    }

    /// Whether a target id has a draft id.
    pub fn t2d(&self) -> Vec<bool> {
        let mut t2d = vec![false; self.target as usize];
        self.chosen.iter().for_each(|id| t2d[*id as usize] = true);
        t2d
    }

    /// The chosen target ids, ascending.
    pub fn chosen(&self) -> &[u32] {
        &self.chosen
    }

    /// How many of the counted tokens the drafter can draft.
    pub fn covered(&self, counts: &TokenCounts) -> u64 {
        let seen = counts.seen();
        seen.iter().filter(|(id, _)| self.chosen.binary_search(id).is_ok()).map(|(_, count)| count).sum()
    }

    /// The two files: name and content. speculators finds them by these names, and only with `--draft-vocab-size`.
    pub fn files(&self) -> [(String, Vec<u8>); 2] {
        let size = self.chosen.len();
        let d2t: Vec<u8> = self.d2t().into_iter().flat_map(i64::to_le_bytes).collect();
        let t2d: Vec<u8> = self.t2d().into_iter().map(u8::from).collect();
        [(format!("d2t-{size}.npy"), npy("<i8", size, &d2t)), (format!("t2d-{size}.npy"), npy("|b1", t2d.len(), &t2d))]
    }
}

/// The header of a NumPy file is padded to a multiple of this, in bytes.
const NPY_ALIGNMENT_BYTES: usize = 64;

/// A NumPy file (format 1.0) of one dimension.
fn npy(descr: &str, length: usize, data: &[u8]) -> Vec<u8> {
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({length},), }}");
    let padded = (10 + header.len() + 1).next_multiple_of(NPY_ALIGNMENT_BYTES);
    header.push_str(&" ".repeat(padded - 10 - header.len() - 1));
    header.push('\n');
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend_from_slice(&(header.len() as u16).to_le_bytes());
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

/// Reads one of the two files: its data, if the header is exactly what [`DraftVocab::files`] writes.
fn read_npy(path: &Path, descr: &str, item_bytes: usize) -> Result<Vec<u8>> {
    let bytes = std::fs::read(path).map_err(|error| Error::io("read", path, error))?;
    let damaged = || Error::data(format!("{} is no NumPy file of one dimension with items {descr}", path.display()));
    let header_bytes =
        usize::from(u16::from_le_bytes([*bytes.get(8).ok_or_else(damaged)?, *bytes.get(9).ok_or_else(damaged)?]));
    let data = bytes.get(10 + header_bytes..).ok_or_else(damaged)?;
    if bytes != npy(descr, data.len() / item_bytes, data) {
        return Err(damaged());
    }
    Ok(data.to_vec())
}

/// Reads the maps of a vocabulary and checks that they fit each other.
///
/// # Errors
/// Environment: a file cannot be read. Data: it is no such map, or the two do not fit.
pub fn read_maps(d2t_path: &Path, t2d_path: &Path) -> Result<DraftVocab> {
    let d2t = read_npy(d2t_path, "<i8", 8)?;
    let d2t: Vec<i64> = d2t
        .chunks_exact(8)
        .map(|item| {
            let mut number = [0; 8];
            number.copy_from_slice(item);
            i64::from_le_bytes(number)
        })
        .collect();
    let t2d = read_npy(t2d_path, "|b1", 1)?;
    if let Some(at) = t2d.iter().position(|item| *item > 1) {
        return Err(Error::data(format!("{}: item {at} is neither true nor false", t2d_path.display())));
    }
    let t2d: Vec<bool> = t2d.into_iter().map(|item| item == 1).collect();
    DraftVocab::from_maps(&d2t, &t2d).map_err(|why| Error::data(format!("{}: {why}", d2t_path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn counts(pairs: &[(u32, u64)]) -> TokenCounts {
        let mut counts = TokenCounts::default();
        pairs.iter().for_each(|(id, count)| (0..*count).for_each(|_| counts.add(*id)));
        counts
    }

    fn chosen(draft: u32, target: u32, special: &[u32], pairs: &[(u32, u64)]) -> DraftVocab {
        DraftVocab::choose(&VocabPlan::new(draft, target, special.to_vec()).unwrap(), &counts(pairs))
    }

    proptest! {
        #[test]
        fn the_maps_are_each_others_inverse(
            target in 1u32..200, share in 0.0f64..=1.0, special in proptest::collection::vec(0u32..200, 0..5),
            tokens in proptest::collection::vec(0u32..300, 0..400),
        ) {
            let draft = ((f64::from(target) * share) as u32).max(1);
            let special: Vec<u32> = special.into_iter().map(|id| id % target).collect();
            let Ok(plan) = VocabPlan::new(draft, target, special.clone()) else { return Ok(()) };
            let mut counts = TokenCounts::default();
            tokens.iter().for_each(|id| counts.add(*id));
            let vocab = DraftVocab::choose(&plan, &counts);
            let (d2t, t2d) = (vocab.d2t(), vocab.t2d());
            prop_assert_eq!((d2t.len(), t2d.len()), (draft as usize, target as usize));
            prop_assert_eq!(t2d.iter().filter(|one| **one).count(), draft as usize);
            for (draft_id, offset) in d2t.iter().enumerate() {
                let id = (draft_id as i64 + offset) as usize;
                prop_assert!(t2d[id]);
                // The draft id of a target id is its rank among the ones.
                prop_assert_eq!(t2d[..id].iter().filter(|one| **one).count(), draft_id);
            }
            prop_assert!(special.iter().all(|id| t2d[*id as usize]));
            prop_assert_eq!(DraftVocab::from_maps(&d2t, &t2d), Ok(vocab.clone()));
            // The order in which tokens were seen says nothing.
            let mut backwards = TokenCounts::default();
            tokens.iter().rev().for_each(|id| backwards.add(*id));
            prop_assert_eq!(&DraftVocab::choose(&plan, &backwards), &vocab);
            // No id outside is more frequent than one inside that is not special.
            let count = |id: u32| tokens.iter().filter(|token| **token == id).count();
            let least = vocab.chosen().iter().filter(|id| !special.contains(id)).map(|id| count(*id)).min();
            let most_outside = (0..target).filter(|id| !t2d[*id as usize]).map(count).max();
            prop_assert!(least.is_none() || most_outside.is_none() || most_outside <= least);
        }

        #[test]
        fn counts_of_any_id_are_kept(ids in proptest::collection::vec(prop_oneof![0u32..9, (1u32 << 20) - 2..(1 << 20) + 2, Just(i32::MAX as u32)], 0..60)) {
            let mut counted = TokenCounts::default();
            ids.iter().for_each(|id| counted.add(*id));
            let mut sorted = ids.clone();
            sorted.sort_unstable();
            let expected: Vec<(u32, u64)> = sorted.chunk_by(|a, b| a == b).map(|run| (run[0], run.len() as u64)).collect();
            prop_assert_eq!(counted.seen(), expected);
            prop_assert_eq!(counted.total(), ids.len() as u64);
        }
    }

    #[test]
    fn ties_go_to_the_lower_id_and_gaps_are_filled_from_below() {
        // 9 and 4 are seen as often, only one fits; 2 is special and never seen.
        assert_eq!(chosen(3, 12, &[2], &[(7, 5), (9, 3), (4, 3)]).chosen(), [2, 4, 7]);
        // Fewer distinct ids than wanted: filled with 0, 1, ...
        let vocab = chosen(6, 12, &[11], &[(5, 1), (1, 9)]);
        assert_eq!(vocab.chosen(), [0, 1, 2, 3, 5, 11]);
        assert_eq!(vocab.d2t(), [0, 0, 0, 0, 1, 6]);
        assert_eq!(vocab.covered(&counts(&[(5, 2), (4, 3), (11, 1)])), 3);
    }

    #[test]
    fn impossible_sizes_are_refused() {
        for (draft, special) in [(0, vec![]), (11, vec![]), (2, vec![1, 2, 3]), (5, vec![10])] {
            let error = VocabPlan::new(draft, 10, special).unwrap_err();
            assert_eq!(error.class(), eaglet_core::Class::Usage, "{error}");
        }
        assert!(VocabPlan::new(2, 10, vec![3, 3, 3]).is_ok(), "an id given twice is one id");
    }

    #[test]
    fn maps_that_do_not_fit_are_refused() {
        let refused = |d2t: &[i64], t2d: &[bool]| DraftVocab::from_maps(d2t, t2d).unwrap_err();
        assert!(refused(&[0, 0], &[true, false]).contains("denies"));
        assert!(refused(&[0, -1], &[true, false]).contains("ascend"));
        assert!(refused(&[0], &[true, true]).contains("2 ones"));
        assert!(refused(&[2], &[true, true]).contains("out of"));
        assert!(refused(&[-1], &[true]).contains("out of"));
    }

    #[test]
    fn the_files_are_numpys() {
        let dir = tempfile::tempdir().unwrap();
        let vocab = chosen(2, 4, &[3], &[(1, 1)]);
        let [d2t, t2d] = vocab.files();
        assert_eq!((d2t.0.as_str(), t2d.0.as_str()), ("d2t-2.npy", "t2d-2.npy"));
        assert!(d2t.1.starts_with(b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }"));
        assert_eq!((d2t.1.len(), t2d.1.len()), (128 + 16, 128 + 4));
        let write = |(name, content): (String, Vec<u8>)| {
            let path = dir.path().join(name);
            std::fs::write(&path, content).unwrap();
            path
        };
        let (d2t, t2d) = (write(d2t), write(t2d));
        assert_eq!(read_maps(&d2t, &t2d).unwrap(), vocab);
        assert!(read_maps(&t2d, &d2t).is_err());
    }
}
