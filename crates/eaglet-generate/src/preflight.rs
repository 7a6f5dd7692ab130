//! Checks before GPU time is spent; `eaglet doctor` shows the same ones. Each finding says what to do.

use crate::client::request::RequestTemplate;
use crate::client::{AttemptFailure, Client, InFlight, Mode};
use crate::run::GenerateSettings;
use crate::server_info::ServerInfo;
use crate::server_state::ServerState;
use eaglet_core::outcome::Cause;
use eaglet_core::prompt::{Message, Role};
use serde::Serialize;
use std::path::Path;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// As it should be.
    Ok,
    /// The run can start, but somebody should know.
    Warning,
    /// The run would fail.
    Failure,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// What was checked.
    pub check: &'static str,
    /// What was found.
    pub found: String,
    /// What to do, if something is to be done.
    pub hint: Option<String>,
}

impl Finding {
    /// All is well.
    pub fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Finding { level: Level::Ok, check, found: found.into(), hint: None }
    }

    /// Worth knowing.
    pub fn warning(check: &'static str, found: impl Into<String>, hint: impl Into<String>) -> Self {
        Finding { level: Level::Warning, check, found: found.into(), hint: Some(hint.into()) }
    }

    /// The run would fail.
    pub fn failure(check: &'static str, found: impl Into<String>, hint: impl Into<String>) -> Self {
        Finding { level: Level::Failure, check, found: found.into(), hint: Some(hint.into()) }
    }
}

/// Whether the limits asked for fit the server's context. Pure.
pub fn check_context(settings: &GenerateSettings, server: &ServerInfo) -> Finding {
    const CHECK: &str = "context length";
    let Some(context) = server.max_model_len else {
        return Finding::ok(CHECK, "the server does not say how long its context is");
    };
    match (settings.max_completion_tokens, settings.max_seq_len) {
        (Some(tokens), _) if tokens >= context => Finding::failure(
            CHECK,
            format!(
                "--max-completion-tokens {tokens} leaves no room for a prompt in the server's context of {context} tokens"
            ),
            format!("lower it below {context}, or start the server with a longer context (vLLM: --max-model-len)"),
        ),
        (_, Some(seq)) if seq > context => Finding::warning(
            CHECK,
            format!("--max-seq-len {seq} is more than the server's context of {context} tokens"),
            format!(
                "answers end at {context} tokens with their prompt; start the server with --max-model-len {seq} for the whole length"
            ),
        ),
        (Some(tokens), Some(seq)) if tokens >= seq => Finding::failure(
            CHECK,
            format!("--max-completion-tokens {tokens} leaves no room for a prompt in --max-seq-len {seq}"),
            "raise --max-seq-len or lower --max-completion-tokens",
        ),
        _ => Finding::ok(CHECK, format!("{context} tokens")),
    }
}

/// Bytes a stage will need, and where the figure comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DiskNeed {
    /// For `raw_responses.jsonl`, at most.
    pub responses_bytes: u64,
    /// For the hidden states that follow, at most; `None` without the model's width.
    pub hidden_states_bytes: Option<u64>,
}

/// Tokens an answer has at most when nobody sets a limit; the estimate needs some figure.
const COMPLETION_TOKENS_GUESS: u64 = 4096;
/// Bytes of a record that do not grow with its answer.
const RECORD_BYTES: u64 = 1200;
/// Bytes of a record per token: about 4 of text, 7 of its id, and escapes.
const RECORD_BYTES_PER_TOKEN: u64 = 12;
/// Three auxiliary layers and the last one, two bytes a value (bf16).
const HIDDEN_BYTES_PER_TOKEN_AND_WIDTH: u64 = 4 * 2;

