//! Reads what training needs of a record, without reading the rest.
//!
//! A record is mostly text and digits. The text is skipped (kept as the JSON it is, for the format that wants it), the ids are read by [`parse_ids`];
//! with `serde_json` into [`eaglet_core::response::Response`] the same takes several times as long.

use eaglet_core::ids::ContentHash;
use eaglet_core::response::{Status, Usage};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::borrow::Cow;

/// One answer of a record.
#[derive(Debug, Default)]
pub(crate) struct Turn<'a> {
    pub(crate) finish_reason: Cow<'a, str>,
    pub(crate) has_reasoning: bool,
    pub(crate) has_content: bool,
    pub(crate) has_tool_calls: bool,
    pub(crate) prompt_token_ids: Option<&'a RawValue>,
    pub(crate) token_ids: Option<&'a RawValue>,
    pub(crate) usage: Option<Usage>,
    pub(crate) flags: Vec<Cow<'a, str>>,
    pub(crate) texts: Texts<'a>,
    /// Of the record's messages, those that were sent for this answer; `None` = all.
    pub(crate) messages_sent: Option<usize>,
}

/// The texts of an answer, as JSON.
#[derive(Debug, Default)]
pub(crate) struct Texts<'a> {
    pub(crate) reasoning: Option<&'a RawValue>,
    pub(crate) content: Option<&'a RawValue>,
    pub(crate) tool_calls: Option<&'a RawValue>,
}

/// A record: whose it is, and its answers in order, the last one last.
#[derive(Debug)]
pub(crate) struct RecordView<'a> {
    pub(crate) sample_id: Cow<'a, str>,
    pub(crate) prompt_hash: ContentHash,
    pub(crate) row: Option<u64>,
    pub(crate) status: Option<Status>,
    pub(crate) messages: Option<&'a RawValue>,
    pub(crate) tools: Option<&'a RawValue>,
    pub(crate) turns: Vec<Turn<'a>>,
}

/// The shape of an answer in the file. Not `#[serde(flatten)]`: that would copy every field.
macro_rules! answer_shape {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident : $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Deserialize)]
        struct $name<'a> {
            #[serde(borrow, default)]
            finish_reason: Option<Cow<'a, str>>,
            #[serde(borrow, default)]
            reasoning: Option<&'a RawValue>,
            #[serde(borrow, default)]
            content: Option<&'a RawValue>,
            #[serde(borrow, default)]
            tool_calls: Option<&'a RawValue>,
            #[serde(borrow, default)]
            prompt_token_ids: Option<&'a RawValue>,
            #[serde(borrow, default)]
            token_ids: Option<&'a RawValue>,
            #[serde(default)]
            usage: Option<Usage>,
            #[serde(borrow, default)]
            flags: Vec<Cow<'a, str>>,
            $($(#[$field_meta])* $field: $type,)*
        }

        impl<'a> $name<'a> {
            fn turn(&mut self, messages_sent: Option<usize>) -> Turn<'a> {
                Turn {
                    finish_reason: self.finish_reason.take().unwrap_or_default(),
                    has_reasoning: holds_text(self.reasoning),
                    has_content: holds_text(self.content),
                    has_tool_calls: self.tool_calls.is_some_and(|calls| calls.get() != "[]"),
                    prompt_token_ids: self.prompt_token_ids,
                    token_ids: self.token_ids,
                    usage: self.usage,
                    flags: std::mem::take(&mut self.flags),
                    texts: Texts { reasoning: self.reasoning, content: self.content, tool_calls: self.tool_calls },
                    messages_sent,
                }
            }
        }
    };
}

answer_shape!(
    /// A whole record.
    RecordShape {
        #[serde(borrow)]
        sample_id: Cow<'a, str>,
        prompt_hash: ContentHash,
        #[serde(default)]
        row: Option<u64>,
        #[serde(default)]
        status: Option<Status>,
        #[serde(borrow, default)]
        messages: Option<&'a RawValue>,
        #[serde(borrow, default)]
        tools: Option<&'a RawValue>,
        #[serde(borrow, default)]
        earlier_turns: Vec<TurnShape<'a>>,
    }
);

