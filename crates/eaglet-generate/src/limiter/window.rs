//! What the limiter is told: measurements of one server over a short time. Plain data.

use std::time::Duration;

/// Where the token rate comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RateSource {
    /// Tokens are seen as they stream: the rate of a window is what came in it.
    #[default]
    Stream,
    /// Only whole replies are seen: the rate comes from the server's own counter or, without one, from how long finished replies took per token
    /// (Little's law), which is far less noisy than how many of them happened to end in a window.
    Replies,
}

/// Measurements of one server over one window, about a second long.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// How long it is.
    pub duration: Duration,
    /// Tokens that came in it (by the server's counter where replies come whole).
    pub tokens: u64,
    /// Mean number of requests out.
    pub mean_in_flight: f64,
    /// Mean number of requests out that had no token yet; `None` where tokens are not seen.
    pub mean_unstarted: Option<f64>,
    /// Requests that ended with an answer.
    pub completions: u64,
    /// Tokens of these answers.
    pub completed_tokens: u64,
    /// Time from request to end, summed over these answers.
    pub completed_time: Duration,
    /// Replies that ask for less: 429, 503, overload.
    pub back_pressure: u64,
    /// Time from request to refusal, summed over these replies.
    pub refused_time: Duration,
    /// The server's gauges, where it has any.
    pub gauges: Gauges,
}

/// A server's gauges over a window; absent is unknown, never 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gauges {
    /// Requests being decoded.
    pub running: Option<f64>,
    /// Requests in the server's queue.
    pub waiting: Option<f64>,
    /// KV cache in use, 0 to 1.
    pub kv_use: Option<f64>,
    /// Sequences thrown out of the batch during the window.
    pub preemptions: Option<f64>,
}

impl Window {
    /// Seconds; never 0.
    pub(super) fn seconds(&self) -> f64 {
        self.duration.as_secs_f64().max(1e-6)
    }
}
