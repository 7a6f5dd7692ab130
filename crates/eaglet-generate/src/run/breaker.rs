//! Keeps a wrong set-up from burning the prompts: failures that every prompt would share are held back until one prompt succeeds. Pure.
//!
//! A wrong key, a wrong path, a field the server refuses, or a server that fails every request ends each prompt within milliseconds. So such endings are
//! not booked at once: a success books them (the trouble was theirs alone), too many in a row stop the run and leave them unanswered.

use crate::retry::Verdict;
use eaglet_core::outcome::Cause;

/// So many refusals in a row, without a success between them, stop the run.
pub const REFUSALS_IN_A_ROW_MAX: usize = 8;

/// So many prompts in a row whose retries were all used up stop the run, or as many as were ever out at once if that is more: one accident can hit all
/// that are out.
pub const EXHAUSTED_IN_A_ROW_MIN: usize = 16;

/// Endings held back.
#[derive(Debug)]
pub struct Breaker<T> {
    held: Vec<T>,
    refusals: usize,
    exhausted: usize,
    exhausted_max: usize,
    proven: bool,
}

/// What to do with an ending.
#[derive(Debug, PartialEq, Eq)]
pub enum Ending {
    /// Nothing yet: it is held.
    Held,
    /// Stop the run: the held prompts are left for a later session.
    Stop,
}

impl<T> Breaker<T> {
    /// A breaker. `proven`: an earlier session succeeded with the same settings.
    pub fn new(proven: bool) -> Self {
        Breaker { held: vec![], refusals: 0, exhausted: 0, exhausted_max: EXHAUSTED_IN_A_ROW_MIN, proven }
    }

    /// So many requests are out at once.
    pub fn out_at_once(&mut self, requests: usize) {
        self.exhausted_max = self.exhausted_max.max(requests);
    }

    /// A prompt ended without an answer.
    pub fn failed(&mut self, cause: Cause, ending: T) -> Ending {
        self.held.push(ending);
        if crate::retry::verdict(cause) == Verdict::FinalUnlessAll {
            self.refusals += 1;
        } else {
            self.exhausted += 1;
        }
        if self.refusals >= REFUSALS_IN_A_ROW_MAX || self.exhausted >= self.exhausted_max {
            Ending::Stop
        } else {
            Ending::Held
        }
    }

    /// The ending that came last.
    pub fn last(&self) -> Option<&T> {
        self.held.last()
    }

    /// A prompt was answered: what was held may be booked.
    pub fn succeeded(&mut self) -> Vec<T> {
        self.proven = true;
        (self.refusals, self.exhausted) = (0, 0);
        std::mem::take(&mut self.held)
    }

    /// The run ends without them: how many are still held, and are no longer.
    pub fn leave(&mut self) -> usize {
        std::mem::take(&mut self.held).len()
    }

    /// Every prompt has ended. Refusals are believed only if anything ever succeeded.
    ///
    /// # Errors
    /// How many were refused, when nothing succeeded.
    pub fn finish(&mut self) -> Result<Vec<T>, usize> {
        if self.refusals > 0 && !self.proven { Err(self.held.len()) } else { Ok(std::mem::take(&mut self.held)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_key_stops_the_run_and_burns_nothing() {
        let mut breaker = Breaker::new(false);
        let endings: Vec<_> = (0..REFUSALS_IN_A_ROW_MAX).map(|n| breaker.failed(Cause::Unauthorized, n)).collect();
        assert_eq!(endings.last(), Some(&Ending::Stop));
        assert!(endings[..REFUSALS_IN_A_ROW_MAX - 1].iter().all(|e| *e == Ending::Held));
        assert_eq!(breaker.finish(), Err(REFUSALS_IN_A_ROW_MAX));
    }

    #[test]
    fn refusals_between_successes_are_the_prompts_own() {
        let mut breaker = Breaker::new(false);
        for n in 0..100 {
            assert_eq!(breaker.failed(Cause::BadRequest, n), Ending::Held);
            assert_eq!(breaker.succeeded(), [n]);
        }
        breaker.failed(Cause::BadRequest, 100);
        assert_eq!(breaker.finish(), Ok(vec![100]));
    }

    #[test]
    fn a_server_that_fails_everything_stops_the_run() {
        let mut breaker = Breaker::new(true);
        let last = (0..EXHAUSTED_IN_A_ROW_MIN).map(|n| breaker.failed(Cause::ServerError, n)).last();
        assert_eq!(last, Some(Ending::Stop));
    }

    #[test]
    fn few_exhausted_prompts_at_the_end_are_booked() {
        let mut breaker = Breaker::new(false);
        breaker.failed(Cause::Reset, 1);
        assert_eq!(breaker.finish(), Ok(vec![1]));
    }
}
