//! The part that many threads do: a line is read, judged, and brought into every wanted format.
//!
//! Batches of lines are dealt out in turn, and each thread has a queue of its own; whoever takes from the queues in the same turn sees the lines in their order.
//! Bounds: [`BATCHES_WAITING`] batches in each queue.

use super::index::{self, LineAt, LineIs};
use super::policy::{self, DropReason, Dropped, Keep};
use super::record::RecordView;
use super::{BATCH_BYTES_MAX, BATCHES_WAITING, Settings, sketch};
use crate::example::{Example, ExampleId};
use crate::outputs::{ConversationSource, Encoded, Format, encode};
use eaglet_core::ids::ContentHash;
use eaglet_core::response::RecordHead;
use eaglet_core::resume::{Record, read_record};
use eaglet_core::{Error, Result};
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// What became of an answer, or of a line without one.
#[derive(Debug)]
pub(super) enum Item {
    /// An example, as the formats want it.
    Kept(Box<KeptItem>),
    /// None, and why.
    Dropped(DroppedItem),
}

#[derive(Debug)]
pub(super) struct KeptItem {
    pub(super) example: Example,
    pub(super) finish_reason: String,
    /// Of the answer, where near duplicates are looked for.
    pub(super) sketch: Option<u128>,
    pub(super) encoded: Vec<(Format, Encoded)>,
}

#[derive(Debug)]
pub(super) struct DroppedItem {
    /// Whose answer it is, as far as the line says.
    pub(super) sample_id: Option<String>,
    pub(super) prompt_hash: Option<ContentHash>,
    pub(super) row: Option<u64>,
    /// `None`: the line holds no answer.
    pub(super) turn: Option<u32>,
    /// Where the line begins, in bytes; told only of lines that nothing else names.
    pub(super) offset: Option<u64>,
    pub(super) dropped: Dropped,
}

/// What one thread made of some lines, in order.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) items: Vec<Item>,
    /// Of the records.
    pub(super) bytes: u64,
}

/// Hands out every batch in the order of the lines.
///
/// # Errors
/// Those of reading, and those of `take`.
pub(super) fn for_each_item(
    path: &Path,
    lines: &[LineAt],
    settings: &Settings,
    threads: usize,
    take: &mut dyn FnMut(Batch) -> Result<()>,
) -> Result<()> {
    let file = File::open(path).map_err(|error| Error::io("open", path, error))?;
    let batches = batches(lines);
    let threads = threads.min(batches.len()).max(1);
    std::thread::scope(|scope| {
        let queues: Vec<Receiver<Result<Batch>>> = (0..threads)
            .map(|thread| {
                let (done, queue) = sync_channel(BATCHES_WAITING);
                let own = batches.iter().skip(thread).step_by(threads);
                let worker = Worker { file: &file, path, settings };
                scope.spawn(move || worker.run(own.map(|batch| &lines[batch.clone()]), &done));
                queue
            })
            .collect();
        for turn in 0..batches.len() {
            // A queue ends early only with the panic of its thread, which the scope passes on.
            let Ok(batch) = queues[turn % threads].recv() else { break };
            take(batch?)?;
        }
        Ok(())
    })
}

/// Ranges of lines of about [`BATCH_BYTES_MAX`].
fn batches(lines: &[LineAt]) -> Vec<Range<usize>> {
    let mut batches = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (at, line) in lines.iter().enumerate() {
        bytes += u64::from(line.bytes);
        if bytes >= BATCH_BYTES_MAX || at + 1 == lines.len() {
            batches.push(start..at + 1);
            (start, bytes) = (at + 1, 0);
        }
    }
    batches
}

struct Worker<'a> {
    file: &'a File,
    path: &'a Path,
    settings: &'a Settings,
}

