//! The plan: every prompt of a run, known before the first request is sent.
//!
//! What is here: reading all rows, filtering, telling duplicates, choosing, spooling. What is not: which prompts are
//! done (the caller says), sending. Invariants: `rows_read = entries + rejected + duplicates + filtered + not chosen`; an
//! entry's key is unique; the order is the data set's, or with a seed that of [`shuffle_rank`]; memory is bounded by about
//! 75 bytes a usable row, never by the size of the texts.

use crate::conversation::Conversation;
use crate::hub::HubSettings;
use crate::identified::Identified;
use crate::inputs::{self, InputFile};
use crate::read_ahead::{self, Became};
use crate::reject::{DuplicateRow, RejectedRow};
use crate::rows::{self, Needs};
use crate::spec::DatasetSpec;
use crate::spool::{Place, Spool, SpoolWriter};
use eaglet_core::ids::{PromptKey, hash128};
use eaglet_core::prompt::Prompt;
use eaglet_core::{Error, Result};
use std::collections::BTreeMap;
use std::io::Read;
use std::ops::ControlFlow;
use std::path::Path;

/// At most so many rejected rows, and so many duplicates, are listed one by one; all of them are counted.
pub const LISTED_ROWS_MAX: usize = 100_000;
/// Keys that are hashed at once for the fingerprint.
const FINGERPRINT_KEYS: usize = 1024;
/// Rows between two calls of `progress`.
const PROGRESS_ROWS: u64 = 1024;

/// One prompt of a plan. 56 bytes, since a plan may have millions.
#[derive(Clone, Copy, Debug)]
pub struct PlanEntry {
    pub(crate) key: [u64; 2],
    pub(crate) row: u64,
    pub(crate) offset: u64,
    pub(crate) length: u32,
    pub(crate) number: u32,
    pub(crate) file: u32,
    pub(crate) text_bytes: u32,
    pub(crate) source: u16,
    pub(crate) done: bool,
}

impl PlanEntry {
    /// What the run knows this prompt by.
    pub fn key(&self) -> PromptKey {
        PromptKey((u128::from(self.key[0]) << 64) | u128::from(self.key[1]))
    }

    /// 0-based position in the data set, over all its files.
    pub fn row(&self) -> u64 {
        self.row
    }

    /// Length of all message texts in UTF-8 bytes (at most `u32::MAX` is recorded).
    pub fn text_bytes(&self) -> u32 {
        self.text_bytes
    }

    /// Index into [`Plan::sources`].
    pub fn source(&self) -> usize {
        usize::from(self.source)
    }

    /// Whether the caller said that this prompt is done.
    pub fn done(&self) -> bool {
        self.done
    }
}

/// Every prompt of a run, in the order of sending.
pub struct Plan {
    entries: Vec<PlanEntry>,
    spool: Spool,
    files: Vec<InputFile>,
    fingerprint: u128,
    tally: Tally,
}

/// What became of the rows that are no entries.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) rows_read: u64,
    pub(crate) filtered: u64,
    pub(crate) not_chosen: u64,
    pub(crate) repaired: u64,
    pub(crate) rejected: Vec<RejectedRow>,
    pub(crate) rejected_counts: BTreeMap<&'static str, u64>,
    pub(crate) duplicates: Vec<DuplicateRow>,
    pub(crate) duplicates_total: u64,
    pub(crate) sources: Vec<String>,
}

impl Plan {
    /// The prompts, in the order of sending.
    pub fn entries(&self) -> &[PlanEntry] {
        &self.entries
    }

    /// One prompt in full.
    ///
    /// # Errors
    /// If the temporary file cannot be read; or as a bug, for an entry that is done (those are not kept).
    pub fn prompt(&self, index: usize) -> Result<Prompt> {
        let entry = self.entries.get(index).filter(|entry| !entry.done);
        let entry = entry.ok_or_else(|| Error::bug(format!("prompt {index} of the plan is done or does not exist")))?;
        self.spool.get(Place { offset: entry.offset, length: entry.length })
    }

    /// Hash over the ordered keys and their number: equal for the same rows in any format.
    pub fn fingerprint(&self) -> u128 {
        self.fingerprint
    }

