//! Replies rendered in advance, for measuring clients.
//!
//! The server must cost far less than the client it measures, so a reply is one buffer, written in slices that end at event
//! boundaries. The texts mean nothing; the JSON around them has the size and the fields of vLLM's.
//!
//! Invariants: 64 replies taken in turn, so every run of n requests gets the same replies; their mean length is exactly the one
//! asked for when it is a multiple of 126.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;
use tokio::{sync::watch, task::yield_now, time::MissedTickBehavior};

use eaglet_serve::{
    api::CREATED,
    http::{LAST_CHUNK, Request, head},
    random::Random,
    shapes::push_event,
    vocabulary::{EOS, bytes_of, draw},
};

use super::{Wire, serve::Ticket};

const REPLIES: usize = 64;
const PROMPT_TOKENS: usize = 300;

/// How the pre-rendered replies are made and sent.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Bench {
    /// Mean length in tokens; lengths lie between half and one and a half of it.
    pub mean_tokens: usize,
    /// Milliseconds between two events of a stream, all streams on one tick as an engine's steps are; 0 sends each event as soon
    /// as the one before is written.
    pub event_ms: u64,
    /// Milliseconds before a whole reply is sent.
    pub whole_ms: u64,
}

impl Default for Bench {
    fn default() -> Self {
        Self { mean_tokens: 1263, event_ms: 0, whole_ms: 0 }
    }
}

/// The replies, and whose turn it is.
#[derive(Debug)]
pub(super) struct Replies {
    settings: Bench,
    replies: Vec<Rendered>,
    next: AtomicUsize,
    tick: watch::Sender<u64>,
}

#[derive(Debug)]
struct Rendered {
    /// Without and with token ids.
    whole: [Bytes; 2],
    stream: [Slices; 2],
}

/// A stream on the wire: the head, then one slice per event.
#[derive(Debug, Default)]
struct Slices {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Slices {
    fn cut(&mut self) {
        self.ends.push(self.bytes.len());
    }

    fn slice(&self, from: usize, to: usize) -> &[u8] {
        let start = from.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start..self.ends[to - 1]]
    }
}

impl Replies {
    pub(super) fn new(settings: Bench, model: &str) -> Arc<Self> {
        // 29 is odd, so this order visits every length once, short and long ones mixed.
        let replies =
            (0..REPLIES).map(|turn| render(model, length(&settings, turn * 29 % REPLIES), turn as u64)).collect();
        let (tick, _) = watch::channel(0);
        Arc::new(Self { settings, replies, next: AtomicUsize::new(0), tick })
    }

    /// Drives all paced streams; runs until the server stops.
    pub(super) async fn beat(&self) {
        if self.settings.event_ms == 0 {
            return;
        }
        let mut interval = tokio::time::interval(Duration::from_millis(self.settings.event_ms));
        interval.set_missed_tick_behavior(MissedTickBehavior::Burst);
        loop {
            interval.tick().await;
            self.tick.send_modify(|beat| *beat += 1);
        }
    }

    /// Sends the reply whose turn it is.
    pub(super) async fn send(&self, wire: &mut Wire, request: &Request, ticket: &mut Ticket<'_>) -> io::Result<()> {
        let says = |name: &str| {
            let spellings = [format!("\"{name}\":true"), format!("\"{name}\": true")];
            spellings.iter().any(|text| memchr::memmem::find(&request.body, text.as_bytes()).is_some())
        };
        let with_ids = usize::from(says("return_token_ids"));
        let reply = &self.replies[self.next.fetch_add(1, Ordering::Relaxed) % REPLIES];
        if !says("stream") {
            if self.settings.whole_ms > 0 {
                tokio::time::sleep(Duration::from_millis(self.settings.whole_ms)).await;
            }
            ticket.finish();
            return wire.send(&reply.whole[with_ids]).await;
        }
        let slices = &reply.stream[with_ids];
        if self.settings.event_ms == 0 {
            one_by_one(wire, slices, ticket).await
        } else {
            self.paced(wire, slices, ticket).await
        }
    }

    async fn paced(&self, wire: &mut Wire, slices: &Slices, ticket: &mut Ticket<'_>) -> io::Result<()> {
        let mut tick = self.tick.subscribe();
        let start = *tick.borrow_and_update();
        wire.send(slices.slice(0, 1)).await?;
        let mut sent = 1;
        while sent < slices.ends.len() {
            if tick.changed().await.is_err() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            // A stream that was late catches up in one write.
            let due = 1 + (*tick.borrow_and_update() - start) as usize;
            let upto = due.min(slices.ends.len());
            if upto == slices.ends.len() {
                ticket.finish();
            }
            wire.send(slices.slice(sent, upto)).await?;
            sent = upto;
        }
        Ok(())
    }
}

async fn one_by_one(wire: &mut Wire, slices: &Slices, ticket: &mut Ticket<'_>) -> io::Result<()> {
    for index in 0..slices.ends.len() {
        if index + 1 == slices.ends.len() {
            ticket.finish();
        }
        wire.send(slices.slice(index, index + 1)).await?;
        yield_now().await;
    }
    Ok(())
}

/// From half to one and a half times the mean, evenly.
fn length(settings: &Bench, step: usize) -> usize {
    let tokens = settings.mean_tokens * (63 + 2 * step) / 126;
    tokens.max(4)
}

/// The text and ids of one reply.
struct Text {
    id: String,
    prompt: Vec<u32>,
    ids: Vec<u32>,
    pieces: Vec<String>,
    reasoning: usize,
}

