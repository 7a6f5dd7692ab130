//! The run: every prompt answered once, whatever happens.
//!
//! One thread drives all requests; one thread writes records. Invariants: conservation (see [`eaglet_core::outcome::Tally`]); a prompt counts as done only after its
//! record is synced; a prompt that is not ended when the run stops is left exactly as if it had never been sent.

mod books;
mod breaker;
mod checkpoints;
mod continuing;
mod disk;
mod server;
mod servers;
mod settings;
mod tail;
mod token_limit;
mod worker;

pub use checkpoints::Inflight;
pub use continuing::Interrupted;
pub use settings::{Concurrency, ContinuationSettings, GenerateSettings};

use crate::client::endpoint::Endpoint;
use crate::client::request::RequestTemplate;
use crate::client::{AttemptFailure, Client, Mode};
use crate::limiter::RateSource;
use crate::retry::Jitter;
use crate::server_info::ServerInfo;
use books::{Books, End, Submitted};
use breaker::Breaker;
use checkpoints::Checkpoints;
use eaglet_core::commit::{CommitEvent, CommitHandle, Committer, Stream};
use eaglet_core::event::Event;
use eaglet_core::inflight::InflightLog;
use eaglet_core::journal::Journal;
use eaglet_core::outcome::Place;
use eaglet_core::progress::{Phase, Snapshot};
use eaglet_core::prompt::Prompt;
use eaglet_core::work::Work;
use eaglet_core::{Error, Result};
use eaglet_data::{Plan, PlanEntry};
use servers::{Common, Lease, Servers};
use std::cell::{Cell, RefCell};
use std::collections::{HashSet, VecDeque};
use std::rc::Rc;
use std::time::Duration;
use tail::{Known, LastPrompts, Lengths, PROMPTS_PER_SLOT};
use token_limit::TokenLimiter;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// New prompts wait while more than this is submitted and not yet synced.
const UNSYNCED_BYTES_MAX: u64 = 64 << 20;

/// How often the books are ticked and a snapshot is reported.
const TICK: Duration = Duration::from_secs(1);

/// At the end, so long the last records may take to reach the disk once somebody wants to leave.
const LAST_SYNC_DEADLINE: Duration = Duration::from_secs(5);

/// At the end, so long the last checkpoints may take.
const LAST_CHECKPOINT_DEADLINE: Duration = Duration::from_secs(2);

/// How a run is asked to stop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stop {
    /// It is not.
    #[default]
    No,
    /// Send nothing new; finish what is out.
    Drain,
    /// As `Drain`, but give up what is out after the deadline of the settings.
    DrainWithDeadline,
    /// Give up what is out; save what is finished.
    Abort,
}

/// What a run reports while it goes on.
pub enum Report {
    /// Something happened.
    Event(Event),
    /// The state, about once a second and at the end.
    Snapshot(Box<Snapshot>),
    /// An attempt failed and will be repeated: for the log.
    Retried {
        /// The prompt's id.
        sample_id: String,
        /// In words.
        detail: String,
    },
}

/// Everything a run starts from.
pub struct RunParts {
    /// Settings.
    pub settings: GenerateSettings,
    /// The prompts.
    pub plan: Plan,
    /// Prompts done in earlier sessions.
    pub done_before: u64,
    /// Prompts failed in earlier sessions.
    pub failed_before: u64,
    /// Token counts of earlier answers.
    pub completion_tokens_before: Vec<u32>,
    /// The servers that were reached: at least one, all with the same model. What the first says about its model holds for the run.
    pub servers: Vec<(Client, ServerInfo)>,
    /// Servers that were not, and join when they can be.
    pub joining: Vec<Rc<Endpoint>>,
    /// The list of servers, where it can change while the run goes on.
    pub server_list: Option<watch::Receiver<Vec<Rc<Endpoint>>>>,
    /// The template of requests.
    pub template: RequestTemplate,
    /// The journal of answers.
    pub responses: Journal,
    /// The journal of failures.
    pub failures: Journal,
    /// Who does the work that waits for a disk.
    pub work: Work,
    /// The file of unfinished answers; without one an interrupted session starts them again.
    pub inflight: Option<Inflight>,
    /// Failure lines of rows that are no prompts (unusable, duplicate), to be written first.
    pub row_failures: Vec<Vec<u8>>,
    /// Seed of the back-off jitter.
    pub jitter_seed: u64,
}

/// How a run ended.
pub struct RunEnd {
    /// The last state.
    pub snapshot: Snapshot,
    /// Why it ended before every prompt did, if it was not asked to.
    pub error: Option<Error>,
    /// Whether somebody asked it to stop.
    pub stopped: bool,
    /// Records that could not be saved; their prompts are left.
    pub unsaved: u64,
}

