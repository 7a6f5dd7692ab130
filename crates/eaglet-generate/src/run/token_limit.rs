//! How many tokens an answer may have, so that prompt and answer fit `--max-seq-len` and the server's context.

use crate::client::Client;
use crate::server_info::{SIDE_TIMEOUT, ServerInfo};
use eaglet_core::prompt::Message;
use serde::Serialize;
use serde_json::Value;
use std::cell::Cell;

/// Tokens that a chat template may add per message, with room to spare (the longest known headers have about 10).
const TEMPLATE_TOKENS_PER_MESSAGE: u64 = 32;
/// Tokens that a chat template may add by itself (default system texts have up to about 150).
const TEMPLATE_TOKENS: u64 = 256;

/// The limit for one prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenLimit {
    /// Send this (or none).
    Send(Option<u64>),
    /// The prompt alone fills the context: it has this many tokens.
    PromptTooLong(u64),
}

/// Lowers the limit where needed. Asks the server to count only when a bound on the tokens says that it could matter.
#[derive(Debug)]
pub struct TokenLimiter {
    wanted: Option<u64>,
    context: Option<u64>,
    can_count: Cell<bool>,
}

impl TokenLimiter {
    /// `wanted` by the person, `context` by `--max-seq-len` and server together.
    pub fn new(wanted: Option<u64>, context: Option<u64>) -> Self {
        TokenLimiter { wanted, context, can_count: Cell::new(true) }
    }

    /// The limit for these messages.
    pub async fn limit(
        &self,
        client: &Client,
        server: &ServerInfo,
        messages: &[Message],
        tools: Option<&[Value]>,
    ) -> TokenLimit {
        let (Some(wanted), Some(context)) = (self.wanted, self.context) else { return TokenLimit::Send(self.wanted) };
        if tokens_at_most(messages, tools).saturating_add(wanted) <= context || !self.can_count.get() {
            return TokenLimit::Send(Some(wanted));
        }
        match Box::pin(count_tokens(client, server, messages, tools)).await {
            Some(count) => fit(wanted, context, count),
            None => {
                // Not vLLM's `/tokenize`: the server itself will refuse what does not fit.
                self.can_count.set(false);
                TokenLimit::Send(Some(wanted))
            }
        }
    }
}

fn fit(wanted: u64, context: u64, prompt: u64) -> TokenLimit {
    match context.saturating_sub(prompt) {
        0 => TokenLimit::PromptTooLong(prompt),
        room => TokenLimit::Send(Some(wanted.min(room))),
    }
}

/// A token of a byte-level vocabulary stands for at least one byte, so bytes bound tokens.
fn tokens_at_most(messages: &[Message], tools: Option<&[Value]>) -> u64 {
    let text: u64 = messages
        .iter()
        .map(|m| {
            let content = m.content.as_ref().map_or(0, eaglet_core::prompt::Content::text_bytes);
            let calls = m.tool_calls.as_ref().map_or(0, |calls| calls.to_string().len());
            let reasoning = m.reasoning.as_ref().map_or(0, String::len);
            (content + calls + reasoning) as u64 + TEMPLATE_TOKENS_PER_MESSAGE
        })
        .sum();
    let tools: u64 = tools.unwrap_or_default().iter().map(|tool| tool.to_string().len() as u64).sum();
    text + tools + TEMPLATE_TOKENS
}

async fn count_tokens(
    client: &Client,
    server: &ServerInfo,
    messages: &[Message],
    tools: Option<&[Value]>,
) -> Option<u64> {
    #[derive(Serialize)]
    struct Tokenize<'a> {
        model: &'a str,
        messages: &'a [Message],
        #[serde(skip_serializing_if = "Option::is_none")]
        tools: Option<&'a [Value]>,
        add_generation_prompt: bool,
    }
    let body =
        serde_json::to_vec(&Tokenize { model: &server.model, messages, tools, add_generation_prompt: true }).ok()?;
    let reply = client.post("/tokenize", body, SIDE_TIMEOUT).await.ok()?;
    reply.status.is_success().then(|| reply.json()?.get("count")?.as_u64())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use eaglet_core::prompt::Role;

    #[test]
    fn the_answer_gets_what_the_prompt_leaves() {
        assert_eq!(fit(8192, 16_384, 1000), TokenLimit::Send(Some(8192)));
        assert_eq!(fit(8192, 16_384, 16_000), TokenLimit::Send(Some(384)));
        assert_eq!(fit(8192, 16_384, 16_384), TokenLimit::PromptTooLong(16_384));
    }

    #[test]
    fn bytes_bound_tokens() {
        let messages = [Message::text(Role::User, "é".repeat(100))];
        assert_eq!(tokens_at_most(&messages, None), 200 + TEMPLATE_TOKENS_PER_MESSAGE + TEMPLATE_TOKENS);
    }
}
