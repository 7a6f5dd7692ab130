//! The run directory: the only code that knows the names in it.
//!
//! ```text
//! OUT/
//!   run.json             fingerprint, format version, provenance, stage states
//!   run.lock             one writer
//!   raw_responses.jsonl  one finished response a line; only ever appended to
//!   inflight.bin         checkpoints of answers that are not finished
//!   failures.jsonl       every prompt that ended without a usable response
//!   progress.json        replaced atomically
//!   events.jsonl         what happened, for the report
//!   inference.log        human log
//!   prepared/            training examples, made from raw_responses.jsonl
//! ```

use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// A directory that holds, or will hold, one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDir(PathBuf);

impl RunDir {
    /// Names a run directory without touching the disk.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        RunDir(path.into())
    }

    /// Makes the directory (and its parents) and checks that it can be written to.
    ///
    /// # Errors
    /// Environment: it cannot be made, is not a directory, or is read-only.
    pub fn create(&self) -> Result<()> {
        let hint = "choose a directory you may write to with --output-dir";
        if self.0.exists() && !self.0.is_dir() {
            return Err(Error::usage(format!("{} is a file, not a directory", self.0.display())).hint(hint));
        }
        std::fs::create_dir_all(&self.0).map_err(|e| Error::io("create the run directory", &self.0, e).hint(hint))?;
        let probe = self.0.join(".writable");
        std::fs::write(&probe, b"").map_err(|e| Error::io("write in the run directory", &self.0, e).hint(hint))?;
        // Nothing is lost when the empty probe stays behind.
        let _ = std::fs::remove_file(&probe);
        Ok(())
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// `run.json`
    pub fn run_file(&self) -> PathBuf {
        self.0.join("run.json")
    }

    /// `run.lock`
    pub fn lock(&self) -> PathBuf {
        self.0.join("run.lock")
    }

    /// `raw_responses.jsonl`
    pub fn responses(&self) -> PathBuf {
        self.0.join("raw_responses.jsonl")
    }

    /// `inflight.bin`
    pub fn inflight(&self) -> PathBuf {
        self.0.join("inflight.bin")
    }

    /// `failures.jsonl`
    pub fn failures(&self) -> PathBuf {
        self.0.join("failures.jsonl")
    }

    /// `progress.json`
    pub fn progress(&self) -> PathBuf {
        self.0.join("progress.json")
    }

    /// `events.jsonl`
    pub fn events(&self) -> PathBuf {
        self.0.join("events.jsonl")
    }

    /// `inference.log`
    pub fn log(&self) -> PathBuf {
        self.0.join("inference.log")
    }

    /// `prepared/`
    pub fn prepared(&self) -> PathBuf {
        self.0.join("prepared")
    }

    /// Whether the directory holds a run or its record (an old script's record counts).
    pub fn holds_a_run(&self) -> bool {
        self.run_file().exists() || self.responses().exists()
    }
}