/// The state that all tasks of a run share. Lives on one thread.
struct Run {
    settings: GenerateSettings,
    plan: Plan,
    servers: Rc<Servers>,
    server: ServerInfo,
    template: RequestTemplate,
    limiter: TokenLimiter,
    books: RefCell<Books>,
    breaker: RefCell<Breaker<worker::EndedPrompt>>,
    jitter: RefCell<Jitter>,
    lengths: RefCell<Lengths>,
    commits: CommitHandle,
    checkpoints: Checkpoints,
    stop: watch::Receiver<Stop>,
    own_stop: Cell<Stop>,
    disk_blocked: Cell<bool>,
    error: RefCell<Option<Error>>,
    /// Something changed that intake or the main loop waits for.
    changed: Notify,
    reports: mpsc::UnboundedSender<Report>,
}

impl Run {
    /// The stronger of what was asked from outside and from inside.
    fn stop(&self) -> Stop {
        (*self.stop.borrow()).max(self.own_stop.get())
    }

    /// Waits until the run is to stop.
    async fn stopping(&self) {
        loop {
            // The driver hears what is asked from outside, and tells it.
            let changed = self.changed.notified();
            if self.stop() != Stop::No {
                return;
            }
            changed.await;
        }
    }

    /// The run cannot go on.
    fn fail(&self, error: Error) {
        self.error.borrow_mut().get_or_insert(error);
        self.own_stop.set(Stop::Abort);
        self.changed.notify_waiters();
    }

    fn stop_refused(&self) {
        let endings = self.breaker.borrow();
        let last = endings.last().map(|ended| ended.failure.detail.clone()).unwrap_or_default();
        let error = Error::server(format!("request after request fails in the same way, last: {last}")).hint(
            "nothing is lost: these prompts count as not sent; put the cause right and run the same command again",
        );
        drop(endings);
        self.fail(error);
    }

    fn submit(&self, stream: Stream, line: Vec<u8>, from: Place, submitted: Submitted, generation: u64) {
        let ticket = self.books.borrow_mut().submit(from, submitted);
        self.checkpoints.submitted(generation, ticket);
        if let Err(error) = self.commits.submit(stream, line, ticket) {
            self.fail(error);
        }
        self.changed.notify_waiters();
    }

    fn submit_failure(&self, ended: worker::EndedPrompt) {
        let failure = ended.failure;
        let submitted = Submitted {
            prompt_bytes: failure.prompt_bytes,
            source: failure.source.clone(),
            end: End::Failed(failure.cause.clone()),
        };
        self.submit(Stream::Failures, failure.to_line(), Place::Waiting, submitted, ended.generation);
    }

    fn retried(&self, prompt: &Prompt, failure: &AttemptFailure) {
        self.books.borrow_mut().tally.retried(failure.cause);
        // The log is a by-product: a receiver that is gone is no reason to stop.
        let _ = self.reports.send(Report::Retried {
            sample_id: prompt.id.to_string(),
            detail: format!("{}: {}", failure.cause.label(), failure.detail),
        });
    }

    fn report(&self, event: Event) {
        let _ = self.reports.send(Report::Event(event));
    }

    fn phase(&self) -> Phase {
        if self.stop() != Stop::No {
            Phase::Draining
        } else if self.disk_blocked.get() {
            Phase::DiskBlocked
        } else if self.servers.all_down() {
            Phase::ServerDown
        } else {
            Phase::Running
        }
    }

    fn snapshot(&self, phase: Phase) -> Snapshot {
        let (gauges, servers) = self.servers.progress();
        self.books.borrow_mut().snapshot(phase, self.servers.tokens(), gauges, servers)
    }

    /// A slot for a prompt that was not sent yet: when a server takes one, the disk takes records and not too many prompts wait for a retry.
    async fn slot(&self) -> Lease {
        loop {
            let changed = self.changed.notified();
            let waiting = self.books.borrow().tally.waiting();
            let waiting_max = 4 * self.servers.limit() as u64 + 64;
            let is_open =
                !self.disk_blocked.get() && waiting < waiting_max && self.commits.pending_bytes() < UNSYNCED_BYTES_MAX;
            if is_open {
                return self.servers.lease(None).await;
            }
            changed.await;
        }
    }
}

