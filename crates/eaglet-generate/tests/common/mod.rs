//! One session of the engine on any storage: what `eaglet generate` does, without its screens.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code)]

use eaglet_core::commit::CommitSettings;
use eaglet_core::ids::PromptKey;
use eaglet_core::inflight::{InflightLog, InflightSettings};
use eaglet_core::journal::Journal;
use eaglet_core::resume::{Known, RecordIndex, RecordIndexBuilder};
use eaglet_core::scan::{ScanLimits, scan_storage};
use eaglet_core::storage::Storage;
use eaglet_core::work::Work;
use eaglet_data::{DatasetSpec, HubSettings};
use eaglet_generate::client::Client;
use eaglet_generate::client::endpoint::Endpoint;
use eaglet_generate::client::request::RequestTemplate;
use eaglet_generate::retry::RetryPolicy;
use eaglet_generate::run::{self, GenerateSettings, Inflight, Interrupted, Report, RunEnd, RunParts, Stop};
use eaglet_generate::server_info;
use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

pub(crate) const RESPONSES: &str = "run/raw_responses.jsonl";
pub(crate) const FAILURES: &str = "run/failures.jsonl";
pub(crate) const INFLIGHT: &str = "run/inflight.bin";

/// A data set of `count` prompts on the real disk, and room for the spool.
pub(crate) fn data_set(count: usize) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let rows = (0..count).map(|n| format!("{{\"id\": \"q{n}\", \"prompt\": \"Describe item {n}.\"}}\n"));
    std::fs::write(dir.path().join("data.jsonl"), rows.collect::<String>()).unwrap();
    dir
}

/// Short waits, one retry.
pub(crate) fn settings(concurrency: usize) -> GenerateSettings {
    GenerateSettings {
        retry: RetryPolicy { retries_max: 1, backoff_first: Duration::from_millis(5), ..RetryPolicy::default() },
        commit: CommitSettings {
            interval: Duration::from_millis(1),
            retry_first: Duration::from_millis(1),
            retry_max: Duration::from_millis(5),
            ..CommitSettings::default()
        },
        drain_deadline: Duration::from_secs(60),
        ..GenerateSettings::new(NonZeroUsize::new(concurrency).unwrap())
    }
}

/// What the journals of a storage hold.
pub(crate) fn index_of(storage: &dyn Storage) -> RecordIndex {
    let mut index = RecordIndexBuilder::default();
    for (path, is_response) in [(RESPONSES, true), (FAILURES, false)] {
        if storage.len(Path::new(path)).unwrap().is_none() {
            continue;
        }
        scan_storage(storage, Path::new(path), ScanLimits::default(), |line| {
            if is_response {
                index.add_response_line(line.bytes, line.offset);
            } else {
                index.add_failure_line(line.bytes);
            }
        })
        .unwrap();
    }
    index.build()
}

/// Opens the journals, plans what is left, and runs it to its end. `observe` gets each report and may ask to stop.
pub(crate) fn session(
    storage: &(impl Storage + Clone + 'static),
    url: &str,
    data: &Path,
    settings: GenerateSettings,
    mut observe: impl FnMut(&Report, &watch::Sender<Stop>),
) -> eaglet_core::Result<RunEnd> {
    let shared: Arc<dyn Storage> = Arc::new(storage.clone());
    storage.create_dir_all(Path::new("run")).unwrap();
    let (responses, _) = Journal::open(Arc::clone(&shared), Path::new(RESPONSES))?;
    let (failures, _) = Journal::open(Arc::clone(&shared), Path::new(FAILURES))?;
    let index = index_of(storage);
    let (mut done, mut failed) = (0, 0);
    let spec = DatasetSpec { inputs: vec![data.join("data.jsonl").display().to_string()], ..DatasetSpec::default() };
    let mut known = |prompt: &_, key| {
        let known = index.known(prompt, key);
        done += u64::from(known == Known::Done);
        failed += u64::from(known == Known::Failed);
        known != Known::New
    };
    let plan = eaglet_data::plan(&spec, &HubSettings::default(), data, None, &mut known, &mut |_| {})?;
    let left: HashSet<PromptKey> =
        plan.entries().iter().filter(|entry| !entry.done()).map(|entry| entry.key()).collect();
    let wanted = settings.continuation.interrupted == Interrupted::Continue;
    let inflight = wanted.then(|| {
        let quick = InflightSettings {
            sync_interval: Duration::from_millis(50),
            retry_interval: Duration::from_millis(5),
            compact_bytes_min: 1 << 20,
            work: Work::Threads,
        };
        let (log, saved) = InflightLog::open(shared, Path::new(INFLIGHT), quick, |key| left.contains(&key));
        Inflight { log, saved }
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let client = Client::new(Rc::new(Endpoint::new(url, None, &[])?), settings.timeouts)?;
        let server = server_info::server_info(&client, None, None).await?;
        let template =
            RequestTemplate::new(&server.model, &settings.sampling, &settings.extra_body, true, settings.token_ids)?;
        let parts = RunParts {
            settings,
            plan,
            done_before: done,
            failed_before: failed,
            completion_tokens_before: vec![],
            servers: vec![(client, server)],
            joining: vec![],
            server_list: None,
            template,
            responses,
            failures,
            work: Work::Threads,
            inflight,
            row_failures: vec![],
            jitter_seed: 1,
        };
        let (stop, stopped) = watch::channel(Stop::No);
        run::run(parts, stopped, |report| observe(&report, &stop)).await
    })
}
