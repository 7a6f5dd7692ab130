//! The part that one thread does, in the order of the rows: duplicates, the split, the counts, and feeding the writers.
//!
//! Invariant: every item that is taken is kept or dropped, and counted once: `items = kept + dropped`.

use super::policy::{DropReason, Dropped, Keep};
use super::summary::{DROPPED_FILE, InputCounts, Lengths, OutputCounts, SplitCounts, Summary, VocabSummary};
use super::work::{DroppedItem, Item, KeptItem};
use super::{InputIdentity, PREPARED_VERSION, Settings};
use crate::example::Example;
use crate::outputs::{Encoded, FileEntry, Format, OutFile, Split, Writer, writer};
use crate::vocab::{DraftVocab, TokenCounts};
use eaglet_core::ids::{BuildHashedKeyHasher, ContentHash};
use eaglet_core::{Error, Result};
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// A line of `dropped.jsonl`.
#[derive(Serialize)]
struct DroppedLine<'a> {
    v: u32,
    sample_id: Option<&'a str>,
    prompt_hash: Option<ContentHash>,
    row: Option<u64>,
    turn: Option<u32>,
    reason: &'static str,
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
}

/// What was kept, by a hash, with the row (`u64::MAX`: unknown).
type Seen = HashMap<u128, u64, BuildHashedKeyHasher>;

fn row_in_words(row: u64) -> String {
    if row == u64::MAX { "an earlier example".to_owned() } else { format!("row {row}") }
}

/// Counts of one side while it grows.
#[derive(Default)]
struct Side {
    tokens: u64,
    supervised: u64,
    lengths: Vec<u32>,
    counts: TokenCounts,
}

pub(super) struct Books<'a> {
    root: PathBuf,
    settings: &'a Settings,
    dropped_file: OutFile,
    writers: BTreeMap<(Format, Split), Box<dyn Writer>>,
    /// Kept examples by their content.
    seen: Seen,
    /// Kept examples by the sketch of their answer.
    sketches: Seen,
    records: u64,
    kept: u64,
    dropped: BTreeMap<&'static str, u64>,
    marks: BTreeMap<&'static str, u64>,
    by_finish_reason: BTreeMap<String, u64>,
    sides: BTreeMap<Split, Side>,
    outputs: BTreeMap<Format, OutputCounts>,
}

impl<'a> Books<'a> {
    pub(super) fn open(root: &Path, settings: &'a Settings) -> Result<Self> {
        Ok(Books {
            root: root.to_owned(),
            settings,
            dropped_file: OutFile::create(root, DROPPED_FILE)?,
            writers: BTreeMap::new(),
            seen: Seen::default(),
            sketches: Seen::default(),
            records: 0,
            kept: 0,
            dropped: BTreeMap::new(),
            marks: BTreeMap::new(),
            by_finish_reason: BTreeMap::new(),
            sides: Split::ALL.into_iter().map(|split| (split, Side::default())).collect(),
            outputs: settings.formats.iter().map(|format| (*format, OutputCounts::default())).collect(),
        })
    }

    pub(super) fn take(&mut self, item: Item) -> Result<()> {
        match item {
            Item::Dropped(item) => self.drop_item(&item),
            Item::Kept(item) => {
                // Turn 0 stands for its record.
                self.records += u64::from(item.example.id.turn == 0);
                match self.repeats(&item) {
                    Some(dropped) => self.drop_example(&item.example, dropped),
                    None => self.keep(*item),
                }
            }
        }
    }

    /// Why an example is dropped because of an earlier one. One that is dropped leaves no trace: only what is kept makes others duplicates.
    fn repeats(&mut self, item: &KeptItem) -> Option<Dropped> {
        let policies = &self.settings.policies;
        let row = item.example.id.row.unwrap_or(u64::MAX);
        let content = (policies.duplicates == Keep::Drop).then(|| item.example.tokens.content_hash());
        let first = |seen: &Seen, hash: Option<u128>| seen.get(&hash?).copied();
        if let Some(row) = first(&self.seen, content) {
            return Some(Dropped::new(DropReason::Duplicate, format!("the ids and mask of {}", row_in_words(row))));
        }
        if let Some(row) = first(&self.sketches, item.sketch) {
            return Some(Dropped::new(
                DropReason::NearDuplicate,
                format!("almost the answer of {}", row_in_words(row)),
            ));
        }
        content.map(|hash| self.seen.insert(hash, row));
        item.sketch.map(|hash| self.sketches.insert(hash, row));
        None
    }

    fn drop_example(&mut self, example: &Example, dropped: Dropped) -> Result<()> {
        let id = &example.id;
        self.write_dropped(&DroppedItem {
            sample_id: Some(id.sample_id.clone()),
            prompt_hash: Some(id.prompt_hash),
            row: id.row,
            turn: Some(id.turn),
            offset: None,
            dropped,
        })
    }

    fn drop_item(&mut self, item: &DroppedItem) -> Result<()> {
        self.records += u64::from(item.turn == Some(0) && item.prompt_hash.is_some());
        self.write_dropped(item)
    }

