//! The face: routes, request checks and error bodies as vLLM 0.32 has them.
//!
//! Pure: a request goes in, a whole reply or a [`Job`] comes out. What a job's reply looks like is in `shapes`, its pace in
//! `face`. Fields that are not read here (temperature, stop strings, log probabilities) are accepted and have no effect.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::{
    answer::{Limits, Reasoning, split_prompt},
    http::{Request, head},
    vocabulary::{ASSISTANT, BOS, Control, EOS, SYSTEM, TOOL, USER, decode, encode},
};

const VERSION: &str = "0.32.0";
/// The creation time in every reply, in seconds since 1970: fixed, so that replies repeat.
pub const CREATED: u64 = 1_760_000_000;
/// The most answers to one request.
const MAX_CHOICES: usize = 128;
/// The path of chat completions.
pub const CHAT: &str = "/v1/chat/completions";
/// The path of plain completions.
pub const COMPLETIONS: &str = "/v1/completions";

/// What is served, as the face tells it.
#[derive(Clone, Debug)]
pub struct Served {
    /// The one model this server has.
    pub model: String,
    /// Prompt and answer together, in tokens.
    pub max_model_len: usize,
    /// Where reasoning goes.
    pub reasoning: Reasoning,
    /// Whether `return_token_ids` is understood; other servers ignore it.
    pub knows_token_ids: bool,
    /// When set, requests under `/v1/` without this bearer token get 401.
    pub api_key: Option<String>,
}

/// What the gauges show.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gauges {
    /// Sequences in the batch.
    pub running: usize,
    /// Sequences in the queue.
    pub waiting: usize,
    /// From 0 to 1.
    pub kv_cache_usage: f64,
    /// Totals since the start.
    pub counters: Counters,
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Tokens of answers.
    pub generation_tokens: u64,
    /// Sequences thrown out for want of blocks.
    pub preemptions: u64,
    /// Answers that ended by themselves.
    pub stopped: u64,
    /// Answers that ended by the limit of their request.
    pub cut_by_length: u64,
}

/// A whole reply.
#[derive(Clone, Debug)]
pub struct Reply {
    /// The status.
    pub status: u16,
    /// The media type.
    pub content_type: &'static str,
    /// Headers beyond the usual ones.
    pub headers: Vec<(&'static str, String)>,
    /// The body.
    pub body: Vec<u8>,
}

impl Reply {
    /// The bytes on the wire.
    pub fn bytes(&self) -> Vec<u8> {
        let length = self.body.len().to_string();
        let mut headers =
            vec![("server", "uvicorn"), ("content-type", self.content_type), ("content-length", length.as_str())];
        headers.extend(self.headers.iter().map(|(name, value)| (*name, value.as_str())));
        let mut bytes = head(self.status, &headers);
        bytes.extend_from_slice(&self.body);
        bytes
    }
}

/// What a request leads to.
#[derive(Debug)]
pub enum Routed {
    /// This reply.
    Reply(Reply),
    /// This generation.
    Generate(Box<Job>),
}

/// An accepted generation.
#[derive(Debug)]
pub struct Job {
    /// Which of the two APIs.
    pub kind: Kind,
    /// The id of the reply.
    pub id: String,
    /// The ids of the rendered prompt.
    pub prompt: Vec<u32>,
    /// How many answers.
    pub choices: usize,
    /// Whether the reply is an event stream.
    pub stream: bool,
    /// Whether the stream ends with the usage.
    pub include_usage: bool,
    /// Whether ids are in the reply.
    pub return_token_ids: bool,
    limits: Limits,
}

/// The two APIs that generate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// From messages.
    Chat,
    /// From a text or ids.
    Completion,
}

/// A reply of JSON.
pub fn json_reply(status: u16, body: &Value) -> Reply {
    Reply { status, content_type: "application/json", headers: Vec::new(), body: body.to_string().into_bytes() }
}

/// A refusal with vLLM's error object.
pub fn refuse(status: u16, kind: &str, param: Value, message: &str) -> Reply {
    json_reply(status, &json!({"error": {"message": message, "type": kind, "param": param, "code": status}}))
}

fn bad_request(param: Value, message: &str) -> Reply {
    refuse(400, "BadRequestError", param, message)
}

/// A body that is no JSON or lacks a field; vLLM writes this type with a space.
fn bad_field(param: &str, message: &str) -> Reply {
    refuse(400, "Bad Request", json!(param), message)
}

/// What a request leads to. `number` makes the reply's id.
pub fn route(served: &Served, gauges: &Gauges, request: &Request, number: u64) -> Routed {
    let method = match request.path.as_str() {
        "/health" | "/version" | "/v1/models" | "/metrics" => "GET",
        CHAT | COMPLETIONS | "/tokenize" | "/detokenize" => "POST",
        _ => return Routed::Reply(json_reply(404, &json!({"detail": "Not Found"}))),
    };
    if request.method != method {
        return Routed::Reply(json_reply(405, &json!({"detail": "Method Not Allowed"})));
    }
    if !authorized(served, request) {
        return Routed::Reply(json_reply(401, &json!({"error": "Unauthorized"})));
    }
    if method == "GET" {
        return Routed::Reply(look(served, gauges, &request.path));
    }
    posted(served, request, number).unwrap_or_else(Routed::Reply)
}

