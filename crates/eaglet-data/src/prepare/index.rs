//! The lines of a record file in the order of the data set, without holding them.
//!
//! Answers stand in the file in the order in which they came. Prepared, they stand in the order of their rows: so what comes out does not depend on
//! how many requests were out, or where a run was interrupted. One pass reads the head of each line and remembers where it is; memory: 48 bytes a line,
//! and 32 more while the second records are looked for.

use super::policy::{DropReason, Dropped};
use eaglet_core::ids::hash128;
use eaglet_core::resume::{Record, read_record};
use eaglet_core::scan::{self, Damage, Line, LineKind};
use eaglet_core::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::path::Path;

/// What a line is, as far as its head says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LineIs {
    /// A record of eaglet.
    Record,
    /// An answer in the older script's format: it has no ids.
    Older,
    /// Nothing that can become an example.
    Useless(Useless),
}

/// Why a line can become no example.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Useless {
    /// A JSON object without an answer.
    NotAnAnswer,
    /// The prompt has an earlier record.
    SecondRecord,
    /// Damaged.
    Damaged(Damage),
}

impl Useless {
    pub(crate) fn dropped(self) -> Dropped {
        let (reason, words) = match self {
            Useless::NotAnAnswer => (DropReason::NotAnAnswer, "a JSON object without an answer"),
            Useless::SecondRecord => (DropReason::SecondRecord, "the prompt has an earlier record"),
            Useless::Damaged(damage) => {
                let words = match damage {
                    Damage::Partial => "unfinished at the end of the file",
                    Damage::TooLong => "longer than 64 MiB",
                    Damage::ZeroBytes => "holds zero bytes",
                    Damage::NotUtf8 => "is not UTF-8",
                    Damage::NotAnObject => "is not one JSON object",
                };
                (DropReason::Unreadable, words)
            }
        };
        Dropped::new(reason, words)
    }
}

/// Stands for a row that the record does not name: behind all others.
const ROW_UNKNOWN: u64 = u64::MAX;

/// Where a line is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LineAt {
    row: u64,
    key: u128,
    pub(crate) offset: u64,
    /// Without the line feed.
    pub(crate) bytes: u32,
    pub(crate) is: LineIs,
}

impl LineAt {
    /// 0-based row of the data set, if the line says.
    pub(crate) fn row(&self) -> Option<u64> {
        (self.row != ROW_UNKNOWN).then_some(self.row)
    }
}

/// What was read, so that the same input is known again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputIdentity {
    /// Bytes of the lines and their line feeds.
    pub bytes: u64,
    /// Lines that are not blank.
    pub lines: u64,
    /// Sum of the lines' BLAKE3-128 hashes, 32 hexadecimal digits: the same for the same lines in any order.
    pub content_hash: String,
}

/// All lines, in the order in which they are prepared.
#[derive(Debug, Default)]
pub(crate) struct Index {
    pub(crate) lines: Vec<LineAt>,
    pub(crate) identity: InputIdentity,
}

#[derive(Default)]
struct Part {
    lines: Vec<LineAt>,
    bytes: u64,
    hash_sum: u128,
}

impl Part {
    fn take(&mut self, line: Line<'_>) {
        self.bytes += line.bytes.len() as u64 + u64::from(line.kind == LineKind::Complete);
        if line.bytes.trim_ascii().is_empty() {
            return;
        }
        let hash = hash128(line.bytes);
        self.hash_sum = self.hash_sum.wrapping_add(hash);
        let (row, key, is) = match line.kind {
            LineKind::TooLong => (None, hash, LineIs::Useless(Useless::Damaged(Damage::TooLong))),
            LineKind::Complete | LineKind::Partial => identify(&line, hash),
        };
        // A line that is too long is given only to its limit, far below 4 GiB.
        let bytes = u32::try_from(line.bytes.len()).unwrap_or(u32::MAX);
        self.lines.push(LineAt { row: row.unwrap_or(ROW_UNKNOWN), key, offset: line.offset, bytes, is });
    }
}

fn identify(line: &Line<'_>, hash: u128) -> (Option<u64>, u128, LineIs) {
    match read_record(line.bytes) {
        Record::Own { key, row, .. } => (row, key.0, LineIs::Record),
        Record::Legacy { id, .. } => (None, hash128(id.as_bytes()), LineIs::Older),
        Record::Unfinished => (None, hash, LineIs::Useless(Useless::NotAnAnswer)),
        Record::Unreadable => {
            let damage = line.damage().unwrap_or(Damage::NotAnObject);
            (None, hash, LineIs::Useless(Useless::Damaged(damage)))
        }
    }
}

/// Reads the heads of all lines on up to `threads` threads.
///
/// # Errors
/// Environment: the file cannot be read.
pub(crate) fn read(path: &Path, threads: usize) -> Result<Index> {
    let parts = scan::scan(path, Part::take, threads)?;
    let identity = InputIdentity {
        bytes: parts.iter().map(|part| part.bytes).sum(),
        lines: parts.iter().map(|part| part.lines.len() as u64).sum(),
        content_hash: format!("{:032x}", parts.iter().fold(0u128, |sum, part| sum.wrapping_add(part.hash_sum))),
    };
    let mut lines: Vec<LineAt> = parts.into_iter().flat_map(|part| part.lines).collect();
    mark_second_records(&mut lines);
    // Lines that name no row come last. The key orders records of one row; only damaged lines that are equal to the byte are left to the offset.
    lines.sort_unstable_by_key(|line| (line.row, line.key, line.offset));
    Ok(Index { lines, identity })
}

/// Of several records of one prompt the first in the file counts, as it does for a resume.
fn mark_second_records(lines: &mut [LineAt]) {
    lines.sort_unstable_by_key(|line| line.offset);
    let mut seen = HashSet::with_capacity(lines.len());
    for line in lines.iter_mut() {
        let answers = matches!(line.is, LineIs::Record | LineIs::Older);
        if answers && !seen.insert((line.key, line.is)) {
            line.is = LineIs::Useless(Useless::SecondRecord);
        }
    }
}

/// Reads one line again.
///
/// # Errors
/// Environment: the file cannot be read. Data: it is shorter than it was.
pub(crate) fn read_line(file: &std::fs::File, path: &Path, line: &LineAt, buffer: &mut Vec<u8>) -> Result<()> {
    use std::os::unix::fs::FileExt;
    buffer.resize(line.bytes as usize, 0);
    file.read_exact_at(buffer, line.offset).map_err(|error| Error::io("read", path, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_costs_what_is_documented() {
        assert_eq!(size_of::<LineAt>(), 48);
    }
}
