//! Resume: from the records of earlier sessions to the work that is left. Pure; reading files is [`crate::scan`]'s.
//!
//! Identity decides, never count or position: a prompt is done when a record with its key (id and content) exists. Records
//! of the Python script that eaglet replaces carry no content hash; they match by id, or by row number for rows that
//! have no id of their own.

use crate::ids::{BuildHashedKeyHasher, ContentHash, PromptId, PromptKey};
use crate::outcome::Failure;
use crate::prompt::Prompt;
use crate::response::{RecordHead, Status};
use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// What earlier sessions left, keyed by identity. About 40 bytes a record.
#[derive(Clone, Debug, Default)]
pub struct RecordIndex {
    done: HashSet<PromptKey, BuildHashedKeyHasher>,
    /// Records without a content hash: their ids.
    legacy: HashSet<String>,
    failed: HashSet<PromptKey, BuildHashedKeyHasher>,
    /// Rows already listed as unusable or duplicate.
    listed_rows: HashSet<u64>,
    /// Totals over the records.
    pub totals: RecordTotals,
}

/// A [`RecordIndex`] that is being read.
#[derive(Clone, Debug, Default)]
pub struct RecordIndexBuilder {
    /// Keys of the records: to fill a list while scanning, and the set once at the end, is twice as fast as to grow a set for each part.
    done: Vec<PromptKey>,
    index: RecordIndex,
}

/// Sums over the records of earlier sessions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecordTotals {
    /// Records by status: ok, truncated, empty.
    pub by_status: HashMap<Status, u64>,
    /// Tokens generated, where known, one per record (for percentiles).
    pub completion_tokens: Vec<u32>,
    /// Records of the older script's format.
    pub legacy: u64,
    /// Records whose prompt has an earlier record: must be 0.
    pub doubled: u64,
    /// Lines that are no record; they are left as they are and their prompts are sent again.
    pub unreadable: u64,
    /// Offset in bytes of the first unreadable line.
    pub first_unreadable: Option<u64>,
}

/// What a line of `raw_responses.jsonl` turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// A record of eaglet.
    Own {
        /// Whose answer it is.
        key: PromptKey,
        /// What became of the prompt.
        status: Status,
        /// Tokens generated, if known.
        completion_tokens: Option<u64>,
        /// 0-based row of the data set, if the record says.
        row: Option<u64>,
    },
    /// An answer in the older script's format.
    Legacy {
        /// The prompt's id there.
        id: String,
        /// Tokens generated, if known.
        completion_tokens: Option<u64>,
    },
    /// A JSON object that holds no answer.
    Unfinished,
    /// Anything else.
    Unreadable,
}

/// What is known about a prompt from earlier sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// Answered: a durable record exists.
    Done,
    /// Ended without a usable response.
    Failed,
    /// Neither.
    New,
}

impl RecordIndexBuilder {
    /// Takes one line of `raw_responses.jsonl`.
    pub fn add_response_line(&mut self, line: &[u8], offset: u64) {
        let totals = &mut self.index.totals;
        let (tokens, status) = match read_record(line) {
            Record::Own { key, status, completion_tokens, row: _ } => {
                self.done.push(key);
                (completion_tokens, status)
            }
            Record::Legacy { id, completion_tokens } => {
                totals.legacy += 1;
                totals.doubled += u64::from(!self.index.legacy.insert(id));
                (completion_tokens, Status::Ok)
            }
            Record::Unfinished => return,
            Record::Unreadable => {
                totals.unreadable += 1;
                let first = totals.first_unreadable.get_or_insert(offset);
                *first = offset.min(*first);
                return;
            }
        };
        *totals.by_status.entry(status).or_default() += 1;
        if let Some(tokens) = tokens {
            totals.completion_tokens.push(u32::try_from(tokens).unwrap_or(u32::MAX));
        }
    }

    /// Takes one line of `failures.jsonl`.
    pub fn add_failure_line(&mut self, line: &[u8]) {
        let Ok(failure) = serde_json::from_slice::<Failure>(line) else { return };
        match failure.key() {
            Some(key) => {
                self.index.failed.insert(key);
            }
            None => {
                self.index.listed_rows.insert(failure.row);
            }
        }
    }

