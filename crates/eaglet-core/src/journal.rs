//! The append-only record of a run: one JSON object a line.
//!
//! What it is: the file, its repair at opening and the rule by which bytes become durable. What it is not: the thread
//! that decides when to sync ([`crate::commit`]), nor a reader of records ([`crate::scan`]).
//!
//! Invariants
//! - What [`Journal::commit`] returned `Ok` for is on the disk. What was not is still in memory.
//! - Undurable records keep their order and their bytes, so writing them again puts the same bytes at the same place:
//!   whatever mixture of attempts a crash leaves is a prefix of the right file, perhaps with a torn tail.
//! - The file is valid line by line whenever eaglet stops, except for a torn tail, which the next opening cuts.
//! - One `Journal` for each file: the caller holds the [`crate::lock::RunLock`].
//!
//! A failed fsync is never simply repeated. Linux reports a write-back error once and marks the pages clean, so a second
//! fsync succeeds although the data never arrived; PostgreSQL lost data this way for twenty years until 2018 ("fsyncgate",
//! <https://wiki.postgresql.org/wiki/Fsync_Errors>). Here the undurable bytes are cut off at once, which drops the pages
//! nobody can trust, and the next commit opens the file again and writes them anew from memory.

mod repair;

pub use repair::{Repair, is_whole_record};

use crate::storage::{Storage, StorageFile, parent_dir, write_all};
use crate::{Error, Result};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Memory kept for the next group after a commit, bytes; a larger burst gives its memory back.
const PENDING_KEPT_BYTES_MAX: usize = 4 << 20;

/// An open journal.
pub struct Journal {
    storage: Arc<dyn Storage>,
    path: PathBuf,
    /// `None` after a failure: the next commit opens the file again.
    file: Option<Box<dyn StorageFile>>,
    durable_len: u64,
    /// Every record not yet durable, each with its newline.
    pending: Vec<u8>,
    /// Set when someone else changed the file: from then on nothing is written or cut.
    changed_by_others: Option<String>,
}

impl Journal {
    /// Opens the journal, creating it where it is missing, and repairs a torn tail. On return everything in the file is
    /// durable, also what an earlier process wrote and did not live to sync.
    ///
    /// # Errors
    /// An environment error naming the file that could not be read, repaired or synced.
    pub fn open(storage: Arc<dyn Storage>, path: &Path) -> Result<(Journal, Repair)> {
        let mut file = storage.open_append(path).map_err(|error| Error::io("open", path, error))?;
        let repair = repair::repair(&*storage, path, &mut *file)?;
        // Records that are in the file will count as done, so they have to be durable before anyone counts them. The name
        // likewise, even if the file was there: whoever created it may have died before syncing the directory.
        file.sync_data().map_err(|error| Error::io("sync", path, error))?;
        let directory = parent_dir(path);
        storage.sync_dir(directory).map_err(|error| Error::io("sync", directory, error))?;
        let durable_len = file.len().map_err(|error| Error::io("read the length of", path, error))?;
        let journal = Journal {
            storage,
            path: path.to_owned(),
            file: Some(file),
            durable_len,
            pending: Vec::new(),
            changed_by_others: None,
        };
        Ok((journal, repair))
    }

    /// Takes a record into memory, to be written by the next [`commit`](Self::commit).
    ///
    /// # Errors
    /// A bug error if the record is not one line that starts with `{` and ends with `}`; nothing is taken then.
    pub fn append(&mut self, record: &[u8]) -> Result<()> {
        check_record(record)?;
        self.pending.reserve(record.len() + 1);
        self.pending.extend_from_slice(record);
        self.pending.push(b'\n');
        Ok(())
    }

    /// Writes and syncs everything appended. After an error nothing of it counts as durable, all of it is still in memory,
    /// and commit may be called again: it opens the file afresh, cuts it to the durable length and writes all again.
    ///
    /// # Errors
    /// The operating system's error; [`io::ErrorKind::InvalidData`] for good once another program has changed the file.
    pub fn commit(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let mut file = self.file_at_durable_len()?;
        let written = write_all(&mut *file, &self.pending).and_then(|()| file.sync_data());
        if let Err(error) = written {
            // Cut now rather than at the next attempt: there may be none, and a later process must not find half a line or
            // trust pages that the kernel has given up on. If even this fails, reopening or the next opening does it.
            let _ = file.set_len(self.durable_len);
            return Err(error);
        }
        self.durable_len += self.pending.len() as u64;
        self.pending.clear();
        self.pending.shrink_to(PENDING_KEPT_BYTES_MAX);
        self.file = Some(file);
        Ok(())
    }

