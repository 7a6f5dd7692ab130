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
    #[serde(borrow)]
    pub prompt_token_ids: Option<TokenIds<'a>>,
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
    #[serde(borrow)]
    pub token_ids: Option<TokenIds<'a>>,
    /// SGLang: ids of the prompt, in the choice.
    #[serde(borrow)]
    pub prompt_token_ids: Option<TokenIds<'a>>,
}

/// A list of token ids, as text. More than half of a reply's values are ids; read one by one through serde they took a sixth of a whole reply's cost.
#[derive(Deserialize, Debug)]
#[serde(transparent)]
pub struct TokenIds<'a>(#[serde(borrow)] &'a RawValue);

impl TokenIds<'_> {
    /// Which of the lists that were taken out of the reply this is.
    pub fn lifted(&self) -> Option<usize> {
        super::id_lists::referred(self.0.get())
    }

    /// Appends the ids to `ids`.
    ///
    /// # Errors
    /// It is not a list of whole numbers from 0 to 2^32 - 1.
    pub fn append_to(&self, ids: &mut Vec<u32>) -> Result<(), serde_json::Error> {
        let before = ids.len();
        if append_compact(self.0.get().as_bytes(), ids).is_none() {
            // White space, or something that is no id: the patient reader decides.
            ids.truncate(before);
            ids.extend(serde_json::from_str::<Vec<u32>>(self.0.get())?);
        }
        Ok(())
    }
}

/// Reads `[1,23,456]`, with or without blanks after the commas; `None` for any other form.
pub(super) fn append_compact(list: &[u8], ids: &mut Vec<u32>) -> Option<()> {
    let mut rest = list.strip_prefix(b"[")?.strip_suffix(b"]")?;
    if rest.is_empty() {
        return Some(());
    }
    ids.reserve(rest.len() / 6 + 1);
    loop {
        let mut id = 0_u64;
        let mut digits = 0;
        while let Some(digit) = rest.get(digits).map(|byte| byte.wrapping_sub(b'0')).filter(|digit| *digit < 10) {
            id = id * 10 + u64::from(digit);
            digits += 1;
            if digits > 10 {
                return None;
            }
        }
        if digits == 0 || (digits > 1 && rest[0] == b'0') {
            return None;
        }
        ids.push(u32::try_from(id).ok()?);
        match &rest[digits..] {
            [] => return Some(()),
            [b',', b' ', after @ ..] | [b',', after @ ..] => rest = after,
            _ => return None,
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> Result<Vec<u32>, serde_json::Error> {
        let mut ids = vec![7];
        let list = TokenIds(serde_json::from_str(text)?);
        list.append_to(&mut ids).inspect_err(|_| assert_eq!(ids, [7]))?;
        Ok(ids.split_off(1))
    }

    proptest! {
        #[test]
        fn ids_are_read_as_serde_reads_them(ids in proptest::collection::vec(any::<u32>(), 0..20), separator in "[, \t\n]{1,3}") {
            let text = format!("[{}]", ids.iter().map(u32::to_string).collect::<Vec<_>>().join(&separator));
            prop_assert_eq!(read(&text).ok(), serde_json::from_str::<Vec<u32>>(&text).ok());
        }

        #[test]
        fn no_list_of_odd_pieces_is_read_otherwise(pieces in proptest::collection::vec(
            prop::sample::select(vec!["0", "1", "01", "-1", "4294967295", "4294967296", "99999999999", "1.0", "1e3", "null", "\"1\"", "[]", ""]), 0..4)) {
            let text = format!("[{}]", pieces.join(","));
            prop_assert_eq!(read(&text).ok(), serde_json::from_str::<Vec<u32>>(&text).ok());
        }
    }
}