fn authorized(served: &Served, request: &Request) -> bool {
    let Some(key) = &served.api_key else {
        return true;
    };
    !request.path.starts_with("/v1/") || request.header("authorization") == Some(&format!("Bearer {key}"))
}

fn look(served: &Served, gauges: &Gauges, path: &str) -> Reply {
    match path {
        "/health" => text_reply("text/plain", Vec::new()),
        "/version" => json_reply(200, &json!({"version": VERSION})),
        "/metrics" => exposition(&metrics(&served.model, gauges)),
        _ => json_reply(
            200,
            &json!({"object": "list", "data": [{
                "id": served.model, "object": "model", "created": CREATED, "owned_by": "vllm", "root": served.model,
                "parent": null, "max_model_len": served.max_model_len, "permission": [],
            }]}),
        ),
    }
}

fn text_reply(content_type: &'static str, body: Vec<u8>) -> Reply {
    Reply { status: 200, content_type, headers: Vec::new(), body }
}

/// A reply of Prometheus text.
pub fn exposition(text: &str) -> Reply {
    text_reply("text/plain; version=0.0.4; charset=utf-8", text.as_bytes().to_vec())
}

/// The gauges as vLLM's exposition.
pub fn metrics(model: &str, gauges: &Gauges) -> String {
    let counters = gauges.counters;
    let mut text = String::new();
    let mut metric = |name: &str, kind: &str, label: &str, value: f64| {
        let family = name.trim_end_matches("_total");
        let _ = writeln!(text, "# HELP vllm:{family} Made up.\n# TYPE vllm:{family} {kind}");
        let _ = writeln!(text, "vllm:{name}{{engine=\"0\",{label}model_name=\"{model}\"}} {value:?}");
        if kind == "counter" {
            let _ = writeln!(
                text,
                "vllm:{family}_created{{engine=\"0\",{label}model_name=\"{model}\"}} {:?}",
                CREATED as f64
            );
        }
    };
    metric("num_requests_running", "gauge", "", gauges.running as f64);
    metric("num_requests_waiting", "gauge", "", gauges.waiting as f64);
    metric("kv_cache_usage_perc", "gauge", "", gauges.kv_cache_usage);
    metric("num_preemptions_total", "counter", "", counters.preemptions as f64);
    metric("prompt_tokens_total", "counter", "", counters.prompt_tokens as f64);
    metric("generation_tokens_total", "counter", "", counters.generation_tokens as f64);
    metric("request_success_total", "counter", "finished_reason=\"stop\",", counters.stopped as f64);
    metric("request_success_total", "counter", "finished_reason=\"length\",", counters.cut_by_length as f64);
    text
}

fn posted(served: &Served, request: &Request, number: u64) -> Result<Routed, Reply> {
    let body: Value = serde_json::from_slice(&request.body)
        .map_err(|error| bad_field(&format!("body.{}", error.column()), &format!("JSON decode error: {error}")))?;
    let model = body.get("model").and_then(Value::as_str);
    if let Some(model) = model.filter(|model| *model != served.model) {
        let message = format!("The model `{model}` does not exist. Valid aliases: {}.", served.model);
        return Err(refuse(404, "NotFoundError", json!("model"), &message));
    }
    match request.path.as_str() {
        "/tokenize" => {
            let tokens = prompt_of(&body, if body.get("messages").is_some() { Kind::Chat } else { Kind::Completion })?;
            let reply = json!({"count": tokens.len(), "max_model_len": served.max_model_len, "tokens": tokens, "token_strs": null});
            Ok(Routed::Reply(json_reply(200, &reply)))
        }
        "/detokenize" => {
            let ids = body.get("tokens").and_then(ids_of).ok_or_else(|| bad_field("body.tokens", "Field required"))?;
            Ok(Routed::Reply(json_reply(200, &json!({"prompt": decode(&ids)}))))
        }
        path => {
            let kind = if path == CHAT { Kind::Chat } else { Kind::Completion };
            job(served, request, &body, kind, number).map(|job| Routed::Generate(Box::new(job)))
        }
    }
}

fn job(served: &Served, request: &Request, body: &Value, kind: Kind, number: u64) -> Result<Job, Reply> {
    let prompt = prompt_of(body, kind)?;
    let flag = |name: &str| body.get(name).and_then(Value::as_bool).unwrap_or(false);
    let max_tokens = allowed_tokens(served, body, kind, prompt.len())?;
    let min_tokens = count(body, "min_tokens")?.unwrap_or(0);
    if min_tokens > max_tokens {
        let message = format!("min_tokens must be at most max_tokens={max_tokens}, got {min_tokens}.");
        return Err(bad_request(json!("min_tokens"), &message));
    }
    let choices = count(body, "n")?.unwrap_or(1);
    if !(1..=MAX_CHOICES).contains(&choices) {
        return Err(bad_request(json!("n"), &format!("n must be from 1 to {MAX_CHOICES}, got {choices}.")));
    }
    let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
    let id = match request.header("x-request-id") {
        Some(given) => format!("{prefix}-{given}"),
        None => format!("{prefix}-{number:032x}"),
    };
    Ok(Job {
        kind,
        id,
        choices,
        prompt,
        stream: flag("stream"),
        include_usage: body.pointer("/stream_options/include_usage").and_then(Value::as_bool).unwrap_or(false),
        return_token_ids: flag("return_token_ids") && served.knows_token_ids,
        limits: Limits { max_tokens, min_tokens, ignore_eos: flag("ignore_eos"), choice: 0, seed: seed(body) },
    })
}

