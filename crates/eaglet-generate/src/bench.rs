//! How many tokens a second a server gives at each number of requests in flight.
//!
//! What is here: the measurement of one level, and the pure decisions on a sweep: where its knee is, whether a further level is worth its time.
//! What is not: screens, and the search during a run. Rates are of tokens as they arrive, so answers need not end inside the window.
//!
//! Invariant: at any time of a level as many requests are out as it says; one that ends, or fails, is replaced at once (after a wait, if it failed).

use crate::client::answer::AnswerPolicy;
use crate::client::{AttemptFailure, Client, InFlight, Mode};
use crate::metrics;
use crate::server_state::ServerState;
use bytes::Bytes;
use eaglet_core::progress::ServerGauges;
use eaglet_core::response::Answer;
use eaglet_core::stats::{Percentiles, percentiles};
use serde::Serialize;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Levels of a sweep that names none.
pub const LEVELS: [usize; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
/// A level within this share of the best is as good as the best: the knee is the smallest such.
pub const KNEE_TOLERANCE: f64 = 0.03;
/// After so many levels without a gain beyond the tolerance, the rest of the usual ones are not worth their time.
const LEVELS_WITHOUT_GAIN_MAX: usize = 2;
/// Between a failure and the next request in its place, unless the server names a longer wait.
const FAILURE_WAIT: Duration = Duration::from_millis(250);
/// Between two looks at the server's gauges.
const GAUGES_INTERVAL: Duration = Duration::from_secs(1);
/// Longest wait for the gauges.
const GAUGES_TIMEOUT: Duration = Duration::from_secs(5);

/// How a level is measured.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Not measured: until the batch is full and its first prompts are computed.
    pub warm_up: Duration,
    /// Measured.
    pub time: Duration,
}

/// What one level showed inside its window.
#[derive(Clone, Debug, Serialize)]
pub struct Level {
    /// Requests in flight.
    pub concurrency: usize,
    /// Length of the window in seconds.
    pub seconds: f64,
    /// Tokens that arrived in it.
    pub tokens: u64,
    /// Tokens a second.
    pub tokens_per_s: f64,
    /// Answers that ended in it.
    pub answers: u64,
    /// Their mean length in tokens, where the server counts.
    pub mean_tokens: Option<f64>,
    /// From the request to its first token, in milliseconds, of the answers that ended.
    pub first_token_ms: Option<Percentiles>,
    /// Mean time between two tokens of an answer, in milliseconds, of the answers that ended.
    pub inter_token_ms: Option<Percentiles>,
    /// Failed requests by cause.
    pub failures: BTreeMap<&'static str, u64>,
    /// What the last failure said.
    pub last_failure: Option<String>,
    /// Most requests queued in the server, by its gauges.
    pub waiting_max: Option<f64>,
    /// Most of the KV cache in use, 0 to 1, by its gauges.
    pub kv_use_max: Option<f64>,
    /// Preemptions, by its gauges.
    pub preemptions: Option<f64>,
}

/// The smallest level within `tolerance` of the best rate: index into `levels`. `None` when no token came at any.
pub fn knee(levels: &[(usize, f64)], tolerance: f64) -> Option<usize> {
    let best = levels.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
    let good = levels.iter().enumerate().filter(|(_, (_, rate))| *rate > 0.0 && *rate >= best * (1.0 - tolerance));
    good.min_by_key(|(_, (concurrency, _))| *concurrency).map(|(index, _)| index)
}

/// Whether a higher level may be worth its time, by what those so far (in ascending order) showed.
pub fn goes_on(levels: &[(usize, f64)]) -> bool {
    match knee(levels, KNEE_TOLERANCE) {
        Some(index) => levels.len() - 1 - index < LEVELS_WITHOUT_GAIN_MAX,
        None => levels.is_empty(),
    }
}

/// What the requests of a level share.
#[derive(Default)]
struct Shared {
    in_flight: InFlight,
    state: ServerState,
    policy: AnswerPolicy,
    measuring: Cell<bool>,
    seen: RefCell<Seen>,
}

#[derive(Default)]
struct Seen {
    answers: u64,
    answered_tokens: Vec<u64>,
    first_token_ms: Vec<u32>,
    inter_token_ms: Vec<u32>,
    failures: BTreeMap<&'static str, u64>,
    last_failure: Option<String>,
    gauges: Vec<ServerGauges>,
}

impl Seen {
    fn answer(&mut self, answer: &Answer) {
        self.answers += 1;
        let tokens = answer.usage.as_ref().and_then(|usage| usage.completion_tokens);
        self.answered_tokens.extend(tokens);
        let Some(first) = answer.first_token_s else { return };
        self.first_token_ms.push(milliseconds(first));
        if let Some(between) = tokens.and_then(|tokens| tokens.checked_sub(1)).filter(|between| *between > 0) {
            self.inter_token_ms.push(milliseconds((answer.latency_s - first) / between as f64));
        }
    }

    fn failure(&mut self, failure: &AttemptFailure) {
        *self.failures.entry(failure.cause.label()).or_default() += 1;
        self.last_failure = Some(failure.detail.clone());
    }
}

fn milliseconds(seconds: f64) -> u32 {
    (seconds * 1000.0).round().clamp(0.0, f64::from(u32::MAX)) as u32
}

/// What a sweep asks.
pub struct Asks {
    /// The server.
    pub client: Rc<Client>,
    /// How answers travel. Whole ones arrive with their last token: their rates are steps, and first-token times are not known.
    pub mode: Mode,
    /// The body of the next request.
    pub next_body: Box<dyn Fn() -> Bytes>,
}

