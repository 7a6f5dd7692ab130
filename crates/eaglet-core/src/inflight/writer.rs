//! The thread that writes checkpoints, and the handle that the run holds.
//!
//! A write that fails costs checkpoints, never the run: the thread says so once, throws away what comes, and tries again every few
//! seconds. Whoever holds the handle sees by [`InflightHandle::epoch`] that frames were lost, and says everything anew.

use super::Saved;
use super::frame::{Frame, append_framed};
use super::replay::{Replayed, compact, framed_bytes, replay, should_compact};
use crate::atomic_file::write_atomic;
use crate::error::io_reason;
use crate::ids::PromptKey;
use crate::storage::{Storage, StorageFile, write_all};
use crate::work::{Clock, Work};
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Batches that may wait for the thread; more are refused.
const QUEUE_BATCHES_MAX: usize = 16;

/// How the file is written.
#[derive(Clone, Copy, Debug)]
pub struct InflightSettings {
    /// Time between two syncs, for a power cut.
    pub sync_interval: Duration,
    /// After a write that failed, time until the next try.
    pub retry_interval: Duration,
    /// A smaller file is not worth a compaction, which holds the file in memory once, bytes.
    pub compact_bytes_min: u64,
    /// Who writes it.
    pub work: Work,
}

impl Default for InflightSettings {
    fn default() -> Self {
        let five_s = Duration::from_secs(5);
        InflightSettings {
            sync_interval: five_s,
            retry_interval: five_s,
            compact_bytes_min: 16 << 20,
            work: Work::Threads,
        }
    }
}

#[derive(Default)]
struct Shared {
    epoch: AtomicU64,
    blocked: AtomicBool,
    notice: Mutex<Option<String>>,
}

/// Payloads of frames, each with what the accounts need of it.
type Batch = Vec<(Effect, Vec<u8>)>;

enum Command {
    Write(Batch),
    Finish,
}

/// Who writes.
#[derive(Clone)]
enum To {
    Thread(SyncSender<Command>),
    Caller(Arc<Mutex<Writer>>),
}

/// What a frame does to the live bytes of its generation.
#[derive(Clone, Copy)]
enum Effect {
    Replaces(u64),
    AddsTo(u64),
    Ends(u64),
}

impl Effect {
    fn of(frame: &Frame) -> Self {
        match frame {
            Frame::Whole { generation, .. } => Effect::Replaces(*generation),
            Frame::More { generation, .. } | Frame::Turn { generation, .. } => Effect::AddsTo(*generation),
            Frame::End { generation } => Effect::Ends(*generation),
        }
    }
}

/// Whether frames were taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// They will be written, unless the disk fails (then the epoch changes).
    Yes,
    /// The thread is behind, or the disk takes nothing: say it again later.
    No,
}

/// Hands frames to the thread; never blocks.
#[derive(Clone)]
pub struct InflightHandle {
    shared: Arc<Shared>,
    to: To,
}

impl InflightHandle {
    /// Hands these frames over, in order, all or none.
    pub fn offer(&self, frames: &[Frame]) -> Taken {
        if self.is_blocked() {
            return Taken::No;
        }
        let batch: Batch = frames.iter().map(|frame| (Effect::of(frame), frame.to_payload())).collect();
        match &self.to {
            To::Caller(writer) => writer.lock().unwrap_or_else(PoisonError::into_inner).step(Some(&batch)),
            To::Thread(commands) => match commands.try_send(Command::Write(batch)) {
                Ok(()) => {}
                Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => return Taken::No,
            },
        }
        Taken::Yes
    }

    /// Changes whenever frames that were taken may have been lost.
    pub fn epoch(&self) -> u64 {
        self.shared.epoch.load(Ordering::Acquire)
    }

    /// Whether the disk takes nothing at the moment.
    pub fn is_blocked(&self) -> bool {
        self.shared.blocked.load(Ordering::Acquire)
    }

