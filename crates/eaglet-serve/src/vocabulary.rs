//! The made-up tokenizer of servers without a model: a fixed, reversible rule between token ids and pieces of text.
//!
//! No language model's tokenizer. Its use is that ids and text can be checked against each other without any file.
//!
//! Id ranges: 0..9 control tokens, 16..272 single bytes, then fixed pieces, pairs of lower-case letters, a space and a letter,
//! and 4,096 words of two syllables.
//!
//! Invariants: every id in a range has one piece and every piece one id; every text can be encoded, and
//! `decode(encode(text)) == text`; encoding takes the longest piece that fits.

use std::{collections::HashMap, sync::LazyLock};

use crate::random::Random;

/// Begins every prompt.
pub const BOS: u32 = 1;
/// Ends every message and every finished answer.
pub const EOS: u32 = 2;
/// Stands between reasoning and content where the answer is set to show it.
pub const THINK_CLOSE: u32 = 4;
/// Opens an assistant turn.
pub const ASSISTANT: u32 = 5;
/// Opens a user turn.
pub const USER: u32 = 6;
/// Opens a system turn.
pub const SYSTEM: u32 = 7;
/// Opens a tool turn.
pub const TOOL: u32 = 8;

const CONTROL: [&str; 9] =
    ["<|pad|>", "<|begin|>", "<|end|>", "<think>", "</think>", "<|assistant|>", "<|user|>", "<|system|>", "<|tool|>"];
const FIRST_BYTE: u32 = 16;
const FIRST_PIECE: u32 = FIRST_BYTE + 256;
const PIECES: [&str; 40] = [
    "\n\n",
    " the",
    " and",
    " of",
    " to",
    " is",
    ", ",
    ". ",
    ": ",
    "; ",
    " \"quoted\"",
    " \"",
    "\",",
    "\\n",
    "\\\"",
    "\\u0041",
    "\t\t",
    " é",
    "ü",
    "ñ",
    " naïve",
    " 计算",
    "模型",
    "語",
    " слово",
    " λ",
    "→",
    " ≤",
    "\u{2028}",
    "\u{a0}",
    "**",
    "```",
    "()",
    "{}",
    "[]",
    " = ",
    "</p>",
    " 42",
    "1.5",
    "e\u{301}",
];
const FIRST_PAIR: u32 = FIRST_PIECE + PIECES.len() as u32;
const FIRST_SPACED: u32 = FIRST_PAIR + 26 * 26;
const FIRST_WORD: u32 = FIRST_SPACED + 26;
const SYLLABLES: u32 = 64;
/// One more than the highest id.
pub const SIZE: u32 = FIRST_WORD + SYLLABLES * SYLLABLES;
/// Characters spelled byte by byte, so that one character spans several tokens.
const SPELLED: [&str; 4] = ["😀", "𝛼", "漢", "ß"];

/// Whether control-token names in a text become control tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// They are plain characters, as in the text of a message.
    Plain,
    /// They are the tokens they name, as in a rendered template.
    Parsed,
}

struct Table {
    pieces: Vec<Vec<u8>>,
    ids: HashMap<Vec<u8>, u32>,
    longest: usize,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let pieces: Vec<Vec<u8>> = (0..SIZE).map(piece_by_rule).collect();
    let with_text = pieces.iter().enumerate().skip(FIRST_BYTE as usize);
    let ids = with_text.map(|(id, piece)| (piece.clone(), id as u32)).collect();
    let longest = pieces.iter().map(Vec::len).max().unwrap_or(1);
    Table { pieces, ids, longest }
});

fn piece_by_rule(id: u32) -> Vec<u8> {
    let letter = |number: u32| b'a' + (number % 26) as u8;
    match id {
        _ if (id as usize) < CONTROL.len() => CONTROL[id as usize].as_bytes().to_vec(),
        _ if id < FIRST_BYTE => Vec::new(),
        _ if id < FIRST_PIECE => vec![(id - FIRST_BYTE) as u8],
        _ if id < FIRST_PAIR => PIECES[(id - FIRST_PIECE) as usize].as_bytes().to_vec(),
        _ if id < FIRST_SPACED => vec![letter((id - FIRST_PAIR) / 26), letter(id - FIRST_PAIR)],
        _ if id < FIRST_WORD => vec![b' ', letter(id - FIRST_SPACED)],
        _ => {
            let number = id - FIRST_WORD;
            let [first, second] = [number / SYLLABLES, number % SYLLABLES].map(syllable);
            [b" ".as_slice(), &first, &second].concat()
        }
    }
}

fn syllable(number: u32) -> [u8; 2] {
    [b"bdfghjklmnprstvz"[(number / 4) as usize], b"aeio"[(number % 4) as usize]]
}

