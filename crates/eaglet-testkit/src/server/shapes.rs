//! The JSON of generated replies, whole and as events, in vLLM's field order.
//!
//! Pure. One [`Choice`] follows one plan and turns its ids into text, so streamed and whole replies cannot differ.

use serde_json::{Map, Value, json};

use super::{
    answer::{Answer, Part, Plan},
    api::{CREATED, Job, Kind},
    vocabulary::{THINK_CLOSE, TextStream, bytes_of},
};

const FINGERPRINT: &str = "vllm-0.32.0-scripted";

/// Text and ids of some consecutive tokens of one choice.
#[derive(Debug, Default)]
pub(super) struct Delta {
    reasoning: String,
    content: String,
    ids: Vec<u32>,
    ended: bool,
}

/// One choice on its way.
pub(super) struct Choice<'j> {
    plan: &'j Plan,
    kind: Kind,
    hide_think: bool,
    text: TextStream,
    next: usize,
}

impl<'j> Choice<'j> {
    pub(super) fn all(job: &'j Job) -> Vec<Self> {
        let mut text = TextStream::default();
        for &id in job.begun() {
            // Only the bytes of an unfinished character stay behind.
            text.push(id);
        }
        job.plans
            .iter()
            .map(|plan| Self { plan, kind: job.kind, hide_think: job.hide_think, text: text.clone(), next: 0 })
            .collect()
    }

    /// The next `count` tokens, fewer at the end, `None` after it.
    pub(super) fn advance(&mut self, count: usize) -> Option<Delta> {
        let end = (self.next + count).min(self.plan.ids.len());
        if self.next == end {
            return None;
        }
        let mut delta = Delta {
            ids: self.plan.ids[self.next..end].to_vec(),
            ended: end == self.plan.ids.len(),
            ..Delta::default()
        };
        let mut part = Part::Content;
        for index in self.next..end {
            let id = self.plan.ids[index];
            match self.part(index) {
                Part::Hidden => {}
                shown => {
                    part = shown;
                    delta.text(part).push_str(&self.text.push(id));
                }
            }
        }
        if delta.ended {
            delta.text(part).push_str(&self.text.finish());
        }
        self.next = end;
        Some(delta)
    }

    /// Plain completions show all but the end token, and special ones if they are to be skipped.
    fn part(&self, index: usize) -> Part {
        match (self.kind, self.plan.part(index)) {
            (Kind::Chat, part) => part,
            (Kind::Completion, Part::Hidden) if index + 1 == self.plan.ids.len() && is_end(self.plan.ids[index]) => {
                Part::Hidden
            }
            (Kind::Completion, Part::Hidden) if self.hide_think && self.plan.ids[index] == THINK_CLOSE => Part::Hidden,
            (Kind::Completion, _) => Part::Content,
        }
    }
}

fn is_end(id: u32) -> bool {
    bytes_of(id) == b"<|end|>"
}

impl Delta {
    fn text(&mut self, part: Part) -> &mut String {
        if part == Part::Reasoning { &mut self.reasoning } else { &mut self.content }
    }
}

fn usage(job: &Job) -> Value {
    let completion: usize = job.plans.iter().map(|plan| plan.ids.len()).sum();
    let prompt = job.prompt.len();
    json!({"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion,
           "prompt_tokens_details": null, "completion_tokens_details": null})
}

fn ids_if(asked: bool, ids: &[u32]) -> Value {
    if asked { json!(ids) } else { Value::Null }
}

/// The whole reply.
pub(super) fn whole(answer: &Answer, job: &Job) -> Value {
    let choices: Vec<Value> = Choice::all(job)
        .into_iter()
        .enumerate()
        .map(|(index, mut choice)| {
            let plan = choice.plan;
            let delta = choice.advance(plan.ids.len()).unwrap_or_default();
            match job.kind {
                Kind::Chat => chat_choice(answer, job, index, plan, delta),
                Kind::Completion => completion_choice(job, index, plan, delta),
            }
        })
        .collect();
    match job.kind {
        Kind::Chat => json!({
            "id": job.id, "object": "chat.completion", "created": CREATED, "model": answer.model, "choices": choices,
            "service_tier": null, "system_fingerprint": FINGERPRINT, "usage": usage(job), "prompt_logprobs": null,
            "prompt_token_ids": ids_if(job.return_token_ids, &job.prompt), "prompt_text": null, "kv_transfer_params": null,
        }),
        Kind::Completion => json!({
            "id": job.id, "object": "text_completion", "created": CREATED, "model": answer.model, "choices": choices,
            "service_tier": null, "system_fingerprint": FINGERPRINT, "usage": usage(job), "kv_transfer_params": null,
        }),
    }
}

