//! The body of a chat request.
//!
//! Everything that is the same for all prompts is rendered once; a request is that text plus messages, tools and the token limit.

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
    limit_is_set: bool,
}

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
        let limit_is_set =
            ["max_completion_tokens", "max_tokens", "n_predict"].iter().any(|key| body.contains_key(*key));
        let mut head = serde_json::to_vec(&body).expect("a map with string keys is plain JSON");
        head.pop();
        Ok(RequestTemplate { head, limit_is_set })
    }

    /// The body of one request.
    pub fn render(&self, messages: &[Message], tools: Option<&[Value]>, max_completion_tokens: Option<u64>) -> Vec<u8> {
        const INFALLIBLE: &str = "writing JSON to memory cannot fail";
        let mut body = Vec::with_capacity(self.head.len() + 256 + messages.iter().map(message_bytes).sum::<usize>());
        body.extend_from_slice(&self.head);
        if let Some(limit) = max_completion_tokens.filter(|_| !self.limit_is_set) {
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
