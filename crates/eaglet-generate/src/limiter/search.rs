//! Tries limits on both sides of the present one, in paired trials, with steps that become smaller. Pure.

use super::Reason;
use super::trial::{Measured, elasticity_error};

/// The steps, as factors: the first finds a knee that the climb passed or did not reach, the last places it.
const FACTORS: [f64; 2] = [1.35, 1.2];
/// A larger limit is worth it from this elasticity on: at a knee of the usual form, rate = n / (a + b n), 2 % of the rate are left there.
const UP_ELASTICITY_MIN: f64 = 0.02;
/// A smaller limit is taken when it costs less than this elasticity.
const DOWN_ELASTICITY_MAX: f64 = 0.012;
/// In doubt the limit goes up, by so many standard errors: noise must not walk it down, since a limit that is too high has signs of its own (a queue,
/// preemptions) and one that is too low has none.
const IN_DOUBT_UP: f64 = 0.5;

/// A base measured longer ago is measured again before the next comparison, in seconds.
const BASE_AGE_MAX_S: f64 = 60.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
}

/// A search under way. It measures the present limit, then one beside it, and so on.
#[derive(Clone, Debug)]
pub(super) struct Search {
    factor: usize,
    base: Option<(usize, Measured)>,
    /// What a measurement that comes now belongs to; `None` is the base.
    trying: Option<Direction>,
    above: Option<Measured>,
    below: Option<Measured>,
    /// In which direction the last step was worth it: the next goes there too, and never back in the same search.
    going: Option<Direction>,
}

/// What the search wants next.
pub(super) enum Step {
    /// Another limit.
    Try(f64, Reason),
    /// The same limit, measured once more.
    Measure,
    /// The end: this limit, with the measurement to hold it against.
    Settle(f64, Measured, Reason),
}

impl Search {
    /// After a climb or a decrease: wide steps first.
    pub(super) fn first() -> Self {
        Search { factor: 0, base: None, trying: None, above: None, below: None, going: None }
    }

    /// From hold: narrow steps only.
    pub(super) fn again() -> Self {
        Search { factor: FACTORS.len() - 1, ..Self::first() }
    }

    /// Takes the measurement of `limit`.
    pub(super) fn measured(&mut self, now: Measured, limit: usize, bounds: (usize, usize)) -> Step {
        let Some((base_limit, base)) = self.base else {
            self.base = Some((limit, now));
            return self.next(bounds, Reason::Trying);
        };
        let Some(direction) = self.trying.take() else {
            // Back at the base: its newest measurement is the one to compare with.
            self.base = Some((limit, now));
            return self.next(bounds, Reason::Trying);
        };
        let elasticity = base.elasticity_to(&now);
        let error = elasticity_error(&base, &now);
        let gain = now.rate / base.rate - 1.0;
        let worth_it = match direction {
            Direction::Up => elasticity + IN_DOUBT_UP * error >= UP_ELASTICITY_MIN,
            Direction::Down => elasticity + IN_DOUBT_UP * error <= DOWN_ELASTICITY_MAX,
        };
        if worth_it {
            (self.above, self.below) = match direction {
                Direction::Up => (None, Some(base)),
                Direction::Down => (Some(base), None),
            };
            self.base = Some((limit, now));
            self.going = Some(direction);
            return self.next(bounds, Reason::Better { gain });
        }
        match direction {
            Direction::Up => self.above = Some(now),
            Direction::Down => self.below = Some(now),
        }
        self.going = None;
        self.back(base_limit, base, now.at_s, bounds, gain)
    }

    /// The limit tried was no better: the other side, or the base again.
    fn back(&mut self, base_limit: usize, base: Measured, now_s: f64, bounds: (usize, usize), gain: f64) -> Step {
        match self.candidate(base_limit, bounds) {
            // What was measured long ago is no fair comparison: the mix of prompts may have changed, or the cache has filled.
            Some(_) if now_s - base.at_s > BASE_AGE_MAX_S => Step::Try(base_limit as f64, Reason::NotBetter { gain }),
            Some((limit, direction)) => {
                self.trying = Some(direction);
                Step::Try(limit, Reason::NotBetter { gain })
            }
            None => self.finish(base_limit, base, Reason::NotBetter { gain }),
        }
    }

    fn next(&mut self, bounds: (usize, usize), reason: Reason) -> Step {
        let Some((base_limit, base)) = self.base else { return Step::Measure };
        match self.candidate(base_limit, bounds) {
            Some((limit, direction)) => {
                self.trying = Some(direction);
                Step::Try(limit, reason)
            }
            None => self.finish(base_limit, base, reason),
        }
    }

    /// The next limit to try from this base, with smaller steps when both sides are known.
    fn candidate(&mut self, base: usize, bounds: (usize, usize)) -> Option<(f64, Direction)> {
        while self.factor < FACTORS.len() {
            let factor = FACTORS[self.factor];
            let up = ((base as f64 * factor).round() as usize).max(base + 1).min(bounds.1);
            let down = ((base as f64 / factor).round() as usize).min(base.saturating_sub(1)).max(bounds.0);
            let may_go_up = self.above.is_none() && self.going != Some(Direction::Down) && up > base;
            let may_go_down = self.below.is_none() && self.going != Some(Direction::Up) && down < base;
            if may_go_up {
                return Some((up as f64, Direction::Up));
            }
            if may_go_down {
                return Some((down as f64, Direction::Down));
            }
            self.factor += 1;
            (self.above, self.below, self.going) = (None, None, None);
        }
        None
    }

    fn finish(&self, base_limit: usize, base: Measured, reason: Reason) -> Step {
        Step::Settle(base_limit as f64, base, reason)
    }
}