fn chat_choice(answer: &Answer, job: &Job, index: usize, plan: &Plan, delta: Delta) -> Value {
    let split = answer.reasoning.field().is_some();
    let content = if split && delta.content.is_empty() { Value::Null } else { json!(delta.content) };
    let reasoning = if split && !delta.reasoning.is_empty() { json!(delta.reasoning) } else { Value::Null };
    let mut message = json!({"role": "assistant", "content": content, "refusal": null, "annotations": null, "audio": null,
                             "function_call": null});
    message[answer.reasoning.field().unwrap_or("reasoning")] = reasoning;
    json!({"index": index, "message": message, "logprobs": null, "finish_reason": plan.finish.name(), "stop_reason": null,
           "token_ids": ids_if(job.return_token_ids, &plan.ids), "routed_experts": null})
}

fn completion_choice(job: &Job, index: usize, plan: &Plan, delta: Delta) -> Value {
    json!({"index": index, "text": delta.content, "logprobs": null, "finish_reason": plan.finish.name(), "stop_reason": null,
           "token_ids": ids_if(job.return_token_ids, &plan.ids), "prompt_logprobs": null,
           "prompt_token_ids": ids_if(job.return_token_ids, &job.prompt)})
}

fn event(answer: &Answer, job: &Job, choices: Value) -> Value {
    let object = if job.kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" };
    json!({"id": job.id, "object": object, "created": CREATED, "model": answer.model, "choices": choices})
}

/// The first event of a chat choice: the role, and the prompt's ids beside the choices. Completions have none.
pub(super) fn opening(answer: &Answer, job: &Job, index: usize) -> Option<Value> {
    if job.kind == Kind::Completion {
        return None;
    }
    let delta = json!({"role": "assistant", "content": ""});
    let mut opening =
        event(answer, job, json!([{"index": index, "delta": delta, "logprobs": null, "finish_reason": null}]));
    opening["prompt_token_ids"] = ids_if(job.return_token_ids, &job.prompt);
    opening["prompt_text"] = Value::Null;
    Some(opening)
}

/// An event with the tokens of `delta`. `first` is whether it is the choice's first.
pub(super) fn progress(answer: &Answer, job: &Job, index: usize, delta: Delta, first: bool) -> Value {
    let finish = if delta.ended { json!(job.plans[index].finish.name()) } else { Value::Null };
    let token_ids = ids_if(job.return_token_ids, &delta.ids);
    let mut choice = match job.kind {
        Kind::Chat => {
            json!({"index": index, "delta": chat_delta(answer, &delta), "logprobs": null, "finish_reason": finish})
        }
        Kind::Completion => {
            json!({"index": index, "text": delta.content, "logprobs": null, "finish_reason": finish})
        }
    };
    if delta.ended {
        choice["stop_reason"] = Value::Null;
    }
    choice["token_ids"] = token_ids;
    if first && job.kind == Kind::Completion {
        choice["prompt_token_ids"] = ids_if(job.return_token_ids, &job.prompt);
    }
    event(answer, job, json!([choice]))
}

fn chat_delta(answer: &Answer, delta: &Delta) -> Value {
    let mut fields = Map::new();
    if let Some(field) = answer.reasoning.field().filter(|_| !delta.reasoning.is_empty()) {
        fields.insert(field.to_owned(), json!(delta.reasoning));
    }
    if !delta.content.is_empty() || fields.is_empty() {
        fields.insert("content".to_owned(), json!(delta.content));
    }
    Value::Object(fields)
}

/// The event with the usage and no choices.
pub(super) fn closing_usage(answer: &Answer, job: &Job) -> Value {
    let mut closing = event(answer, job, json!([]));
    closing["usage"] = usage(job);
    closing["system_fingerprint"] = json!(FINGERPRINT);
    closing
}
