//! Group commit: one thread that makes submitted records durable together.
//!
//! What it is: the driver of [`policy`] over the journals of a run. What it is not: back-pressure. [`CommitHandle::submit`]
//! never blocks, so that no network task waits for a disk; its queue is bounded by admission instead: the scheduler takes
//! no new prompt while [`CommitHandle::pending_bytes`] is above its bound, and what is in flight then is the rest of it.
//!
//! Invariants
//! - A ticket is reported in [`CommitEvent::Durable`] once, after the fsync that covers its record.
//! - A record is synced at most [`CommitSettings::interval`] after its submission, unless the disk fails.
//! - While it fails there is one [`CommitEvent::Blocked`] an episode, then either `Unblocked` or `Failed`. After `Failed`
//!   nothing is written any more and submitting is an error.
//!
//! One fsync a record costs fourteen times the wall time of one a second; one write a record costs nothing.

mod policy;
mod steps;

pub use steps::{CommitSteps, NextStep};

pub use policy::{BlockKind, CommitSettings, GroupCommit, Next, Verdict};

use crate::error::io_reason;
use crate::journal::{Journal, check_record};
use crate::work::{Clock, Work};
use crate::{Error, Result};
use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long past its deadline [`Committer::finish`] waits for an attempt that is under way.
const FINISH_GRACE: Duration = Duration::from_secs(1);

/// Which journal a record belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Answers.
    Responses,
    /// Prompts that ended without one.
    Failures,
}

/// What the commit thread reports.
#[derive(Debug)]
pub enum CommitEvent {
    /// The records of these tickets are on the disk.
    Durable {
        /// As given to [`CommitHandle::submit`], in order of submission within a stream.
        tickets: Vec<u64>,
    },
    /// Nothing can be written just now; what was submitted waits in memory. Once an episode.
    Blocked {
        /// The operating system's reason.
        reason: String,
        /// The file that could not be written.
        path: PathBuf,
        /// Whether making room will help.
        kind: BlockKind,
    },
    /// Writing works again, everything submitted before is durable.
    Unblocked,
    /// Given up. Nothing more will be written; intake must stop.
    Failed(Error),
}

/// What [`Committer::finish`] left behind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finished {
    /// How many records became durable since the start.
    pub durable: u64,
    /// Tickets whose records are not known to be durable.
    pub unsaved: Vec<u64>,
}

struct Submission {
    stream: Stream,
    record: Vec<u8>,
    at: Instant,
}

#[derive(Default)]
struct Queue {
    submissions: VecDeque<Submission>,
    /// Tickets not yet durable, for each stream in order of submission.
    tickets: [VecDeque<u64>; 2],
    pending_bytes: u64,
    /// The thread waits for the time of its next sync and need not be woken below so many pending bytes: a wake-up a record was a twentieth of what a
    /// record costs.
    wake_at_bytes: u64,
    durable: u64,
    flush_asked: bool,
    finish_by: Option<Instant>,
    given_up: bool,
    stopped: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    /// The thread waits here for work.
    work: Condvar,
    /// `finish` waits here for the thread.
    stopped: Condvar,
    clock: Clock,
    /// Told of work where no thread waits for it.
    on_work: Option<Box<dyn Fn() + Send + Sync>>,
}

impl Shared {
    fn new(clock: Clock, on_work: Option<Box<dyn Fn() + Send + Sync>>) -> Arc<Self> {
        let (queue, work, stopped) = Default::default();
        Arc::new(Shared { queue, work, stopped, clock, on_work })
    }

