//! What was tried in place of the limiter, kept to be compared with it (`docs/design/0004-concurrency.md`).

use super::Controller;
use eaglet_generate::limiter::{Change, Reason, Window};

fn moved(limit: &mut f64, max: usize, to: impl Fn(f64) -> f64) -> Option<Change> {
    let from = limit.round() as usize;
    *limit = to(*limit).clamp(1.0, max as f64);
    let to = limit.round() as usize;
    (from != to).then_some(Change { from, to, reason: Reason::Trying })
}

/// Climbs the gradient: every few seconds a step in the direction in which the rate last grew.
pub(crate) struct Gradient {
    limit: f64,
    max: usize,
    up: bool,
    last_rate: f64,
    tokens: f64,
    seconds: f64,
}

impl Gradient {
    pub(crate) fn new(max: usize) -> Self {
        Gradient { limit: 16.0, max, up: true, last_rate: 0.0, tokens: 0.0, seconds: 0.0 }
    }
}

impl Controller for Gradient {
    fn limit(&self) -> usize {
        self.limit.round() as usize
    }

    fn observe(&mut self, window: &Window) -> Option<Change> {
        if window.back_pressure > 0 {
            return moved(&mut self.limit, self.max, |limit| limit * 0.9);
        }
        self.tokens += window.tokens as f64;
        self.seconds += window.duration.as_secs_f64();
        if self.seconds < 5.0 {
            return None;
        }
        let rate = self.tokens / self.seconds;
        (self.tokens, self.seconds) = (0.0, 0.0);
        if rate < self.last_rate {
            self.up = !self.up;
        }
        self.last_rate = rate;
        let up = self.up;
        moved(&mut self.limit, self.max, |limit| {
            if up { (limit * 1.1).max(limit + 1.0) } else { (limit / 1.1).min(limit - 1.0) }
        })
    }
}

/// Additive increase while the server's queue is empty, multiplicative decrease when it is not, or on back-pressure.
pub(crate) struct AimdOnQueue {
    limit: f64,
    max: usize,
    since_cut_s: f64,
}

impl AimdOnQueue {
    pub(crate) fn new(max: usize) -> Self {
        AimdOnQueue { limit: 16.0, max, since_cut_s: 0.0 }
    }
}

impl Controller for AimdOnQueue {
    fn limit(&self) -> usize {
        self.limit.round() as usize
    }

    fn observe(&mut self, window: &Window) -> Option<Change> {
        self.since_cut_s += window.duration.as_secs_f64();
        let queue = window.gauges.waiting.or(window.mean_unstarted).unwrap_or(0.0);
        let is_over = window.back_pressure > 0 || queue > (self.limit * 0.05).max(1.0);
        if is_over && self.since_cut_s > 10.0 {
            self.since_cut_s = 0.0;
            return moved(&mut self.limit, self.max, |limit| limit * 0.8);
        }
        if !is_over && window.mean_in_flight >= self.limit * 0.9 {
            return moved(&mut self.limit, self.max, |limit| limit + 1.0);
        }
        None
    }
}

/// Little's law, as in Gradient2 of Netflix's concurrency-limits: the limit shrinks as the time per token grows beyond its long-term mean.
pub(crate) struct LittlesLaw {
    limit: f64,
    max: usize,
    long: f64,
    short: f64,
}

impl LittlesLaw {
    pub(crate) fn new(max: usize) -> Self {
        LittlesLaw { limit: 16.0, max, long: 0.0, short: 0.0 }
    }
}

impl Controller for LittlesLaw {
    fn limit(&self) -> usize {
        self.limit.round() as usize
    }

    fn observe(&mut self, window: &Window) -> Option<Change> {
        let seconds = window.duration.as_secs_f64();
        if window.back_pressure > 0 {
            return moved(&mut self.limit, self.max, |limit| limit * 0.9);
        }
        let tokens = if window.tokens > 0 { window.tokens as f64 } else { window.completed_tokens as f64 };
        if tokens == 0.0 || window.mean_in_flight < self.limit * 0.5 {
            return None;
        }
        let per_token = window.mean_in_flight * seconds / tokens;
        if self.long == 0.0 {
            (self.long, self.short) = (per_token, per_token);
        }
        self.short += (per_token - self.short) * (seconds / 3.0).min(1.0);
        self.long += (per_token - self.long) * (seconds / 100.0).min(1.0);
        let gradient = (1.5 * self.long / self.short).clamp(0.5, 1.0);
        let wanted = self.limit * gradient + self.limit.sqrt();
        moved(&mut self.limit, self.max, |limit| limit * 0.8 + wanted * 0.2)
    }
}