    /// Rows that cannot be used, with place and reason; the first [`LISTED_ROWS_MAX`] of them.
    pub fn rejected(&self) -> &[RejectedRow] {
        &self.tally.rejected
    }

    /// All rejected rows, counted by the label of their reason.
    pub fn rejected_counts(&self) -> &BTreeMap<&'static str, u64> {
        &self.tally.rejected_counts
    }

    /// Rows that repeat an earlier one, with both places; the first [`LISTED_ROWS_MAX`] of them.
    pub fn duplicates(&self) -> &[DuplicateRow] {
        &self.tally.duplicates
    }

    /// Number of all duplicate rows.
    pub fn duplicates_total(&self) -> u64 {
        self.tally.duplicates_total
    }

    /// Rows whose text was repaired ([`crate::BadText::Repair`]).
    pub fn repaired(&self) -> u64 {
        self.tally.repaired
    }

    /// Rows that did not pass the filters.
    pub fn filtered(&self) -> u64 {
        self.tally.filtered
    }

    /// Usable rows left out because `max_samples` chose others.
    pub fn not_chosen(&self) -> u64 {
        self.tally.not_chosen
    }

    /// Rows read; less than the data set has when `max_samples` was reached first.
    pub fn rows_read(&self) -> u64 {
        self.tally.rows_read
    }

    /// Names of the data set's sources, indexed by [`PlanEntry::source`]; the first is empty and stands for "none".
    pub fn sources(&self) -> &[String] {
        &self.tally.sources
    }

    /// Where a prompt stands in its file: `file.jsonl:12` or `file.parquet row 12`.
    pub fn origin(&self, index: usize) -> Option<String> {
        self.entries.get(index).map(|entry| origin(&self.files, entry))
    }
}

