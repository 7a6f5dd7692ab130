//! What a run is told: validated, and the part of it that makes the run what it is (the fingerprint).

use crate::client::answer::AnswerPolicy;
use crate::client::request::TokenIds;
use crate::client::{Mode, Timeouts};
use crate::retry::RetryPolicy;
use crate::run::Interrupted;
use crate::server_info::ServerInfo;
use eaglet_core::commit::CommitSettings;
use eaglet_core::sampling::Sampling;
use eaglet_data::{Plan, Turns};
use serde_json::{Map, Value, json};
use std::num::NonZeroUsize;
use std::time::Duration;

/// How unfinished answers are treated.
#[derive(Clone, Copy, Debug)]
pub struct ContinuationSettings {
    /// Answers that an accident interrupted.
    pub interrupted: Interrupted,
    /// How often an answer that was cut at its token limit is continued, each time with the same limit.
    pub truncated_rounds: u32,
    /// Time between two checkpoints of an answer.
    pub checkpoint_interval: Duration,
}

impl Default for ContinuationSettings {
    fn default() -> Self {
        ContinuationSettings {
            interrupted: Interrupted::Continue,
            truncated_rounds: 0,
            checkpoint_interval: Duration::from_secs(2),
        }
    }
}

/// Requests out at once at each server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Concurrency {
    /// Found and held by the limiter ([`crate::limiter`]), never above `max`.
    Auto {
        /// The highest limit.
        max: NonZeroUsize,
    },
    /// Always this.
    Pinned(NonZeroUsize),
}

impl Concurrency {
    /// The highest limit that is tried when nobody names one: four times vLLM's usual `--max-num-seqs`.
    pub const AUTO_MAX: NonZeroUsize = NonZeroUsize::new(1024).expect("1024 is not 0");

    /// The most that can be out at one server.
    pub fn max(self) -> usize {
        match self {
            Concurrency::Auto { max } => max.get(),
            Concurrency::Pinned(number) => number.get(),
        }
    }
}

impl From<NonZeroUsize> for Concurrency {
    fn from(number: NonZeroUsize) -> Self {
        Concurrency::Pinned(number)
    }
}

/// Settings of the generate stage.
#[derive(Clone, Debug)]
pub struct GenerateSettings {
    /// Requests out at once at each server.
    pub concurrency: Concurrency,
    /// Streamed or whole.
    pub mode: Mode,
    /// Which turns are answered.
    pub turns: Turns,
    /// Sampling sent.
    pub sampling: Sampling,
    /// Merged into every request.
    pub extra_body: Map<String, Value>,
    /// Token limit of an answer; `None` = the server's.
    pub max_completion_tokens: Option<u64>,
    /// Tokens of prompt and answer together; the answer's limit is lowered for prompts that would go over it.
    pub max_seq_len: Option<u64>,
    /// Answers shorter than this are kept and flagged; training leaves them out.
    pub min_completion_tokens: Option<u64>,
    /// Whether to ask for token ids.
    pub token_ids: TokenIds,
    /// How answers are judged.
    pub answers: AnswerPolicy,
    /// Time-outs of a request.
    pub timeouts: Timeouts,
    /// Retries.
    pub retry: RetryPolicy,
    /// Unfinished answers.
    pub continuation: ContinuationSettings,
    /// Group commit.
    pub commit: CommitSettings,
    /// How long a drain that nobody watches (SIGTERM) may take before requests are given up.
    pub drain_deadline: Duration,
}

impl GenerateSettings {
    /// Settings with every default, for this many requests at once: streamed, the server's own sampling and limits.
    pub fn new(concurrency: impl Into<Concurrency>) -> Self {
        GenerateSettings {
            concurrency: concurrency.into(),
            mode: Mode::Stream,
            turns: Turns::Last,
            sampling: Sampling::default(),
            extra_body: Map::new(),
            max_completion_tokens: None,
            max_seq_len: None,
            min_completion_tokens: None,
            token_ids: TokenIds::Ask,
            answers: AnswerPolicy::default(),
            timeouts: Timeouts::default(),
            retry: RetryPolicy::default(),
            continuation: ContinuationSettings::default(),
            commit: CommitSettings::default(),
            drain_deadline: Duration::from_secs(60),
        }
    }

    /// What makes this run this run: resuming it with another value is refused. Inputs are known by content, not by path, so that a converted or
    /// moved data set is the same data set.
    pub fn fingerprint(&self, server: &ServerInfo, plan: &Plan) -> Value {
        let mut fingerprint = json!({
            "dataset": {"prompts": plan.entries().len(), "content_hash": format!("{:032x}", plan.fingerprint()), "turns": self.turns},
            "model": server.model,
            "server_model": server.root,
            "sampling": self.sampling,
            "max_completion_tokens": self.max_completion_tokens,
            "max_seq_len": self.max_seq_len,
            "extra_body": self.extra_body,
        });
        // Only where it is used, so that runs begun before it existed go on.
        if self.continuation.truncated_rounds > 0 {
            fingerprint["continue_truncated"] = self.continuation.truncated_rounds.into();
        }
        fingerprint
    }

    /// Longest context a prompt and its answer may fill, in tokens, if anything bounds it.
    pub fn context_limit(&self, server: &ServerInfo) -> Option<u64> {
        match (self.max_seq_len, server.max_model_len) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}