/// How many tokens the request may generate, or vLLM's refusal when prompt and answer cannot fit the context.
fn allowed_tokens(served: &Served, body: &Value, kind: Kind, prompt: usize) -> Result<usize, Reply> {
    let context = served.max_model_len;
    if prompt >= context {
        let least = context + 1;
        let message = format!(
            "This model's maximum context length is {context} tokens. However, your request has at least {least} input tokens. \
             Please reduce the length of the input messages. (parameter=input_tokens, value={least})"
        );
        return Err(bad_request(json!("input_tokens"), &message));
    }
    let names: &[&str] = if kind == Kind::Chat { &["max_completion_tokens", "max_tokens"] } else { &["max_tokens"] };
    for name in names {
        let Some(wanted) = count(body, name)? else {
            continue;
        };
        if wanted == 0 {
            return Err(bad_request(json!(name), &format!("{name} must be at least 1, got 0.")));
        }
        if prompt + wanted > context {
            let message = format!(
                "'max_tokens' or 'max_completion_tokens' is too large: {wanted}. This model's maximum context length is {context} tokens \
                 and your request has {prompt} input tokens ({wanted} > {context} - {prompt}). (parameter={name}, value={wanted})"
            );
            return Err(bad_request(json!(name), &message));
        }
        return Ok(wanted);
    }
    let room = context - prompt;
    Ok(if kind == Kind::Chat { room } else { room.min(16) })
}

fn count(body: &Value, name: &str) -> Result<Option<usize>, Reply> {
    match body.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64() {
            Some(number) => Ok(Some(number as usize)),
            None => Err(bad_field(&format!("body.{name}"), "Input should be a valid integer")),
        },
    }
}

/// The sampling seed; only its difference matters, so a negative one may wrap.
fn seed(body: &Value) -> u64 {
    body.get("seed").and_then(|seed| seed.as_u64().or(seed.as_i64().map(i64::cast_unsigned))).unwrap_or(0)
}

fn ids_of(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

fn prompt_of(body: &Value, kind: Kind) -> Result<Vec<u32>, Reply> {
    if kind == Kind::Chat {
        return chat_prompt(body);
    }
    let prompt = match body.get("prompt") {
        Some(Value::String(text)) => {
            let ids = encode(text, Control::Parsed);
            if ids.first() == Some(&BOS) { ids } else { [vec![BOS], ids].concat() }
        }
        Some(list @ Value::Array(_)) => ids_of(list)
            .ok_or_else(|| bad_field("body.prompt", "a text or one list of token ids is understood here"))?,
        _ => return Err(bad_field("body.prompt", "Field required")),
    };
    if prompt.is_empty() {
        return Err(bad_request(Value::Null, "The decoder prompt cannot be empty"));
    }
    Ok(prompt)
}

/// The ids of a rendered chat: a begin token, each message between its role and an end token, then the assistant's opening.
fn chat_prompt(body: &Value) -> Result<Vec<u32>, Reply> {
    let Some(messages) = body.get("messages").and_then(Value::as_array) else {
        return Err(bad_field("body.messages", "Field required"));
    };
    if messages.is_empty() {
        return Err(bad_request(Value::Null, "The list of messages is empty"));
    }
    let flag = |name: &str, default| body.get(name).and_then(Value::as_bool).unwrap_or(default);
    let mut ids = vec![BOS];
    for message in messages {
        ids.push(match message.get("role").and_then(Value::as_str) {
            Some("user") => USER,
            Some("assistant") => ASSISTANT,
            Some("system" | "developer") => SYSTEM,
            Some("tool") => TOOL,
            other => {
                return Err(bad_request(Value::Null, &format!("Unexpected message role: {other:?}")));
            }
        });
        ids.extend(encode(&message_text(message), Control::Plain));
        ids.push(EOS);
    }
    if flag("continue_final_message", false) {
        ids.pop();
    } else if flag("add_generation_prompt", true) {
        ids.push(ASSISTANT);
    }
    Ok(ids)
}

/// The text of a message, whether it is one string or a list of parts.
fn message_text(message: &Value) -> String {
    match message.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => parts.iter().filter_map(|part| part.get("text").and_then(Value::as_str)).collect(),
        _ => String::new(),
    }
}

impl Job {
    /// What the answer number `choice` may be.
    pub fn limits(&self, choice: usize) -> Limits {
        Limits { choice, ..self.limits }
    }

    /// The part of the answer that was already in the prompt; its last bytes may be half a character.
    pub fn begun(&self) -> &[u32] {
        split_prompt(&self.prompt).1
    }
}
