//! The bytes of a frame. Pure.
//!
//! ```text
//! file    = MAGIC frame*
//! frame   = length: u32 LE   checksum: first 4 bytes of the payload's BLAKE3   payload
//! payload = kind: u8   fields; numbers as LEB128, texts and lists with their length before them
//! ```

use super::{Seam, Unfinished};
use crate::ids::PromptKey;
use crate::response::{Answer, ReasoningField, Segment, Status};

/// First bytes of the file; the last one is the version.
pub const MAGIC: &[u8; 8] = b"EAGLETI\x01";

/// Length and checksum before each payload.
pub(super) const FRAME_HEAD_BYTES: usize = 8;

/// Longest payload read or written: ids and text of the largest reply, and its prompt.
pub(super) const PAYLOAD_BYTES_MAX: usize = 256 << 20;

/// What a frame says about a generation (one answer to one turn of one prompt), known by a number within the file.
#[derive(Clone, Debug, PartialEq)]
pub enum Frame {
    /// All there is of an answer. Replaces what was said of it before.
    Whole {
        /// Number of the generation.
        generation: u64,
        /// Its prompt.
        key: PromptKey,
        /// 0-based turn of the conversation that is answered.
        turn: u64,
        /// When, in seconds since 1970.
        at: u64,
        /// The answer so far.
        unfinished: Box<Unfinished>,
    },
    /// What came since the last frame of this generation.
    More {
        /// Number of the generation.
        generation: u64,
        /// How many ids, and bytes of reasoning and content, there must be already.
        follows: [u64; 3],
        /// Further ids.
        token_ids: Vec<u32>,
        /// Further reasoning.
        reasoning: String,
        /// Further content.
        content: String,
        /// The field of the reasoning.
        field: Option<ReasoningField>,
        /// Whether ids and texts end together now.
        seam: Seam,
    },
    /// The prompt of this generation has a durable record (or needs no checkpoint any more).
    End {
        /// Number of the generation.
        generation: u64,
    },
    /// A turn of a conversation that is answered, while later ones are not.
    Turn {
        /// Number of the generation of the turns that follow.
        generation: u64,
        /// The prompt.
        key: PromptKey,
        /// 0-based.
        turn: u64,
        /// The answer.
        answer: Box<Answer>,
        /// Its status.
        status: Status,
    },
}

impl Frame {
    /// The generation it speaks of.
    pub fn generation(&self) -> u64 {
        match self {
            Frame::Whole { generation, .. }
            | Frame::More { generation, .. }
            | Frame::End { generation }
            | Frame::Turn { generation, .. } => *generation,
        }
    }

    /// The payload.
    pub fn to_payload(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        match self {
            Frame::Whole { generation, key, turn, at, unfinished } => {
                out.push(1);
                put_numbers(&mut out, &[*generation, *turn, *at]);
                out.extend_from_slice(&key.0.to_le_bytes());
                put_unfinished(&mut out, unfinished);
            }
            Frame::More { generation, follows, token_ids, reasoning, content, field, seam } => {
                out.push(2);
                put_number(&mut out, *generation);
                put_numbers(&mut out, follows);
                put_ids(&mut out, token_ids);
                put_text(&mut out, reasoning);
                put_text(&mut out, content);
                out.extend([field_code(*field), seam_code(*seam)]);
            }
            Frame::End { generation } => {
                out.push(3);
                put_number(&mut out, *generation);
            }
            Frame::Turn { generation, key, turn, answer, status } => {
                out.push(4);
                put_numbers(&mut out, &[*generation, *turn]);
                out.extend_from_slice(&key.0.to_le_bytes());
                let json = serde_json::to_vec(&(answer, status)).expect("an answer is plain JSON with string keys");
                put_number(&mut out, json.len() as u64);
                out.extend_from_slice(&json);
            }
        }
        out
    }

    /// Reads a payload; `None` for anything that [`Frame::to_payload`] did not write.
    pub fn parse(payload: &[u8]) -> Option<Frame> {
        let mut reader = Reader(payload);
        let frame = match reader.byte()? {
            1 => {
                let [generation, turn, at] = reader.numbers()?;
                let key = reader.key()?;
                Frame::Whole { generation, key, turn, at, unfinished: Box::new(reader.unfinished()?) }
            }
            2 => Frame::More {
                generation: reader.number()?,
                follows: reader.numbers()?,
                token_ids: reader.ids()?,
                reasoning: reader.text()?,
                content: reader.text()?,
                field: reader.field()?,
                seam: reader.seam()?,
            },
            3 => Frame::End { generation: reader.number()? },
            4 => {
                let [generation, turn] = reader.numbers()?;
                let key = reader.key()?;
                let length = reader.length()?;
                let (answer, status) = serde_json::from_slice(reader.take(length)?).ok()?;
                Frame::Turn { generation, key, turn, answer, status }
            }
            _ => return None,
        };
        reader.0.is_empty().then_some(frame)
    }
}

