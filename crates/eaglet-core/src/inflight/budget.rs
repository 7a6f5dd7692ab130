//! How many bytes of checkpoints may be written in a second. Pure.

use std::time::Duration;

/// A bucket of bytes that fills with time. What is due and finds it empty waits; the caller asks for the oldest first.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    bytes_per_s: f64,
    /// Bytes that may be written now; below zero after a checkpoint larger than what there was.
    available: f64,
    at: Duration,
}

impl Budget {
    /// A full bucket: at most one second's bytes are saved up.
    pub fn new(bytes_per_s: u64) -> Self {
        Budget { bytes_per_s: bytes_per_s as f64, available: bytes_per_s as f64, at: Duration::ZERO }
    }

    /// Whether anything may be written at this time (since any fixed instant). Never more than one second's bytes and one checkpoint
    /// are written in any second.
    pub fn is_open(&mut self, now: Duration) -> bool {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.available = (self.available + passed * self.bytes_per_s).min(self.bytes_per_s);
        self.available > 0.0
    }

    /// Books what was written. It may be more than there was, once; then nothing is open until that is made good.
    pub fn spend(&mut self, bytes: u64) {
        self.available -= bytes as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Over any time, no more goes out than the rate allows, one second saved up, and one checkpoint.
        #[test]
        fn no_more_than_the_rate_goes_out(steps in proptest::collection::vec((0u64..700, 1u64..3000), 1..200)) {
            const RATE: u64 = 1000;
            let mut budget = Budget::new(RATE);
            let (mut now, mut out, mut largest) = (Duration::ZERO, 0u64, 0);
            for (wait_ms, bytes) in steps {
                now += Duration::from_millis(wait_ms);
                if budget.is_open(now) {
                    budget.spend(bytes);
                    out += bytes;
                    largest = largest.max(bytes);
                }
                let allowed = RATE as f64 * (now.as_secs_f64() + 1.0) + largest as f64;
                prop_assert!(out as f64 <= allowed + 1.0, "{out} of {allowed} after {now:?}");
            }
        }
    }

    #[test]
    fn an_overdrawn_budget_opens_again() {
        let mut budget = Budget::new(100);
        assert!(budget.is_open(Duration::ZERO));
        budget.spend(1000);
        assert!(!budget.is_open(Duration::from_secs(5)));
        assert!(budget.is_open(Duration::from_secs(10)));
    }
}
