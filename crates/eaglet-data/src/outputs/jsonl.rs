//! One JSON object a line, for SpecForge and for speculators.
//!
//! SpecForge's `prompts_path` needs `input_ids` and `loss_mask` and ignores the rest; speculators' `prepare-data` reads the file with Arrow's JSON reader, for
//! which every line must have the same fields of the same types.

use super::{Encoded, FileEntry, Format, OutFile, Split, Writer, not_for_this};
use crate::example::{Example, MaskedIds};
use eaglet_core::Result;
use std::path::Path;

/// `{"id", "turn", "input_ids", "loss_mask"}`
pub(super) fn specforge(example: &Example) -> Vec<u8> {
    let mut line = line_for(&example.tokens);
    line.extend_from_slice(b"{\"id\":");
    push_json(&mut line, &example.id.sample_id);
    line.extend_from_slice(b",\"turn\":");
    push_number(&mut line, example.id.turn);
    push_tokens(&mut line, &example.tokens);
    line
}

/// `{"id", "primary_id", "input_ids", "loss_mask"}`: the names that speculators' own files have, and no `metadata`, whose fields differ from row to row.
pub(super) fn speculators(example: &Example) -> Vec<u8> {
    let mut line = line_for(&example.tokens);
    line.extend_from_slice(b"{\"id\":");
    push_json(&mut line, &format!("{}_gen{}", example.id.sample_id, example.id.turn));
    line.extend_from_slice(b",\"primary_id\":");
    push_json(&mut line, &example.id.sample_id);
    push_tokens(&mut line, &example.tokens);
    line
}

fn line_for(tokens: &MaskedIds) -> Vec<u8> {
    Vec::with_capacity(128 + tokens.len() * 9)
}

fn push_json(line: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(line, text).expect("text is JSON, and memory takes it");
}

/// The two lists, and the end of the object and the line.
fn push_tokens(line: &mut Vec<u8>, tokens: &MaskedIds) {
    line.extend_from_slice(b",\"input_ids\":[");
    for id in tokens.ids() {
        push_number(line, *id);
        line.push(b',');
    }
    // An example has a token, so there is a comma too many.
    line.pop();
    line.extend_from_slice(b"],\"loss_mask\":[");
    for (count, supervised) in tokens.runs() {
        let pair: &[u8] = if supervised { b"1," } else { b"0," };
        for _ in 0..count {
            line.extend_from_slice(pair);
        }
    }
    line.pop();
    line.extend_from_slice(b"]}\n");
}

/// Digits of a `u32` at most.
const DIGITS_MAX: usize = 10;

fn push_number(line: &mut Vec<u8>, mut number: u32) {
    let mut digits = [0; DIGITS_MAX];
    let mut at = DIGITS_MAX;
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    line.extend_from_slice(&digits[at..]);
}

/// The file of a split.
pub(super) struct LineFile {
    file: OutFile,
    format: Format,
}

impl LineFile {
    pub(super) fn create(root: &Path, format: Format, split: Split) -> Result<Self> {
        let file = OutFile::create(root, format!("{}/{}.jsonl", format.label(), split.label()))?;
        Ok(LineFile { file, format })
    }
}

impl Writer for LineFile {
    fn add(&mut self, _example: &Example, encoded: Encoded) -> Result<()> {
        match encoded {
            Encoded::Bytes(line) => self.file.append(&line),
            _ => Err(not_for_this(self.format)),
        }
    }

    fn finish(self: Box<Self>) -> Result<Vec<FileEntry>> {
        Ok(vec![self.file.finish()?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::{ExampleId, Marks};
    use eaglet_core::ids::ContentHash;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    proptest! {
        #[test]
        fn a_line_holds_exactly_the_example(sample in any::<String>(), turn in any::<u32>(),
                                            pairs in proptest::collection::vec((0u32..=i32::MAX as u32, 0u8..2), 1..30)) {
            let (ids, mask): (Vec<u32>, Vec<u8>) = pairs.into_iter().unzip();
            let Ok(tokens) = MaskedIds::from_mask(ids.clone(), &mask) else { return Ok(()) };
            let id = ExampleId { sample_id: sample.clone(), prompt_hash: ContentHash(1), row: Some(1), turn };
            let example = Example { id, tokens, marks: Marks::default() };
            let read = |line: Vec<u8>| {
                let text = line.strip_suffix(b"\n").unwrap();
                assert!(!text.contains(&b'\n'));
                serde_json::from_slice::<Value>(text).unwrap()
            };
            prop_assert_eq!(read(specforge(&example)), json!({"id": sample, "turn": turn, "input_ids": ids, "loss_mask": mask}));
            let expected = json!({"id": format!("{sample}_gen{turn}"), "primary_id": sample, "input_ids": ids, "loss_mask": mask});
            prop_assert_eq!(read(speculators(&example)), expected);
        }
    }
}
