//! The JSON of generated replies, whole and as events, in vLLM's field order.
//!
//! Pure. One [`Choice`] follows one plan and turns its ids into text, so streamed and whole replies cannot differ.

use serde_json::{Map, Value, json};

use crate::{
    answer::{Finish, Part, Token},
    api::{CREATED, Job, Kind, Served},
    http::{LAST_CHUNK, push_chunk},
    vocabulary::{EOS, TextStream},
};

/// The headers of an event stream.
pub const STREAM_HEADERS: [(&str, &str); 3] =
    [("server", "uvicorn"), ("content-type", "text/event-stream; charset=utf-8"), ("transfer-encoding", "chunked")];
const FINGERPRINT: &str = "vllm-0.32.0-simulated";

/// Text and ids of some consecutive tokens of one choice.
#[derive(Debug, Default)]
pub struct Delta {
    reasoning: String,
    content: String,
    ids: Vec<u32>,
    finish: Option<Finish>,
}

/// One choice on its way: tokens in, texts out.
#[derive(Debug)]
pub struct Choice {
    kind: Kind,
    text: TextStream,
    last: Part,
}

impl Choice {
    /// The choices of a job, each after the part of the answer that the prompt holds already.
    pub fn all(job: &Job) -> Vec<Self> {
        let mut text = TextStream::default();
        for &id in job.begun() {
            // Only the bytes of an unfinished character stay behind.
            text.push(id);
        }
        (0..job.choices).map(|_| Self { kind: job.kind, text: text.clone(), last: Part::Content }).collect()
    }

    /// The next tokens; with `finish` the last ones.
    pub fn take(&mut self, tokens: &[Token], finish: Option<Finish>) -> Delta {
        let mut delta = Delta { ids: tokens.iter().map(|token| token.id).collect(), finish, ..Delta::default() };
        for (index, token) in tokens.iter().enumerate() {
            let is_last = finish.is_some() && index + 1 == tokens.len();
            match self.part(token, is_last) {
                Part::Hidden => {}
                shown => {
                    self.last = shown;
                    delta.text(shown).push_str(&self.text.push(token.id));
                }
            }
        }
        if finish.is_some() {
            let rest = self.text.finish();
            delta.text(self.last).push_str(&rest);
        }
        delta
    }

    /// Plain completions show all but the end token.
    fn part(&self, token: &Token, is_last: bool) -> Part {
        match (self.kind, token.part) {
            (Kind::Chat, part) => part,
            (Kind::Completion, Part::Hidden) if is_last && token.id == EOS => Part::Hidden,
            (Kind::Completion, _) => Part::Content,
        }
    }
}

impl Delta {
    /// How many tokens are in it.
    pub fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// Adds what came after it.
    pub fn append(&mut self, later: Delta) {
        self.reasoning.push_str(&later.reasoning);
        self.content.push_str(&later.content);
        self.ids.extend(later.ids);
        self.finish = later.finish;
    }

    fn finish_reason(&self) -> Value {
        self.finish.map_or(Value::Null, |finish| json!(finish.name()))
    }

    fn text(&mut self, part: Part) -> &mut String {
        if part == Part::Reasoning { &mut self.reasoning } else { &mut self.content }
    }
}

fn usage(job: &Job, completion: usize) -> Value {
    let prompt = job.prompt.len();
    json!({"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion,
           "prompt_tokens_details": null, "completion_tokens_details": null})
}

fn ids_if(asked: bool, ids: &[u32]) -> Value {
    if asked { json!(ids) } else { Value::Null }
}

/// The whole reply, from one delta for each choice.
pub fn whole(served: &Served, job: &Job, deltas: &[Delta]) -> Value {
    let usage = usage(job, deltas.iter().map(Delta::tokens).sum());
    let choice = |(index, delta)| match job.kind {
        Kind::Chat => chat_choice(served, job, index, delta),
        Kind::Completion => completion_choice(job, index, delta),
    };
    let choices: Vec<Value> = deltas.iter().enumerate().map(choice).collect();
    match job.kind {
        Kind::Chat => json!({
            "id": job.id, "object": "chat.completion", "created": CREATED, "model": served.model, "choices": choices,
            "service_tier": null, "system_fingerprint": FINGERPRINT, "usage": usage, "prompt_logprobs": null,
            "prompt_token_ids": ids_if(job.return_token_ids, &job.prompt), "prompt_text": null, "kv_transfer_params": null,
        }),
        Kind::Completion => json!({
            "id": job.id, "object": "text_completion", "created": CREATED, "model": served.model, "choices": choices,
            "service_tier": null, "system_fingerprint": FINGERPRINT, "usage": usage, "kv_transfer_params": null,
        }),
    }
}