    fn tell_of_work(&self) {
        self.work.notify_one();
        if let Some(on_work) = &self.on_work {
            on_work();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // No code panics while it holds the lock, and every field is valid on its own.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Submits records; cheap to clone.
#[derive(Clone)]
pub struct CommitHandle(Arc<Shared>);

impl CommitHandle {
    /// Hands over a record (one JSON object without newline) and a ticket to know it by. Never blocks.
    ///
    /// # Errors
    /// A bug error for a malformed record; an environment error once the committer has given up or stopped. The record is
    /// not taken then.
    pub fn submit(&self, stream: Stream, record: Vec<u8>, ticket: u64) -> Result<()> {
        check_record(&record)?;
        let mut queue = self.0.lock();
        if queue.given_up || queue.stopped {
            return Err(Error::environment("records can no longer be saved: writing failed earlier or has ended"));
        }
        queue.pending_bytes += record.len() as u64 + 1;
        queue.tickets[stream as usize].push_back(ticket);
        queue.submissions.push_back(Submission { stream, record, at: (self.0.clock)() });
        let wake = queue.pending_bytes >= queue.wake_at_bytes;
        drop(queue);
        if wake {
            self.0.tell_of_work();
        }
        Ok(())
    }

    /// How much is submitted and not yet durable, bytes.
    pub fn pending_bytes(&self) -> u64 {
        self.0.lock().pending_bytes
    }

    /// Asks for a sync of what has been submitted, without waiting for it.
    pub fn flush(&self) {
        self.0.lock().flush_asked = true;
        self.0.tell_of_work();
    }
}

/// The commit thread. Dropping it without [`finish`](Self::finish) makes one last attempt and waits for that.
pub struct Committer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Instead of a thread.
    steps: Option<CommitSteps>,
}

impl Committer {
    /// Starts the thread. `on_event` runs on it: it must be quick and must not panic.
    ///
    /// # Errors
    /// An environment error if there is no thread to be had.
    pub fn start(
        responses: Journal,
        failures: Journal,
        settings: CommitSettings,
        on_event: impl Fn(CommitEvent) + Send + 'static,
    ) -> Result<Committer> {
        let shared = Shared::new(Work::Threads.clock(), None);
        let writer = Writer::new(&shared, [responses, failures], settings, Box::new(on_event));
        let thread = std::thread::Builder::new()
            .name("eaglet-commit".to_owned())
            .spawn(move || writer.run())
            .map_err(|error| Error::environment("cannot start the thread that saves records").with_source(error))?;
        Ok(Committer { shared, thread: Some(thread), steps: None })
    }

    /// What records are submitted through.
    pub fn handle(&self) -> CommitHandle {
        CommitHandle(Arc::clone(&self.shared))
    }

    /// Makes what was submitted durable and stops. At least one attempt is made; while the disk is full it goes on until the
    /// deadline. A disk that does not answer at all is left behind a second after it; its tickets count as unsaved.
    ///
    /// # Errors
    /// A bug error if the thread died.
    pub fn finish(mut self, deadline: Instant) -> Result<Finished> {
        if let Some(steps) = self.steps.take() {
            return Ok(steps.finish());
        }
        self.ask_to_stop(deadline);
        let mut queue = self.shared.lock();
        while !queue.stopped {
            let left = (deadline + FINISH_GRACE).saturating_duration_since(Instant::now());
            if left.is_zero() {
                // Stuck inside a system call: nobody can end that. The thread stops by itself if the call ever returns.
                self.thread = None;
                return Ok(queue.finished());
            }
            queue = self.shared.stopped.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let finished = queue.finished();
        drop(queue);
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(_)) => Err(Error::bug("the thread that saves records panicked")),
            _ => Ok(finished),
        }
    }

    fn ask_to_stop(&self, deadline: Instant) {
        self.shared.lock().finish_by = Some(deadline);
        self.shared.work.notify_one();
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        // The thread must not outlive the run lock that its owner drops next.
        if let Some(thread) = self.thread.take() {
            self.ask_to_stop(Instant::now());
            let _ = thread.join();
        }
        if let Some(steps) = self.steps.take() {
            steps.finish();
        }
    }
}

impl Queue {
    fn finished(&self) -> Finished {
        Finished { durable: self.durable, unsaved: self.tickets.iter().flatten().copied().collect() }
    }
}

/// Says that the thread is gone however it goes.
struct StoppedOnDrop(Arc<Shared>);

impl Drop for StoppedOnDrop {
    fn drop(&mut self) {
        self.0.lock().stopped = true;
        self.0.stopped.notify_all();
    }
}

struct Writer {
    shared: Arc<Shared>,
    journals: [Journal; 2],
    /// Records in each journal's memory.
    appended: [usize; 2],
    group: GroupCommit,
    started: Instant,
    on_event: Box<dyn Fn(CommitEvent) + Send>,
}

/// What the writer does next.
enum Task {
    Sync,
    /// At most so long, unless something is submitted.
    Wait(Option<Duration>),
    Stop,
}

impl Writer {
    fn new(
        shared: &Arc<Shared>,
        journals: [Journal; 2],
        settings: CommitSettings,
        on_event: Box<dyn Fn(CommitEvent) + Send>,
    ) -> Self {
        let started = (shared.clock)();
        let group = GroupCommit::new(settings);
        Writer { shared: Arc::clone(shared), journals, appended: [0; 2], group, started, on_event }
    }