    fn write_dropped(&mut self, item: &DroppedItem) -> Result<()> {
        let reason = item.dropped.reason.label();
        *self.dropped.entry(reason).or_default() += 1;
        let line = DroppedLine {
            v: PREPARED_VERSION,
            sample_id: item.sample_id.as_deref(),
            prompt_hash: item.prompt_hash,
            row: item.row,
            turn: item.turn,
            reason,
            detail: &item.dropped.detail,
            offset: item.offset,
        };
        let mut bytes =
            serde_json::to_vec(&line).map_err(|error| Error::bug(format!("a dropped answer is no JSON: {error}")))?;
        bytes.push(b'\n');
        self.dropped_file.append(&bytes)
    }

    fn keep(&mut self, item: KeptItem) -> Result<()> {
        let KeptItem { example, finish_reason, encoded, sketch: _ } = item;
        let validation = example.id.is_validation(self.settings.validation_share);
        let split = if validation { Split::Validation } else { Split::Train };
        self.count(&example, finish_reason, split);
        for (format, encoded) in encoded {
            let counts = self.outputs.entry(format).or_default();
            match encoded {
                Encoded::WithLastTurn => {
                    *counts.left_out.entry("earlier_turn".to_owned()).or_default() += 1;
                }
                Encoded::LeftOut(why) => *counts.left_out.entry(why.to_owned()).or_default() += 1,
                encoded => {
                    let rows = if validation { &mut counts.validation } else { &mut counts.train };
                    *rows += 1;
                    self.writer(format, split)?.add(&example, encoded)?;
                }
            }
        }
        Ok(())
    }

    /// A file appears with its first row: an empty one stops some loaders.
    fn writer(&mut self, format: Format, split: Split) -> Result<&mut Box<dyn Writer>> {
        use std::collections::btree_map::Entry;
        Ok(match self.writers.entry((format, split)) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(place) => place.insert(writer(format, split, &self.root)?),
        })
    }

    fn count(&mut self, example: &Example, finish_reason: String, split: Split) {
        self.kept += 1;
        *self.by_finish_reason.entry(finish_reason).or_default() += 1;
        let marks = example.marks;
        let set = [
            ("cut_at_limit", marks.cut_at_limit),
            ("clipped", marks.clipped),
            ("cut_in_thought", marks.cut_in_thought),
            ("repetition", marks.repetition),
        ];
        for (label, _) in set.into_iter().filter(|(_, set)| *set) {
            *self.marks.entry(label).or_default() += 1;
        }
        let side = self.sides.entry(split).or_default();
        side.tokens += example.tokens.len() as u64;
        side.supervised += example.tokens.supervised() as u64;
        side.lengths.push(u32::try_from(example.tokens.len()).unwrap_or(u32::MAX));
        if self.settings.draft_vocab.is_some() {
            example.tokens.supervised_ids().for_each(|id| side.counts.add(id));
        }
    }

    /// Ends all files, and says what was done.
    pub(super) fn close(mut self, input: &InputIdentity, fingerprint: Value) -> Result<Summary> {
        let mut files = vec![self.dropped_file.finish()?];
        for writer in std::mem::take(&mut self.writers).into_values() {
            files.extend(writer.finish()?);
        }
        let sides = &self.sides;
        let vocabulary = write_vocabulary(&self.root, self.settings, sides, &mut files)?;
        let owned = |counts: &BTreeMap<&'static str, u64>| counts.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect();
        Ok(Summary {
            v: PREPARED_VERSION,
            eaglet: env!("CARGO_PKG_VERSION").to_owned(),
            fingerprint,
            input: InputCounts {
                lines: input.lines,
                records: self.records,
                items: self.kept + self.dropped.values().sum::<u64>(),
            },
            kept: self.kept,
            dropped: owned(&self.dropped),
            marks: owned(&self.marks),
            by_finish_reason: self.by_finish_reason,
            splits: sides.iter().map(|(split, side)| (*split, side.counted())).collect(),
            vocabulary,
            outputs: self.outputs,
            files,
        })
    }
}

impl Side {
    fn counted(&self) -> SplitCounts {
        SplitCounts {
            examples: self.lengths.len() as u64,
            tokens: self.tokens,
            supervised_tokens: self.supervised,
            lengths: Lengths::of(&self.lengths),
        }
    }
}

/// Chooses the drafter's vocabulary from the training side and writes its maps: once for all, and where speculators looks for them.
fn write_vocabulary(
    root: &Path,
    settings: &Settings,
    sides: &BTreeMap<Split, Side>,
    files: &mut Vec<FileEntry>,
) -> Result<Option<VocabSummary>> {
    let (Some(plan), Some(train), Some(validation)) =
        (&settings.draft_vocab, sides.get(&Split::Train), sides.get(&Split::Validation))
    else {
        return Ok(None);
    };
    let vocab = DraftVocab::choose(plan, &train.counts);
    let mut directories = vec![String::new()];
    if settings.formats.contains(&Format::Speculators) {
        let with_data = Split::ALL.into_iter().filter(|split| !sides[split].lengths.is_empty());
        directories.extend(with_data.map(|split| format!("{}/{}/", Format::Speculators.label(), split.label())));
    }
    for (name, content) in vocab.files() {
        for directory in &directories {
            let mut file = OutFile::create(root, format!("{directory}{name}"))?;
            file.append(&content)?;
            files.push(file.finish()?);
        }
    }
    Ok(Some(VocabSummary {
        draft: u32::try_from(vocab.chosen().len()).unwrap_or(u32::MAX),
        target: plan.target(),
        distinct: train.counts.seen().len() as u64,
        covered_train: vocab.covered(&train.counts),
        covered_validation: vocab.covered(&validation.counts),
    }))
}