/// A change of what is asked from outside; never, once nobody can ask any more.
async fn changed_or_never(outside: &mut watch::Receiver<Stop>) {
    if outside.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Runs the generate stage to its end on the current thread (inside a [`tokio::task::LocalSet`]).
///
/// # Errors
/// Environment: the thread that writes records cannot be started. What goes wrong later is in [`RunEnd::error`], with what was reached.
pub async fn run(parts: RunParts, stop: watch::Receiver<Stop>, mut observe: impl FnMut(Report)) -> Result<RunEnd> {
    let (commit_events, mut commits) = mpsc::unbounded_channel();
    let (reports, mut reported) = mpsc::unbounded_channel();
    let journals = [parts.responses, parts.failures];
    let committer = disk::committer(parts.work, journals, parts.settings.commit, move |event| {
        // The receiver lives as long as the run.
        let _ = commit_events.send(event);
    })?;
    let handle = committer.handle();
    let row_failures = parts.row_failures.len() as u64;
    for line in parts.row_failures {
        handle.submit(Stream::Failures, line, 0)?;
    }
    let (inflight, saved) = parts.inflight.map_or((None, Default::default()), |found| (Some(found.log), found.saved));
    let checkpoint_interval = parts.settings.continuation.checkpoint_interval;
    let Some(server) = parts.servers.first().map(|(_, info)| info.clone()) else {
        return Err(Error::bug("a run was started without a server"));
    };
    let context = parts.servers.iter().filter_map(|(_, info)| parts.settings.context_limit(info)).min();
    let servers = Servers::new(
        Common {
            concurrency: parts.settings.concurrency,
            source: if parts.settings.mode == Mode::Stream { RateSource::Stream } else { RateSource::Replies },
            timeouts: parts.settings.timeouts,
            info: server.clone(),
            context,
        },
        reports.clone(),
    );
    parts.servers.into_iter().for_each(|(client, info)| servers.add(client, info));
    parts.joining.into_iter().for_each(|endpoint| servers.join(endpoint));
    let run = Rc::new(Run {
        limiter: TokenLimiter::new(parts.settings.max_completion_tokens, context),
        servers,
        books: RefCell::new(Books::new(
            parts.plan.entries().len() as u64,
            parts.done_before,
            parts.failed_before,
            parts.completion_tokens_before,
        )),
        breaker: RefCell::new(Breaker::new(parts.done_before > 0)),
        jitter: RefCell::new(Jitter::new(parts.jitter_seed)),
        lengths: RefCell::default(),
        commits: handle,
        checkpoints: Checkpoints::new(inflight.as_ref().map(InflightLog::handle), saved, checkpoint_interval),
        settings: parts.settings,
        plan: parts.plan,
        server,
        template: parts.template,
        stop,
        own_stop: Cell::new(Stop::No),
        disk_blocked: Cell::new(false),
        error: RefCell::new(None),
        changed: Notify::new(),
        reports,
    });
    run.report(Event::Started {
        planned: run.plan.entries().len() as u64,
        already_ended: parts.done_before + parts.failed_before,
    });
    let mut driver = Driver::new(Rc::clone(&run), parts.server_list);
    driver.drive(&mut commits, &mut reported, &mut observe).await;
    let unsaved = driver.last_records(committer, row_failures, &mut commits, &mut reported, &mut observe).await?;
    drop(driver);
    run.servers.close();
    if let Some(inflight) = inflight {
        run.checkpoints.write_all();
        inflight.finish((Instant::now() + LAST_CHECKPOINT_DEADLINE).into_std());
    }
    while let Ok(report) = reported.try_recv() {
        observe(report);
    }
    let snapshot = run.snapshot(Phase::Ended);
    let left = snapshot.planned - snapshot.done - snapshot.failed;
    observe(Report::Event(Event::Ended { done: snapshot.done, failed: snapshot.failed, left }));
    observe(Report::Snapshot(Box::new(snapshot.clone())));
    let stopped = *run.stop.borrow() != Stop::No;
    let error = run.error.borrow_mut().take();
    Ok(RunEnd { snapshot, error, stopped, unsaved })
}

/// The main loop: starts prompts, hears the disk, the server, the tasks and whoever wants to stop.
struct Driver {
    run: Rc<Run>,
    tasks: JoinSet<()>,
    /// Prompts whose answers an earlier session began, in order: they go first.
    begun: VecDeque<usize>,
    went_first: HashSet<usize>,
    next: usize,
    /// Prompts of the plan from `next` on that are not done.
    left: usize,
    /// Where few are left, they are here, and `next` is at the end.
    last: LastPrompts,
    ticked: Instant,
    told: Stop,
    drain_until: Option<Instant>,
    server_list: Option<watch::Receiver<Vec<Rc<Endpoint>>>>,
}

impl Driver {
    fn new(run: Rc<Run>, server_list: Option<watch::Receiver<Vec<Rc<Endpoint>>>>) -> Self {
        let entries = run.plan.entries().iter().enumerate();
        let begun = entries.filter(|(_, e)| !e.done() && run.checkpoints.has_saved(e.key())).map(|(n, _)| n);
        let begun: VecDeque<usize> = begun.collect();
        let left = run.plan.entries().iter().filter(|entry| !entry.done()).count() - begun.len();
        Driver {
            run,
            left,
            last: LastPrompts::default(),
            ticked: Instant::now(),
            tasks: JoinSet::new(),
            went_first: begun.iter().copied().collect(),
            begun,
            next: 0,
            told: Stop::No,
            drain_until: None,
            server_list,
        }
    }

    async fn drive(
        &mut self,
        commits: &mut mpsc::UnboundedReceiver<CommitEvent>,
        reported: &mut mpsc::UnboundedReceiver<Report>,
        observe: &mut impl FnMut(Report),
    ) {
        let run = Rc::clone(&self.run);
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let mut look = tokio::time::interval(run.checkpoints.look_interval());
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let mut outside = run.stop.clone();
        self.skip_done();
        loop {
            self.hear_stop();
            if self.tasks.is_empty() && (self.is_exhausted() || run.stop() != Stop::No) {
                return;
            }
            let may_start = run.stop() == Stop::No && !self.is_exhausted();
            // In this order, so that a simulated run is the same each time. None of the first can keep the last from its turn: they
            // are ready only so often.
            tokio::select! {
                biased;
                () = changed_or_never(&mut outside) => {}
                Some(event) = commits.recv() => self.hear_disk(event),
                Some(joined) = self.tasks.join_next() => self.joined(joined),
                Some(report) = reported.recv() => observe(report),
                _ = tick.tick() => self.tick(observe),
                _ = look.tick() => run.checkpoints.look(),
                lease = run.slot(), if may_start => self.start(lease),
                () = run.changed.notified(), if !may_start => {}
            }
        }
    }

    fn is_exhausted(&self) -> bool {
        self.begun.is_empty() && self.last.is_empty() && self.next >= self.run.plan.entries().len()
    }

    fn skip_done(&mut self) {
        let entries = self.run.plan.entries();
        while self.next < entries.len() && (entries[self.next].done() || self.went_first.contains(&self.next)) {
            self.next += 1;
        }
    }

    /// Begun answers, then the plan in order, its last prompts as [`tail`] says.
    fn next_prompt(&mut self) -> Option<usize> {
        let run = Rc::clone(&self.run);
        if let Some(begun) = self.begun.pop_front() {
            return Some(begun);
        }
        if self.last.is_empty() && self.left > 0 && self.left <= PROMPTS_PER_SLOT * run.servers.limit() {
            let left = run.plan.entries().iter().enumerate().skip(self.next);
            let left = left.filter(|(index, entry)| !entry.done() && !self.went_first.contains(index));
            let known = |(index, entry): (usize, &PlanEntry)| Known {
                index,
                source: entry.source(),
                prompt_bytes: entry.text_bytes().into(),
            };
            self.last = LastPrompts::new(left.map(known).collect());
            (self.next, self.left) = (run.plan.entries().len(), 0);
        }
        if let Some(index) = self.last.next(&run.lengths.borrow()) {
            return Some(index);
        }
        let index = (self.next < run.plan.entries().len()).then_some(self.next)?;
        self.next += 1;
        self.left = self.left.saturating_sub(1);
        self.skip_done();
        Some(index)
    }

    fn start(&mut self, lease: Lease) {
        let Some(index) = self.next_prompt() else { return };
        self.tasks.spawn_local(worker::answer_prompt(Rc::clone(&self.run), index, lease));
    }

    fn joined(&self, joined: std::result::Result<(), tokio::task::JoinError>) {
        if let Err(error) = joined
            && error.is_panic()
        {
            self.run.fail(
                Error::bug(format!("a request's task panicked: {error}"))
                    .hint("please report it; what is finished is saved"),
            );
        }
    }

    fn hear_stop(&mut self) {
        let stop = self.run.stop();
        if stop > self.told {
            self.told = stop;
            self.run.changed.notify_waiters();
            let reason =
                if self.run.own_stop.get() == Stop::No { "asked to stop" } else { "the run cannot go on" }.to_owned();
            match stop {
                Stop::Abort => self.run.report(Event::Aborting { reason }),
                _ => self.run.report(Event::Draining { reason }),
            }
            if stop == Stop::DrainWithDeadline {
                self.drain_until = Some(Instant::now() + self.run.settings.drain_deadline);
            }
        }
        if stop == Stop::Abort && !self.tasks.is_empty() {
            self.run.checkpoints.write_all();
            self.tasks.abort_all();
        }
    }

    fn hear_disk(&mut self, event: CommitEvent) {
        let run = &self.run;
        match event {
            CommitEvent::Durable { tickets } => {
                run.checkpoints.durable(&tickets);
                let mut books = run.books.borrow_mut();
                tickets.into_iter().for_each(|ticket| books.durable(ticket));
            }
            CommitEvent::Blocked { reason, path, .. } => {
                run.disk_blocked.set(true);
                run.report(Event::DiskBlocked { reason: format!("cannot write {}: {reason}", path.display()) });
            }
            CommitEvent::Unblocked => {
                run.disk_blocked.set(false);
                run.report(Event::DiskUnblocked);
            }
            CommitEvent::Failed(error) => {
                // A record that could no longer be submitted may have been noticed first; this says why.
                run.error.take();
                run.fail(error);
            }
        }
        run.changed.notify_waiters();
    }

    fn tick(&mut self, observe: &mut impl FnMut(Report)) {
        let run = &self.run;
        let since = std::mem::replace(&mut self.ticked, Instant::now()).elapsed();
        run.books.borrow_mut().tick(run.servers.tokens());
        if self.is_exhausted() && run.stop() == Stop::No {
            let mut books = run.books.borrow_mut();
            let in_flight = books.tally.in_flight();
            if in_flight > 0 {
                books.tail.add(since.as_secs_f64(), in_flight, run.servers.limit() as u64);
            }
        }
        if let Some(list) = self.server_list.as_mut().filter(|list| list.has_changed().unwrap_or(false)) {
            run.servers.follow(&list.borrow_and_update());
        }
        if let Some(text) = run.checkpoints.take_notice() {
            run.report(Event::Notice { text });
        }
        if let Some(error) = run.servers.tick() {
            run.fail(error);
        }
        run.breaker.borrow_mut().out_at_once(run.servers.limit());
        if self.drain_until.is_some_and(|until| Instant::now() >= until) {
            self.drain_until = None;
            run.own_stop.set(Stop::Abort);
        }
        observe(Report::Snapshot(Box::new(run.snapshot(run.phase()))));
    }

    /// Books what the breaker still holds, and waits until the last records are on the disk, or until somebody wants to leave.
    async fn last_records(
        &mut self,
        committer: Committer,
        row_failures: u64,
        commits: &mut mpsc::UnboundedReceiver<CommitEvent>,
        reported: &mut mpsc::UnboundedReceiver<Report>,
        observe: &mut impl FnMut(Report),
    ) -> Result<u64> {
        let run = Rc::clone(&self.run);
        // A run that was stopped leaves them: the next session finds out whether they were alone.
        if run.error.borrow().is_none() && run.stop() == Stop::No {
            let ended = run.breaker.borrow_mut().finish();
            match ended {
                Ok(held) => held.into_iter().for_each(|ended| run.submit_failure(ended)),
                Err(_) => run.stop_refused(),
            }
        }
        // Nobody waits for what is left.
        let left = run.breaker.borrow_mut().leave();
        (0..left).for_each(|_| run.books.borrow_mut().tally.step(Place::Waiting, Place::NotStarted));
        run.commits.flush();
        let mut tick = tokio::time::interval(TICK);
        let mut outside = run.stop.clone();
        let leave_now = |run: &Run| run.error.borrow().is_some() || *run.stop.borrow() == Stop::Abort;
        while run.books.borrow().tally.unsynced() > 0 && !leave_now(&run) {
            tokio::select! {
                biased;
                Some(event) = commits.recv() => self.hear_disk(event),
                Some(report) = reported.recv() => observe(report),
                _ = tick.tick() => self.tick(observe),
                () = changed_or_never(&mut outside) => {}
            }
        }
        let finished = committer.finish((Instant::now() + LAST_SYNC_DEADLINE).into_std())?;
        while let Ok(event) = commits.try_recv() {
            self.hear_disk(event);
        }
        let unsaved = finished.unsaved.iter().filter(|ticket| **ticket != 0).count() as u64;
        if !finished.unsaved.is_empty() && run.error.borrow().is_none() {
            let rows = (finished.unsaved.len() as u64 - unsaved).min(row_failures);
            let what = if unsaved > 0 {
                format!("{unsaved} finished answers")
            } else {
                format!("{rows} lines about unusable rows")
            };
            run.fail(Error::environment(format!("{what} could not be saved: the disk did not take them"))
                .hint("make room and run the same command again; their prompts are sent again, everything reported as done is safe"));
        }
        Ok(unsaved)
    }
}
