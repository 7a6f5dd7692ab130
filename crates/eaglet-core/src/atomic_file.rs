//! Files that are replaced as a whole: a reader sees the old content or the new, never a mixture.
//!
//! What it is: one function over [`Storage`]. What it is not: the journal, which is only ever appended to.
//!
//! | the machine stops                    | what is there afterwards                                       |
//! |--------------------------------------|----------------------------------------------------------------|
//! | while the scratch file is written    | the old file; a scratch file, overwritten by the next attempt  |
//! | after the sync, before the rename    | the same                                                       |
//! | after the rename, before the dir sync| the old file or the new, each whole                            |
//! | after the directory sync (`Ok`)      | the new file                                                   |
//!
//! The sync comes before the rename because some file systems make a rename durable before the data it names, which
//! would leave an empty file under the good name.

use crate::storage::{Storage, parent_dir, write_all};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

/// Replaces the file at `path` with `bytes`, durably. One writer for each path: the scratch file has a fixed name, so
/// that crashes leave at most one behind.
///
/// # Errors
/// The operating system's; the caller adds what the file is for and its path. The old content is then untouched, except
/// that after a failed directory sync either content may be the durable one.
pub fn write_atomic(storage: &dyn Storage, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let scratch = scratch_path(path);
    let written = fill(storage, &scratch, bytes).and_then(|()| storage.rename(&scratch, path));
    if let Err(error) = written {
        // The error above is the one to tell; a scratch file that cannot be removed is overwritten next time.
        let _ = storage.remove_file(&scratch);
        return Err(error);
    }
    storage.sync_dir(parent_dir(path))
}

fn fill(storage: &dyn Storage, scratch: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = storage.create(scratch)?;
    write_all(&mut *file, bytes)?;
    file.sync_data()
}

/// The sibling in which the new content is prepared: `.NAME.scratch`.
fn scratch_path(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".scratch");
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::RealStorage;

    #[test]
    fn replaces_and_leaves_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("progress.json");
        write_atomic(&RealStorage, &path, b"{\"done\":1}").unwrap();
        write_atomic(&RealStorage, &path, b"{}").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"{}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_missing_directory_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let error = write_atomic(&RealStorage, &dir.path().join("gone/progress.json"), b"{}").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
