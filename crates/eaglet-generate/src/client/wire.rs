//! The JSON that servers send: typed, borrowed from the buffer, tolerant of what is missing.
//!
//! Field names across servers: `design` notes in `docs/servers.md`. A `Value` tree costs 20 % more on the hot path.

use eaglet_core::response::Usage;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::borrow::Cow;

/// Text borrowed from the buffer when it holds no escapes (a bare `Option<Cow>` would always be copied).
#[derive(Deserialize, Debug)]
pub struct Text<'a>(#[serde(borrow)] pub Cow<'a, str>);

/// A chunk of a stream or a whole reply; which one, its choices tell.
#[derive(Deserialize, Debug, Default)]
#[serde(default)]
pub struct Reply<'a> {
    /// The server's id of the reply.
    #[serde(borrow)]
    pub id: Option<Text<'a>>,
    /// Mostly one; empty or missing in a usage chunk.
    #[serde(borrow)]
    pub choices: Option<Vec<Choice<'a>>>,
    /// Token counts, in whichever chunk has them.
    pub usage: Option<WireUsage>,
    /// vLLM's chat API: ids of the prompt, at the root.
    pub prompt_token_ids: Option<Vec<u32>>,
    /// An error inside a reply that began as 200.
    #[serde(borrow)]
    pub error: Option<&'a RawValue>,
    /// SGLang's extension.
    pub sglext: Option<SglExt>,
    /// llama.cpp's extension (`"verbose": true`).
    #[serde(rename = "__verbose")]
    pub verbose: Option<Verbose>,
}

/// One choice.
#[derive(Deserialize, Debug, Default)]
#[serde(default)]
pub struct Choice<'a> {
    /// Of a stream.
    #[serde(borrow)]
    pub delta: Option<Turn<'a>>,
    /// Of a whole reply.
    #[serde(borrow)]
    pub message: Option<Turn<'a>>,
    /// Of a plain completion, streamed or whole.
    #[serde(borrow)]
    pub text: Option<Text<'a>>,
    /// A string from most servers, an object from some; null until the end.
    #[serde(borrow)]
    pub finish_reason: Option<&'a RawValue>,
    /// Stop string or stop token.
    #[serde(borrow)]
    pub stop_reason: Option<&'a RawValue>,
    /// vLLM, TensorRT-LLM, SGLang: ids of the completion.
    pub token_ids: Option<Vec<u32>>,
    /// SGLang: ids of the prompt, in the choice.
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// Message or delta.
#[derive(Deserialize, Debug, Default)]
#[serde(default)]
pub struct Turn<'a> {
    /// Text.
    #[serde(borrow)]
    pub content: Option<Text<'a>>,
    /// Reasoning, newer name.
    #[serde(borrow)]
    pub reasoning: Option<Text<'a>>,
    /// Reasoning, older name.
    #[serde(borrow)]
    pub reasoning_content: Option<Text<'a>>,
    /// Calls, or pieces of them.
    #[serde(borrow)]
    pub tool_calls: Option<&'a RawValue>,
}

/// Usage with its optional details.
#[derive(Deserialize, Debug, Default, Clone, Copy)]
#[serde(default)]
pub struct WireUsage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    completion_tokens_details: Option<WireDetails>,
}

#[derive(Deserialize, Debug, Default, Clone, Copy)]
#[serde(default)]
struct WireDetails {
    reasoning_tokens: Option<u64>,
}

impl From<WireUsage> for Usage {
    fn from(wire: WireUsage) -> Self {
        Usage {
            prompt_tokens: wire.prompt_tokens,
            completion_tokens: wire.completion_tokens,
            reasoning_tokens: wire.completion_tokens_details.and_then(|d| d.reasoning_tokens),
        }
    }
}

/// SGLang's `sglext`.
#[derive(Deserialize, Debug, Default)]
#[serde(default)]
pub struct SglExt {
    /// Ids of the prompt.
    pub input_ids: Option<Vec<u32>>,
    /// Ids of the completion, per choice.
    pub output_ids: Option<Vec<Vec<u32>>>,
}

/// llama.cpp's `__verbose`.
#[derive(Deserialize, Debug, Default)]
#[serde(default)]
pub struct Verbose {
    /// Ids of the completion.
    pub tokens: Option<Vec<u32>>,
}