    /// Joins two parts of one record file.
    #[must_use]
    pub fn merge(mut self, other: RecordIndexBuilder) -> Self {
        self.done.extend(other.done);
        let RecordIndex { done: _, legacy, failed, listed_rows, totals } = other.index;
        let index = &mut self.index;
        for id in legacy {
            index.totals.doubled += u64::from(!index.legacy.insert(id));
        }
        index.failed.extend(failed);
        index.listed_rows.extend(listed_rows);
        for (status, count) in totals.by_status {
            *index.totals.by_status.entry(status).or_default() += count;
        }
        index.totals.completion_tokens.extend(totals.completion_tokens);
        index.totals.legacy += totals.legacy;
        index.totals.doubled += totals.doubled;
        index.totals.unreadable += totals.unreadable;
        index.totals.first_unreadable =
            [index.totals.first_unreadable, totals.first_unreadable].into_iter().flatten().min();
        self
    }

    /// The index of everything taken.
    pub fn build(self) -> RecordIndex {
        let RecordIndexBuilder { done, mut index } = self;
        index.done.reserve(done.len());
        for key in done {
            index.totals.doubled += u64::from(!index.done.insert(key));
        }
        index
    }
}

impl RecordIndex {
    /// What earlier sessions say about this prompt, whose key the caller has at hand. A record wins over a failure: the prompt was retried with success.
    pub fn known(&self, prompt: &Prompt, key: PromptKey) -> Known {
        if self.done.contains(&key) || self.is_legacy(prompt) {
            Known::Done
        } else if self.failed.contains(&key) {
            Known::Failed
        } else {
            Known::New
        }
    }

    fn is_legacy(&self, prompt: &Prompt) -> bool {
        if self.legacy.is_empty() {
            return false;
        }
        let has_own_id = prompt.id != PromptId::from_hash(prompt.hash);
        self.legacy.contains(prompt.id.as_str()) || (!has_own_id && self.legacy.contains(&prompt.row.to_string()))
    }

    /// Whether `failures.jsonl` already lists this row as unusable or duplicate.
    pub fn lists_row(&self, row: u64) -> bool {
        self.listed_rows.contains(&row)
    }

    /// Number of records.
    pub fn record_count(&self) -> u64 {
        (self.done.len() + self.legacy.len()) as u64
    }
}

/// Says whose answer a line of `raw_responses.jsonl` is, from its head where eaglet wrote it.
pub fn read_record(line: &[u8]) -> Record {
    if let Some(head) = RecordHead::parse(line) {
        let key = PromptKey::new(&head.sample_id, head.prompt_hash);
        let RecordHead { status, completion_tokens, row, .. } = head;
        return Record::Own { key, status, completion_tokens, row };
    }
    match serde_json::from_slice::<Value>(line) {
        Ok(Value::Object(record)) => read_foreign_record(&record),
        _ => Record::Unreadable,
    }
}