fn text(length: usize, seed: u64) -> Text {
    let mut random = Random::new(seed);
    let mut one = || loop {
        // Only tokens that are whole characters, so that a token is an event with text.
        let drawn = draw(&mut random);
        if let [id] = drawn[..] {
            return id;
        }
    };
    let prompt: Vec<u32> = (0..PROMPT_TOKENS).map(|_| one()).collect();
    let mut ids: Vec<u32> = (1..length).map(|_| one()).collect();
    let mut pieces: Vec<String> = ids.iter().map(|&id| String::from_utf8_lossy(bytes_of(id)).into_owned()).collect();
    ids.push(EOS);
    pieces.push(String::new());
    let id = format!("chatcmpl-{:016x}{:016x}", random.bits(), random.bits());
    Text { id, prompt, ids, pieces, reasoning: length * 3 / 5 }
}

fn render(model: &str, length: usize, seed: u64) -> Rendered {
    let text = text(length, seed);
    let usage = json!({"prompt_tokens": PROMPT_TOKENS, "total_tokens": PROMPT_TOKENS + length, "completion_tokens": length,
                       "prompt_tokens_details": null});
    let each = [false, true];
    Rendered {
        whole: each.map(|with_ids| whole(model, &text, &usage, with_ids)),
        stream: each.map(|with_ids| stream(model, &text, &usage, with_ids)),
    }
}

fn whole(model: &str, text: &Text, usage: &serde_json::Value, with_ids: bool) -> Bytes {
    let (reasoning, content) = text.pieces.split_at(text.reasoning);
    let body = json!({
        "id": text.id, "object": "chat.completion", "created": CREATED, "model": model,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content.concat(), "refusal": null, "annotations": null,
            "audio": null, "function_call": null, "reasoning": reasoning.concat()}, "logprobs": null, "finish_reason": "stop",
            "stop_reason": null, "token_ids": with_ids.then_some(&text.ids), "routed_experts": null}],
        "service_tier": null, "system_fingerprint": "vllm-0.32.0-scripted", "usage": usage, "prompt_logprobs": null,
        "prompt_token_ids": with_ids.then_some(&text.prompt), "prompt_text": null, "kv_transfer_params": null,
    })
    .to_string();
    let length = body.len().to_string();
    let mut bytes =
        head(200, &[("server", "uvicorn"), ("content-length", &length), ("content-type", "application/json")]);
    bytes.extend_from_slice(body.as_bytes());
    Bytes::from(bytes)
}

fn stream(model: &str, text: &Text, usage: &serde_json::Value, with_ids: bool) -> Slices {
    let event = |choices: serde_json::Value| json!({"id": text.id, "object": "chat.completion.chunk", "created": CREATED, "model": model, "choices": choices});
    let mut slices = Slices::default();
    let headers =
        [("server", "uvicorn"), ("content-type", "text/event-stream; charset=utf-8"), ("transfer-encoding", "chunked")];
    slices.bytes = head(200, &headers);
    slices.cut();
    let delta = json!({"role": "assistant", "content": ""});
    let mut opening = event(json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": null}]));
    opening["prompt_token_ids"] = json!(with_ids.then_some(&text.prompt));
    push_event(&mut slices.bytes, &opening.to_string());
    slices.cut();
    // Tens of thousands of events: all but the choice is the same text each time.
    let frame = event(json!([])).to_string();
    let (before, after) = frame.split_at(frame.len() - "]}".len());
    for (index, (&id, piece)) in text.ids.iter().zip(&text.pieces).enumerate() {
        let choice = token_choice(text, index, piece, with_ids.then_some(id));
        push_event(&mut slices.bytes, &format!("{before}{choice}{after}"));
        slices.cut();
    }
    let mut closing = event(json!([]));
    closing["usage"] = usage.clone();
    push_event(&mut slices.bytes, &closing.to_string());
    slices.cut();
    push_event(&mut slices.bytes, "[DONE]");
    slices.bytes.extend_from_slice(LAST_CHUNK);
    slices.cut();
    slices
}

/// The choice of the event for the token at `index`.
fn token_choice(text: &Text, index: usize, piece: &str, id: Option<u32>) -> String {
    let field = if index < text.reasoning { "reasoning" } else { "content" };
    let last = index + 1 == text.ids.len();
    let finish = if last { "\"stop\",\"stop_reason\":null" } else { "null" };
    let ids = id.map_or("null".to_owned(), |id| format!("[{id}]"));
    let piece = serde_json::Value::from(piece);
    format!(
        "{{\"index\":0,\"delta\":{{\"{field}\":{piece}}},\"logprobs\":null,\"finish_reason\":{finish},\"token_ids\":{ids}}}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_have_the_mean_asked_for() {
        let settings = Bench { mean_tokens: 1260, ..Bench::default() };
        let lengths: Vec<usize> = (0..REPLIES).map(|step| length(&settings, step)).collect();
        assert_eq!(lengths.iter().sum::<usize>(), 1260 * REPLIES);
        assert_eq!((lengths[0], lengths[63]), (630, 1890));
    }

    #[test]
    fn a_stream_has_a_slice_per_token_and_three_more_events() {
        for with_ids in [false, true] {
            let rendered = render("m", 10, 3);
            let slices = &rendered.stream[usize::from(with_ids)];
            assert_eq!(slices.ends.len(), 1 + 1 + 10 + 2);
            for index in 1..slices.ends.len() {
                let slice = String::from_utf8_lossy(slices.slice(index, index + 1)).into_owned();
                assert_eq!(slice.matches("data: ").count(), 1, "{slice}");
                assert_eq!(slice.contains("\"token_ids\":["), with_ids && (2..12).contains(&index), "{slice}");
            }
            assert_eq!(slices.slice(0, slices.ends.len()), slices.bytes);
        }
    }
}