answer_shape!(
    /// An earlier turn.
    TurnShape {
        messages_sent: usize,
    }
);

fn holds_text(json: Option<&RawValue>) -> bool {
    json.is_some_and(|json| json.get() != "\"\"")
}

impl<'a> RecordView<'a> {
    /// Reads a line; the error says in words why it is no record.
    pub(crate) fn parse(line: &'a [u8]) -> Result<Self, serde_json::Error> {
        let mut shape: RecordShape<'a> = serde_json::from_slice(line)?;
        let mut turns: Vec<Turn<'a>> = Vec::with_capacity(shape.earlier_turns.len() + 1);
        for mut earlier in std::mem::take(&mut shape.earlier_turns) {
            let sent = earlier.messages_sent;
            turns.push(earlier.turn(Some(sent)));
        }
        turns.push(shape.turn(None));
        let RecordShape { sample_id, prompt_hash, row, status, messages, tools, .. } = shape;
        Ok(RecordView { sample_id, prompt_hash, row, status, messages, tools, turns })
    }
}

/// Bytes of an id in a list, at least: one digit would be two with its comma, most ids have four or five.
const ID_BYTES_USUAL: usize = 5;

/// Reads a JSON list of token ids; `None` if it is anything else, or holds a number that is no `u32`.
pub(crate) fn parse_ids(json: &str) -> Option<Vec<u32>> {
    let inner = json.trim_ascii().strip_prefix('[')?.strip_suffix(']')?.as_bytes();
    let mut ids = Vec::with_capacity(inner.len() / ID_BYTES_USUAL + 1);
    if inner.trim_ascii().is_empty() {
        return Some(ids);
    }
    let mut at = 0;
    loop {
        at += blanks(&inner[at..]);
        let first = at;
        let mut id: u64 = 0;
        while let Some(digit) = inner.get(at).map(|byte| byte.wrapping_sub(b'0')).filter(|digit| *digit < 10) {
            // Longer numbers are refused below, before they could overflow.
            id = id.wrapping_mul(10).wrapping_add(u64::from(digit));
            at += 1;
        }
        if at == first || at - first > 10 {
            return None;
        }
        ids.push(u32::try_from(id).ok()?);
        at += blanks(&inner[at..]);
        match inner.get(at) {
            None => return Some(ids),
            Some(b',') => at += 1,
            Some(_) => return None,
        }
    }
}

fn blanks(bytes: &[u8]) -> usize {
    bytes.iter().take_while(|byte| byte.is_ascii_whitespace()).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ids_are_read_as_serde_reads_them(ids in proptest::collection::vec(any::<u32>(), 0..50)) {
            prop_assert_eq!(parse_ids(&serde_json::to_string(&ids).unwrap()), Some(ids.clone()));
            prop_assert_eq!(parse_ids(&serde_json::to_string_pretty(&ids).unwrap()), Some(ids));
        }

        #[test]
        fn what_serde_refuses_is_refused(text in "\\[[0-9, .eE\\-\\]\\[]{0,12}\\]") {
            let expected: Option<Vec<u32>> = serde_json::from_str(&text).ok();
            if expected.is_none() && text.as_bytes().windows(2).all(|w| !(w[0] == b'0' && w[1].is_ascii_digit())) {
                prop_assert_eq!(parse_ids(&text), None);
            } else if expected.is_some() {
                prop_assert_eq!(parse_ids(&text), expected);
            }
        }
    }

    #[test]
    fn no_list_of_ids_is_none() {
        for json in [
            "",
            "[",
            "null",
            "[1,]",
            "[,1]",
            "[-1]",
            "[1.0]",
            "[4294967296]",
            "[true]",
            "[[1]]",
            "[1 2]",
            "[99999999999999999999]",
        ] {
            assert_eq!(parse_ids(json), None, "{json}");
        }
        assert_eq!(parse_ids("[]"), Some(vec![]));
        assert_eq!(parse_ids(" [ 1 ,\t2 ] "), Some(vec![1, 2]));
    }
}
