//! Rows read ahead: one thread reads, parses and hashes them while another counts them and tells which are new.
//!
//! A row is read by a pure function of the row; what depends on earlier rows (duplicates, choice) is not here. Order is kept; memory is
//! bounded by [`BATCHES_MAX`] batches, each of about [`BATCH_MAX_BYTES`] or one row. Opening a finished run of a million prompts is half
//! as long by this (`benchmarks/README.md`). Rows go back to be freed where they were allocated: freed by the other thread they made both threads
//! queue for one allocator arena, and the whole three times slower.

use crate::conversation;
use crate::inputs::InputFile;
use crate::plan::prompt_of;
use crate::reject::RejectReason;
use crate::rows::{self, Needs, RawRow};
use crate::spec::DatasetSpec;
use eaglet_core::prompt::Prompt;
use eaglet_core::{Error, Result};
use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

/// Batches that wait at most.
const BATCHES_MAX: usize = 4;
/// Rows of a batch at most.
const BATCH_MAX_ROWS: usize = 512;
/// Text of a batch at most, in bytes, but for its last row.
const BATCH_MAX_BYTES: usize = 1 << 20;

/// A row, read on its own.
pub(crate) struct ReadRow {
    /// 1-based, as in [`RawRow`].
    pub(crate) number: u64,
    pub(crate) became: Became,
    /// Whether the data set gives the id.
    pub(crate) id_given: bool,
    pub(crate) repaired: bool,
    /// Bit n: the row has the field of filter n (the last bit stands for all from 63 on).
    pub(crate) filters_seen: u64,
}

/// What a row became.
pub(crate) enum Became {
    Prompt(Prompt),
    /// It did not pass the filters.
    Filtered,
    /// Its id, if it has one, and why it is none.
    Rejected(Option<String>, RejectReason),
}

/// Reads one row; `position` counts all rows from 0.
pub(crate) fn read_row(raw: RawRow<'_>, position: u64, spec: &DatasetSpec) -> ReadRow {
    let mut row = ReadRow {
        number: raw.number,
        became: Became::Filtered,
        id_given: false,
        repaired: raw.repaired,
        filters_seen: 0,
    };
    let mut fields = match raw.fields {
        Ok(fields) => fields,
        Err(reason) => return ReadRow { became: Became::Rejected(None, reason), ..row },
    };
    for (index, filter) in spec.filters.iter().enumerate() {
        row.filters_seen |= u64::from(fields.lookup(filter.field()).is_some()) << index.min(63);
    }
    if !spec.filters.iter().all(|filter| filter.matches(&fields)) {
        return row;
    }
    let mut id = conversation::take_row_id(&mut fields, spec.id_field.as_deref());
    row.id_given = id.is_some();
    row.became = match conversation::read_row(fields, &mut id, spec) {
        Ok(read) => {
            row.repaired |= read.repaired;
            Became::Prompt(prompt_of(read, position))
        }
        Err(RejectReason::NoPromptField(_)) => {
            Became::Rejected(id, RejectReason::NoPromptField(raw.ignored.to_owned()))
        }
        Err(reason) => Became::Rejected(id, reason),
    };
    row
}

enum Message {
    Rows(usize, Vec<ReadRow>),
    /// The file of this index was read to its end and had so many rows.
    FileEnd(usize, u64),
    Failed(Error),
}

/// Hands every row of `files` to `take`, with the index of its file, in order, until it breaks.
///
/// # Errors
/// Those of reading, those of `take`, and a file without rows.
pub(crate) fn for_each_row(
    files: &[InputFile],
    needs: &Needs,
    spec: &DatasetSpec,
    take: &mut dyn FnMut(usize, &ReadRow) -> Result<ControlFlow<()>>,
) -> Result<()> {
    std::thread::scope(|scope| {
        let (batches, received) = sync_channel(BATCHES_MAX);
        let (give_back, used) = channel();
        scope.spawn(move || {
            let reader = Reader { batches, used };
            if let Err(error) = reader.read_all(files, needs, spec) {
                // Nobody listens only when enough was read.
                let _ = reader.batches.send(Message::Failed(error));
            }
        });
        for_each_received(files, received, &give_back, take)
    })
}

fn for_each_received(
    files: &[InputFile],
    received: Receiver<Message>,
    give_back: &Sender<Vec<ReadRow>>,
    take: &mut dyn FnMut(usize, &ReadRow) -> Result<ControlFlow<()>>,
) -> Result<()> {
    for message in received {
        match message {
            Message::Rows(file, rows) => {
                for row in &rows {
                    if take(file, row)?.is_break() {
                        return Ok(());
                    }
                }
                // The reader may have ended.
                let _ = give_back.send(rows);
            }
            Message::FileEnd(file, 0) => {
                return Err(Error::data(format!("{}: no rows", files[file].shown))
                    .hint("the file is empty; a download or an export may have failed"));
            }
            Message::FileEnd(..) => {}
            Message::Failed(error) => return Err(error),
        }
    }
    Ok(())
}

/// The reading side. Batches on their way in either direction are at most [`BATCHES_MAX`] and the two in hand.
struct Reader {
    batches: SyncSender<Message>,
    used: Receiver<Vec<ReadRow>>,
}

impl Reader {
    fn read_all(&self, files: &[InputFile], needs: &Needs, spec: &DatasetSpec) -> Result<()> {
        let mut position = 0;
        for (file, input) in files.iter().enumerate() {
            let (mut batch, mut bytes, first) = (self.empty_batch(), 0, position);
            let flow = rows::read(input, needs, &mut |raw| {
                let row = read_row(raw, position, spec);
                position += 1;
                if let Became::Prompt(prompt) = &row.became {
                    bytes += prompt.text_bytes();
                }
                batch.push(row);
                if batch.len() < BATCH_MAX_ROWS && bytes < BATCH_MAX_BYTES {
                    return Ok(ControlFlow::Continue(()));
                }
                bytes = 0;
                Ok(self.send(Message::Rows(file, std::mem::replace(&mut batch, self.empty_batch()))))
            });
            // The rows before a fault of the file count: it may lie behind the last one that is wanted.
            let wanted = self.send(Message::Rows(file, batch)).is_continue();
            if !wanted || flow?.is_break() || self.send(Message::FileEnd(file, position - first)).is_break() {
                break;
            }
        }
        Ok(())
    }

    /// Breaks when nobody takes rows any more.
    fn send(&self, message: Message) -> ControlFlow<()> {
        if self.batches.send(message).is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }

    /// A batch that came back, emptied here, or a new one.
    fn empty_batch(&self) -> Vec<ReadRow> {
        let mut batch = self.used.try_recv().unwrap_or_default();
        batch.clear();
        batch
    }
}