impl Worker<'_> {
    fn run<'l>(&self, batches: impl Iterator<Item = &'l [LineAt]>, done: &SyncSender<Result<Batch>>) {
        let mut buffer = Vec::new();
        for lines in batches {
            let mut batch = Batch::default();
            let read = lines.iter().try_for_each(|line| self.line(line, &mut buffer, &mut batch));
            // Nobody takes any more after an error, whose word has been said.
            if done.send(read.map(|()| batch)).is_err() {
                return;
            }
        }
    }

    fn line(&self, line: &LineAt, buffer: &mut Vec<u8>, batch: &mut Batch) -> Result<()> {
        index::read_line(self.file, self.path, line, buffer)?;
        batch.bytes += u64::from(line.bytes);
        match line.is {
            LineIs::Record => self.record(line, buffer, &mut batch.items),
            LineIs::Older => {
                batch.items.push(Item::Dropped(older(line, buffer)));
            }
            LineIs::Useless(useless_as) => {
                batch.items.push(Item::Dropped(useless(line, buffer, useless_as.dropped())));
            }
        }
        Ok(())
    }

    fn record(&self, line: &LineAt, bytes: &[u8], items: &mut Vec<Item>) {
        let record = match RecordView::parse(bytes) {
            Ok(record) => record,
            Err(error) => {
                let dropped = Dropped::new(DropReason::Unreadable, format!("is no record: {error}"));
                items.push(Item::Dropped(useless(line, bytes, dropped)));
                return;
            }
        };
        let last = record.turns.len() - 1;
        let judge = |(at, turn)| policy::judge(turn, record.status.filter(|_| at == last), &self.settings.policies);
        let verdicts: Vec<_> = record.turns.iter().enumerate().map(judge).collect();
        let all_turns_kept = verdicts.iter().all(Result::is_ok);
        for (turn, verdict) in verdicts.into_iter().enumerate() {
            let id = ExampleId {
                sample_id: record.sample_id.to_string(),
                prompt_hash: record.prompt_hash,
                row: record.row,
                turn: u32::try_from(turn).unwrap_or(u32::MAX),
            };
            items.push(match verdict {
                Ok((tokens, marks)) => {
                    let example = Example { id, tokens, marks };
                    let conversation = ConversationSource { record: &record, turn, all_turns_kept };
                    let formats = self.settings.formats.iter();
                    let encoded = formats.map(|format| (*format, encode(*format, &example, &conversation))).collect();
                    let finish_reason = record.turns[turn].finish_reason.to_string();
                    let sketch = self.sketch(&example);
                    Item::Kept(Box::new(KeptItem { example, finish_reason, sketch, encoded }))
                }
                Err(dropped) => Item::Dropped(DroppedItem {
                    sample_id: Some(id.sample_id),
                    prompt_hash: Some(id.prompt_hash),
                    row: id.row,
                    turn: Some(id.turn),
                    offset: None,
                    dropped,
                }),
            });
        }
    }
}

impl Worker<'_> {
    fn sketch(&self, example: &Example) -> Option<u128> {
        if self.settings.policies.near_duplicates == Keep::Keep {
            return None;
        }
        sketch::sketch(&example.tokens.supervised_ids().collect::<Vec<_>>())
    }
}

fn older(line: &LineAt, bytes: &[u8]) -> DroppedItem {
    let sample_id = match read_record(bytes) {
        Record::Legacy { id, .. } => Some(id),
        _ => None,
    };
    let dropped = Dropped::new(DropReason::NoTokenIds, "a record of the older script, which kept no ids");
    DroppedItem { sample_id, prompt_hash: None, row: line.row(), turn: Some(0), offset: None, dropped }
}

fn useless(line: &LineAt, bytes: &[u8], dropped: Dropped) -> DroppedItem {
    let head = RecordHead::parse(bytes);
    DroppedItem {
        sample_id: head.as_ref().map(|head| head.sample_id.to_string()),
        prompt_hash: head.map(|head| head.prompt_hash),
        row: line.row(),
        turn: None,
        offset: Some(line.offset),
        dropped,
    }
}
