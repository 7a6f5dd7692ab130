//! The body of a chat request, and of the request that continues an answer.
//!
//! Everything that is the same for all prompts is rendered once; a request is that text plus messages, tools and the token limit, or plus
//! the ids to go on from.

use eaglet_core::prompt::Message;
use eaglet_core::sampling::Sampling;
use eaglet_core::{Error, Result};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// Which ids to ask the server for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenIds {
    /// Ask in every known server's way; those that do not know it ignore it.
    Ask,
    /// Do not ask (a strict gateway refuses unknown fields).
    DoNotAsk,
}

/// What all requests of a run have in common.
#[derive(Clone, Debug)]
pub struct RequestTemplate {
    head: Vec<u8>,
    /// The user's own limit in `--extra-body` wins over ours.
    own_limit: Option<Value>,
    /// `None` where an answer cannot be continued.
    continuation: Option<ContinuationHead>,
}

/// The part of a continuation's body that does not change.
#[derive(Clone, Debug)]
struct ContinuationHead {
    head: Vec<u8>,
    /// Tokens before which the answer may not end; those that are there count.
    min_tokens: Option<u64>,
}

/// Members that mean something to the chat API only.
const CHAT_ONLY: [&str; 17] = [
    "max_completion_tokens",
    "max_tokens",
    "n_predict",
    "min_tokens",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "include_reasoning",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
];

/// Members whose effect depends on what was generated before the cut: a stop string may lie across it, a grammar would begin anew.
const NOT_CONTINUABLE: [&str; 10] = [
    "stop",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structural_tag",
    "echo",
    "truncate_prompt_tokens",
];

/// Members that `--extra-body` may not hold: eaglet could no longer tell what was answered.
const RESERVED: [&str; 5] = ["messages", "stream", "stream_options", "n", "model"];

impl RequestTemplate {
    /// Renders what does not change.
    ///
    /// # Errors
    /// Usage: `extra_body` holds a member that eaglet must set itself.
    pub fn new(
        model: &str,
        sampling: &Sampling,
        extra_body: &Map<String, Value>,
        stream: bool,
        ids: TokenIds,
    ) -> Result<Self> {
        let mut body = Map::new();
        body.insert("model".to_owned(), model.into());
        let Ok(Value::Object(sampling)) = serde_json::to_value(sampling) else {
            return Err(Error::bug("sampling settings are not a JSON object"));
        };
        body.extend(sampling);
        if stream {
            body.insert("stream".to_owned(), true.into());
            body.insert("stream_options".to_owned(), json!({"include_usage": true}));
        }
        if ids == TokenIds::Ask {
            // vLLM, TensorRT-LLM and newer SGLang; llama.cpp.
            body.insert("return_token_ids".to_owned(), true.into());
            body.insert("return_tokens".to_owned(), true.into());
        }
        for (key, value) in extra_body {
            if RESERVED.contains(&key.as_str()) {
                return Err(Error::usage(format!("--extra-body: {key:?} is set by eaglet itself"))
                    .hint("use the flag for it, or leave it out"));
            }
            body.insert(key.clone(), value.clone());
        }
        let own_limit =
            ["max_completion_tokens", "max_tokens", "n_predict"].iter().find_map(|key| body.get(*key)).cloned();
        let continuation = (stream && ids == TokenIds::Ask).then(|| continuation_head(&body)).flatten();
        Ok(RequestTemplate { head: open_object(&body), own_limit, continuation })
    }

    /// Whether answers to these requests can be continued from their ids.
    pub fn can_continue(&self) -> bool {
        self.continuation.is_some()
    }

    /// The token limit that `--extra-body` sets, `None` if it sets none; an `Err` holds one that is no number.
    ///
    /// # Errors
    /// It is set to something that is no number of tokens.
    pub fn own_limit(&self) -> std::result::Result<Option<u64>, &Value> {
        self.own_limit.as_ref().map(|limit| limit.as_u64().ok_or(limit)).transpose()
    }

