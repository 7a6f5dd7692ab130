//! A run's record on its own, and a prepared set against it.

use super::{Examples, Report};
use crate::example::MaskedIds;
use crate::prepare::{InputIdentity, Summary};
use eaglet_core::ids::{PromptKey, hash128};
use eaglet_core::outcome::Failure;
use eaglet_core::response::{Answer, Response};
use eaglet_core::resume::{Record, read_record};
use eaglet_core::run_dir::RunDir;
use eaglet_core::run_file::{RunFile, StageState};
use eaglet_core::storage::RealStorage;
use eaglet_core::{Result, lock::RunLock, scan};
use serde_json::Value;
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
    let parts = scan::scan(responses, |part: &mut ComparedPart, line| part.take(line.bytes, examples), threads())?;
    let mut found = HashSet::new();
    let mut items = 0;
    for part in parts {
        items += part.items;
        found.extend(part.found);
        report.absorb(part.report);
    }
    report.equal("answers and other lines of the run", items, summary.input.items);
    report.equal("examples that are answers of the run", found.len() as u64, examples.len() as u64);
    report.checked("examples compared with the run's answers", found.len() as u64);
    Ok(())
}

#[derive(Default)]
struct ComparedPart {
    items: u64,
    found: Vec<(PromptKey, u32)>,
    seen: HashSet<PromptKey>,
    report: Report,
}

impl ComparedPart {
    fn take(&mut self, line: &[u8], examples: &Examples) {
        if line.trim_ascii().is_empty() {
            return;
        }
        let Ok(record) = serde_json::from_slice::<Response>(line) else {
            self.items += 1;
            return;
        };
        let key = PromptKey::new(record.sample_id.as_str(), record.prompt_hash);
        if !self.seen.insert(key) {
            self.items += 1;
            return;
        }
        for (turn, answer) in answers(&record).enumerate() {
            self.items += 1;
            let turn = turn as u32;
            let Some((length, content)) = examples.get(&(key, turn)) else { continue };
            if content_of(answer, *length as usize) == Some(*content) {
                self.found.push((key, turn));
            } else {
                self.report
                    .wrong(format!("{}: turn {turn}: the example is not what the server gave", record.sample_id));
            }
        }
    }
}

/// The content that an example of this answer has, at this length.
fn content_of(answer: &Answer, length: usize) -> Option<u128> {
    let (prompt, sampled) = (answer.prompt_token_ids.as_ref()?, answer.token_ids.as_ref()?);
    let ids = [prompt.as_slice(), sampled].concat();
    if length > ids.len() {
        return None;
    }
    let mask: Vec<u8> = (0..length).map(|at| u8::from(at >= prompt.len())).collect();
    Some(MaskedIds::from_mask(ids[..length].to_vec(), &mask).ok()?.content_hash())
}
