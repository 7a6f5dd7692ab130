//! Checks what is on the disk: a run's record, and a prepared set.
//!
//! What it is: a reading of everything, with other code than that which wrote it where there is any (records through the record type, JSON through its parser, Arrow and
//! Parquet through their readers), and a list of what is wrong. What it is not: a repair. It changes nothing.

mod against_run;
mod rows;

use crate::outputs::{Format, Split};
use crate::prepare::Summary;
use crate::shards::ShardReader;
use crate::vocab::{self, TokenCounts};
use eaglet_core::ids::{PromptKey, hash128};
use eaglet_core::{Error, Result};
use rows::Row;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

pub use against_run::verify_run;

/// Findings that are kept; further ones are only counted.
const FINDINGS_KEPT_MAX: usize = 100;
/// The version of the directory and its summary's name.
const SUMMARY_FILE: &str = "summary.json";
const DROPPED_FILE: &str = "dropped.jsonl";

/// What was checked, and what is wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// What was looked at: how many of each.
    pub checked: BTreeMap<String, u64>,
    /// What is wrong, in words, the first [`FINDINGS_KEPT_MAX`].
    pub findings: Vec<String>,
    /// How much is wrong in all.
    pub findings_total: u64,
    /// What is no fault but should be known.
    pub notes: Vec<String>,
}

impl Report {
    fn wrong(&mut self, what: impl Into<String>) {
        self.findings_total += 1;
        if self.findings.len() < FINDINGS_KEPT_MAX {
            self.findings.push(what.into());
        }
    }

    fn checked(&mut self, what: &str, count: u64) {
        *self.checked.entry(what.to_owned()).or_default() += count;
    }

    fn equal(&mut self, what: &str, found: u64, expected: u64) {
        if found != expected {
            self.wrong(format!("{what}: {found}, expected {expected}"));
        }
    }

    /// Another report's findings too.
    fn absorb(&mut self, other: Report) {
        other.checked.iter().for_each(|(what, count)| self.checked(what, *count));
        let hidden = other.findings_total - other.findings.len() as u64;
        other.findings.into_iter().for_each(|finding| self.wrong(finding));
        self.findings_total += hidden;
        self.notes.extend(other.notes);
    }
}

/// Examples of a prepared set by whose answer they are: length in tokens, and content.
type Examples = HashMap<(PromptKey, u32), (u32, u128)>;

/// Checks a prepared set, and against its run where `responses` (a `raw_responses.jsonl`) is given.
///
/// # Errors
/// Usage: the directory holds no prepared set. Environment: files cannot be read. What is wrong with their content is in the report.
pub fn verify_prepared(directory: &Path, responses: Option<&Path>) -> Result<Report> {
    let Some(summary) = Summary::read(directory)? else {
        return Err(Error::usage(format!("{} holds no prepared set", directory.display()))
            .hint("make one with eaglet prepare RUN; one that is being made is in DIR.unfinished"));
    };
    let mut report = Report::default();
    check_sums(&summary, &mut report);
    check_files(directory, &summary, &mut report)?;
    check_dropped(directory, &summary, &mut report)?;
    let mut looked = Looked::default();
    let formats: Vec<Format> = summary.outputs.keys().copied().collect();
    for format in formats {
        check_format(directory, format, &summary, &mut looked, &mut report)?;
    }
    check_agreement(&looked, &summary, &mut report);
    check_maps(directory, &summary, &looked, &mut report)?;
    if let Some(responses) = responses {
        against_run::check(responses, &summary, &looked.examples, &mut report)?;
    }
    Ok(report)
}

/// What reading the formats gathers.
#[derive(Default)]
struct Looked {
    /// Of each format and side, a hash over the contents of all its rows in order.
    digests: BTreeMap<(Format, Split), u128>,
    /// Only a shard says whose answer a row is.
    examples: Examples,
    /// Supervised tokens, from the first format with ids.
    counts: BTreeMap<Split, TokenCounts>,
}