    /// Why checkpoints cannot be written, told once.
    pub fn take_notice(&self) -> Option<String> {
        self.shared.notice.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The thread. Dropping it lets the thread finish by itself.
pub struct InflightLog {
    handle: InflightHandle,
    /// Heard of when the thread has ended.
    finished: Option<Receiver<()>>,
}

impl InflightLog {
    /// Reads what an earlier session left of the prompts that `is_left` names, and starts the thread. Does not fail: without a
    /// readable file there is nothing to go on from, without a writable one nothing is saved for later.
    pub fn open(
        storage: Arc<dyn Storage>,
        path: &Path,
        settings: InflightSettings,
        is_left: impl FnMut(PromptKey) -> bool,
    ) -> (InflightLog, HashMap<PromptKey, Saved>) {
        let mut found = storage.read(path).map(|bytes| replay(&bytes)).unwrap_or_default();
        found.retain(is_left);
        let shared = Arc::new(Shared::default());
        let clock = settings.work.clock();
        let mut writer = Writer {
            storage,
            path: path.to_owned(),
            settings,
            shared: Arc::clone(&shared),
            file: None,
            file_bytes: 0,
            sizes: HashMap::new(),
            told: false,
            clock,
            retry_at: clock(),
            synced_at: clock(),
            is_synced: true,
        };
        if let Err(error) = writer.start_with(&found) {
            writer.failed(&error);
        }
        let (to, finished) = match settings.work {
            Work::Caller(_) => (To::Caller(Arc::new(Mutex::new(writer))), None),
            Work::Threads => {
                let (commands, finished) = writer.start(&shared);
                (To::Thread(commands), Some(finished))
            }
        };
        (InflightLog { handle: InflightHandle { shared, to }, finished }, found.into_saved())
    }

    /// What frames are handed over through.
    pub fn handle(&self) -> InflightHandle {
        self.handle.clone()
    }

    /// Writes and syncs what was taken, or gives up at the deadline. Removes the file when nothing is unfinished.
    pub fn finish(self, deadline: Instant) {
        let commands = match &self.handle.to {
            To::Caller(writer) => return writer.lock().unwrap_or_else(PoisonError::into_inner).end(),
            To::Thread(commands) => commands,
        };
        let mut command = Command::Finish;
        while let Err(TrySendError::Full(back)) = commands.try_send(command) {
            if Instant::now() >= deadline {
                return;
            }
            command = back;
            std::thread::sleep(Duration::from_millis(2));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let _ = self.finished.map(|finished| finished.recv_timeout(left));
    }
}

struct Writer {
    storage: Arc<dyn Storage>,
    path: PathBuf,
    settings: InflightSettings,
    shared: Arc<Shared>,
    /// `None` while nothing can be written.
    file: Option<Box<dyn StorageFile>>,
    file_bytes: u64,
    /// Live bytes of each generation.
    sizes: HashMap<u64, u64>,
    told: bool,
    clock: Clock,
    retry_at: Instant,
    synced_at: Instant,
    is_synced: bool,
}

impl Writer {
    /// Starts the thread: what it takes, and where it says that it has ended.
    fn start(mut self, shared: &Shared) -> (SyncSender<Command>, Receiver<()>) {
        let (commands, inbox) = sync_channel(QUEUE_BATCHES_MAX);
        let (say_finished, finished) = sync_channel(1);
        let started = std::thread::Builder::new().name("eaglet-inflight".to_owned()).spawn(move || {
            self.run(&inbox);
            // Nobody may wait any more.
            let _ = say_finished.try_send(());
        });
        if started.is_err() {
            shared.blocked.store(true, Ordering::Release);
        }
        (commands, finished)
    }

    fn run(&mut self, inbox: &Receiver<Command>) {
        loop {
            match inbox.recv_timeout(self.settings.sync_interval.min(self.settings.retry_interval)) {
                Ok(Command::Write(batch)) => self.step(Some(&batch)),
                Ok(Command::Finish) | Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => self.step(None),
            }
        }
        self.end();
    }

    /// Writes this, and does what is due.
    fn step(&mut self, batch: Option<&Batch>) {
        if let Some(batch) = batch {
            self.guarded(|writer| writer.write(batch));
        }
        let now = (self.clock)();
        if self.file.is_none() && now >= self.retry_at {
            self.guarded(Writer::recover);
        }
        if now.saturating_duration_since(self.synced_at) >= self.settings.sync_interval {
            self.guarded(Writer::sync);
        }
    }

    fn end(&mut self) {
        if self.file.is_some() && self.sizes.is_empty() {
            self.file = None;
            // A file that stays behind says that nothing is unfinished.
            let _ = self.storage.remove_file(&self.path);
        } else {
            self.guarded(Writer::sync);
        }
    }

    fn guarded(&mut self, step: impl FnOnce(&mut Self) -> io::Result<()>) {
        if let Err(error) = step(self) {
            self.failed(&error);
        }
    }

    fn failed(&mut self, error: &io::Error) {
        self.file = None;
        self.retry_at = (self.clock)() + self.settings.retry_interval;
        self.shared.blocked.store(true, Ordering::Release);
        self.shared.epoch.fetch_add(1, Ordering::AcqRel);
        if !std::mem::replace(&mut self.told, true) {
            let notice = format!(
                "unfinished answers cannot be saved in {} for now: {}; an accident would cost their tokens again",
                self.path.display(),
                io_reason(error)
            );
            *self.shared.notice.lock().unwrap_or_else(PoisonError::into_inner) = Some(notice);
        }
    }

    /// Replaces the file by one that says just this.
    fn start_with(&mut self, found: &Replayed) -> io::Result<()> {
        let (bytes, sizes) = found.to_file();
        self.replace(&bytes, sizes)
    }

    fn replace(&mut self, bytes: &[u8], sizes: HashMap<u64, u64>) -> io::Result<()> {
        self.file = None;
        write_atomic(&*self.storage, &self.path, bytes)?;
        self.file = Some(self.storage.open_append(&self.path)?);
        (self.file_bytes, self.sizes) = (bytes.len() as u64, sizes);
        Ok(())
    }

    fn write(&mut self, batch: &[(Effect, Vec<u8>)]) -> io::Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let mut bytes = Vec::with_capacity(batch.iter().map(|(_, payload)| payload.len() + 8).sum());
        batch.iter().for_each(|(_, payload)| append_framed(&mut bytes, payload));
        write_all(&mut **file, &bytes)?;
        self.file_bytes += bytes.len() as u64;
        self.is_synced = false;
        for (effect, payload) in batch {
            let size = framed_bytes(payload);
            match effect {
                Effect::Replaces(generation) => {
                    self.sizes.insert(*generation, size);
                }
                Effect::AddsTo(generation) => *self.sizes.entry(*generation).or_default() += size,
                Effect::Ends(generation) => {
                    self.sizes.remove(generation);
                }
            }
        }
        if should_compact(self.sizes.values().sum(), self.file_bytes, self.settings.compact_bytes_min) {
            let (bytes, sizes) = compact(&self.storage.read(&self.path)?);
            self.replace(&bytes, sizes)?;
        }
        Ok(())
    }

    /// Opens the file again after a failure, without what a broken write may have left at its end.
    fn recover(&mut self) -> io::Result<()> {
        let found = match self.storage.read(&self.path) {
            Ok(bytes) => replay(&bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Replayed::default(),
            Err(error) => return Err(error),
        };
        self.start_with(&found)?;
        self.shared.epoch.fetch_add(1, Ordering::AcqRel);
        self.shared.blocked.store(false, Ordering::Release);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.synced_at = (self.clock)();
        match &mut self.file {
            Some(file) if !std::mem::replace(&mut self.is_synced, true) => file.sync_data(),
            _ => Ok(()),
        }
    }
}
