//! One measurement at one limit: waits until the server has settled, then collects windows until the rate is known well enough. Pure.

use super::window::{RateSource, Window};

/// How well a rate must be known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Precision {
    /// At least so many decode steps of the server, so that the grain of a step does not matter.
    pub(super) steps: f64,
    /// At least so long, in seconds.
    pub(super) seconds_min: f64,
    /// No longer than so many times the minimum, however noisy it is.
    pub(super) stretch_max: f64,
    /// Relative standard error that is good enough.
    pub(super) error: f64,
}

/// For the climb: differences are large.
pub(super) const COARSE: Precision = Precision { steps: 40.0, seconds_min: 2.0, stretch_max: 3.0, error: 0.02 };
/// For the search: 1 % must be seen.
pub(super) const FINE: Precision = Precision { steps: 150.0, seconds_min: 8.0, stretch_max: 5.0, error: 0.004 };

/// A noisy measurement is not stretched beyond this, in seconds.
const STRETCHED_MAX_S: f64 = 60.0;
/// Whole replies: a measurement needs so many of them, and at least one for each slot.
const REPLIES_MIN: u64 = 16;
/// Neighbouring windows are alike (prompts come in bunches), so that the error of their mean is larger than independent ones would have.
const AUTOCORRELATION: f64 = 1.5;
/// Share of the limit by which the number of requests out may differ from it.
const REACHED_SHARE: f64 = 0.04;
/// Longest wait for requests without a token to get one, in seconds: then it is a queue, and no reason to wait on.
const UNSTARTED_WAIT_MAX_S: f64 = 20.0;

/// A token rate at a number of requests out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Measured {
    /// Requests out, mean.
    pub(super) in_flight: f64,
    /// Tokens per second.
    pub(super) rate: f64,
    /// Its relative standard error.
    pub(super) error: f64,
    /// When it was taken, in seconds of the limiter's own time.
    pub(super) at_s: f64,
}

impl Measured {
    /// How much of a change in requests out came back as a change in rate: 1 is all of it, 0 none, below 0 is harm.
    pub(super) fn elasticity_to(&self, other: &Measured) -> f64 {
        let step = (other.in_flight / self.in_flight).ln();
        if step.abs() < 1e-3 { 0.0 } else { (other.rate / self.rate).ln() / step }
    }
}

/// Standard error of [`Measured::elasticity_to`].
pub(super) fn elasticity_error(a: &Measured, b: &Measured) -> f64 {
    a.error.hypot(b.error) / (b.in_flight / a.in_flight).ln().abs().max(1e-3)
}

/// A measurement under way.
#[derive(Clone, Debug, Default)]
pub(super) struct Trial {
    settled: bool,
    since_start_s: f64,
    since_reached_s: f64,
    windows: u32,
    seconds: f64,
    tokens: f64,
    slots: f64,
    sum: f64,
    sum_of_squares: f64,
    replies: u64,
    reply_tokens: u64,
    reply_s: f64,
}

impl Trial {
    /// Takes a window at this limit; the result once it is known well enough.
    pub(super) fn push(
        &mut self,
        window: &Window,
        limit: usize,
        source: RateSource,
        precision: Precision,
        now_s: f64,
    ) -> Option<Measured> {
        let seconds = window.seconds();
        self.since_start_s += seconds;
        let slack = (limit as f64 * REACHED_SHARE).max(0.75);
        if (window.mean_in_flight - limit as f64).abs() > slack {
            // Still filling or draining; or too few prompts are left to fill it, and then there is nothing to learn.
            *self = Trial { since_start_s: self.since_start_s, ..Trial::default() };
            return None;
        }
        if !self.settled {
            self.since_reached_s += seconds;
            self.replies += window.completions;
            self.settled = self.is_settled(window, limit, source);
            if self.settled {
                self.replies = 0;
            }
            return None;
        }
        self.add(window);
        let (rate, error) = self.rate(source)?;
        let step_s = self.slots / self.seconds / rate;
        let needed = (precision.steps * step_s).max(precision.seconds_min);
        let enough = match source {
            RateSource::Stream => self.windows >= 2 && self.seconds >= needed,
            RateSource::Replies if self.tokens > 0.0 => self.windows >= 2 && self.seconds >= needed,
            RateSource::Replies => self.replies >= REPLIES_MIN.max(limit as u64),
        };
        let longest = (needed * precision.stretch_max).min(STRETCHED_MAX_S).max(needed);
        let good = error <= precision.error || self.seconds >= longest;
        (enough && good).then(|| Measured { in_flight: self.slots / self.seconds, rate, error, at_s: now_s })
    }

    fn is_settled(&self, window: &Window, limit: usize, source: RateSource) -> bool {
        let unstarted = window.mean_unstarted.or(window.gauges.waiting).unwrap_or(0.0);
        let has_started = unstarted <= (limit as f64 * 0.1).max(1.0) || self.since_reached_s >= UNSTARTED_WAIT_MAX_S;
        let flows = match source {
            RateSource::Stream => window.tokens > 0,
            // A reply that ends now may have begun under the old limit: one turn of all slots is waited for.
            RateSource::Replies => window.tokens > 0 || self.replies >= limit as u64,
        };
        has_started && flows
    }

    fn add(&mut self, window: &Window) {
        let seconds = window.seconds();
        let rate = window.tokens as f64 / seconds;
        self.windows += 1;
        self.seconds += seconds;
        self.tokens += window.tokens as f64;
        self.slots += window.mean_in_flight * seconds;
        self.sum += rate;
        self.sum_of_squares += rate * rate;
        self.replies += window.completions;
        self.reply_tokens += window.completed_tokens;
        self.reply_s += window.completed_time.as_secs_f64();
    }

    /// The rate so far and its relative error.
    fn rate(&self, source: RateSource) -> Option<(f64, f64)> {
        if self.tokens > 0.0 {
            let count = f64::from(self.windows);
            let mean = self.sum / count;
            let variance = (self.sum_of_squares / count - mean * mean).max(0.0);
            let error = if self.windows < 2 { 1.0 } else { (variance / (count - 1.0)).sqrt() / mean * AUTOCORRELATION };
            return Some((self.tokens / self.seconds, error));
        }
        if source == RateSource::Stream || self.reply_tokens == 0 || self.reply_s <= 0.0 {
            return None;
        }
        // Little: requests out = rate in requests x time of each; in tokens: rate = requests out / time per token.
        let per_token_s = self.reply_s / self.reply_tokens as f64;
        Some((self.slots / self.seconds / per_token_s, 0.1 / (self.replies as f64).sqrt()))
    }
}