/// A record of our format whose fields somebody reordered, or one of the older script.
fn read_foreign_record(record: &serde_json::Map<String, Value>) -> Record {
    let text = |name: &str| record.get(name).and_then(Value::as_str).filter(|t| !t.is_empty());
    let id = ["sample_id", "id", "prompt_id", "index", "idx"].iter().find_map(|name| match record.get(*name)? {
        Value::String(id) => Some(id.clone()),
        Value::Number(id) => Some(id.to_string()),
        _ => None,
    });
    let Some(id) = id else { return Record::Unreadable };
    let tokens = |of: &Value| of.get("completion_tokens").and_then(Value::as_u64);
    let completion_tokens =
        record.get("completion_tokens").and_then(Value::as_u64).or_else(|| tokens(record.get("usage")?));
    if let Some(hash) = text("prompt_hash").and_then(|h| h.parse::<ContentHash>().ok()) {
        let status = match text("status") {
            Some("truncated") => Status::Truncated,
            Some("empty") => Status::Empty,
            _ => Status::Ok,
        };
        let row = record.get("row").and_then(Value::as_u64);
        return Record::Own { key: PromptKey::new(&id, hash), status, completion_tokens, row };
    }
    let failed = record.get("error").is_some_and(|e| !e.is_null() && e != &Value::Bool(false))
        || matches!(text("status"), Some("error" | "failed" | "timeout"));
    let answered = ["content", "reasoning", "reasoning_content", "response", "completion", "text", "output"]
        .iter()
        .any(|name| text(name).is_some());
    if answered && !failed { Record::Legacy { id, completion_tokens } } else { Record::Unfinished }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::{Message, Role};

    fn prompt(id: Option<&str>, row: u64, text: &str) -> Prompt {
        Prompt::new(id.map(PromptId::given), row, None, vec![Message::text(Role::User, text)], None)
    }

    fn known(index: &RecordIndex, prompt: &Prompt) -> Known {
        index.known(prompt, prompt.key())
    }

    fn builder(lines: &[&str]) -> RecordIndexBuilder {
        let mut builder = RecordIndexBuilder::default();
        lines.iter().for_each(|line| builder.add_response_line(line.as_bytes(), 0));
        builder
    }

    fn index(lines: &[&str]) -> RecordIndex {
        builder(lines).build()
    }

    /// Records in any order, with holes: exactly the missing prompts are left (a peer counts lines and skips that many).
    #[test]
    fn work_left_is_by_identity_not_by_count() {
        let prompts: Vec<_> = (0..8).map(|n| prompt(Some(&format!("q{n}")), n, &format!("question {n}"))).collect();
        let line = |n: usize| {
            format!(
                "{{\"v\":1,\"sample_id\":\"q{n}\",\"prompt_hash\":\"{}\",\"status\":\"ok\",\"prompt_tokens\":1,\"completion_tokens\":2}}",
                prompts[n].hash
            )
        };
        let index = index(&[&line(5), &line(0), &line(3)]);
        let left: Vec<u64> = prompts.iter().filter(|p| known(&index, p) == Known::New).map(|p| p.row).collect();
        assert_eq!(left, [1, 2, 4, 6, 7]);
        assert_eq!(known(&index, &prompt(Some("q5"), 5, "another question")), Known::New);
        assert_eq!(index.totals.completion_tokens, [2, 2, 2]);
    }

    #[test]
    fn a_failure_is_not_sent_again_and_a_later_record_outweighs_it() {
        let asked = prompt(Some("a"), 0, "x");
        let mut index = RecordIndexBuilder::default();
        let failure = Failure {
            v: 1,
            sample_id: Some(asked.id.clone()),
            prompt_hash: Some(asked.hash),
            failed_as: crate::outcome::FailedAs::Exhausted,
            cause: "reset".into(),
            detail: String::new(),
            origin: None,
            row: 0,
            source: None,
            prompt_bytes: 1,
            at: String::new(),
            attempts: vec![],
            partial: None,
        };
        index.add_failure_line(&failure.to_line());
        assert_eq!(known(&index.clone().build(), &asked), Known::Failed);
        let line = format!("{{\"sample_id\":\"a\",\"prompt_hash\":\"{}\",\"status\":\"ok\"}}", asked.hash);
        index.add_response_line(line.as_bytes(), 0);
        assert_eq!(known(&index.build(), &asked), Known::Done);
    }

    #[test]
    fn the_old_scripts_records_are_accepted_in_whatever_subset() {
        let index = index(&[
            r#"{"sample_id": 3, "content": "yes", "reasoning": null}"#,
            r#"{"sample_id": "k7", "reasoning": "hm", "content": "", "completion_tokens": 9, "time": 1.5}"#,
            r#"{"sample_id": "bad", "content": null, "error": "timed out"}"#,
            r#"{"sample_id": "hollow"}"#,
            "not json",
        ]);
        assert_eq!(known(&index, &prompt(None, 3, "row without an id")), Known::Done);
        assert_eq!(known(&index, &prompt(Some("mine"), 3, "row with its own id")), Known::New);
        assert_eq!(known(&index, &prompt(Some("k7"), 0, "x")), Known::Done);
        assert_eq!(known(&index, &prompt(Some("bad"), 0, "x")), Known::New);
        assert_eq!(known(&index, &prompt(Some("hollow"), 0, "x")), Known::New);
        assert_eq!((index.totals.legacy, index.totals.unreadable), (2, 1));
    }

    #[test]
    fn merging_parts_is_reading_the_whole() {
        let line = r#"{"sample_id": "a", "content": "x"}"#;
        let merged = builder(&[line]).merge(builder(&[line, r#"{"sample_id": "b", "content": "y"}"#])).build();
        assert_eq!((merged.record_count(), merged.totals.doubled), (2, 1));
    }

    #[test]
    fn a_key_that_comes_twice_is_counted_as_doubled() {
        let line = format!("{{\"sample_id\":\"a\",\"prompt_hash\":\"{}\",\"status\":\"ok\"}}", ContentHash(5));
        let built = builder(&[&line]).merge(builder(&[&line])).build();
        assert_eq!((built.record_count(), built.totals.doubled), (1, 1));
    }
}
