//! From the bytes of the file to what is unfinished, and the file's live part. Pure.

use super::frame::{FRAME_HEAD_BYTES, Frame, MAGIC, append_framed, first_frame};
use super::{Saved, Unfinished};
use crate::ids::PromptKey;
use crate::response::{Answer, Status};
use std::collections::{BTreeMap, HashMap};

/// One generation as the frames tell it.
#[derive(Clone, Debug, PartialEq)]
struct Told {
    key: PromptKey,
    turn: u64,
    at: u64,
    unfinished: Option<Box<Unfinished>>,
    turns: BTreeMap<u64, (Box<Answer>, Status)>,
}

/// What a file says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Replayed {
    told: BTreeMap<u64, Told>,
    /// Bytes up to the end of the last whole frame; 0 for a file of another kind.
    pub good_bytes: u64,
}

/// Reads as many whole frames as there are.
pub fn replay(bytes: &[u8]) -> Replayed {
    let mut replayed = Replayed::default();
    let Some(mut rest) = bytes.strip_prefix(MAGIC) else { return replayed };
    replayed.good_bytes = MAGIC.len() as u64;
    while let Some((frame, length)) = first_frame(rest) {
        replayed.take(frame);
        replayed.good_bytes += length as u64;
        rest = &rest[length..];
    }
    replayed
}

impl Replayed {
    fn take(&mut self, frame: Frame) {
        match frame {
            Frame::Whole { generation, key, turn, at, unfinished } => {
                let told = self.generation(generation, key, turn, at);
                (told.turn, told.at, told.unfinished) = (turn, at, Some(unfinished));
            }
            Frame::Turn { generation, key, turn, answer, status } => {
                let told = self.generation(generation, key, turn + 1, 0);
                told.turns.insert(turn, (answer, status));
                // What was told of this turn before it ended is over.
                if told.turn <= turn {
                    (told.turn, told.unfinished) = (turn + 1, None);
                }
            }
            Frame::End { generation } => {
                self.told.remove(&generation);
            }
            Frame::More { generation, follows, token_ids, reasoning, content, field, seam } => {
                let Some(answer) = self.told.get_mut(&generation).and_then(|told| told.unfinished.as_mut()) else {
                    return;
                };
                let has = [answer.token_ids.len(), answer.reasoning.len(), answer.content.len()].map(|n| n as u64);
                if has != follows {
                    return;
                }
                answer.token_ids.extend_from_slice(&token_ids);
                answer.reasoning.push_str(&reasoning);
                answer.content.push_str(&content);
                (answer.field, answer.seam) = (field, seam);
            }
        }
    }

    fn generation(&mut self, generation: u64, key: PromptKey, turn: u64, at: u64) -> &mut Told {
        let fresh = || Told { key, turn, at, unfinished: None, turns: BTreeMap::new() };
        let told = self.told.entry(generation).or_insert_with(fresh);
        if told.key != key {
            *told = fresh();
        }
        told
    }

    /// What there is of each prompt. Of two generations of one prompt the later number counts.
    pub fn into_saved(self) -> HashMap<PromptKey, Saved> {
        let mut saved = HashMap::new();
        for (generation, told) in self.told {
            let mut turns = Vec::new();
            for (number, (answer, status)) in told.turns {
                if number != turns.len() as u64 {
                    break;
                }
                turns.push((*answer, status));
            }
            // An answer to a turn whose predecessors are missing follows from nothing.
            let unfinished = told.unfinished.filter(|_| told.turn == turns.len() as u64).map(|unfinished| *unfinished);
            if unfinished.is_some() || !turns.is_empty() {
                saved.insert(told.key, Saved { generation, turns, unfinished });
            }
        }
        saved
    }

    /// Forgets the prompts that are not left.
    pub fn retain(&mut self, mut is_left: impl FnMut(PromptKey) -> bool) {
        self.told.retain(|_, told| is_left(told.key));
    }

    /// The file that says just this, and how many bytes each generation takes in it.
    pub fn to_file(&self) -> (Vec<u8>, HashMap<u64, u64>) {
        let mut file = MAGIC.to_vec();
        let mut sizes = HashMap::new();
        for (&generation, told) in &self.told {
            let before = file.len();
            for (&turn, (answer, status)) in &told.turns {
                let frame = Frame::Turn { generation, key: told.key, turn, answer: answer.clone(), status: *status };
                append_framed(&mut file, &frame.to_payload());
            }
            if let Some(unfinished) = &told.unfinished {
                let frame = Frame::Whole {
                    generation,
                    key: told.key,
                    turn: told.turn,
                    at: told.at,
                    unfinished: unfinished.clone(),
                };
                append_framed(&mut file, &frame.to_payload());
            }
            sizes.insert(generation, (file.len() - before) as u64);
        }
        (file, sizes)
    }

    /// The highest number of a generation.
    pub fn last_generation(&self) -> Option<u64> {
        self.told.last_key_value().map(|(generation, _)| *generation)
    }

    /// Whether nothing is unfinished.
    pub fn is_empty(&self) -> bool {
        self.told.is_empty()
    }
}

/// The live part of a file's bytes.
pub fn compact(bytes: &[u8]) -> (Vec<u8>, HashMap<u64, u64>) {
    replay(bytes).to_file()
}

/// Whether the dead bytes of a file outweigh its live ones, and the file has `bytes_min`.
pub fn should_compact(live_bytes: u64, file_bytes: u64, bytes_min: u64) -> bool {
    file_bytes >= bytes_min && file_bytes.saturating_sub(live_bytes) > live_bytes
}

/// Bytes that a payload takes in the file.
pub(super) fn framed_bytes(payload: &[u8]) -> u64 {
    (FRAME_HEAD_BYTES + payload.len()) as u64
}
