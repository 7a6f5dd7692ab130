//! How a run says how it goes: the content of `progress.json` and of the live line.

use crate::stats::{LossTable, Percentiles};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the run is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Sending prompts.
    Running,
    /// Waiting for the server.
    ServerDown,
    /// Waiting for room on the disk.
    DiskBlocked,
    /// Finishing what is out.
    Draining,
    /// Ended, complete or not.
    Ended,
}

/// The server's own gauges; absent = not reported, never 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ServerGauges {
    /// Requests being decoded.
    pub running: Option<f64>,
    /// Requests queued.
    pub waiting: Option<f64>,
    /// KV cache in use, 0 to 1.
    pub kv_use: Option<f64>,
    /// Preemptions so far.
    pub preemptions: Option<f64>,
    /// Tokens generated so far.
    pub generation_tokens: Option<f64>,
    /// Why there are none, when there are none.
    pub not_available: Option<String>,
}

/// What became of answers that were interrupted, in this session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Continued {
    /// Answers put together from several segments.
    pub answers: u64,
    /// Tokens of interrupted answers that did not have to be generated again, those of earlier sessions included.
    pub tokens_kept: u64,
    /// Tokens that had arrived and were lost with their attempt.
    pub tokens_lost: u64,
    /// Answers that could not be continued and started again.
    pub started_again: u64,
}

/// The end of a run: from the start of its last prompt on, fewer requests are out than could be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tail {
    /// How long it has lasted, seconds.
    pub seconds: f64,
    /// Share of the slots in use meanwhile, 0 to 1.
    pub slots_used: f64,
}

/// How one server is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServerPhase {
    /// It gets requests.
    Up,
    /// It is away.
    Down,
    /// Requests broke on it: it is left out for a while, then probed.
    Ejected,
    /// It was taken off the list; what is out is finished.
    Leaving,
}

/// One server of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerProgress {
    /// Server, without credentials.
    pub endpoint: String,
    /// How it is.
    pub state: ServerPhase,
    /// Requests that may be out.
    pub limit: u64,
    /// Requests that are.
    pub in_flight: u64,
    /// Tokens received from it in this session.
    pub tokens: u64,
    /// Its gauges.
    pub gauges: ServerGauges,
}

impl ServerGauges {
    /// Several servers as one: requests and counters add up, the fullest cache decides.
    #[must_use]
    pub fn joined(self, other: ServerGauges) -> ServerGauges {
        let add = |a: Option<f64>, b: Option<f64>| a.into_iter().chain(b).reduce(|a, b| a + b);
        ServerGauges {
            running: add(self.running, other.running),
            waiting: add(self.waiting, other.waiting),
            kv_use: self.kv_use.into_iter().chain(other.kv_use).reduce(f64::max),
            preemptions: add(self.preemptions, other.preemptions),
            generation_tokens: add(self.generation_tokens, other.generation_tokens),
            not_available: self.not_available.or(other.not_available),
        }
    }
}

/// The state of a run at one instant. Rates are per second.
#[derive(Clone, Debug, Serialize)]
pub struct Snapshot {
    /// Format version of `progress.json`.
    pub v: u32,
    /// When, RFC 3339 in UTC.
    pub at: String,
    /// Process that writes it.
    pub pid: u32,
    /// What it is doing.
    pub phase: Phase,
    /// Seconds since this session began.
    pub elapsed_s: f64,
    /// Prompts in the plan.
    pub planned: u64,
    /// Prompts with a durable record.
    pub done: u64,
    /// Prompts that ended without.
    pub failed: u64,
    /// Requests out.
    pub in_flight: u64,
    /// Prompts between two attempts.
    pub waiting: u64,
    /// Prompts whose record waits for its sync.
    pub unsynced: u64,
    /// Prompts not sent yet.
    pub not_started: u64,
    /// Requests that may be out, all servers together.
    pub concurrency: u64,
    /// Requests ended per second over the last 30 s.
    pub requests_per_s: Option<f64>,
    /// Tokens received per second over the last 30 s.
    pub tokens_per_s: Option<f64>,
    /// Tokens received per second since this session began.
    pub tokens_per_s_overall: f64,
    /// Tokens received in this session, lost attempts included.
    pub tokens: u64,
    /// Tokens per second over the whole session that ended in a record.
    pub usable_tokens_per_s: f64,
    /// Lengths of the answers, in tokens.
    pub completion_tokens: Option<Percentiles>,
    /// Seconds to the end of the prompts, and what the estimate rests on.
    pub eta_s: Option<f64>,
    /// What the estimate rests on, in words.
    pub eta_basis: String,
    /// Retries of this session by cause.
    pub retries_by_cause: BTreeMap<&'static str, u64>,
    /// Failures of this session by cause.
    pub failed_by_cause: BTreeMap<String, u64>,
    /// Answers of this session by status.
    pub by_status: BTreeMap<&'static str, u64>,
    /// Answers of this session by finish reason.
    pub by_finish_reason: BTreeMap<String, u64>,
    /// The server's gauges; of several servers, all together.
    pub server: ServerGauges,
    /// Each server.
    pub servers: Vec<ServerProgress>,
    /// What was lost, by prompt length and by source.
    pub losses: LossTable,
    /// Interrupted answers.
    pub continued: Continued,
    /// The end of the run; null before the last prompt was sent.
    pub tail: Option<Tail>,
}

/// The time left, from the rate of this session; with its basis in words.
pub fn eta(left: u64, ended_this_session: u64, recent_per_s: Option<f64>, elapsed_s: f64) -> (Option<f64>, String) {
    const ENDED_MIN: u64 = 5;
    if left == 0 {
        return (Some(0.0), "nothing is left".to_owned());
    }
    if ended_this_session < ENDED_MIN || elapsed_s <= 0.0 {
        return (None, format!("no estimate before {ENDED_MIN} prompts ended"));
    }
    let overall = ended_this_session as f64 / elapsed_s;
    match recent_per_s.filter(|rate| *rate > 0.0) {
        Some(recent) => {
            // The last half minute says what the server does now, the whole session evens out long answers.
            let rate = (recent + overall) / 2.0;
            (Some(left as f64 / rate), format!("{rate:.2} prompts/s, mean of the last 30 s and the session"))
        }
        None => (Some(left as f64 / overall), format!("{overall:.2} prompts/s over the session")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_eta_states_its_basis() {
        assert_eq!(eta(10, 2, None, 5.0).0, None);
        assert_eq!(eta(0, 2, None, 5.0).0, Some(0.0));
        let (seconds, basis) = eta(100, 50, Some(3.0), 50.0);
        assert_eq!(seconds, Some(50.0));
        assert_eq!(basis, "2.00 prompts/s, mean of the last 30 s and the session");
        assert_eq!(eta(100, 50, Some(0.0), 50.0).0, Some(100.0));
    }
}
