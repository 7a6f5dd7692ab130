//! The seam between eaglet and the disk, where tests inject faults.
//!
//! What it is: the few file operations on which the journal and the atomic files stand, as two traits, and
//! [`RealStorage`], which hands them to the operating system. What it is not: a virtual file system. Data sets are read
//! and logs are written without it; only what must survive a crash goes through here.
//!
//! Invariants
//! - `Ok` from [`StorageFile::sync_data`] covers every byte written through any handle of that file before the call.
//! - Nothing here retries a failed sync: after one, the kernel may already have dropped the dirty pages and a second
//!   sync would report success for data that never reached the disk. The journal writes again instead.
//! - A name (created, renamed) is durable only after [`Storage::sync_dir`] of its directory.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The file operations that must be right across a crash.
pub trait Storage: Send + Sync {
    /// Makes a directory and whatever is missing above it; the new names are durable on return.
    fn create_dir_all(&self, path: &Path) -> io::Result<()>;
    /// Opens for reading and for writing at the end; creates an empty file where there is none.
    fn open_append(&self, path: &Path) -> io::Result<Box<dyn StorageFile>>;
    /// Opens for reading; fails with [`io::ErrorKind::NotFound`] where there is no file.
    fn open_read(&self, path: &Path) -> io::Result<Box<dyn StorageFile>>;
    /// Creates an empty file, or empties the one that is there.
    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>>;
    /// The whole content of a small file.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// Gives a file another name, replacing what had that name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Makes the names in a directory durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Length in bytes of what has this name now, `None` where nothing has it.
    fn len(&self, path: &Path) -> io::Result<Option<u64>>;
}

/// An open file of a [`Storage`].
pub trait StorageFile: Send {
    /// Writes at the end and returns how many bytes were taken, perhaps fewer than given.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;
    /// Makes the content and the length durable.
    fn sync_data(&mut self) -> io::Result<()>;
    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;
    /// Whether there is no byte in it.
    fn is_empty(&self) -> io::Result<bool> {
        self.len().map(|bytes| bytes == 0)
    }
    /// Cuts the file to this length (or extends it with zero bytes).
    fn set_len(&mut self, len: u64) -> io::Result<()>;
    /// Reads from this position; 0 means the end of the file.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
}

/// The directory that holds this name; `.` for a bare name.
pub fn parent_dir(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Writes all the bytes, however many calls that takes.
///
/// # Errors
/// The first error other than an interruption; some of the bytes may be written then.
pub fn write_all(file: &mut dyn StorageFile, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.write(bytes) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::WriteZero, "the file took no more bytes")),
            Ok(taken) => bytes = &bytes[taken..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Fills the buffer from this position; returns fewer bytes than it holds only at the end of the file.
///
/// # Errors
/// The first error other than an interruption.
pub fn read_full_at(
    mut read_at: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
    buffer: &mut [u8],
    offset: u64,
) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(taken) => filled += taken,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// The file system of the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealStorage;

impl Storage for RealStorage {
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        let mut missing = Vec::new();
        for ancestor in path.ancestors() {
            if ancestor.as_os_str().is_empty() || ancestor.try_exists()? {
                break;
            }
            missing.push(ancestor);
        }
        fs::create_dir_all(path)?;
        missing.iter().rev().try_for_each(|made| self.sync_dir(parent_dir(made)))
    }

    fn open_append(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        let file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        Ok(Box::new(RealFile(file)))
    }

    fn open_read(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        Ok(Box::new(RealFile(File::open(path)?)))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        // Not O_APPEND with O_TRUNC in one: std refuses the pair. The handle writes in order from zero, which is the end.
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
        Ok(Box::new(RealFile(file)))
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        fs::read(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        match File::open(path)?.sync_all() {
            // Some network and FUSE file systems cannot sync a directory and say so; there is nothing more to be had.
            Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
            other => other,
        }
    }

    fn len(&self, path: &Path) -> io::Result<Option<u64>> {
        match fs::metadata(path) {
            Ok(metadata) => Ok(Some(metadata.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

struct RealFile(File);

impl StorageFile for RealFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        io::Write::write(&mut self.0, bytes)
    }

    fn sync_data(&mut self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn len(&self) -> io::Result<u64> {
        self.0.metadata().map(|metadata| metadata.len())
    }

    fn set_len(&mut self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buffer, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appends_go_to_the_end_also_after_a_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er/journal");
        RealStorage.create_dir_all(parent_dir(&path)).unwrap();
        let mut file = RealStorage.open_append(&path).unwrap();
        write_all(&mut *file, b"one two").unwrap();
        file.set_len(4).unwrap();
        write_all(&mut *file, b"three").unwrap();
        file.sync_data().unwrap();
        assert_eq!(RealStorage.read(&path).unwrap(), b"one three");
        assert_eq!(RealStorage.len(&path).unwrap(), Some(9));
    }

    #[test]
    fn what_is_not_there_has_no_length() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(RealStorage.len(&dir.path().join("nothing")).unwrap(), None);
    }

    #[test]
    fn a_bare_name_lies_in_the_current_directory() {
        assert_eq!(parent_dir(Path::new("journal")), Path::new("."));
        assert_eq!(parent_dir(Path::new("run/journal")), Path::new("run"));
    }
}