    /// The file, opened again if need be, with exactly the durable bytes in it.
    fn file_at_durable_len(&mut self) -> io::Result<Box<dyn StorageFile>> {
        if let Some(change) = &self.changed_by_others {
            return Err(io::Error::new(io::ErrorKind::InvalidData, change.clone()));
        }
        let healthy = self.file.take();
        // By name, not by handle: it also notices that the file was removed or replaced under us.
        let found = self.storage.len(&self.path)?;
        let own_leftover_max = if healthy.is_some() { 0 } else { self.pending.len() as u64 };
        let expected = self.durable_len..=self.durable_len + own_leftover_max;
        let Some(len) = found.filter(|len| expected.contains(len)) else {
            let found = found.map_or_else(|| "is gone".to_owned(), |len| format!("has {len} bytes"));
            let change = format!("another program changed the file: it {found}, expected {} bytes", self.durable_len);
            self.changed_by_others = Some(change.clone());
            return Err(io::Error::new(io::ErrorKind::InvalidData, change));
        };
        if let Some(file) = healthy {
            return Ok(file);
        }
        let mut file = self.storage.open_append(&self.path)?;
        if len != self.durable_len {
            file.set_len(self.durable_len)?;
        }
        Ok(file)
    }

    /// Where the journal lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How much of the file is durable, bytes.
    pub fn durable_len(&self) -> u64 {
        self.durable_len
    }

    /// How much waits in memory, bytes.
    pub fn pending_bytes(&self) -> u64 {
        self.pending.len() as u64
    }
}

/// Whether these bytes may become a line of a journal.
///
/// # Errors
/// A bug error: whoever made the record did not make one line with one JSON object.
pub fn check_record(record: &[u8]) -> Result<()> {
    let is_object = record.len() >= 2 && record.starts_with(b"{") && record.ends_with(b"}");
    if !is_object {
        return Err(Error::bug("a record for the journal is not a JSON object"));
    }
    if memchr::memchr2(b'\n', 0, record).is_some() {
        return Err(Error::bug("a record for the journal holds a raw line feed or zero byte"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::RealStorage;

    fn open(path: &Path) -> (Journal, Repair) {
        Journal::open(Arc::new(RealStorage), path).unwrap()
    }

    #[test]
    fn nothing_is_in_the_file_before_commit_and_all_after() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let (mut journal, repair) = open(&path);
        assert_eq!(repair, Repair::default());
        journal.append(b"{\"n\":1}").unwrap();
        journal.append(b"{\"n\":2}").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"");
        assert_eq!(journal.pending_bytes(), 16);
        journal.commit().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"{\"n\":1}\n{\"n\":2}\n");
        assert_eq!((journal.pending_bytes(), journal.durable_len()), (0, 16));
    }

    #[test]
    fn a_record_that_would_break_the_line_rule_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = open(&dir.path().join("journal.jsonl"));
        for bad in [&b"{\"a\":\n1}"[..], b"[1]", b"{", b"", b"{\"a\":\"\0\"}", b"{} "] {
            assert_eq!(journal.append(bad).unwrap_err().class(), crate::Class::Bug, "{bad:?}");
        }
        assert_eq!(journal.pending_bytes(), 0);
    }

    #[test]
    fn a_file_changed_by_another_program_is_left_alone_for_good() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let (mut journal, _) = open(&path);
        std::fs::write(&path, "{\"theirs\":1}\n").unwrap();
        journal.append(b"{\"ours\":1}").unwrap();
        for _ in 0..3 {
            let error = journal.commit().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert!(error.to_string().contains("has 13 bytes, expected 0 bytes"), "{error}");
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"theirs\":1}\n");
    }

    #[test]
    fn a_removed_file_is_noticed_and_not_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let (mut journal, _) = open(&path);
        std::fs::remove_file(&path).unwrap();
        journal.append(b"{}").unwrap();
        assert!(journal.commit().unwrap_err().to_string().contains("is gone"));
        assert!(journal.commit().is_err());
        assert!(!path.exists());
    }
}
