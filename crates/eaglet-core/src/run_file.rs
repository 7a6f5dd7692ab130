//! `run.json`: what this run is, so that it is not resumed as another one.
//!
//! The fingerprint is a JSON object. Two fingerprints are compared leaf by leaf; a difference is shown as
//! `sampling.temperature: 0.7 in the run, 0.9 now`.

use crate::provenance::Provenance;
use crate::storage::Storage;
use crate::{Error, Result, atomic_file};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// Version of the run directory's format.
pub const RUN_FORMAT_VERSION: u32 = 1;

/// State of one stage of the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StageState {
    /// Begun, or ended before everything was answered.
    Unfinished,
    /// Every planned prompt ended.
    Complete,
}

/// What is known about the generate stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateStage {
    /// How far it is.
    pub state: StageState,
    /// Prompts planned at the last start.
    pub planned: u64,
    /// Prompts done at the last end or start.
    pub done: u64,
    /// Prompts failed at the last end or start.
    pub failed: u64,
    /// Sessions that worked on it.
    pub sessions: u64,
}

/// A change of the fingerprint that somebody allowed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConfigChange {
    /// When, RFC 3339 in UTC.
    pub at: String,
    /// Lines as [`differences`] gives them.
    pub differences: Vec<String>,
}

/// The content of `run.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunFile {
    /// Format of the run directory.
    pub format_version: u32,
    /// When the run began, RFC 3339 in UTC.
    pub created_at: String,
    /// Dataset, model, server model and sampling.
    pub fingerprint: Value,
    /// What ran, and where, at the last start.
    pub provenance: Provenance,
    /// The generate stage.
    pub generate: GenerateStage,
    /// Changes allowed by `--allow-config-change`, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub config_changes: Vec<ConfigChange>,
}

impl RunFile {
    /// Reads `run.json`; `None` when there is none.
    ///
    /// # Errors
    /// Data: it is not what eaglet writes, or of a newer format.
    pub fn read(storage: &dyn Storage, path: &Path) -> Result<Option<Self>> {
        let bytes = match storage.read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io("read", path, error)),
        };
        let damaged = |what: String| {
            Error::data(format!("{} {what}", path.display()))
                .hint("the answers are in raw_responses.jsonl; move run.json aside to resume by identity alone")
        };
        let value: Value = serde_json::from_slice(&bytes).map_err(|e| damaged(format!("is not JSON: {e}")))?;
        let version = value.get("format_version").and_then(Value::as_u64);
        if version != Some(RUN_FORMAT_VERSION.into()) {
            let found = version.map_or("none".to_owned(), |v| v.to_string());
            return Err(damaged(format!("has format version {found}, this eaglet reads {RUN_FORMAT_VERSION}")));
        }
        serde_json::from_value(value).map(Some).map_err(|e| damaged(format!("is not a run file: {e}")))
    }

    /// Writes `run.json` atomically.
    ///
    /// # Errors
    /// Environment: the disk does not take it.
    pub fn write(&self, storage: &dyn Storage, path: &Path) -> Result<()> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("a run file is plain JSON with string keys");
        bytes.push(b'\n');
        atomic_file::write_atomic(storage, path, &bytes).map_err(|e| Error::io("write", path, e))
    }
}

/// The leaves in which two fingerprints differ, one line each, in the order of `old` then `new`.
pub fn differences(old: &Value, new: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    compare("", Some(old), Some(new), &mut lines);
    lines
}

fn compare(path: &str, old: Option<&Value>, new: Option<&Value>, lines: &mut Vec<String>) {
    let (old, new) = (old.unwrap_or(&Value::Null), new.unwrap_or(&Value::Null));
    let empty = Map::new();
    match (old, new) {
        (old, new) if old == new => {}
        (Value::Object(_), Value::Object(_) | Value::Null) | (Value::Null, Value::Object(_)) => {
            let (a, b) = (old.as_object().unwrap_or(&empty), new.as_object().unwrap_or(&empty));
            let keys = a.keys().chain(b.keys().filter(|key| !a.contains_key(*key)));
            for key in keys {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                compare(&path, a.get(key), b.get(key), lines);
            }
        }
        _ => lines.push(format!("{path}: {} in the run, {} now", shown(old), shown(new))),
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "not set".to_owned(),
        other => {
            let text = other.to_string();
            match text.char_indices().nth(80) {
                Some((cut, _)) => format!("{}...", &text[..cut]),
                None => text,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn differences_name_the_leaf_and_both_values() {
        let old = json!({"model": "a", "sampling": {"temperature": 0.7}, "dataset": {"rows": 3}});
        let new = json!({"model": "b", "sampling": {"temperature": 0.7, "seed": 1}, "dataset": {"rows": 3}});
        assert_eq!(
            differences(&old, &new),
            ["model: \"a\" in the run, \"b\" now", "sampling.seed: not set in the run, 1 now"]
        );
        assert!(differences(&old, &old).is_empty());
    }

    #[test]
    fn a_whole_group_that_is_new_is_shown_by_its_leaves() {
        let lines = differences(&json!({}), &json!({"extra_body": {"chat_template_kwargs": {"thinking": true}}}));
        assert_eq!(lines, ["extra_body.chat_template_kwargs.thinking: not set in the run, true now"]);
    }
}