/// The numbers of the summary among themselves.
fn check_sums(summary: &Summary, report: &mut Report) {
    report.equal("summary: kept + dropped", summary.kept + summary.dropped_total(), summary.input.items);
    report.equal(
        "summary: examples of both splits",
        summary.splits.values().map(|side| side.examples).sum(),
        summary.kept,
    );
    report.equal("summary: kept by finish reason", summary.by_finish_reason.values().sum(), summary.kept);
    for (format, rows) in &summary.outputs {
        let all = rows.train + rows.validation + rows.left_out.values().sum::<u64>();
        report.equal(&format!("summary: rows of {} with those left out", format.label()), all, summary.kept);
    }
}

/// Every file is listed, and is what the list says.
fn check_files(directory: &Path, summary: &Summary, report: &mut Report) -> Result<()> {
    let mut found = BTreeSet::new();
    list_files(directory, "", &mut found)?;
    found.remove(SUMMARY_FILE);
    for entry in &summary.files {
        if !found.remove(&entry.path) {
            report.wrong(format!("{}: is not there", entry.path));
            continue;
        }
        let path = directory.join(&entry.path);
        let file = std::fs::File::open(&path).map_err(|error| Error::io("open", &path, error))?;
        let mut hasher = blake3::Hasher::new();
        let bytes = std::io::copy(&mut std::io::BufReader::with_capacity(1 << 20, file), &mut hasher)
            .map_err(|error| Error::io("read", &path, error))?;
        report.checked("bytes", bytes);
        report.checked("files", 1);
        if bytes != entry.bytes {
            report.wrong(format!("{}: has {bytes} bytes, the summary says {}", entry.path, entry.bytes));
        } else if hasher.finalize().to_hex().as_str() != entry.blake3 {
            report.wrong(format!("{}: its hash is not the summary's", entry.path));
        }
    }
    found.iter().for_each(|path| report.wrong(format!("{path}: is not in the summary")));
    Ok(())
}

fn list_files(directory: &Path, front: &str, found: &mut BTreeSet<String>) -> Result<()> {
    let failed = |error| Error::io("read", directory, error);
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = format!("{front}{}", entry.file_name().to_string_lossy());
        if entry.file_type().map_err(failed)?.is_dir() {
            list_files(&entry.path(), &format!("{name}/"), found)?;
        } else {
            found.insert(name);
        }
    }
    Ok(())
}

/// The list of what was dropped has what the summary counts.
fn check_dropped(directory: &Path, summary: &Summary, report: &mut Report) -> Result<()> {
    #[derive(Deserialize)]
    struct Line {
        reason: String,
    }
    let path = directory.join(DROPPED_FILE);
    if !path.exists() {
        return Ok(());
    }
    let mut by_reason: BTreeMap<String, u64> = BTreeMap::new();
    rows::for_each_line(&path, &mut |number, line| match serde_json::from_slice::<Line>(line) {
        Ok(line) => *by_reason.entry(line.reason).or_default() += 1,
        Err(error) => report.wrong(format!("{DROPPED_FILE}: line {number}: {error}")),
    })?;
    if by_reason != summary.dropped {
        report.wrong(format!("{DROPPED_FILE}: holds {by_reason:?}, the summary says {:?}", summary.dropped));
    }
    Ok(())
}

