//! Settings of what the scripted server answers by default. The answers themselves: `eaglet_serve::answer`.

use eaglet_serve::{
    answer::{AnswerRule, Length},
    api::Served,
};
use serde::Deserialize;

pub use eaglet_serve::answer::Reasoning;

/// Settings of the default answer.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Answer {
    /// The one model this server has.
    pub model: String,
    /// Prompt and answer together, in tokens.
    pub max_model_len: usize,
    /// Mean length of an answer that finishes by itself, in tokens with the end token.
    pub mean_tokens: usize,
    /// Lengths lie evenly between `mean_tokens * (1 - spread)` and `mean_tokens * (1 + spread)`; 0 to 1.
    pub spread: f64,
    /// Changes every answer.
    pub seed: u64,
    /// Where reasoning goes.
    pub reasoning: Reasoning,
    /// Puts the `</think>` token between reasoning and content into the ids (and into the text of plain completions).
    pub think_token: bool,
    /// Whether `return_token_ids` is understood; other servers ignore it.
    pub knows_token_ids: bool,
    /// When set, requests without this bearer token get 401.
    pub api_key: Option<String>,
    /// Time between two tokens of one answer, in milliseconds; 0 is as fast as possible.
    pub token_ms: f64,
    /// Time from the start of running to the first token, in milliseconds.
    pub first_token_ms: f64,
    /// Requests beyond this wait in a queue.
    pub max_running: usize,
    /// Tokens in one event of a stream; 0 counts as 1.
    pub tokens_per_chunk: usize,
    /// Room of the key-value cache in tokens; when it is passed a running request is preempted.
    pub kv_cache_tokens: usize,
}

impl Default for Answer {
    fn default() -> Self {
        Self {
            model: "fake/model".to_owned(),
            max_model_len: 8192,
            mean_tokens: 64,
            spread: 0.5,
            seed: 0,
            reasoning: Reasoning::None,
            think_token: false,
            knows_token_ids: true,
            api_key: None,
            token_ms: 0.0,
            first_token_ms: 0.0,
            max_running: 256,
            tokens_per_chunk: 1,
            kv_cache_tokens: 4 << 20,
        }
    }
}

impl Answer {
    /// The rule by which answers follow from prompts.
    pub(super) fn rule(&self) -> AnswerRule {
        AnswerRule {
            length: Length::Even { mean: self.mean_tokens, spread: self.spread },
            reasoning_share: if self.reasoning == Reasoning::None { 0.0 } else { 0.6 },
            think_token: self.think_token,
            seed: self.seed,
        }
    }

    /// What the face says of the model.
    pub(super) fn served(&self) -> Served {
        Served {
            model: self.model.clone(),
            max_model_len: self.max_model_len,
            reasoning: self.reasoning,
            knows_token_ids: self.knows_token_ids,
            api_key: self.api_key.clone(),
        }
    }
}
