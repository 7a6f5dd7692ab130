//! What opening a journal does about its tail.
//!
//! What it is: the decision where the good part ends, and the cut. What it is not: a judge of the middle. A bad line with
//! good ones after it is no trace of a crash of ours; it is left as it stands and [`crate::scan`] reports it.
//!
//! A crash while records were being written leaves a prefix of them, and on some file systems zero bytes where length
//! became durable and data did not. A raw zero byte never occurs in JSON, so:
//! - zero bytes at the end, and terminated lines at the end that hold a zero byte, are cut;
//! - a line without its newline is kept if it is a whole JSON object (no proper prefix of an object is one) and then gets
//!   its newline; otherwise it is cut: half a line, half a UTF-8 character, white space;
//! - a terminated line without a zero byte is never cut.
//!
//! The cut bytes are kept in `NAME.torn-N` beside the journal, written and synced before the journal is cut. A crash
//! between the two leaves a second copy after the next opening, never none.

use crate::scan::LINE_BYTES_MAX;
use crate::storage::{Storage, StorageFile, parent_dir, read_full_at, write_all};
use crate::{Error, Result};
use serde_json::value::RawValue;
use std::ffi::OsString;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Bytes looked at or copied at a time.
const BLOCK_BYTES: u64 = 64 << 10;
/// How many `NAME.torn-N` are kept before opening refuses to make another.
const TORN_FILES_MAX: u32 = 10_000;

/// What was done to the tail of a journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repair {
    /// How many bytes were cut off the end; 0 for a file that was whole.
    pub cut_bytes: u64,
    /// Where the cut began in the journal, bytes; meaningful only if something was cut.
    pub cut_at: u64,
    /// The file that keeps the cut bytes.
    pub kept_in: Option<PathBuf>,
    /// Whether the last record was whole and only lacked its newline.
    pub newline_added: bool,
}

impl Repair {
    /// Whether the file had to be changed.
    pub fn was_needed(&self) -> bool {
        self.cut_bytes > 0 || self.newline_added
    }
}

/// Where the good part ends, and whether its last line lacks the newline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tail {
    keep: u64,
    newline_missing: bool,
}

/// Repairs the tail of an open journal and syncs what it changed.
pub(super) fn repair(storage: &dyn Storage, path: &Path, file: &mut dyn StorageFile) -> Result<Repair> {
    let reading = |error| Error::io("read the end of", path, error);
    let len = file.len().map_err(reading)?;
    let tail = find_tail(file, len).map_err(reading)?;
    let mut repair = Repair { cut_bytes: len - tail.keep, newline_added: tail.newline_missing, ..Repair::default() };
    if repair.cut_bytes > 0 {
        repair.cut_at = tail.keep;
        repair.kept_in = Some(keep_aside(storage, path, file, tail.keep..len)?);
        file.set_len(tail.keep).map_err(|error| Error::io("cut the torn end of", path, error))?;
    }
    if tail.newline_missing {
        write_all(file, b"\n").map_err(|error| Error::io("end the last line of", path, error))?;
    }
    Ok(repair)
}

/// Walks backwards from the end to the last thing worth keeping.
fn find_tail(file: &dyn StorageFile, len: u64) -> io::Result<Tail> {
    let mut end = len;
    loop {
        end = rposition(file, end, |byte| byte != 0)?.map_or(0, |last| last + 1);
        if end == 0 {
            return Ok(Tail { keep: 0, newline_missing: false });
        }
        let last_newline = rposition(file, end, |byte| byte == b'\n')?;
        if last_newline == Some(end - 1) {
            let line_start = rposition(file, end - 1, |byte| byte == b'\n')?.map_or(0, |newline| newline + 1);
            let zero_byte = rposition_in(file, line_start..end, |byte| byte == 0)?;
            if zero_byte.is_none() {
                return Ok(Tail { keep: end, newline_missing: false });
            }
            end = line_start;
            continue;
        }
        let line_start = last_newline.map_or(0, |newline| newline + 1);
        if end - line_start <= LINE_BYTES_MAX as u64 && is_whole_record(&read_range(file, line_start..end)?) {
            return Ok(Tail { keep: end, newline_missing: true });
        }
        end = line_start;
    }
}

/// Whether the bytes are one whole JSON object in UTF-8, white space around it allowed.
pub fn is_whole_record(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes)
        .ok()
        .and_then(|text| serde_json::from_str::<&RawValue>(text).ok())
        .is_some_and(|value| value.get().starts_with('{'))
}

/// Position of the last byte before `end` that is wanted.
fn rposition(file: &dyn StorageFile, end: u64, wanted: impl Fn(u8) -> bool) -> io::Result<Option<u64>> {
    rposition_in(file, 0..end, wanted)
}

fn rposition_in(file: &dyn StorageFile, range: Range<u64>, wanted: impl Fn(u8) -> bool) -> io::Result<Option<u64>> {
    let mut end = range.end;
    while end > range.start {
        let start = end.saturating_sub(BLOCK_BYTES).max(range.start);
        let block = read_range(file, start..end)?;
        if let Some(index) = block.iter().rposition(|&byte| wanted(byte)) {
            return Ok(Some(start + index as u64));
        }
        end = start;
    }
    Ok(None)
}