/// Reads every row of a format.
fn check_format(
    directory: &Path,
    format: Format,
    summary: &Summary,
    looked: &mut Looked,
    report: &mut Report,
) -> Result<()> {
    let limits = Limits::of(summary);
    let counts_tokens = format != Format::SpecforgeConversations && looked.counts.is_empty();
    for split in Split::ALL {
        let (mut rows_found, mut digest, mut tokens, mut supervised) = (0, 0u128, 0, 0);
        let mut counts = TokenCounts::default();
        // A file that is not there has been told of.
        for path in data_files(summary, format, split).into_iter().filter(|path| directory.join(path).exists()) {
            let shown = path.clone();
            let mut take = |row: Result<Row, String>| {
                rows_found += 1;
                match row {
                    Ok(Row { tokens: Some(masked), .. }) => {
                        digest = hash128(&[digest.to_be_bytes(), masked.content_hash().to_be_bytes()].concat());
                        tokens += masked.len() as u64;
                        supervised += masked.supervised() as u64;
                        if counts_tokens {
                            masked.supervised_ids().for_each(|id| counts.add(id));
                        }
                        if let Some(what) = limits.broken_by(&masked) {
                            report.wrong(format!("{shown}: row {rows_found}: {what}"));
                        }
                    }
                    Ok(_) => {}
                    Err(what) => report.wrong(format!("{shown}: row {rows_found}: {what}")),
                }
            };
            let read = match format {
                Format::Shards => shard_rows(&directory.join(&path), split, &limits, &mut looked.examples, &mut take),
                _ => rows::for_each(format, &directory.join(&path), &mut take),
            };
            match read {
                Err(error) if error.class() == eaglet_core::Class::Data => report.wrong(error.to_string()),
                other => other?,
            }
        }
        let label = format!("{} {}", format.label(), split.label());
        let expected = &summary.outputs[&format];
        let expected_rows = if split == Split::Train { expected.train } else { expected.validation };
        report.equal(&format!("{label}: rows"), rows_found, expected_rows);
        report.checked(&format!("rows of {}", format.label()), rows_found);
        if format != Format::SpecforgeConversations {
            looked.digests.insert((format, split), digest);
            let side = summary.splits.get(&split).copied().unwrap_or_default();
            report.equal(&format!("{label}: tokens"), tokens, side.tokens);
            report.equal(&format!("{label}: supervised tokens"), supervised, side.supervised_tokens);
            if counts_tokens {
                looked.counts.insert(split, counts);
            }
        }
    }
    Ok(())
}

/// What no example may break, from the settings.
struct Limits {
    vocab_size: Option<u64>,
    max_seq_len: Option<u64>,
    validation_share: Option<f64>,
}

impl Limits {
    fn of(summary: &Summary) -> Self {
        let settings = summary.fingerprint.get("settings");
        let policy = |name: &str| settings?.get("policies")?.get(name)?.as_u64();
        Limits {
            vocab_size: policy("vocab_size"),
            max_seq_len: policy("max_seq_len"),
            validation_share: settings.and_then(|settings| settings.get("validation_share")).and_then(Value::as_f64),
        }
    }

    fn broken_by(&self, tokens: &crate::example::MaskedIds) -> Option<String> {
        let length = tokens.len() as u64;
        if self.max_seq_len.is_some_and(|max| length > max) {
            return Some(format!("has {length} tokens, more than max_seq_len"));
        }
        let size = self.vocab_size?;
        let id = tokens.ids().iter().find(|id| u64::from(**id) >= size)?;
        Some(format!("holds id {id}, the vocabulary has {size}"))
    }
}

/// The files that hold the rows of one side, as the summary lists them, in order.
fn data_files(summary: &Summary, format: Format, split: Split) -> Vec<String> {
    let (format, split) = (format.label(), split.label());
    let belongs = |path: &str| {
        let Some(name) = path.strip_prefix(format).and_then(|rest| rest.strip_prefix('/')) else { return false };
        let of_split = name.strip_prefix(split).is_some_and(|rest| rest.starts_with(['-', '.', '/']));
        of_split && [".examples", ".jsonl", ".arrow", ".parquet"].iter().any(|end| name.ends_with(end))
    };
    summary.files.iter().map(|file| file.path.clone()).filter(|path| belongs(path)).collect()
}

