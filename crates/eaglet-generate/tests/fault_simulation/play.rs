//! Plays a case: real sessions of the run, on one clock that jumps, against simulated servers behind pipes, on a disk in memory.

use super::case::{Case, Fate, Temper};
use super::checks::{Watch, records};
use super::common::{FAILURES, INFLIGHT, RESPONSES, index_of};
use eaglet_core::Class;
use eaglet_core::ids::PromptKey;
use eaglet_core::inflight::{InflightLog, InflightSettings};
use eaglet_core::journal::Journal;
use eaglet_core::resume::Known;
use eaglet_core::storage::Storage;
use eaglet_core::work::Work;
use eaglet_data::{DatasetSpec, HubSettings, Plan};
use eaglet_generate::client::connection::{Connecting, Connector, Duplex};
use eaglet_generate::client::endpoint::Endpoint;
use eaglet_generate::client::request::RequestTemplate;
use eaglet_generate::client::{Client, Mode};
use eaglet_generate::run::{self, Inflight, Interrupted, RunEnd, RunParts, Stop};
use eaglet_generate::server_info;
use eaglet_serve::simulate::{Settings, Simulator};
use eaglet_testkit::faulty_storage::{Fault, FaultPlan, FaultyStorage, Operation, Persistence};
use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::LocalSet;
use tokio::time::Instant;

/// A session that nobody interrupts ends within this time, on its own clock.
const SESSION_MAX: Duration = Duration::from_secs(3600);
/// Sessions that may end with an error before the accidents are over, where the settings are strict.
const SESSIONS_MAX: usize = 12;
/// Between two sessions.
const PAUSE: Duration = Duration::from_secs(30);

/// What a case came to.
#[derive(Debug, Default)]
pub(crate) struct Played {
    /// What was reported, with its time in milliseconds.
    pub(crate) trace: Vec<String>,
    /// Kinds of events, and causes of retries.
    pub(crate) seen: BTreeSet<String>,
    /// On its own clock.
    pub(crate) took: Duration,
    pub(crate) sessions: usize,
    pub(crate) failed: usize,
    pub(crate) joined: usize,
}

/// The way to a simulated server: a pipe, and times in which it leads nowhere.
#[derive(Debug)]
struct Pipe {
    server: Simulator,
    bytes: usize,
    unreachable: Option<(Instant, Instant)>,
}

impl Connector for Pipe {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async {
            if self.unreachable.is_some_and(|(from, to)| (from..to).contains(&Instant::now())) {
                std::future::pending::<()>().await;
            }
            self.server.connect_by(self.bytes).map(|pipe| Box::new(pipe) as Box<dyn Duplex>)
        })
    }
}

fn clock() -> std::time::Instant {
    Instant::now().into_std()
}

/// Plays it and checks everything; panics with what is wrong.
pub(crate) fn play(case: &Case) -> Played {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(Stage::new(case).play())
}

struct Stage<'a> {
    case: &'a Case,
    servers: Vec<Rc<Pipe>>,
    data: tempfile::TempDir,
    storage: FaultyStorage,
    watch: Rc<RefCell<Watch>>,
}

impl<'a> Stage<'a> {
    fn new(case: &'a Case) -> Self {
        let data = tempfile::tempdir().unwrap();
        std::fs::write(data.path().join("data.jsonl"), case.rows()).unwrap();
        let watch = Rc::new(RefCell::new(Watch::new(&case.settings)));
        Stage { case, servers: vec![], data, storage: FaultyStorage::new(), watch }
    }

