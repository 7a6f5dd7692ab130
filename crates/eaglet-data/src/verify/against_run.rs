//! A run's record on its own, and a prepared set against it.

use super::{Examples, Report};
use crate::example::MaskedIds;
use crate::prepare::{InputIdentity, Summary};
use eaglet_core::ids::{ContentHash, PromptKey, hash128};
use eaglet_core::outcome::Failure;
use eaglet_core::response::{Answer, Response};
use eaglet_core::resume::{Record, read_record};
use eaglet_core::run_dir::RunDir;
use eaglet_core::run_file::{RunFile, StageState};
use eaglet_core::storage::RealStorage;
use eaglet_core::{Result, lock::RunLock, scan};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::HashSet;
use std::path::Path;

/// Threads that read records.
const THREADS_MAX: usize = 4;

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX)
}

/// Checks the record of a run: every line whole, every prompt once, the counts those of `run.json`.
///
/// # Errors
/// Environment: files cannot be read. What is wrong with their content is in the report.
pub fn verify_run(run_dir: &RunDir) -> Result<Report> {
    let mut report = Report::default();
    let parts = scan::scan(&run_dir.responses(), RunPart::take, threads())?;
    let mut keys = HashSet::new();
    let mut lines = 0;
    for part in parts {
        lines += part.keys.len() as u64;
        let twice = part.keys.into_iter().filter(|(key, _)| !keys.insert(*key)).collect::<Vec<_>>();
        for (_, offset) in twice {
            report.wrong(format!("raw_responses.jsonl: the prompt of the record at byte {offset} has another record"));
        }
        report.absorb(part.report);
    }
    report.checked("records", lines);
    check_failures(run_dir, &mut report)?;
    check_counts(run_dir, keys.len() as u64, &mut report)?;
    Ok(report)
}

#[derive(Default)]
struct RunPart {
    /// With the offset of the record in bytes.
    keys: Vec<(u128, u64)>,
    report: Report,
}

impl RunPart {
    fn take(&mut self, line: scan::Line<'_>) {
        if line.bytes.trim_ascii().is_empty() {
            return;
        }
        let at = line.offset;
        match read_record(line.bytes) {
            Record::Legacy { id, .. } => self.keys.push((hash128(id.as_bytes()), at)),
            Record::Unfinished => self.report.notes.push(format!("the object at byte {at} is no answer")),
            Record::Unreadable => match line.kind {
                // A run that goes on is writing it, or the next one cuts it off.
                scan::LineKind::Partial => self.report.notes.push("the last line is unfinished".to_owned()),
                _ => self.report.wrong(format!("raw_responses.jsonl: the line at byte {at} is no record")),
            },
            Record::Own { key, .. } => {
                self.keys.push((key.0, at));
                match serde_json::from_slice::<Response>(line.bytes) {
                    Err(error) => self.report.wrong(format!("raw_responses.jsonl: the record at byte {at}: {error}")),
                    Ok(record) => check_record(&record, &mut self.report),
                }
            }
        }
    }
}

/// The answers of a record, in order.
fn answers(record: &Response) -> impl Iterator<Item = &Answer> {
    record.earlier_turns.iter().map(|turn| &turn.answer).chain([&record.answer])
}

fn check_record(record: &Response, report: &mut Report) {
    report.checked("answers", answers(record).count() as u64);
    for answer in answers(record) {
        let Some(ids) = &answer.token_ids else { continue };
        report.checked("answers with ids", 1);
        let segments: u64 = answer.segments.iter().map(|segment| segment.tokens).sum();
        if !answer.segments.is_empty() && segments != ids.len() as u64 {
            report.wrong(format!(
                "raw_responses.jsonl: {}: its segments have {segments} tokens, its ids {}",
                record.sample_id,
                ids.len()
            ));
        }
    }
}

fn check_failures(run_dir: &RunDir, report: &mut Report) -> Result<()> {
    let path = run_dir.failures();
    if !path.exists() {
        return Ok(());
    }
    super::rows::for_each_line(&path, &mut |number, line| match serde_json::from_slice::<Failure>(line) {
        Ok(_) => report.checked("failures", 1),
        Err(error) => report.wrong(format!("failures.jsonl: line {number}: {error}")),
    })
}

fn check_counts(run_dir: &RunDir, records: u64, report: &mut Report) -> Result<()> {
    let Some(run) = RunFile::read(&RealStorage, &run_dir.run_file())? else {
        report.notes.push("there is no run.json: counts were not compared".to_owned());
        return Ok(());
    };
    if RunLock::holder(run_dir.path())?.is_some() {
        report.notes.push("the run goes on: counts were not compared".to_owned());
        return Ok(());
    }
    let stage = &run.generate;
    if stage.state == StageState::Complete {
        report.equal("run.json: done + failed", stage.done + stage.failed, stage.planned);
        report.equal("raw_responses.jsonl: prompts with a record", records, stage.done);
    } else {
        report.notes.push(format!("the run is not complete: {records} of {} prompts have a record", stage.planned));
    }
    Ok(())
}

