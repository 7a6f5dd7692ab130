//! Tells answers that are almost the same.
//!
//! The rule: of the hashes of all [`NGRAM_TOKENS`]-grams of an answer, the [`SKETCH_HASHES`] smallest different ones are its sketch; answers with one sketch are near
//! duplicates. Two answers that share the part `J` of their n-grams have one sketch with a probability of about `J` to the power of [`SKETCH_HASHES`]: 0.92 at 99 %, 0.43 at
//! 90 %, 0.004 at 50 %. An answer with fewer n-grams has no sketch. The prompts play no part.

use eaglet_core::ids::hash128;

/// Tokens of an n-gram.
pub const NGRAM_TOKENS: usize = 8;
/// Hashes of a sketch.
pub const SKETCH_HASHES: usize = 8;

/// 128 bits that stand for the sketch of an answer.
pub(super) fn sketch(ids: &[u32]) -> Option<u128> {
    // Ascending. Almost every hash is larger than the last one, so this is one comparison a token.
    let mut smallest = Vec::with_capacity(SKETCH_HASHES + 1);
    for ngram in ids.windows(NGRAM_TOKENS) {
        let hash = hash_of(ngram);
        if smallest.len() == SKETCH_HASHES && smallest.last().is_some_and(|last| hash >= *last) {
            continue;
        }
        if let Err(place) = smallest.binary_search(&hash) {
            smallest.insert(place, hash);
            smallest.truncate(SKETCH_HASHES);
        }
    }
    let bytes: Vec<u8> = smallest.iter().flat_map(|hash: &u64| hash.to_le_bytes()).collect();
    (smallest.len() == SKETCH_HASHES).then(|| hash128(&bytes))
}

/// All bits depend on all tokens (the finalizer of MurmurHash3).
fn hash_of(ngram: &[u32]) -> u64 {
    let mut hash =
        ngram.iter().fold(0u64, |hash, id| (hash.rotate_left(5) ^ u64::from(*id)).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    for multiplier in [0xFF51_AFD7_ED55_8CCD, 0xC4CE_B9FE_1A85_EC53] {
        hash = (hash ^ hash >> 33).wrapping_mul(multiplier);
    }
    hash ^ hash >> 33
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_sketch_is_that_of_the_smallest_hashes(ids in proptest::collection::vec(0u32..6, 0..80)) {
            let mut hashes: Vec<u64> = ids.windows(NGRAM_TOKENS).map(hash_of).collect();
            hashes.sort_unstable();
            hashes.dedup();
            hashes.truncate(SKETCH_HASHES);
            let bytes: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
            prop_assert_eq!(sketch(&ids), (hashes.len() == SKETCH_HASHES).then(|| hash128(&bytes)));
        }
    }

    #[test]
    fn almost_equal_answers_mostly_have_one_sketch_and_others_never() {
        let text = |seed: u32| -> Vec<u32> {
            (0..2000u32).map(|n| n.wrapping_mul(2_654_435_761).rotate_left(seed) % 50_000).collect()
        };
        let same = (0..100).filter(|at| {
            let mut changed = text(3);
            changed[at * 20] = 50_001;
            sketch(&changed) == sketch(&text(3))
        });
        assert!(same.count() >= 90);
        assert!((4..20).all(|seed| sketch(&text(seed)) != sketch(&text(3))));
        assert_eq!(sketch(&text(1)[..14]), None);
    }
}