    fn run(mut self) {
        let _stopped = StoppedOnDrop(Arc::clone(&self.shared));
        let mut last_chance_taken = false;
        while let Some(finish_by) = self.wait_for_sync(last_chance_taken) {
            last_chance_taken = finish_by.is_some();
            self.sync();
        }
    }

    fn now(&self) -> Duration {
        (self.shared.clock)().saturating_duration_since(self.started)
    }

    /// Returns when a sync is due, with the deadline if the end is asked for; `None` when it is time to stop.
    fn wait_for_sync(&mut self, last_chance_taken: bool) -> Option<Option<Instant>> {
        let shared = Arc::clone(&self.shared);
        let mut queue = shared.lock();
        loop {
            if !queue.submissions.is_empty() {
                let submissions = std::mem::take(&mut queue.submissions);
                drop(queue);
                self.append(submissions);
                queue = shared.lock();
                continue;
            }
            let wait = match self.task(&mut queue, last_chance_taken) {
                Task::Sync => return Some(queue.finish_by),
                Task::Stop => return None,
                Task::Wait(wait) => {
                    queue.wake_at_bytes = self.group.wake_at_bytes(self.now());
                    wait
                }
            };
            queue = match wait {
                None => shared.work.wait(queue).unwrap_or_else(PoisonError::into_inner),
                Some(wait) => shared.work.wait_timeout(queue, wait).unwrap_or_else(PoisonError::into_inner).0,
            };
            queue.wake_at_bytes = 0;
        }
    }

    /// What to do once everything submitted is appended.
    fn task(&mut self, queue: &mut Queue, last_chance_taken: bool) -> Task {
        if std::mem::take(&mut queue.flush_asked) {
            self.group.flush();
        }
        let now = self.now();
        // How long the end may still be put off, once it is asked for.
        let left = queue.finish_by.map(|by| by.saturating_duration_since(self.started + now));
        if let Some(left) = left {
            self.group.flush();
            if !last_chance_taken {
                self.group.retry_now(now);
            } else if left.is_zero() {
                return Task::Stop;
            }
        }
        match (self.group.next(now), left) {
            (Next::Sync, _) => Task::Sync,
            (Next::Idle | Next::GivenUp, Some(_)) => Task::Stop,
            (Next::Idle | Next::GivenUp, None) => Task::Wait(None),
            (Next::WaitUntil(then), left) => {
                let wait = then.saturating_sub(now);
                Task::Wait(Some(left.map_or(wait, |left| wait.min(left))))
            }
        }
    }

    fn append(&mut self, submissions: VecDeque<Submission>) {
        for submission in submissions {
            let index = submission.stream as usize;
            self.journals[index].append(&submission.record).expect("submit has checked the record");
            self.appended[index] += 1;
            let at = submission.at.saturating_duration_since(self.started);
            self.group.submitted(submission.record.len() as u64 + 1, at);
        }
    }

    /// One attempt to make everything appended durable, and the events that follow from it.
    fn sync(&mut self) {
        let mut durable_bytes = 0;
        let mut tickets = Vec::new();
        let mut failure: Option<(io::Error, PathBuf)> = None;
        for (index, journal) in self.journals.iter_mut().enumerate() {
            let bytes = journal.pending_bytes();
            match journal.commit() {
                Ok(()) => {
                    let mut queue = self.shared.lock();
                    queue.pending_bytes -= bytes;
                    queue.durable += self.appended[index] as u64;
                    tickets.extend(queue.tickets[index].drain(..self.appended[index]));
                    self.appended[index] = 0;
                    durable_bytes += bytes;
                }
                Err(error) => failure = failure.or_else(|| Some((error, journal.path().to_owned()))),
            }
        }
        if !tickets.is_empty() {
            (self.on_event)(CommitEvent::Durable { tickets });
        }
        let Some((error, path)) = failure else {
            if self.group.synced() {
                (self.on_event)(CommitEvent::Unblocked);
            }
            return;
        };
        let kind = BlockKind::of(&error);
        match self.group.failed(kind, durable_bytes, self.now()) {
            Verdict::Blocked { begins: true } => {
                (self.on_event)(CommitEvent::Blocked { reason: io_reason(&error), path, kind });
            }
            Verdict::Blocked { begins: false } => {}
            Verdict::GiveUp => {
                self.shared.lock().given_up = true;
                let hint = "what was saved before is safe; mend the disk, then resume the run";
                (self.on_event)(CommitEvent::Failed(Error::io("write", &path, error).hint(hint)));
            }
        }
    }
}
