//! `summary.json`: what became of everything, and what was written. No times, names of machines or paths: the same input gives the same bytes.

use crate::outputs::{FileEntry, Format, Split};
use eaglet_core::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Name of the summary in a prepared directory. It is the last file written.
pub const SUMMARY_FILE: &str = "summary.json";
/// Name of the list of what was dropped.
pub const DROPPED_FILE: &str = "dropped.jsonl";

/// The content of `summary.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Version of the prepared directory.
    pub v: u32,
    /// Version of eaglet that made it.
    pub eaglet: String,
    /// Input and settings.
    pub fingerprint: Value,
    /// What was read.
    pub input: InputCounts,
    /// Answers that became examples.
    pub kept: u64,
    /// What did not, by reason. `input.items` = `kept` + all of these.
    pub dropped: BTreeMap<String, u64>,
    /// Kept examples that have something to be known: see `Marks`.
    pub marks: BTreeMap<String, u64>,
    /// Kept examples by finish reason.
    pub by_finish_reason: BTreeMap<String, u64>,
    /// The two sides.
    pub splits: BTreeMap<Split, SplitCounts>,
    /// The drafter's vocabulary, where it is not the target's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<VocabSummary>,
    /// Rows of each format.
    pub outputs: BTreeMap<Format, OutputCounts>,
    /// Every other file of the directory, by path.
    pub files: Vec<FileEntry>,
}

/// What was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputCounts {
    /// Lines that are not blank.
    pub lines: u64,
    /// Lines that are eaglet's records.
    pub records: u64,
    /// What is kept or dropped: each answer of a record (one for each turn), and each line that holds none.
    pub items: u64,
}

/// One side of the split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitCounts {
    /// Examples.
    pub examples: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Of these supervised.
    pub supervised_tokens: u64,
    /// Tokens of an example; null without one.
    pub lengths: Option<Lengths>,
}

/// Percentiles of lengths, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lengths {
    /// Half are at most this long.
    pub p50: u32,
    /// 90 % are at most this long.
    pub p90: u32,
    /// 99 % are at most this long.
    pub p99: u32,
    /// The longest.
    pub max: u32,
}

impl Lengths {
    /// Of these lengths; `None` of none.
    pub(super) fn of(lengths: &[u32]) -> Option<Self> {
        let all = eaglet_core::stats::percentiles(lengths)?;
        Some(Lengths { p50: all.p50, p90: all.p90, p99: all.p99, max: all.max })
    }
}

/// The drafter's vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VocabSummary {
    /// Tokens that can be drafted.
    pub draft: u32,
    /// Tokens of the target.
    pub target: u32,
    /// Different tokens supervised in training.
    pub distinct: u64,
    /// Supervised tokens of the training side that can be drafted, of `splits.train.supervised_tokens`.
    pub covered_train: u64,
    /// The same of the validation side.
    pub covered_validation: u64,
}

/// Rows of one format.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputCounts {
    /// Rows for training.
    pub train: u64,
    /// Rows for validation.
    pub validation: u64,
    /// Kept examples that the format cannot hold, by reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub left_out: BTreeMap<String, u64>,
}

impl Summary {
    /// Everything that was dropped.
    pub fn dropped_total(&self) -> u64 {
        self.dropped.values().sum()
    }

    /// Reads the summary of a prepared directory; `None` where there is none.
    ///
    /// # Errors
    /// Environment: it cannot be read. Data: it is none, or of a newer format.
    pub fn read(directory: &Path) -> Result<Option<Self>> {
        let path = directory.join(SUMMARY_FILE);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(error) => return Err(Error::io("read", &path, error)),
        };
        let damaged =
            |what: String| Error::data(format!("{} {what}", path.display())).hint("prepare again, with --overwrite");
        let value: Value = serde_json::from_slice(&bytes).map_err(|error| damaged(format!("is not JSON: {error}")))?;
        let version = value.get("v").and_then(Value::as_u64);
        if version != Some(super::PREPARED_VERSION.into()) {
            let found = version.map_or("none".to_owned(), |version| version.to_string());
            return Err(damaged(format!("has version {found}, this eaglet reads {}", super::PREPARED_VERSION)));
        }
        serde_json::from_value(value).map(Some).map_err(|error| damaged(format!("is no summary: {error}")))
    }

    /// As it stands in the file.
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut bytes =
            serde_json::to_vec_pretty(self).map_err(|error| Error::bug(format!("a summary is no JSON: {error}")))?;
        bytes.push(b'\n');
        Ok(bytes)
    }
}