    /// The body of a request that continues an answer; `None` when answers cannot be continued.
    pub fn render_continuation(&self, rest: &Continuation<'_>) -> Option<Vec<u8>> {
        const INFALLIBLE: &str = "writing JSON to memory cannot fail";
        let head = self.continuation.as_ref()?;
        let ids = rest.prompt_token_ids.iter().chain(rest.token_ids);
        let mut body = Vec::with_capacity(head.head.len() + 128 + 7 * ids.clone().count());
        body.extend_from_slice(&head.head);
        let mut member = |name: &str, value: u64| {
            body.extend_from_slice(format!(",\"{name}\":{value}").as_bytes());
        };
        member("max_tokens", rest.max_tokens);
        if let Some(min) = head.min_tokens.map(|min| min.saturating_sub(rest.token_ids.len() as u64)) {
            member("min_tokens", min.min(rest.max_tokens));
        }
        if rest.special_tokens == SpecialTokens::Show {
            body.extend_from_slice(b",\"skip_special_tokens\":false,\"spaces_between_special_tokens\":false");
        }
        body.extend_from_slice(b",\"prompt\":[");
        for (index, id) in ids.enumerate() {
            if index > 0 {
                body.push(b',');
            }
            serde_json::to_writer(&mut body, id).expect(INFALLIBLE);
        }
        body.extend_from_slice(b"]}");
        Some(body)
    }

    /// The body of one request.
    pub fn render(&self, messages: &[Message], tools: Option<&[Value]>, max_completion_tokens: Option<u64>) -> Vec<u8> {
        const INFALLIBLE: &str = "writing JSON to memory cannot fail";
        let mut body = Vec::with_capacity(self.head.len() + 256 + messages.iter().map(message_bytes).sum::<usize>());
        body.extend_from_slice(&self.head);
        if let Some(limit) = max_completion_tokens.filter(|_| self.own_limit.is_none()) {
            body.extend_from_slice(b",\"max_completion_tokens\":");
            serde_json::to_writer(&mut body, &limit).expect(INFALLIBLE);
        }
        if let Some(tools) = tools.filter(|tools| !tools.is_empty()) {
            body.extend_from_slice(b",\"tools\":");
            serde_json::to_writer(&mut body, tools).expect(INFALLIBLE);
        }
        body.extend_from_slice(b",\"messages\":");
        serde_json::to_writer(&mut body, messages).expect(INFALLIBLE);
        body.push(b'}');
        body
    }
}

/// What a continuation goes on from.
#[derive(Clone, Copy, Debug)]
pub struct Continuation<'a> {
    /// Ids of the rendered prompt.
    pub prompt_token_ids: &'a [u32],
    /// Ids of the answer so far.
    pub token_ids: &'a [u32],
    /// Further tokens at most.
    pub max_tokens: u64,
    /// Whether the text is to show them.
    pub special_tokens: SpecialTokens,
}

/// Whether special tokens appear in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// They do: the marker at the end of reasoning may be one.
    Show,
    /// As on the chat API.
    Skip,
}

/// The object without its closing brace.
fn open_object(body: &Map<String, Value>) -> Vec<u8> {
    let mut head = serde_json::to_vec(body).expect("a map with string keys is plain JSON");
    head.pop();
    head
}

fn continuation_head(chat: &Map<String, Value>) -> Option<ContinuationHead> {
    if NOT_CONTINUABLE.iter().any(|name| chat.get(*name).is_some_and(|value| !value.is_null())) {
        return None;
    }
    let min_tokens = chat.get("min_tokens").and_then(Value::as_u64);
    let body = chat.iter().filter(|(name, _)| !CHAT_ONLY.contains(&name.as_str()));
    let body = body.map(|(name, value)| (name.clone(), value.clone())).collect();
    Some(ContinuationHead { head: open_object(&body), min_tokens })
}