fn read_range(file: &dyn StorageFile, range: Range<u64>) -> io::Result<Vec<u8>> {
    // Callers ask for at most LINE_BYTES_MAX, so the length fits.
    let mut bytes = vec![0; (range.end - range.start) as usize];
    let taken = read_full_at(|buffer, at| file.read_at(buffer, at), &mut bytes, range.start)?;
    if taken < bytes.len() {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter while it was read"));
    }
    Ok(bytes)
}

/// Copies a range of the journal into a new file beside it, durably.
fn keep_aside(storage: &dyn Storage, path: &Path, file: &dyn StorageFile, range: Range<u64>) -> Result<PathBuf> {
    let aside = free_name(storage, path)?;
    let copied = copy_range(storage, &aside, file, range).and_then(|()| storage.sync_dir(parent_dir(&aside)));
    if let Err(error) = copied {
        let _ = storage.remove_file(&aside);
        let hint = format!("the end of {} is torn and stays as it is until it can be copied there", path.display());
        return Err(Error::io("keep the torn end in", &aside, error).hint(hint));
    }
    Ok(aside)
}

fn copy_range(storage: &dyn Storage, to: &Path, file: &dyn StorageFile, range: Range<u64>) -> io::Result<()> {
    let mut copy = storage.create(to)?;
    let mut at = range.start;
    while at < range.end {
        let block_end = (at + BLOCK_BYTES).min(range.end);
        write_all(&mut *copy, &read_range(file, at..block_end)?)?;
        at = block_end;
    }
    copy.sync_data()
}

fn free_name(storage: &dyn Storage, path: &Path) -> Result<PathBuf> {
    for number in 1..=TORN_FILES_MAX {
        let mut name = OsString::from(path.file_name().unwrap_or_default());
        name.push(format!(".torn-{number}"));
        let aside = path.with_file_name(name);
        if storage.len(&aside).map_err(|error| Error::io("look for", &aside, error))?.is_none() {
            return Ok(aside);
        }
    }
    Err(Error::environment(format!("{} has {TORN_FILES_MAX} torn ends beside it already", path.display()))
        .hint("look at the .torn-N files, then move them away"))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Memory(Vec<u8>);

    impl StorageFile for Memory {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn sync_data(&mut self) -> io::Result<()> {
            Ok(())
        }
        fn len(&self) -> io::Result<u64> {
            Ok(self.0.len() as u64)
        }
        fn set_len(&mut self, len: u64) -> io::Result<()> {
            self.0.resize(len as usize, 0);
            Ok(())
        }
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
            let rest = &self.0[(offset as usize).min(self.0.len())..];
            let taken = rest.len().min(buffer.len());
            buffer[..taken].copy_from_slice(&rest[..taken]);
            Ok(taken)
        }
    }

    fn tail_of(bytes: &[u8]) -> Tail {
        find_tail(&Memory(bytes.to_vec()), bytes.len() as u64).unwrap()
    }

    #[test]
    fn every_prefix_of_a_good_file_keeps_exactly_its_whole_records() {
        let lines = ["{\"a\":\"{x\\n}\"}\n", "{\"b\":\"grün\"}\r\n", "{\"c\":[{}]}\n"];
        let whole = lines.concat().into_bytes();
        for cut in 0..=whole.len() {
            let mut expected = Tail { keep: 0, newline_missing: false };
            let mut line_start = 0;
            for line in lines {
                let object_end = line_start + line.trim_end().len();
                let line_end = line_start + line.len();
                if cut >= line_end {
                    expected = Tail { keep: line_end as u64, newline_missing: false };
                } else if cut >= object_end {
                    expected = Tail { keep: cut as u64, newline_missing: true };
                }
                line_start = line_end;
            }
            assert_eq!(tail_of(&whole[..cut]), expected, "cut at {cut}");
        }
    }

    #[test]
    fn zeros_inside_a_terminated_last_line_are_a_torn_block() {
        assert_eq!(tail_of(b"{\"a\":1}\n{\"b\":\0\0\0\0}\n"), Tail { keep: 8, newline_missing: false });
        assert_eq!(tail_of(b"{\"a\":1}\n{\"b\":\0\0\n\0\0\"c\"}\n{\"d"), Tail { keep: 8, newline_missing: false });
    }

    #[test]
    fn a_terminated_bad_line_without_zeros_is_not_ours_to_cut() {
        assert_eq!(tail_of(b"{\"a\":1}\nhello\n").keep, 14);
    }

    #[test]
    fn zeros_behind_a_whole_record_go_and_the_record_stays() {
        assert_eq!(tail_of(b"{\"a\":1}\0\0\0"), Tail { keep: 7, newline_missing: true });
    }

    #[test]
    fn a_tail_longer_than_a_block_is_found() {
        let mut bytes = b"{\"a\":1}\n{\"b\":\"".to_vec();
        bytes.resize(3 * BLOCK_BYTES as usize + 5, b'x');
        assert_eq!(tail_of(&bytes).keep, 8);
        bytes.resize(6 * BLOCK_BYTES as usize, 0);
        assert_eq!(tail_of(&bytes).keep, 8);
        assert_eq!(tail_of(&vec![0; 2 * BLOCK_BYTES as usize + 1]).keep, 0);
    }
}
