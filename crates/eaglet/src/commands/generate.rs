//! `eaglet generate`: opens the run directory, asks the server, fixes the plan, runs, tells the end.

use super::prepared::UrlFile;
use super::{detach, prepared};
use crate::cli::GenerateArgs;
use crate::log::{RunLog, Watcher};
use crate::signals::Signals;
use crate::{Exit, environment, render};
use eaglet_core::ids::PromptKey;
use eaglet_core::inflight::{InflightLog, InflightSettings};
use eaglet_core::journal::Journal;
use eaglet_core::lock::RunLock;
use eaglet_core::outcome::{FailedAs, Failure};
use eaglet_core::provenance::{Provenance, now};
use eaglet_core::resume::{Known, RecordIndex, RecordIndexBuilder};
use eaglet_core::run_dir::RunDir;
use eaglet_core::run_file::{ConfigChange, GenerateStage, RUN_FORMAT_VERSION, RunFile, StageState, differences};
use eaglet_core::storage::{RealStorage, Storage};
use eaglet_core::work::Work;
use eaglet_core::{Error, Result, scan};
use eaglet_data::{DatasetSpec, Plan};
use eaglet_generate::client::Client;
use eaglet_generate::client::endpoint::Endpoint;
use eaglet_generate::preflight::{self, Finding, Level};
use eaglet_generate::run::{self, GenerateSettings, Inflight, Interrupted, RunEnd, RunParts, Stop};
use eaglet_generate::server_info::{self, ServerInfo};
use std::collections::HashSet;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Runs the command.
pub(crate) fn generate(args: GenerateArgs) -> Result<Exit> {
    let mut settings = prepared::generate_settings(&args)?;
    let spec = prepared::dataset_spec(&args.input)?;
    let (endpoints, url_file) = prepared::servers(&args.connection)?;
    let run_dir = RunDir::new(&args.output_dir);
    run_dir.create()?;
    if args.detach {
        return detach::detach(&run_dir, &spec);
    }
    let watcher = if detach::is_detached() { Watcher::Nobody } else { Watcher::Stderr };
    settings.concurrency = prepared::descriptors(settings.concurrency, endpoints.len())?;
    let _lock = RunLock::acquire(run_dir.path())?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::environment(format!("cannot start the event loop: {e}")))?;
    let local = tokio::task::LocalSet::new();
    let mut log = RunLog::open(&run_dir, watcher);
    let session = Session { args: &args, settings, spec, run_dir: &run_dir };
    let end = local.block_on(&runtime, session.run(endpoints, url_file, &mut log))?;
    if watcher == Watcher::Stderr {
        log.say(render::summary::text(&end.snapshot).trim_end());
    }
    if args.json {
        print_json(&end)?;
    }
    finish(end, &args)
}

fn print_json(end: &RunEnd) -> Result<()> {
    use std::io::Write;
    let mut text =
        serde_json::to_vec_pretty(&end.snapshot).map_err(|e| Error::bug(format!("the state is not JSON: {e}")))?;
    text.push(b'\n');
    // A reader that went away (head, a closed pipe) is no failure of the run.
    let _ = std::io::stdout().write_all(&text);
    Ok(())
}

/// The exit code, or the error that ended the run early.
fn finish(end: RunEnd, args: &GenerateArgs) -> Result<Exit> {
    if let Some(error) = end.error {
        return Err(error);
    }
    let s = &end.snapshot;
    if s.planned > s.done + s.failed {
        return Ok(Exit::Interrupted);
    }
    let over = s.failed as f64 > args.failure_tolerance * s.planned as f64;
    Ok(if over { Exit::WithFailures } else { Exit::Done })
}

struct Session<'a> {
    args: &'a GenerateArgs,
    settings: GenerateSettings,
    spec: DatasetSpec,
    run_dir: &'a RunDir,
}