/// Compares a prepared set with the record it was made of: the same lines, every example an answer of the record with exactly its ids, every other answer dropped.
pub(super) fn check(responses: &Path, summary: &Summary, examples: &Examples, report: &mut Report) -> Result<()> {
    let identity = crate::prepare::identity_of(responses, threads())?;
    let prepared: Option<InputIdentity> =
        summary.fingerprint.get("input").cloned().and_then(|input: Value| serde_json::from_value(input).ok());
    if prepared.as_ref() != Some(&identity) {
        let before = prepared.map_or("?".to_owned(), |input| input.lines.to_string());
        report.wrong(format!(
            "raw_responses.jsonl is not what was prepared: {} lines now, {before} then",
            identity.lines
        ));
        return Ok(());
    }
    if !summary.outputs.contains_key(&crate::outputs::Format::Shards) {
        report.notes.push("without shards examples are not compared with the run's answers".to_owned());
        return Ok(());
    }
    let parts = scan::scan(responses, |part: &mut ComparedPart, line| part.take(&line, examples), threads())?;
    let mut items: u64 = parts.iter().map(|part| part.other_lines).sum();
    let mut records: Vec<Compared> = parts.into_iter().flat_map(|part| part.records).collect();
    records.sort_unstable_by_key(|record| record.offset);
    let (mut seen, mut found) = (HashSet::new(), 0);
    for record in records {
        // Of several records of one prompt the first counts.
        if !seen.insert(record.key) {
            items += 1;
            continue;
        }
        items += record.turns;
        found += record.found;
        if let Some(what) = record.wrong {
            report.wrong(what);
        }
    }
    report.equal("answers and other lines of the run", items, summary.input.items);
    report.equal("examples that are answers of the run", found, examples.len() as u64);
    report.checked("examples compared with the run's answers", found);
    Ok(())
}

/// What of a record is compared, read by another reader than prepare's own.
#[derive(Deserialize)]
struct ComparedRecord<'a> {
    #[serde(borrow)]
    sample_id: Cow<'a, str>,
    prompt_hash: ContentHash,
    #[serde(borrow, default)]
    prompt_token_ids: Option<&'a RawValue>,
    #[serde(borrow, default)]
    token_ids: Option<&'a RawValue>,
    #[serde(borrow, default)]
    earlier_turns: Vec<ComparedTurn<'a>>,
}

#[derive(Clone, Copy, Deserialize)]
struct ComparedTurn<'a> {
    #[serde(borrow, default)]
    prompt_token_ids: Option<&'a RawValue>,
    #[serde(borrow, default)]
    token_ids: Option<&'a RawValue>,
}

/// A record, compared with its examples.
struct Compared {
    key: PromptKey,
    /// Of its line, in bytes.
    offset: u64,
    turns: u64,
    /// Turns that are examples, with exactly their ids.
    found: u64,
    /// The last turn that is an example with others.
    wrong: Option<String>,
}

#[derive(Default)]
struct ComparedPart {
    /// Lines that are no records.
    other_lines: u64,
    records: Vec<Compared>,
}

impl ComparedPart {
    fn take(&mut self, line: &scan::Line<'_>, examples: &Examples) {
        if line.bytes.trim_ascii().is_empty() {
            return;
        }
        let Ok(record) = serde_json::from_slice::<ComparedRecord<'_>>(line.bytes) else {
            self.other_lines += 1;
            return;
        };
        let key = PromptKey::new(&record.sample_id, record.prompt_hash);
        let mut compared = Compared { key, offset: line.offset, turns: 0, found: 0, wrong: None };
        let last = ComparedTurn { prompt_token_ids: record.prompt_token_ids, token_ids: record.token_ids };
        for (turn, answer) in (0..).zip(record.earlier_turns.iter().copied().chain([last])) {
            compared.turns += 1;
            let Some((length, content)) = examples.get(&(key, turn)) else { continue };
            if content_of(answer, *length as usize) == Some(*content) {
                compared.found += 1;
            } else {
                let id = &record.sample_id;
                compared.wrong = Some(format!("{id}: turn {turn}: the example is not what the server gave"));
            }
        }
        self.records.push(compared);
    }
}

/// The content that an example of this answer has, at this length.
fn content_of(answer: ComparedTurn<'_>, length: usize) -> Option<u128> {
    let ids = |json: Option<&RawValue>| serde_json::from_str::<Vec<u32>>(json?.get()).ok();
    let (prompt, sampled) = (ids(answer.prompt_token_ids)?, ids(answer.token_ids)?);
    let ids = [prompt.as_slice(), sampled.as_slice()].concat();
    if length > ids.len() {
        return None;
    }
    let mask: Vec<u8> = (0..length).map(|at| u8::from(at >= prompt.len())).collect();
    Some(MaskedIds::from_mask(ids[..length].to_vec(), &mask).ok()?.content_hash())
}
