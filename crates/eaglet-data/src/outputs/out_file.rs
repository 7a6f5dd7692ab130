//! A file that is hashed and counted while it is written.

use eaglet_core::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Bytes written to the file at a time.
const BUFFER_BYTES: usize = 1 << 20;

/// A finished file, as the summary lists it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FileEntry {
    /// Below the prepared directory, with `/`.
    pub path: String,
    /// Length in bytes.
    pub bytes: u64,
    /// BLAKE3 of the content, 64 hexadecimal digits.
    pub blake3: String,
}

/// A file being written.
pub(crate) struct OutFile {
    file: BufWriter<File>,
    root: PathBuf,
    name: String,
    bytes: u64,
    hasher: blake3::Hasher,
}

impl OutFile {
    /// Makes the file `name` below `root`, and the directories it needs.
    pub(crate) fn create(root: &Path, name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        let path = root.join(&name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|error| Error::io("make the directory", parent, error))?;
        }
        let file = File::create(&path).map_err(|error| Error::io("create", &path, error))?;
        let file = BufWriter::with_capacity(BUFFER_BYTES, file);
        Ok(OutFile { file, root: root.to_owned(), name, bytes: 0, hasher: blake3::Hasher::new() })
    }

    /// Where it is.
    pub(crate) fn path(&self) -> PathBuf {
        self.root.join(&self.name)
    }

    /// Bytes so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends, with the path in the error.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.write_all(bytes).map_err(|error| Error::io("write", &self.path(), error))
    }

    /// Syncs the file; its name becomes durable with the directory's sync at the end of all.
    pub(crate) fn finish(self) -> Result<FileEntry> {
        let path = self.path();
        let failed = |error| Error::io("write", &path, error);
        let file = self.file.into_inner().map_err(|error| failed(error.into_error()))?;
        file.sync_all().map_err(failed)?;
        Ok(FileEntry { path: self.name, bytes: self.bytes, blake3: self.hasher.finalize().to_hex().to_string() })
    }
}

impl Write for OutFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = self.file.write(bytes)?;
        self.hasher.update(&bytes[..taken]);
        self.bytes += taken as u64;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes a small file whole.
pub(crate) fn write_whole(root: &Path, name: &str, content: &[u8]) -> Result<FileEntry> {
    let mut file = OutFile::create(root, name)?;
    file.append(content)?;
    file.finish()
}
