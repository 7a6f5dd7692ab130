//! From the record of a run to training examples.
//!
//! What it is: one pass over `raw_responses.jsonl` that keeps exactly the sampled ids, says why anything was dropped, and writes any subset of the
//! [`Format`]s. What it is not: a tokenizer; a record without ids is dropped with that reason.
//!
//! ```text
//! index (heads of all lines, several threads) ──> rows in the data set's order ──> work (several threads: read, judge, encode)
//!    ──> books (one thread, in order: duplicates, split, counts, writers) ──> OUT.unfinished/ ──rename──> OUT/
//! ```
//!
//! Invariants
//! - What was sampled is what is trained: `input_ids` are the server's ids of prompt and answer, 1 in `loss_mask` are exactly the answer's.
//! - Every line is accounted for: answers and other lines = kept + dropped, by reason.
//! - The same lines with the same settings give the same bytes, in whatever order the lines stand and however many threads work.
//! - `OUT/` is whole or not there: it appears by a rename, after everything in it was synced. A finished one with the same fingerprint is not made again.
//! - Memory: 48 bytes a line, 40 an example, and for each thread at most [`BATCHES_WAITING`] + 2 batches of [`BATCH_BYTES_MAX`] bytes of records or one record, as read
//!   and as encoded (some four times that); for Arrow and Parquet a batch of a million tokens on each side, and 64 MiB of a row group.

mod books;
mod directory;
mod index;
mod policy;
pub(crate) mod record;
mod repetition;
mod sketch;
mod summary;
mod work;

pub use index::InputIdentity;
pub use policy::{DropReason, Keep, Policies, ThinkMarkers, TooLong};
pub use repetition::{COPIES_MIN, LOOP_TOKENS_MIN};
pub use summary::{InputCounts, Lengths, OutputCounts, SplitCounts, Summary, VocabSummary};

use crate::outputs::Format;
use crate::vocab::VocabPlan;
use books::Books;
use directory::Unfinished;
use eaglet_core::{Error, Result};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Version of the prepared directory.
pub const PREPARED_VERSION: u32 = 1;
/// Bytes of records that a thread takes on at a time, but for a longer record.
const BATCH_BYTES_MAX: u64 = 1 << 20;
/// Batches of each thread that wait to be written.
const BATCHES_WAITING: usize = 2;
/// Threads at most: beyond that the one that writes is the slowest.
pub const THREADS_MAX: usize = 64;

/// What is made. Part of the fingerprint, all of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Settings {
    /// What becomes an example.
    pub policies: Policies,
    /// What is written.
    pub formats: BTreeSet<Format>,
    /// Share of the prompts that is set apart, 0 to 1.
    pub validation_share: f64,
    /// The drafter's vocabulary; `None` = as large as the target's.
    pub draft_vocab: Option<VocabPlan>,
}

/// How it is made; the result does not depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads that read and encode, 1 to [`THREADS_MAX`].
    pub threads: usize,
    /// Whether another prepared set in the directory is replaced.
    pub existing: Existing,
}

/// What happens to a prepared set of other input or settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It stays, and the new one is refused.
    Refuse,
    /// It is removed once the new one is complete.
    Replace,
}

/// How far it is, for whoever looks.
#[derive(Debug, Default)]
pub struct Progress {
    /// Bytes of records done.
    pub bytes_done: AtomicU64,
    /// Bytes of records in all; 0 until that is known.
    pub bytes_total: AtomicU64,
}

/// How it ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Prepared {
    /// The set was made.
    Made(Summary),
    /// A finished one with the same fingerprint was there.
    WasThere(Summary),
}

/// Makes the prepared set of a record file.
///
/// # Errors
/// Usage: the directory holds something else. Environment: files cannot be read or written. Data: what is in the directory is damaged.
pub fn prepare(
    input: &Path,
    out: &Path,
    settings: &Settings,
    options: Options,
    progress: &Progress,
) -> Result<Prepared> {
    let threads = options.threads.clamp(1, THREADS_MAX);
    let index = index::read(input, threads)?;
    let fingerprint = fingerprint(&index.identity, settings)?;
    if let Some(summary) = directory::existing(out, &fingerprint, options.existing)? {
        return Ok(Prepared::WasThere(summary));
    }
    progress.bytes_total.store(index.lines.iter().map(|line| u64::from(line.bytes)).sum(), Ordering::Relaxed);
    let unfinished = Unfinished::begin(out)?;
    let mut books = Books::open(unfinished.path(), settings)?;
    work::for_each_item(input, &index.lines, settings, threads, &mut |batch| {
        progress.bytes_done.fetch_add(batch.bytes, Ordering::Relaxed);
        batch.items.into_iter().try_for_each(|item| books.take(item))
    })?;
    let mut summary = books.close(&index.identity, fingerprint)?;
    summary.files.sort();
    unfinished.finish(&summary, options.existing)?;
    Ok(Prepared::Made(summary))
}

/// What a record file is known by.
pub(crate) fn identity_of(input: &Path, threads: usize) -> Result<InputIdentity> {
    index::read(input, threads).map(|index| index.identity)
}

/// What makes a prepared set this one.
fn fingerprint(input: &InputIdentity, settings: &Settings) -> Result<Value> {
    let settings =
        serde_json::to_value(settings).map_err(|error| Error::bug(format!("settings are no JSON: {error}")))?;
    Ok(json!({"prepared_version": PREPARED_VERSION, "input": input, "settings": settings}))
}