fn chat_choice(served: &Served, job: &Job, index: usize, delta: &Delta) -> Value {
    let split = served.reasoning.field().is_some();
    let content = if split && delta.content.is_empty() { Value::Null } else { json!(delta.content) };
    let reasoning = if split && !delta.reasoning.is_empty() { json!(delta.reasoning) } else { Value::Null };
    let mut message = json!({"role": "assistant", "content": content, "refusal": null, "annotations": null, "audio": null,
                             "function_call": null});
    message[served.reasoning.field().unwrap_or("reasoning")] = reasoning;
    json!({"index": index, "message": message, "logprobs": null, "finish_reason": delta.finish_reason(), "stop_reason": null,
           "token_ids": ids_if(job.return_token_ids, &delta.ids), "routed_experts": null})
}

fn completion_choice(job: &Job, index: usize, delta: &Delta) -> Value {
    json!({"index": index, "text": delta.content, "logprobs": null, "finish_reason": delta.finish_reason(), "stop_reason": null,
           "token_ids": ids_if(job.return_token_ids, &delta.ids), "prompt_logprobs": null,
           "prompt_token_ids": ids_if(job.return_token_ids, &job.prompt)})
}

fn event(served: &Served, job: &Job, choices: Value) -> Value {
    let object = if job.kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" };
    json!({"id": job.id, "object": object, "created": CREATED, "model": served.model, "choices": choices})
}

/// The first event of a chat choice: the role, and the prompt's ids beside the choices. Completions have none.
pub fn opening(served: &Served, job: &Job, index: usize) -> Option<Value> {
    if job.kind == Kind::Completion {
        return None;
    }
    let delta = json!({"role": "assistant", "content": ""});
    let mut opening =
        event(served, job, json!([{"index": index, "delta": delta, "logprobs": null, "finish_reason": null}]));
    opening["prompt_token_ids"] = ids_if(job.return_token_ids, &job.prompt);
    opening["prompt_text"] = Value::Null;
    Some(opening)
}

/// An event with the tokens of `delta`. `first` is whether it is the choice's first.
pub fn progress(served: &Served, job: &Job, index: usize, delta: &Delta, first: bool) -> Value {
    let finish = delta.finish_reason();
    let token_ids = ids_if(job.return_token_ids, &delta.ids);
    let mut choice = match job.kind {
        Kind::Chat => {
            json!({"index": index, "delta": chat_delta(served, delta), "logprobs": null, "finish_reason": finish})
        }
        Kind::Completion => {
            json!({"index": index, "text": delta.content, "logprobs": null, "finish_reason": finish})
        }
    };
    if delta.finish.is_some() {
        choice["stop_reason"] = Value::Null;
    }
    choice["token_ids"] = token_ids;
    if first && job.kind == Kind::Completion {
        choice["prompt_token_ids"] = ids_if(job.return_token_ids, &job.prompt);
    }
    event(served, job, json!([choice]))
}

fn chat_delta(served: &Served, delta: &Delta) -> Value {
    let mut fields = Map::new();
    if let Some(field) = served.reasoning.field().filter(|_| !delta.reasoning.is_empty()) {
        fields.insert(field.to_owned(), json!(delta.reasoning));
    }
    if !delta.content.is_empty() || fields.is_empty() {
        fields.insert("content".to_owned(), json!(delta.content));
    }
    Value::Object(fields)
}

/// The event with the usage and no choices.
fn closing_usage(served: &Served, job: &Job, completion_tokens: usize) -> Value {
    let mut closing = event(served, job, json!([]));
    closing["usage"] = usage(job, completion_tokens);
    closing["system_fingerprint"] = json!(FINGERPRINT);
    closing
}

/// The last bytes of a stream: the usage where it was asked for, the end mark, the last chunk.
pub fn ending(served: &Served, job: &Job, completion_tokens: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    if job.include_usage {
        push_event(&mut bytes, &closing_usage(served, job, completion_tokens).to_string());
    }
    push_event(&mut bytes, "[DONE]");
    bytes.extend_from_slice(LAST_CHUNK);
    bytes
}

/// Appends one event, as a chunk of its own.
pub fn push_event(out: &mut Vec<u8>, data: &str) {
    push_chunk(out, format!("data: {data}\n\n").as_bytes());
}
