//! Finds answers that run in circles.
//!
//! The rule: a stretch of an answer *repeats* with period `d` when every token in it equals the one `d` before. A loop is a stretch that holds
//! [`COPIES_MIN`] copies of its period and at least [`LOOP_TOKENS_MIN`] tokens, both with the first copy. Periods are proposed by n-grams (the last
//! place where the same [`NGRAM_TOKENS`] tokens stood) and then compared token by token, so what is found is a loop without doubt; time is linear.

/// Copies of the period in a loop, at least.
pub const COPIES_MIN: usize = 4;
/// Tokens of a loop, at least: code and tables repeat for a while without being stuck.
pub const LOOP_TOKENS_MIN: usize = 256;
/// Tokens by which a period is proposed.
pub const NGRAM_TOKENS: usize = 8;
/// How far back the beginning of a repeat is looked for, tokens. Mostly the n-gram is all there is to be found; it is more where a slot of the table was
/// overwritten.
const LOOK_BACK_TOKENS_MAX: usize = 64;
/// Slots of the table of last places, a power of two.
const TABLE_SLOTS: usize = 1 << 14;
/// An odd number without pattern (2^64 divided by the golden ratio).
const MIX: u64 = 0x9E37_79B9_7F4A_7C15;

/// A stretch of tokens that repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// Where it begins, in tokens.
    pub start: usize,
    /// Its length in tokens, first copy included.
    pub tokens: usize,
    /// Its period in tokens.
    pub period: usize,
}

/// The longest loop of a list of tokens, the first of equal ones.
pub fn longest_loop(ids: &[u32]) -> Option<Loop> {
    if ids.len() < LOOP_TOKENS_MIN {
        return None;
    }
    let mut last_place = vec![u32::MAX; TABLE_SLOTS];
    let mut found: Option<Loop> = None;
    let mut open: Option<Loop> = None;
    for at in 0..ids.len() {
        if let Some(candidate) = &mut open {
            if ids[at] == ids[at - candidate.period] {
                candidate.tokens += 1;
            } else {
                keep_longer(&mut found, open.take());
            }
        }
        if at + 1 < NGRAM_TOKENS {
            continue;
        }
        let slot = &mut last_place[slot_of(&ids[at + 1 - NGRAM_TOKENS..=at])];
        let before = *slot as usize;
        *slot = at as u32;
        if open.is_none() && before < at {
            open = repeat_ending_at(ids, at, at - before);
        }
    }
    keep_longer(&mut found, open);
    found
}

/// The repeat of at least an n-gram with this period that ends at `at`.
fn repeat_ending_at(ids: &[u32], at: usize, period: usize) -> Option<Loop> {
    let matches = 0..LOOK_BACK_TOKENS_MAX.min(at + 1 - period);
    let matching = matches.take_while(|back| ids[at - back] == ids[at - back - period]).count();
    (matching >= NGRAM_TOKENS).then(|| Loop { start: at + 1 - matching - period, tokens: matching + period, period })
}

fn keep_longer(found: &mut Option<Loop>, candidate: Option<Loop>) {
    let Some(candidate) = candidate else { return };
    let long_enough = candidate.tokens >= LOOP_TOKENS_MIN && candidate.tokens >= COPIES_MIN * candidate.period;
    if long_enough && found.is_none_or(|found| candidate.tokens > found.tokens) {
        *found = Some(candidate);
    }
}

fn slot_of(ngram: &[u32]) -> usize {
    let hash = ngram.iter().fold(0u64, |hash, id| (hash.rotate_left(5) ^ u64::from(*id)).wrapping_mul(MIX));
    (hash >> (64 - TABLE_SLOTS.trailing_zeros())) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Tokens without a pattern.
    fn noise(count: usize, seed: u64) -> Vec<u32> {
        (0..count as u64).map(|n| (((n + 1).wrapping_mul(MIX) ^ seed).wrapping_mul(MIX) >> 40) as u32).collect()
    }

    proptest! {
        #[test]
        fn a_loop_is_found_wherever_it_stands(front in 0usize..600, period in 1usize..300, copies in 4usize..9, back in 0usize..600, seed in any::<u64>()) {
            let block = noise(period, seed);
            let tokens = period * copies;
            prop_assume!(tokens >= LOOP_TOKENS_MIN + NGRAM_TOKENS);
            let ids = [noise(front, !seed), block.repeat(copies), noise(back, seed ^ 77)].concat();
            let found = longest_loop(&ids).expect("a loop is there");
            prop_assert_eq!(found.period, period);
            // A neighbour may continue the pattern by chance, hardly more.
            prop_assert!(found.start.abs_diff(front) <= 1 && found.tokens.abs_diff(tokens) <= 2, "{:?}", found);
        }

        #[test]
        fn noise_has_no_loop(count in 0usize..3000, seed in any::<u64>()) {
            prop_assert_eq!(longest_loop(&noise(count, seed)), None);
        }

        #[test]
        fn what_is_found_repeats(ids in proptest::collection::vec(0u32..3, 0..900)) {
            if let Some(found) = longest_loop(&ids) {
                let stretch = &ids[found.start..found.start + found.tokens];
                prop_assert!(stretch.windows(found.period + 1).all(|w| w[0] == w[found.period]));
                prop_assert!(stretch.len() >= LOOP_TOKENS_MIN && stretch.len() >= COPIES_MIN * found.period);
            }
        }
    }

    #[test]
    fn short_repeats_are_no_loop() {
        assert_eq!(longest_loop(&[7; LOOP_TOKENS_MIN - 1]), None);
        assert_eq!(longest_loop(&[7; LOOP_TOKENS_MIN]).map(|l| (l.start, l.tokens, l.period)), Some((0, 256, 1)));
        // Three copies of a long block are a quotation.
        assert_eq!(longest_loop(&noise(500, 1).repeat(3)), None);
    }
}