impl Session<'_> {
    async fn run(
        mut self,
        endpoints: Vec<Rc<Endpoint>>,
        url_file: Option<UrlFile>,
        log: &mut RunLog,
    ) -> Result<RunEnd> {
        let args = self.args;
        if let Some(timeout) = args.limits.timeout {
            log.say(&format!("--timeout {}: taken as the longest silence between two tokens; an answer whose tokens flow has no limit", timeout.as_secs_f64()));
        }
        let (servers, joining) = self.reach(&endpoints, log).await?;
        let server = servers[0].1.clone();
        prepared::resolve_markers(&mut self.settings, &servers[0].0, &server).await?;
        let storage: Arc<dyn Storage> = Arc::new(RealStorage);
        let (responses, failures) = open_journals(&storage, self.run_dir, log)?;
        let index = read_index(self.run_dir)?;
        tell_index(&index, log);
        let mut counts = Counts::default();
        let retry_failed = args.retry_failed;
        let plan = eaglet_data::plan(
            &self.spec,
            &environment::hub_settings(),
            self.run_dir.path(),
            Some(&mut std::io::stdin().lock()),
            &mut |prompt, key| counts.known(index.known(prompt, key), retry_failed),
            &mut |_| {},
        )?;
        tell_plan(&plan, log);
        let (mut run_file, same) = self.run_file(&storage, &server, &plan, &counts, log)?;
        let template = prepared::template(&self.settings, &server)?;
        self.preflight(&servers, &plan, &template, counts.ended() == 0, log).await?;
        let row_failures = row_failures(&plan, &index);
        let inflight = self.inflight(&storage, &plan, same, log);
        let parts = RunParts {
            settings: self.settings,
            done_before: counts.done,
            failed_before: counts.failed,
            completion_tokens_before: index.totals.completion_tokens.clone(),
            servers,
            joining,
            server_list: url_file.map(|file| watch_file(file, endpoints)),
            template,
            responses,
            failures,
            work: Work::Threads,
            inflight,
            row_failures,
            jitter_seed: u64::from(std::process::id()) ^ jiff::Timestamp::now().as_nanosecond() as u64,
            plan,
        };
        // The index has done its work; a million records are 60 MB.
        drop(index);
        let (stop, stopped) = watch::channel(Stop::No);
        let signals = tokio::task::spawn_local(Signals::take()?.pass_on(stop));
        log.begin_line();
        let end = run::run(parts, stopped, |report| log.take(report)).await;
        signals.abort();
        let end = end?;
        let complete = end.error.is_none() && end.snapshot.planned == end.snapshot.done + end.snapshot.failed;
        run_file.generate.state = if complete { StageState::Complete } else { StageState::Unfinished };
        (run_file.generate.done, run_file.generate.failed) = (end.snapshot.done, end.snapshot.failed);
        if let Err(error) = run_file.write(&*storage, &self.run_dir.run_file()) {
            log.say(&format!("warning: {error}; the records are not concerned"));
        }
        Ok(end)
    }

    /// Asks each server for its model. Those that cannot be reached join later, if at least one can; another model is refused.
    async fn reach(
        &self,
        endpoints: &[Rc<Endpoint>],
        log: &RunLog,
    ) -> Result<(Vec<(Client, ServerInfo)>, Vec<Rc<Endpoint>>)> {
        let connection = &self.args.connection;
        let (mut servers, mut joining, mut first_error) = (Vec::<(Client, ServerInfo)>::new(), vec![], None);
        for endpoint in endpoints {
            let client = Client::new(Rc::clone(endpoint), self.settings.timeouts)?;
            let wanted = servers.first().map(|(_, info)| info.model.as_str()).or(connection.model.as_deref());
            match server_info::server_info(&client, wanted, connection.model_path.as_deref()).await {
                Ok(info) => {
                    if let Some((_, ours)) = servers.first() {
                        server_info::same_model(ours, &info, &endpoint.label())?;
                    }
                    servers.push((client, info));
                }
                Err(error) if endpoints.len() > 1 && server_info::is_unreachable(&error) => {
                    joining.push((Rc::clone(endpoint), error.to_string()));
                    first_error.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        match first_error {
            Some(error) if servers.is_empty() => return Err(error),
            _ => {}
        }
        joining.iter().for_each(|(_, error)| log.say(&format!("{error}; it joins the run when it can be reached")));
        Ok((servers, joining.into_iter().map(|(endpoint, _)| endpoint).collect()))
    }

    /// Reads `run.json`, holds this run against it, and writes it anew.
    fn run_file(
        &self,
        storage: &Arc<dyn Storage>,
        server: &ServerInfo,
        plan: &Plan,
        counts: &Counts,
        log: &RunLog,
    ) -> Result<(RunFile, Settings)> {
        let path = self.run_dir.run_file();
        let fingerprint = self.settings.fingerprint(server, plan);
        let provenance = Provenance { server: server.owned_by.clone(), ..Provenance::here(prepared::masked_command()) };
        let stage = GenerateStage {
            state: StageState::Unfinished,
            planned: plan.entries().len() as u64,
            done: counts.done,
            failed: counts.failed,
            sessions: 1,
        };
        let mut settings = Settings::Other;
        let run_file = match RunFile::read(&**storage, &path)? {
            None => RunFile {
                format_version: RUN_FORMAT_VERSION,
                created_at: now(),
                fingerprint,
                provenance,
                generate: stage,
                config_changes: vec![],
            },
            Some(mut before) => {
                let changed = differences(&before.fingerprint, &fingerprint);
                if !changed.is_empty() {
                    if !self.args.allow_config_change {
                        return Err(Error::usage(format!("{} holds another run: {}", self.run_dir.path().display(), changed.join("; ")))
                            .hint("choose another --output-dir, or go on with the new settings with --allow-config-change (recorded in run.json)"));
                    }
                    changed.iter().for_each(|line| log.say(&format!("changed, as allowed: {line}")));
                    before.config_changes.push(ConfigChange { at: now(), differences: changed });
                } else {
                    settings = Settings::Same;
                }
                let sessions = before.generate.sessions + 1;
                RunFile { fingerprint, provenance, generate: GenerateStage { sessions, ..stage }, ..before }
            }
        };
        run_file.write(&**storage, &path)?;
        Ok((run_file, settings))
    }

    /// What earlier sessions left of unfinished answers. Those of other settings are of another run, and are forgotten.
    fn inflight(&self, storage: &Arc<dyn Storage>, plan: &Plan, same: Settings, log: &RunLog) -> Option<Inflight> {
        if self.settings.continuation.interrupted == Interrupted::StartAgain {
            return None;
        }
        let left: HashSet<PromptKey> =
            plan.entries().iter().filter(|entry| !entry.done()).map(|entry| entry.key()).collect();
        let is_left = |key| same == Settings::Same && left.contains(&key);
        let (file, settings) = (self.run_dir.inflight(), InflightSettings::default());
        let (writer, saved) = InflightLog::open(Arc::clone(storage), &file, settings, is_left);
        if !saved.is_empty() {
            let begun = saved.values().filter_map(|saved| saved.unfinished.as_ref());
            let tokens: usize = begun.map(|unfinished| unfinished.token_ids.len()).sum();
            log.say(&format!("going on with {} unfinished answers, {tokens} tokens of them are there", saved.len()));
        }
        Some(Inflight { log: writer, saved })
    }

    async fn preflight(
        &self,
        servers: &[(Client, ServerInfo)],
        plan: &Plan,
        template: &eaglet_generate::client::request::RequestTemplate,
        is_new: bool,
        log: &RunLog,
    ) -> Result<()> {
        let left = plan.entries().iter().filter(|entry| !entry.done());
        let (prompts, bytes) = left.fold((0, 0), |(n, bytes), entry| (n + 1, bytes + u64::from(entry.text_bytes())));
        let hidden =
            self.args.connection.model_path.as_deref().and_then(|path| preflight::hidden_size(Path::new(path)));
        let need = preflight::disk_need(prompts, bytes, &self.settings, hidden);
        // The shortest context bounds the run.
        let shortest = servers.iter().min_by_key(|(_, info)| info.max_model_len.unwrap_or(u64::MAX));
        let mut findings: Vec<Finding> =
            shortest.iter().map(|(_, info)| preflight::check_context(&self.settings, info)).collect();
        if let Some(free) = environment::free_bytes(self.run_dir.path()) {
            findings.push(preflight::check_disk(&need, free));
        }
        if is_new && !self.args.no_probe && prompts > 0 && findings.iter().all(|f| f.level != Level::Failure) {
            for (client, _) in servers {
                let mut finding = preflight::probe(client, template, &self.settings).await;
                if servers.len() > 1 {
                    finding.found = format!("{}: {}", client.endpoint().label(), finding.found);
                }
                findings.push(finding);
            }
        }
        refuse_failures(&findings)?;
        let text = render::findings::text(&findings, false);
        if !text.is_empty() {
            log.say(text.trim_end());
        }
        Ok(())
    }
}

/// Whether the run in the directory was begun with the settings of now.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Settings {
    Same,
    /// Changed, new, or nobody knows.
    Other,
}

/// Between two looks at the file that lists the servers.
const URL_FILE_INTERVAL: Duration = Duration::from_secs(2);

/// Follows the file that lists the servers. A file that cannot be read, as in the middle of being written, changes nothing.
fn watch_file(file: UrlFile, mut last: Vec<Rc<Endpoint>>) -> watch::Receiver<Vec<Rc<Endpoint>>> {
    let (list, listed) = watch::channel(last.clone());
    tokio::task::spawn_local(async move {
        loop {
            tokio::time::sleep(URL_FILE_INTERVAL).await;
            let Ok(now) = file.read() else { continue };
            let labels = |list: &[Rc<Endpoint>]| list.iter().map(|endpoint| endpoint.label()).collect::<Vec<_>>();
            if labels(&now) != labels(&last) {
                last = now.clone();
                if list.send(now).is_err() {
                    return;
                }
            }
        }
    });
    listed
}

/// The first finding with which the run would fail, as an error.
fn refuse_failures(findings: &[Finding]) -> Result<()> {
    match findings.iter().find(|f| f.level == Level::Failure) {
        None => Ok(()),
        Some(failure) => {
            let error = Error::server(format!("{}: {}", failure.check, failure.found));
            Err(match &failure.hint {
                Some(hint) => error.hint(hint.clone()),
                None => error,
            })
        }
    }
}

/// Prompts of the plan that ended in earlier sessions.
#[derive(Debug, Default)]
struct Counts {
    done: u64,
    failed: u64,
}

impl Counts {
    /// Counts a prompt; true when it is not to be sent.
    fn known(&mut self, known: Known, retry_failed: bool) -> bool {
        match known {
            Known::Done => self.done += 1,
            Known::Failed if !retry_failed => self.failed += 1,
            Known::Failed | Known::New => return false,
        }
        true
    }

    fn ended(&self) -> u64 {
        self.done + self.failed
    }
}

fn open_journals(storage: &Arc<dyn Storage>, run_dir: &RunDir, log: &RunLog) -> Result<(Journal, Journal)> {
    let open = |path: &Path| -> Result<Journal> {
        let (journal, repair) = Journal::open(Arc::clone(storage), path)?;
        if repair.cut_bytes > 0 {
            let kept = repair.kept_in.map(|path| path.display().to_string()).unwrap_or_default();
            log.say(&format!(
                "repaired the torn end of {}: {} bytes of an unfinished record set aside in {kept}",
                path.display(),
                repair.cut_bytes
            ));
        }
        Ok(journal)
    };
    Ok((open(&run_dir.responses())?, open(&run_dir.failures())?))
}

/// Threads that read the records of earlier sessions: two saturate a page cache.
const SCAN_THREADS_MAX: usize = 4;

/// Reads what earlier sessions left.
pub(super) fn read_index(run_dir: &RunDir) -> Result<RecordIndex> {
    let threads = std::thread::available_parallelism().map_or(2, std::num::NonZero::get).min(SCAN_THREADS_MAX);
    let mut parts: Vec<RecordIndexBuilder> = Vec::new();
    if run_dir.responses().exists() {
        parts = scan::scan(
            &run_dir.responses(),
            |index: &mut RecordIndexBuilder, line| index.add_response_line(line.bytes, line.offset),
            threads,
        )?;
    }
    if run_dir.failures().exists() {
        parts.extend(scan::scan(
            &run_dir.failures(),
            |index: &mut RecordIndexBuilder, line| index.add_failure_line(line.bytes),
            1,
        )?);
    }
    Ok(parts.into_iter().reduce(RecordIndexBuilder::merge).unwrap_or_default().build())
}

fn tell_index(index: &RecordIndex, log: &RunLog) {
    let totals = &index.totals;
    if let Some(offset) = totals.first_unreadable {
        log.say(&format!(
            "warning: {} lines of raw_responses.jsonl are no records (the first at byte {offset}); they are left as they are, and their prompts are sent again",
            totals.unreadable
        ));
    }
    if totals.legacy > 0 {
        log.say(&format!("{} records of the older script's format are accepted, by id", totals.legacy));
    }
    if totals.doubled > 0 {
        log.say(&format!("warning: {} prompts have more than one record; the first one counts", totals.doubled));
    }
}

fn tell_plan(plan: &Plan, log: &RunLog) {
    let counted = plan.rejected_counts();
    if !counted.is_empty() {
        let by_reason =
            counted.iter().map(|(reason, count)| format!("{reason} {count}")).collect::<Vec<_>>().join(", ");
        let first = plan
            .rejected()
            .first()
            .map(|row| format!("; the first: {}: {}", row.origin, row.reason))
            .unwrap_or_default();
        log.say(&format!("unusable rows, listed in failures.jsonl: {by_reason}{first}"));
    }
    if plan.duplicates_total() > 0 {
        log.say(&format!(
            "{} rows repeat an earlier one; each prompt is answered once, the repeats are listed in failures.jsonl",
            plan.duplicates_total()
        ));
    }
    if plan.repaired() > 0 {
        log.say(&format!("{} rows with broken Unicode were repaired with U+FFFD", plan.repaired()));
    }
}

/// Lines for rows that are no prompts, unless an earlier session listed them.
fn row_failures(plan: &Plan, index: &RecordIndex) -> Vec<Vec<u8>> {
    let at = now();
    let failure = |row: u64, origin: &str, failed_as, cause: &str, detail: String, id: Option<String>| Failure {
        v: 1,
        sample_id: id.map(eaglet_core::ids::PromptId::given),
        prompt_hash: None,
        failed_as,
        cause: cause.to_owned(),
        detail,
        origin: Some(origin.to_owned()),
        row,
        source: None,
        prompt_bytes: 0,
        at: at.clone(),
        attempts: vec![],
        partial: None,
    };
    let rejected = plan
        .rejected()
        .iter()
        .map(|r| failure(r.row, &r.origin, FailedAs::Unusable, r.reason.label(), r.reason.to_string(), r.id.clone()));
    let duplicates = plan.duplicates().iter().map(|d| {
        let detail = format!("repeats {}", d.first_origin);
        failure(d.row, &d.origin, FailedAs::Duplicate, "duplicate", detail, Some(d.id.clone()))
    });
    rejected.chain(duplicates).filter(|f| !index.lists_row(f.row)).map(|f| f.to_line()).collect()
}