/// Keeps `concurrency` requests out and measures. What is out at the end is given up. To be called inside a [`tokio::task::LocalSet`].
pub async fn level(asks: &Rc<Asks>, concurrency: usize, window: Window) -> Level {
    let shared = Rc::new(Shared::default());
    let mut tasks = JoinSet::new();
    for _ in 0..concurrency {
        tasks.spawn_local(keep_asking(Rc::clone(asks), Rc::clone(&shared)));
    }
    tasks.spawn_local(watch_gauges(Rc::clone(asks), Rc::clone(&shared)));
    tokio::time::sleep(window.warm_up).await;
    shared.measuring.set(true);
    let (begin, before) = (Instant::now(), shared.in_flight.tokens.get());
    tokio::time::sleep(window.time).await;
    let (seconds, tokens) = (begin.elapsed().as_secs_f64(), shared.in_flight.tokens.get() - before);
    shared.measuring.set(false);
    tasks.shutdown().await;
    let seen = shared.seen.take();
    summary(concurrency, seconds, tokens, seen)
}

async fn keep_asking(asks: Rc<Asks>, shared: Rc<Shared>) {
    loop {
        let asked = asks.client.chat((asks.next_body)(), asks.mode, &shared.policy, &shared.state, &shared.in_flight);
        match asked.await {
            Ok((answer, _)) if shared.measuring.get() => shared.seen.borrow_mut().answer(&answer),
            Ok(_) => {}
            Err(failure) => {
                // Those of the warm-up count: they say why a level shows nothing.
                shared.seen.borrow_mut().failure(&failure);
                tokio::time::sleep(failure.retry_after.unwrap_or_default().max(FAILURE_WAIT)).await;
            }
        }
    }
}

async fn watch_gauges(asks: Rc<Asks>, shared: Rc<Shared>) {
    loop {
        tokio::time::sleep(GAUGES_INTERVAL).await;
        if !shared.measuring.get() {
            continue;
        }
        for path in metrics::METRICS_PATHS {
            let Ok(reply) = asks.client.get(path, GAUGES_TIMEOUT).await else { continue };
            if let Ok(gauges) = metrics::read(reply.status.as_u16(), &reply.body) {
                shared.seen.borrow_mut().gauges.push(gauges);
                break;
            }
        }
    }
}

fn summary(concurrency: usize, seconds: f64, tokens: u64, seen: Seen) -> Level {
    let most = |gauge: fn(&ServerGauges) -> Option<f64>| seen.gauges.iter().filter_map(gauge).reduce(f64::max);
    let preemptions = |gauges: Option<&ServerGauges>| gauges.and_then(|gauges| gauges.preemptions);
    let counted = seen.answered_tokens.len() as f64;
    Level {
        concurrency,
        seconds,
        tokens,
        tokens_per_s: tokens as f64 / seconds,
        answers: seen.answers,
        mean_tokens: (counted > 0.0).then(|| seen.answered_tokens.iter().sum::<u64>() as f64 / counted),
        first_token_ms: percentiles(&seen.first_token_ms),
        inter_token_ms: percentiles(&seen.inter_token_ms),
        waiting_max: most(|gauges| gauges.waiting),
        kv_use_max: most(|gauges| gauges.kv_use),
        preemptions: preemptions(seen.gauges.last())
            .zip(preemptions(seen.gauges.first()))
            .map(|(last, first)| (last - first).max(0.0)),
        failures: seen.failures,
        last_failure: seen.last_failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_knee_is_the_smallest_level_near_the_best() {
        let curve = [(1, 120.0), (32, 1100.0), (64, 1360.0), (128, 1536.0), (200, 1590.0), (256, 1450.0)];
        assert_eq!(knee(&curve, 0.03), Some(4), "128 is 3.4 % below the best");
        assert_eq!(knee(&curve, 0.04), Some(3));
        assert_eq!(knee(&[(1, 0.0), (2, 0.0)], 0.03), None);
        assert_eq!(knee(&[], 0.03), None);
        assert_eq!(knee(&[(8, 100.0), (4, 99.0)], 0.03), Some(1), "in whatever order");
    }

    #[test]
    fn a_sweep_ends_when_two_levels_brought_nothing() {
        let mut levels = Vec::new();
        for (concurrency, rate) in [(1, 10.0), (2, 20.0), (4, 40.0), (8, 41.0), (16, 40.5), (32, 41.0)] {
            if !goes_on(&levels) {
                break;
            }
            levels.push((concurrency, rate));
        }
        assert_eq!(levels.last(), Some(&(16, 40.5)));
        assert!(!goes_on(&[(1, 0.0)]), "a server that gives nothing gives no more at 512");
    }

    proptest! {
        #[test]
        fn nothing_smaller_than_the_knee_is_as_good(rates in prop::collection::vec(0.1f64..1000.0, 1..12), tolerance in 0.0f64..0.5) {
            let levels: Vec<(usize, f64)> = rates.iter().enumerate().map(|(index, rate)| (1 << index, *rate)).collect();
            let index = knee(&levels, tolerance).unwrap();
            let enough = rates.iter().copied().fold(0.0, f64::max) * (1.0 - tolerance);
            prop_assert!(rates[index] >= enough);
            prop_assert!(rates[..index].iter().all(|rate| *rate < enough));
        }
    }
}