    async fn play(mut self) -> Played {
        let began = Instant::now();
        for (faults, unreachable) in self.case.fault_scripts().into_iter().zip(&self.case.unreachable_s) {
            let settings = Settings { faults, seed: self.case.seed, ..Settings::new(self.case.profile.clone()) };
            let server = Simulator::new(settings);
            let running = server.clone();
            tokio::spawn(async move { running.run().await });
            let at = |seconds: u64| began + Duration::from_secs(seconds);
            let unreachable = unreachable.map(|(from, to)| (at(from), at(to)));
            self.servers.push(Rc::new(Pipe { server, bytes: self.case.pipe_bytes, unreachable }));
        }
        let mut sessions = 0;
        let mut fates = self.case.fates.iter().copied();
        loop {
            let fate = fates.next();
            sessions += 1;
            assert!(sessions <= SESSIONS_MAX, "session after session fails");
            if self.session(fate, sessions).await {
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
        let took = began.elapsed();
        let (failed, joined) = records(self.case, &self.storage);
        let (trace, seen) = self.watch.borrow_mut().take();
        Played { trace, seen, took, sessions, failed, joined }
    }

    /// One process; whether everything is done.
    async fn session(&mut self, fate: Option<(u64, Fate)>, number: usize) -> bool {
        // Whatever a process has started ends with it.
        let local = LocalSet::new();
        let (stop, stopped) = watch::channel(Stop::No);
        let disk = self.storage.clone();
        if let Some((from, to)) = self.case.disk_full_s.filter(|_| number == 1) {
            local.spawn_local(fill_disk(disk.clone(), from, to));
        }
        let dies_at = match fate {
            Some((at, Fate::Killed(_))) => Duration::from_secs(at),
            Some((at, Fate::Asked(what))) => {
                local.spawn_local(async move {
                    tokio::time::sleep(Duration::from_secs(at)).await;
                    stop.send_replace(what);
                    std::future::pending::<()>().await;
                });
                SESSION_MAX
            }
            None => SESSION_MAX,
        };
        let ended = {
            let mut running = Box::pin(local.run_until(self.run(stopped)));
            let ended = tokio::time::timeout(dies_at, &mut running).await;
            // The disk as it is before the process is tidied away here.
            let left = match fate {
                Some((_, Fate::Killed(mode))) if ended.is_err() => Some(disk.crash(mode, self.case.seed)),
                _ => None,
            };
            let _inside = local.enter();
            drop(running);
            ended.map_err(|_| left)
        };
        drop(local);
        match (ended, fate) {
            (Ok(end), _) => {
                self.storage.heal();
                self.ended(&end, fate)
            }
            (Err(Some(left)), _) => {
                self.storage = left;
                self.watch.borrow_mut().died(&self.storage);
                false
            }
            (Err(None), _) => panic!("not ended after {} s", SESSION_MAX.as_secs()),
        }
    }

    fn ended(&self, end: &RunEnd, fate: Option<(u64, Fate)>) -> bool {
        let last = &end.snapshot;
        assert_eq!((last.in_flight, last.waiting, last.unsynced), (0, 0, end.unsaved), "{last:?}");
        // Somebody who wants to leave at once does not wait for room on the disk.
        let unsaved = self.case.disk_full_s.is_some() && matches!(fate, Some((_, Fate::Asked(_))));
        assert!(end.unsaved == 0 || (unsaved && end.error.is_some()), "{last:?}");
        if let Some(error) = &end.error {
            assert_ne!(error.class(), Class::Bug, "{error}");
            assert!(self.case.temper == Temper::Strict || end.unsaved > 0, "{error}");
        }
        let complete = last.done + last.failed == last.planned;
        let may_stop = matches!(fate, Some((_, Fate::Asked(_))));
        assert!(complete || end.error.is_some() || (end.stopped && may_stop), "{last:?}");
        complete && end.error.is_none()
    }

    async fn run(&self, stopped: watch::Receiver<Stop>) -> RunEnd {
        let settings = self.case.settings.clone();
        let shared: Arc<dyn Storage> = Arc::new(self.storage.clone());
        shared.create_dir_all(Path::new("run")).unwrap();
        let open = |path| Journal::open(Arc::clone(&shared), Path::new(path)).unwrap().0;
        let (responses, failures) = (open(RESPONSES), open(FAILURES));
        let (plan, done_before, failed_before) = self.plan();
        self.watch.borrow_mut().begins(&self.storage, done_before);
        let left: HashSet<PromptKey> = plan.entries().iter().filter(|e| !e.done()).map(|e| e.key()).collect();
        let work = Work::Caller(clock);
        let inflight = (settings.continuation.interrupted == Interrupted::Continue).then(|| {
            let how = InflightSettings { work, ..InflightSettings::default() };
            let (log, saved) =
                InflightLog::open(Arc::clone(&shared), Path::new(INFLIGHT), how, |key| left.contains(&key));
            Inflight { log, saved }
        });
        let (servers, joining) = self.reach().await;
        let model = &servers[0].1.model;
        let (sampling, extra, stream) = (&settings.sampling, &settings.extra_body, settings.mode == Mode::Stream);
        let template = RequestTemplate::new(model, sampling, extra, stream, settings.token_ids).unwrap();
        let parts = RunParts {
            settings,
            plan,
            done_before,
            failed_before,
            completion_tokens_before: vec![],
            servers,
            joining,
            server_list: self.server_list(),
            template,
            responses,
            failures,
            work,
            inflight,
            row_failures: vec![],
            jitter_seed: self.case.seed,
        };
        let watch = Rc::clone(&self.watch);
        run::run(parts, stopped, move |report| watch.borrow_mut().hear(&report)).await.unwrap()
    }

    fn plan(&self) -> (Plan, u64, u64) {
        let index = index_of(&self.storage);
        let (mut done, mut failed) = (0, 0);
        let mut known = |prompt: &_, key| {
            let known = index.known(prompt, key);
            done += u64::from(known == Known::Done);
            failed += u64::from(known == Known::Failed);
            known != Known::New
        };
        let dir = self.data.path();
        let inputs = vec![dir.join("data.jsonl").display().to_string()];
        let spec = DatasetSpec { inputs, turns: self.case.settings.turns, ..DatasetSpec::default() };
        let plan = eaglet_data::plan(&spec, &HubSettings::default(), dir, None, &mut known, &mut |_| {}).unwrap();
        (plan, done, failed)
    }

    /// The list of servers as it changes.
    fn server_list(&self) -> Option<watch::Receiver<Vec<Rc<Endpoint>>>> {
        let (servers, lists) = (self.servers.clone(), self.case.lists.clone());
        lists.first()?;
        let (list, listed) = watch::channel((0..servers.len()).map(|n| endpoint(&servers, n)).collect());
        tokio::task::spawn_local(async move {
            let began = Instant::now();
            for (at, names) in lists {
                tokio::time::sleep_until(began + Duration::from_secs(at)).await;
                list.send_replace(names.into_iter().map(|n| endpoint(&servers, n)).collect());
            }
            std::future::pending::<()>().await;
        });
        Some(listed)
    }

    /// The servers that answer, and those that do not yet; at least one does, sooner or later.
    async fn reach(&self) -> (Vec<(Client, server_info::ServerInfo)>, Vec<Rc<Endpoint>>) {
        loop {
            let (mut servers, mut joining) = (vec![], vec![]);
            for endpoint in (0..self.servers.len()).map(|n| endpoint(&self.servers, n)) {
                let client = Client::new(Rc::clone(&endpoint), self.case.settings.timeouts).unwrap();
                match server_info::server_info(&client, None, None).await {
                    Ok(info) => servers.push((client, info)),
                    Err(_) => joining.push(endpoint),
                }
            }
            if !servers.is_empty() {
                return (servers, joining);
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
}

fn endpoint(servers: &[Rc<Pipe>], n: usize) -> Rc<Endpoint> {
    let endpoint = Endpoint::new(&format!("http://server-{n}:8000"), None, &[]).unwrap();
    Rc::new(endpoint.reached_by(Rc::clone(&servers[n]) as Rc<dyn Connector>))
}

async fn fill_disk(disk: FaultyStorage, from: u64, to: u64) {
    tokio::time::sleep(Duration::from_secs(from)).await;
    let fault = Fault::NoSpace;
    disk.plan(FaultPlan { operation: Operation::Any, nth: 1, fault, persistence: Persistence::Sticky });
    tokio::time::sleep(Duration::from_secs(to - from)).await;
    disk.heal();
}