/// Rows of a shard, which also say whose answers they are.
fn shard_rows(
    path: &Path,
    split: Split,
    limits: &Limits,
    examples: &mut Examples,
    take: &mut dyn FnMut(Result<Row, String>),
) -> Result<()> {
    let shard = ShardReader::open(path)?;
    for (at, entry) in shard.entries().iter().enumerate() {
        let example = match shard.example(at) {
            Ok(example) => example,
            Err(error) if error.class() == eaglet_core::Class::Data => {
                take(Err(error.to_string()));
                continue;
            }
            Err(error) => return Err(error),
        };
        let key = PromptKey::new(&entry.id.sample_id, entry.id.prompt_hash);
        let content = example.tokens.content_hash();
        if examples.insert((key, entry.id.turn), (entry.tokens, content)).is_some() {
            take(Err(format!("{:?} turn {} is there twice", entry.id.sample_id, entry.id.turn)));
            continue;
        }
        let belongs =
            limits.validation_share.is_none_or(|share| entry.id.is_validation(share) == (split == Split::Validation));
        take(if belongs {
            Ok(Row { tokens: Some(example.tokens) })
        } else {
            Err(format!("{:?} belongs to the other side of the split", entry.id.sample_id))
        });
    }
    Ok(())
}

/// All formats hold the same examples in the same order.
fn check_agreement(looked: &Looked, summary: &Summary, report: &mut Report) {
    for split in Split::ALL {
        let whole = |format: &Format| summary.outputs.get(format).is_some_and(|rows| rows.left_out.is_empty());
        let mut digests = looked
            .digests
            .iter()
            .filter(|((format, of), _)| *of == split && whole(format))
            .map(|((format, _), digest)| (format, digest));
        let Some((first, expected)) = digests.next() else { continue };
        for (format, digest) in digests.filter(|(_, digest)| *digest != expected) {
            let _ = digest;
            report.wrong(format!(
                "{}: {} and {} hold different examples",
                split.label(),
                first.label(),
                format.label()
            ));
        }
    }
}

/// The vocabulary's maps are each other's inverse, have the sizes that the summary says, and cover what it says.
fn check_maps(directory: &Path, summary: &Summary, looked: &Looked, report: &mut Report) -> Result<()> {
    let maps: Vec<PathBuf> =
        summary.files.iter().map(|file| PathBuf::from(&file.path)).filter(|path| is_map(path)).collect();
    let Some(wanted) = &summary.vocabulary else {
        if let Some(map) = maps.first() {
            report.wrong(format!("{}: the summary has no vocabulary", map.display()));
        }
        return Ok(());
    };
    if maps.is_empty() {
        report.wrong("the maps of the vocabulary are not there");
    }
    for d2t in maps {
        let t2d = d2t.with_file_name(format!("t2d-{}.npy", wanted.draft));
        match vocab::read_maps(&directory.join(&d2t), &directory.join(t2d)) {
            Ok(vocab) => {
                let shown = d2t.display().to_string();
                report.checked("vocabulary maps", 1);
                report.equal(&format!("{shown}: draft tokens"), vocab.chosen().len() as u64, wanted.draft.into());
                report.equal(&format!("{shown}: target tokens"), vocab.t2d().len() as u64, wanted.target.into());
                for (split, covered) in
                    [(Split::Train, wanted.covered_train), (Split::Validation, wanted.covered_validation)]
                {
                    if let Some(counts) = looked.counts.get(&split) {
                        report.equal(
                            &format!("{shown}: covered tokens of {}", split.label()),
                            vocab.covered(counts),
                            covered,
                        );
                    }
                }
            }
            Err(error) if error.class() == eaglet_core::Class::Data => report.wrong(error.to_string()),
            Err(error) if error.io_source().is_some_and(|e| e.kind() == std::io::ErrorKind::NotFound) => {
                report.wrong(error.to_string());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn is_map(path: &Path) -> bool {
    path.file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.starts_with("d2t-") && name.ends_with(".npy"))
}