fn message_bytes(message: &Message) -> usize {
    64 + message.content.as_ref().map_or(0, eaglet_core::prompt::Content::text_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use eaglet_core::prompt::Role;

    fn body(sampling: &Sampling, extra: Value, stream: bool) -> Value {
        let extra = extra.as_object().cloned().unwrap_or_default();
        let template = RequestTemplate::new("m", sampling, &extra, stream, TokenIds::Ask).unwrap();
        let body = template.render(&[Message::text(Role::User, "hi \u{2028}\"")], None, Some(9));
        serde_json::from_slice(&body).unwrap()
    }

    /// A peer sends the repetition penalty as the presence penalty; every name is checked in the body.
    #[test]
    fn every_sampling_setting_goes_out_under_its_own_name() {
        let sampling = Sampling {
            temperature: Some(0.5),
            top_p: Some(0.9),
            top_k: Some(40),
            min_p: Some(0.01),
            repetition_penalty: Some(1.1),
            presence_penalty: Some(0.2),
            frequency_penalty: Some(0.3),
            seed: Some(7),
            stop: vec!["END".into()],
        };
        let expected = json!({"model": "m", "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1,
            "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 7, "stop": ["END"], "stream": true,
            "stream_options": {"include_usage": true}, "return_token_ids": true, "return_tokens": true, "max_completion_tokens": 9,
            "messages": [{"role": "user", "content": "hi \u{2028}\""}]});
        assert_eq!(body(&sampling, json!({}), true), expected);
    }

    fn continuation(sampling: &Sampling, extra: Value) -> Option<Value> {
        let extra = extra.as_object().cloned().unwrap();
        let template = RequestTemplate::new("m", sampling, &extra, true, TokenIds::Ask).unwrap();
        let rest = Continuation {
            prompt_token_ids: &[1, 2],
            token_ids: &[3],
            max_tokens: 7,
            special_tokens: SpecialTokens::Show,
        };
        template.render_continuation(&rest).map(|body| serde_json::from_slice(&body).unwrap())
    }

    #[test]
    fn a_continuation_asks_for_the_rest_with_the_same_sampling() {
        let sampling = Sampling { temperature: Some(0.5), seed: Some(7), ..Sampling::default() };
        let extra = json!({"chat_template_kwargs": {"thinking": true}, "min_tokens": 5, "max_tokens": 8, "logit_bias": {"9": 1}});
        let expected = json!({"model": "m", "temperature": 0.5, "seed": 7, "stream": true, "stream_options": {"include_usage": true},
            "return_token_ids": true, "return_tokens": true, "logit_bias": {"9": 1}, "max_tokens": 7, "min_tokens": 4,
            "skip_special_tokens": false, "spaces_between_special_tokens": false, "prompt": [1, 2, 3]});
        assert_eq!(continuation(&sampling, extra), Some(expected));
    }

    #[test]
    fn what_looks_back_over_the_cut_is_not_continued() {
        let stops = Sampling { stop: vec!["END".into()], ..Sampling::default() };
        assert_eq!(continuation(&stops, json!({})), None);
        assert_eq!(continuation(&Sampling::default(), json!({"response_format": {"type": "json_object"}})), None);
        assert!(continuation(&Sampling::default(), json!({"response_format": null})).is_some());
    }

    #[test]
    fn extra_body_is_merged_and_its_limit_wins() {
        let body =
            body(&Sampling::default(), json!({"chat_template_kwargs": {"thinking": false}, "max_tokens": 3}), false);
        assert_eq!(body["chat_template_kwargs"]["thinking"], false);
        assert_eq!(body["max_tokens"], 3);
        assert!(body.get("max_completion_tokens").is_none() && body.get("stream").is_none());
        let extra = json!({"n": 2}).as_object().cloned().unwrap();
        assert!(RequestTemplate::new("m", &Sampling::default(), &extra, true, TokenIds::Ask).is_err());
    }
}
