//! The prompts of a plan on disk: written once in order, read back by position.
//!
//! An unlinked temporary file: it takes no name and is gone with the process, whatever ends it. It is no record; a resumed
//! run makes it anew from the data set.

use eaglet_core::prompt::Prompt;
use eaglet_core::{Error, Result};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Write buffer in bytes.
const BUFFER_BYTES: usize = 1 << 20;

/// Where a prompt lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) offset: u64,
    pub(crate) length: u32,
}

/// A spool that is being written.
pub(crate) struct SpoolWriter {
    file: BufWriter<File>,
    directory: PathBuf,
    offset: u64,
    line: Vec<u8>,
}

impl SpoolWriter {
    pub(crate) fn create(directory: &Path) -> Result<Self> {
        let file = tempfile::tempfile_in(directory)
            .map_err(|error| Error::io("make a temporary file in", directory, error))?;
        let file = BufWriter::with_capacity(BUFFER_BYTES, file);
        Ok(SpoolWriter { file, directory: directory.to_owned(), offset: 0, line: Vec::new() })
    }

    pub(crate) fn push(&mut self, prompt: &Prompt) -> Result<Place> {
        self.line.clear();
        serde_json::to_writer(&mut self.line, prompt).expect("a prompt is plain JSON, and memory takes every write");
        let length = u32::try_from(self.line.len())
            .map_err(|_| Error::data(format!("prompt {}: {} bytes, the limit is 4 GiB", prompt.id, self.line.len())))?;
        self.file.write_all(&self.line).map_err(|error| full(&self.directory, error))?;
        let place = Place { offset: self.offset, length };
        self.offset += u64::from(length);
        Ok(place)
    }

    pub(crate) fn finish(self) -> Result<Spool> {
        let directory = self.directory;
        let file = self.file.into_inner().map_err(|error| full(&directory, error.into_error()))?;
        Ok(Spool { file, directory })
    }
}

fn full(directory: &Path, error: std::io::Error) -> Error {
    Error::io("write the prompts to a temporary file in", directory, error)
        .hint("the prompts still to be answered need room there, about as much as the uncompressed data set")
}

/// A finished spool. Reading needs no position of its own, so threads may share it.
pub(crate) struct Spool {
    file: File,
    directory: PathBuf,
}

impl Spool {
    pub(crate) fn get(&self, place: Place) -> Result<Prompt> {
        let mut line = vec![0; place.length as usize];
        self.file
            .read_exact_at(&mut line, place.offset)
            .map_err(|error| Error::io("read the prompts from a temporary file in", &self.directory, error))?;
        serde_json::from_slice(&line)
            .map_err(|error| Error::bug(format!("a prompt does not read back as it was written: {error}")))
    }
}