/// Appends a payload with its head.
pub fn append_framed(out: &mut Vec<u8>, payload: &[u8]) {
    assert!(payload.len() <= PAYLOAD_BYTES_MAX, "a frame holds no more than a reply may have");
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    out.extend_from_slice(&checksum(payload));
    out.extend_from_slice(payload);
}

/// The first frame of these bytes and its length with the head; `None` when there is no whole and good one.
pub(super) fn first_frame(bytes: &[u8]) -> Option<(Frame, usize)> {
    let length = u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    if length > PAYLOAD_BYTES_MAX {
        return None;
    }
    let payload = bytes.get(FRAME_HEAD_BYTES..FRAME_HEAD_BYTES + length)?;
    if bytes[4..FRAME_HEAD_BYTES] != checksum(payload) {
        return None;
    }
    Some((Frame::parse(payload)?, FRAME_HEAD_BYTES + length))
}

fn checksum(payload: &[u8]) -> [u8; 4] {
    let mut first = [0; 4];
    first.copy_from_slice(&blake3::hash(payload).as_bytes()[..4]);
    first
}

fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn put_numbers(out: &mut Vec<u8>, numbers: &[u64]) {
    numbers.iter().for_each(|number| put_number(out, *number));
}

fn put_ids(out: &mut Vec<u8>, ids: &[u32]) {
    put_number(out, ids.len() as u64);
    ids.iter().for_each(|id| put_number(out, u64::from(*id)));
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    put_number(out, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

fn put_unfinished(out: &mut Vec<u8>, unfinished: &Unfinished) {
    put_ids(out, &unfinished.prompt_token_ids);
    put_ids(out, &unfinished.token_ids);
    put_text(out, &unfinished.reasoning);
    put_text(out, &unfinished.content);
    out.extend([field_code(unfinished.field), seam_code(unfinished.seam)]);
    put_text(out, &unfinished.endpoint);
    put_number(out, unfinished.segments.len() as u64);
    for segment in &unfinished.segments {
        put_number(out, segment.tokens);
        put_text(out, &segment.endpoint);
        put_text(out, &segment.why);
    }
}

const FIELDS: [Option<ReasoningField>; 5] = [
    None,
    Some(ReasoningField::Reasoning),
    Some(ReasoningField::ReasoningContent),
    Some(ReasoningField::Both),
    Some(ReasoningField::Markers),
];

fn field_code(field: Option<ReasoningField>) -> u8 {
    FIELDS.iter().position(|known| *known == field).expect("every field is in the list") as u8
}

fn seam_code(seam: Seam) -> u8 {
    u8::from(seam == Seam::Unsure)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    fn number(&mut self) -> Option<u64> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            // The tenth byte has room for one bit only.
            if shift == 63 && bits > 1 {
                return None;
            }
            number |= bits << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }

    fn numbers<const N: usize>(&mut self) -> Option<[u64; N]> {
        let mut numbers = [0; N];
        for number in &mut numbers {
            *number = self.number()?;
        }
        Some(numbers)
    }

    /// A length that the rest of the payload can hold, so that nobody reserves more than there is.
    fn length(&mut self) -> Option<usize> {
        let length = usize::try_from(self.number()?).ok()?;
        (length <= self.0.len()).then_some(length)
    }

    fn ids(&mut self) -> Option<Vec<u32>> {
        let count = self.length()?;
        let mut ids = Vec::with_capacity(count);
        for _ in 0..count {
            ids.push(u32::try_from(self.number()?).ok()?);
        }
        Some(ids)
    }

    fn text(&mut self) -> Option<String> {
        let length = self.length()?;
        String::from_utf8(self.take(length)?.to_vec()).ok()
    }

    fn key(&mut self) -> Option<PromptKey> {
        Some(PromptKey(u128::from_le_bytes(self.take(16)?.try_into().ok()?)))
    }

    fn field(&mut self) -> Option<Option<ReasoningField>> {
        FIELDS.get(usize::from(self.byte()?)).copied()
    }

    fn seam(&mut self) -> Option<Seam> {
        match self.byte()? {
            0 => Some(Seam::Clean),
            1 => Some(Seam::Unsure),
            _ => None,
        }
    }

    fn unfinished(&mut self) -> Option<Unfinished> {
        Some(Unfinished {
            prompt_token_ids: self.ids()?,
            token_ids: self.ids()?,
            reasoning: self.text()?,
            content: self.text()?,
            field: self.field()?,
            seam: self.seam()?,
            endpoint: self.text()?,
            segments: {
                let count = self.length()?;
                (0..count)
                    .map(|_| Some(Segment { tokens: self.number()?, endpoint: self.text()?, why: self.text()? }))
                    .collect::<Option<_>>()?
            },
        })
    }
}