/// Upper bounds of the disk need. `prompt_bytes` is the sum over the prompts left. Pure.
pub fn disk_need(prompts: u64, prompt_bytes: u64, settings: &GenerateSettings, hidden_size: Option<u64>) -> DiskNeed {
    let tokens = prompts * settings.max_completion_tokens.unwrap_or(COMPLETION_TOKENS_GUESS);
    // Prompt text is stored once as text and once as ids; four bytes a token is usual.
    let prompt_tokens = prompt_bytes / 4;
    DiskNeed {
        responses_bytes: prompts * RECORD_BYTES + prompt_bytes + prompt_tokens * 7 + tokens * RECORD_BYTES_PER_TOKEN,
        hidden_states_bytes: hidden_size
            .map(|width| (tokens + prompt_tokens) * width * HIDDEN_BYTES_PER_TOKEN_AND_WIDTH),
    }
}

/// Whether there is room. Pure.
pub fn check_disk(need: &DiskNeed, free_bytes: u64) -> Finding {
    const CHECK: &str = "disk";
    let gb = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
    let hidden =
        need.hidden_states_bytes.map_or("unknown (no config.json with hidden_size at --model-path)".to_owned(), gb);
    let found = format!(
        "{} free; responses need at most {}, the hidden states after them at most {hidden}",
        gb(free_bytes),
        gb(need.responses_bytes)
    );
    if need.responses_bytes > free_bytes {
        return Finding::warning(
            CHECK,
            found,
            "a full disk pauses the run and loses nothing; make room or choose another --output-dir",
        );
    }
    if need.hidden_states_bytes.is_some_and(|bytes| bytes > free_bytes) {
        return Finding::warning(
            CHECK,
            found,
            "the responses fit; for the hidden states plan another disk or the ring mode, which makes and deletes them in turns",
        );
    }
    Finding::ok(CHECK, found)
}

/// `hidden_size` of the model at a local path (in `text_config` for multi-modal models).
pub fn hidden_size(model_path: &Path) -> Option<u64> {
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(model_path.join("config.json")).ok()?).ok()?;
    config.get("hidden_size").or(config.get("text_config")?.get("hidden_size")).and_then(serde_json::Value::as_u64)
}

/// Asks for one short answer, end to end.
pub async fn probe(client: &Client, template: &RequestTemplate, settings: &GenerateSettings) -> Finding {
    const CHECK: &str = "probe answer";
    /// Enough to see text and ids; vLLM's first request may take half a minute to warm up, which the first-byte time-out allows for.
    const PROBE_TOKENS: u64 = 8;
    let body = template.render(&[Message::text(Role::User, "Say OK.")], None, Some(PROBE_TOKENS));
    let (state, in_flight) = (ServerState::default(), InFlight::default());
    match client.chat(body.into(), settings.mode, &settings.answers, &state, &in_flight).await {
        Ok((answer, _)) => {
            let ids = match (&answer.prompt_token_ids, &answer.token_ids) {
                (Some(_), Some(_)) => "with exact token ids",
                _ => "without token ids: training examples will be made from the text",
            };
            let streamed = if settings.mode == Mode::Stream { "streamed" } else { "whole" };
            Finding::ok(CHECK, format!("{streamed}, after {:.2} s, {ids}", answer.latency_s))
        }
        Err(failure) => probe_failure(CHECK, &failure),
    }
}

fn probe_failure(check: &'static str, failure: &AttemptFailure) -> Finding {
    let found = format!("{}: {}", failure.cause.label(), failure.detail);
    match failure.cause {
        Cause::Unauthorized => {
            Finding::failure(check, found, "name the environment variable that holds the key with --api-key-env NAME")
        }
        Cause::Connect | Cause::Tls => Finding::failure(check, found, "is the server still up?"),
        Cause::BadRequest => Finding::warning(
            check,
            found,
            "the server refuses the request; check the sampling flags and --extra-body, and try --no-token-ids if it names an unknown field",
        ),
        _ => Finding::warning(check, found, "the run goes on and stops by itself if every prompt fails like this"),
    }
}

#[cfg(test)]
mod tests;