/// Reads the data set and fixes what is sent.
///
/// `work_dir` takes the spool and the kept copy of standard input. `is_done` is asked once for each prompt of the plan;
/// `progress` hears the number of rows read now and then.
///
/// # Errors
/// Usage: an input that does not exist, one id on two contents, filters that match nothing. Data: a damaged file, a file
/// without rows, or none that can be used. Environment: a file or `work_dir` that cannot be read or written.
pub fn plan(
    spec: &DatasetSpec,
    hub: &HubSettings,
    work_dir: &Path,
    stdin: Option<&mut dyn Read>,
    is_done: &mut dyn FnMut(&Prompt, PromptKey) -> bool,
    progress: &mut dyn FnMut(u64),
) -> Result<Plan> {
    if spec.max_samples == Some(0) {
        return Err(Error::usage("the number of samples must be at least 1"));
    }
    let files = inputs::resolve(spec, hub, work_dir, stdin)?;
    let needs = Needs::of(spec);
    let mut spool = SpoolWriter::create(work_dir)?;
    let mut identified = Identified::new(spec, &files);
    // With a seed and a number, which rows are chosen is known only after all were read: identify first, spool the
    // chosen ones in a second reading. Otherwise one reading does both.
    let two_readings = spec.shuffle_seed.is_some() && spec.max_samples.is_some();
    let stop_at = if two_readings { u64::MAX } else { spec.max_samples.unwrap_or(u64::MAX) };
    read_ahead::for_each_row(&files, &needs, spec, &mut |file, row| {
        if let Some((prompt, mut entry)) = identified.take(file, row)? {
            if !two_readings {
                place(&mut entry, prompt, &mut spool, is_done)?;
            }
            identified.entries.push(entry);
        }
        if identified.tally.rows_read.is_multiple_of(PROGRESS_ROWS) {
            progress(identified.tally.rows_read);
        }
        let full = identified.entries.len() as u64 >= stop_at;
        Ok(if full { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    progress(identified.tally.rows_read);
    let (mut entries, mut tally) = identified.finish()?;
    if let Some(seed) = spec.shuffle_seed {
        shuffle(&mut entries, seed);
    }
    if two_readings {
        let wanted = spec.max_samples.and_then(|max| usize::try_from(max).ok()).unwrap_or(usize::MAX);
        tally.not_chosen = entries.len().saturating_sub(wanted) as u64;
        entries.truncate(wanted);
        spool_chosen(spec, &needs, &files, &mut entries, &mut spool, is_done)?;
    }
    entries.shrink_to_fit();
    Ok(Plan { fingerprint: fingerprint(&entries), entries, spool: spool.finish()?, files, tally })
}

/// Second reading: spools the chosen rows, which may lie anywhere.
fn spool_chosen(
    spec: &DatasetSpec,
    needs: &Needs,
    files: &[InputFile],
    entries: &mut [PlanEntry],
    spool: &mut SpoolWriter,
    is_done: &mut dyn FnMut(&Prompt, PromptKey) -> bool,
) -> Result<()> {
    let mut by_row: Vec<usize> = (0..entries.len()).collect();
    by_row.sort_unstable_by_key(|index| entries[*index].row);
    let mut next = by_row.into_iter().peekable();
    let mut row = 0;
    for file in files {
        let flow = rows::read(file, needs, &mut |raw| {
            if let Some(index) = next.next_if(|index| entries[*index].row == row) {
                let entry = &mut entries[index];
                let prompt = match read_ahead::read_row(raw, row, spec).became {
                    Became::Prompt(prompt) if prompt.key() == entry.key() => prompt,
                    _ => return Err(changed(file)),
                };
                place(entry, &prompt, spool, is_done)?;
            }
            row += 1;
            Ok(if next.peek().is_none() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        if flow.is_break() {
            return Ok(());
        }
    }
    Err(changed(files.last().expect("a row was read, so there is a file")))
}

fn changed(file: &InputFile) -> Error {
    Error::data(format!("{}: changed while it was being read", file.shown))
        .hint("let its writer finish, then start again")
}

/// Asks whether the prompt is done, and spools it if not.
fn place(
    entry: &mut PlanEntry,
    prompt: &Prompt,
    spool: &mut SpoolWriter,
    is_done: &mut dyn FnMut(&Prompt, PromptKey) -> bool,
) -> Result<()> {
    entry.done = is_done(prompt, entry.key());
    if !entry.done {
        let place = spool.push(prompt)?;
        (entry.offset, entry.length) = (place.offset, place.length);
    }
    Ok(())
}

pub(crate) fn prompt_of(read: Conversation, row: u64) -> Prompt {
    Prompt::new(read.id, row, read.source, read.messages, read.tools)
}

/// Rank of a row in a shuffled plan: the first 64 bits (big-endian) of BLAKE3 over seed and row, each as 8 little-endian
/// bytes. Ranks are sorted, ties by row; so the order depends on nothing but seed and row numbers, on any platform.
pub fn shuffle_rank(seed: u64, row: u64) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    bytes[8..].copy_from_slice(&row.to_le_bytes());
    (hash128(&bytes) >> 64) as u64
}

fn shuffle(entries: &mut [PlanEntry], seed: u64) {
    entries.sort_by_cached_key(|entry| (shuffle_rank(seed, entry.row), entry.row));
}

fn fingerprint(entries: &[PlanEntry]) -> u128 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(entries.len() as u64).to_le_bytes());
    // In pieces: a call costs as much as hashing some hundred bytes.
    let mut piece = Vec::with_capacity(16 * FINGERPRINT_KEYS);
    for entries in entries.chunks(FINGERPRINT_KEYS) {
        piece.clear();
        entries.iter().for_each(|entry| piece.extend_from_slice(&entry.key().0.to_be_bytes()));
        hasher.update(&piece);
    }
    let mut first = [0; 16];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    u128::from_be_bytes(first)
}

pub(crate) fn origin(files: &[InputFile], entry: &PlanEntry) -> String {
    rows::origin(&files[entry.file as usize], u64::from(entry.number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_stays_small() {
        assert!(size_of::<PlanEntry>() <= 56);
    }

    #[test]
    fn shuffle_ranks_are_fixed_for_ever() {
        // A change here changes which prompts `--shuffle-seed 7 --max-samples N` means.
        let mut rows: Vec<u64> = (0..8).collect();
        rows.sort_by_key(|row| shuffle_rank(7, *row));
        assert_eq!(rows, [3, 6, 1, 2, 4, 7, 5, 0]);
    }
}