/// The bytes of a token; empty for an id outside the vocabulary.
pub fn bytes_of(id: u32) -> &'static [u8] {
    TABLE.pieces.get(id as usize).map_or(&[], Vec::as_slice)
}

/// The text of these ids; bytes that are no UTF-8 become U+FFFD.
pub fn decode(ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| bytes_of(id)).copied().collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The ids of a text.
pub fn encode(text: &str, control: Control) -> Vec<u32> {
    let bytes = text.as_bytes();
    let mut ids = Vec::with_capacity(bytes.len() / 2);
    let mut position = 0;
    while position < bytes.len() {
        let rest = &bytes[position..];
        let (id, length) = control_token(rest, control).unwrap_or_else(|| longest_piece(rest));
        ids.push(id);
        position += length;
    }
    ids
}

fn control_token(rest: &[u8], control: Control) -> Option<(u32, usize)> {
    if control == Control::Plain || rest[0] != b'<' {
        return None;
    }
    let id = CONTROL.iter().position(|name| rest.starts_with(name.as_bytes()))?;
    Some((id as u32, CONTROL[id].len()))
}

fn longest_piece(rest: &[u8]) -> (u32, usize) {
    (1..=TABLE.longest.min(rest.len()))
        .rev()
        .find_map(|length| TABLE.ids.get(&rest[..length]).map(|&id| (id, length)))
        .expect("every single byte is a token")
}

/// Draws the next word or character of an answer: one token, or several when a character is spelled byte by byte.
pub fn draw(random: &mut Random) -> Vec<u32> {
    let kind = random.below(100);
    match kind {
        0..70 => vec![FIRST_WORD + random.below(SYLLABLES * SYLLABLES)],
        70..97 => vec![draw_one(random)],
        _ => SPELLED[random.below(SPELLED.len() as u32) as usize]
            .bytes()
            .map(|byte| FIRST_BYTE + u32::from(byte))
            .collect(),
    }
}

/// Draws one token that holds only whole characters.
pub fn draw_one(random: &mut Random) -> u32 {
    FIRST_PIECE + random.below(PIECES.len() as u32)
}

/// Turns ids into text one at a time and holds an unfinished character back until its last byte, as vLLM's detokenizer does.
///
/// Invariant: what [`push`](Self::push) and [`finish`](Self::finish) gave, joined, equals [`decode`] of all the ids.
#[derive(Clone, Debug, Default)]
pub struct TextStream {
    pending: Vec<u8>,
}

impl TextStream {
    /// The text that this id completes; empty inside a character.
    pub fn push(&mut self, id: u32) -> String {
        self.pending.extend_from_slice(bytes_of(id));
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.pending) {
                Ok(whole) => {
                    text.push_str(whole);
                    self.pending.clear();
                    return text;
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&self.pending[..valid]));
                    let Some(wrong) = error.error_len() else {
                        self.pending.drain(..valid);
                        return text;
                    };
                    text.push('\u{FFFD}');
                    self.pending.drain(..valid + wrong);
                }
            }
        }
    }

    /// The text of a character that was never finished: U+FFFD, or nothing.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_has_one_id() {
        assert_eq!(TABLE.ids.len(), (SIZE - FIRST_BYTE) as usize, "two ids share a piece");
        for id in FIRST_BYTE..SIZE {
            assert_eq!(TABLE.ids[bytes_of(id)], id);
        }
    }

    #[test]
    fn any_text_comes_back() {
        for text in ["", "Räuber & \"Söhne\"\r\n\0", "🧵 bada <|end|> zo", " bada bado", "e\u{301}\u{2028}</think>"]
        {
            for control in [Control::Plain, Control::Parsed] {
                assert_eq!(decode(&encode(text, control)), text);
            }
        }
    }

    #[test]
    fn control_names_are_tokens_only_where_asked() {
        assert_eq!(encode("<|end|>", Control::Parsed), [EOS]);
        assert!(encode("<|end|>", Control::Plain).iter().all(|&id| id >= FIRST_BYTE));
    }

    #[test]
    fn streamed_text_equals_decoded_text_for_any_ids() {
        let mut random = Random::new(7);
        for _ in 0..200 {
            let ids: Vec<u32> = (0..random.below(40)).map(|_| random.below(SIZE)).collect();
            let mut stream = TextStream::default();
            let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
            text.push_str(&stream.finish());
            assert_eq!(text, decode(&ids), "{ids:?}");
        }
    }

    #[test]
    fn a_spelled_character_appears_with_its_last_byte() {
        let mut stream = TextStream::default();
        let pieces: Vec<String> = "漢".bytes().map(|byte| stream.push(FIRST_BYTE + u32::from(byte))).collect();
        assert_eq!(pieces, ["", "", "漢"]);
    }
}
