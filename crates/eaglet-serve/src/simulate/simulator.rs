//! The simulated engine on a clock, behind the face: steps take their time, tokens reach their streams, faults come and go.
//!
//! Decisions are elsewhere: the batch in `engine`, what goes wrong in `faults`, what is answered in `answer`. The clock is tokio's, divided by
//! the speed; nothing else here tells the time, except a Retry-After that is written as a date.
//!
//! Invariants: tokens of a step are seen when the step is over, never before; a server that came back has forgotten everything; a stream that
//! is dropped frees its blocks at once.

use std::{
    collections::BTreeMap,
    io,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::DuplexStream,
    sync::{Notify, watch},
    time::Instant,
};

use super::{
    engine::{Engine, SequenceId, Step},
    faults::{FaultScript, Faults, Health},
    profile::{Lengths, Profile},
};
use crate::{
    answer::{AnswerRule, Finish, Length, Reasoning},
    api::{Gauges, Served},
    backend::Backend,
    face::{self, Farewell},
    wire::{ByteStream, Wire},
};

/// A clock that is further behind than this does not try to catch up: the machine is too slow for the speed.
const LAG_MAX: Duration = Duration::from_millis(250);
/// What is buffered of a connection inside the process.
const PIPE_BYTES: usize = 64 << 10;

/// How a server is simulated.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What it pretends to be.
    pub profile: Profile,
    /// How many of its seconds go by in one of ours; above 0.
    pub speed: f64,
    /// Changes answers and what goes wrong.
    pub seed: u64,
    /// What goes wrong.
    pub faults: FaultScript,
}

impl Settings {
    /// A server without faults, at its own speed.
    pub fn new(profile: Profile) -> Self {
        Self { profile, speed: 1.0, seed: 0, faults: FaultScript::default() }
    }
}

/// A simulated server; clones are the same server. It moves while [`run`](Self::run) is polled.
#[derive(Clone, Debug)]
pub struct Simulator(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) served: Served,
    pub(super) rule: AnswerRule,
    speed: f64,
    started: Instant,
    pub(super) state: Mutex<State>,
    /// Told when there may be something to compute.
    pub(super) work: Notify,
    pub(super) life: LifeCell,
    pub(super) faults: Mutex<Faults>,
    /// Whether it was told to end, so that no script brings it back.
    ended: AtomicBool,
    replies: AtomicU64,
    connections: watch::Sender<usize>,
}

/// How the server is, and who waits for a change of it. They are woken in the order in which they began to wait (a `watch` channel wakes in
/// a random one), so that a simulation is the same each time.
#[derive(Debug)]
pub(super) struct LifeCell {
    now: Mutex<Life>,
    changed: Notify,
}

impl LifeCell {
    fn new(health: Health) -> Self {
        Self { now: Mutex::new(Life { health, incarnation: 0 }), changed: Notify::new() }
    }

    pub(super) fn now(&self) -> Life {
        *lock(&self.now)
    }

    fn becomes(&self, life: Life) {
        *lock(&self.now) = life;
        self.changed.notify_waiters();
    }

    /// Waits until it is as wanted.
    pub(super) async fn until(&self, is_wanted: impl Fn(Life) -> bool) {
        loop {
            let changed = self.changed.notified();
            if is_wanted(self.now()) {
                return;
            }
            changed.await;
        }
    }
}

/// How the server is, and for the how-many-eth time it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Life {
    health: Health,
    incarnation: u64,
}

impl Life {
    /// Whether connections are accepted.
    pub(super) fn accepts(self) -> bool {
        matches!(self.health, Health::Serving | Health::Stalled)
    }
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) engine: Engine,
    /// How often the engine was made anew.
    pub(super) incarnation: u64,
    pub(super) streams: BTreeMap<SequenceId, Progress>,
    pub(super) stopped: u64,
    pub(super) cut_by_length: u64,
}

/// The engine's end of a stream.
#[derive(Debug)]
pub(super) struct Progress {
    pub(super) generated: watch::Sender<usize>,
    pub(super) finish: Finish,
}

impl State {
    fn fresh(profile: Profile, incarnation: u64) -> Self {
        Self { engine: Engine::new(profile), incarnation, streams: BTreeMap::new(), stopped: 0, cut_by_length: 0 }
    }

    /// Hands out the tokens of a step.
    fn deliver(&mut self, step: &Step) {
        for id in &step.progressed {
            if let Some(progress) = self.streams.get(id) {
                progress.generated.send_modify(|generated| *generated += 1);
            }
        }
        for id in &step.finished {
            match self.streams.remove(id).map(|progress| progress.finish) {
                Some(Finish::Stop) => self.stopped += 1,
                Some(Finish::Length | Finish::Abort) => self.cut_by_length += 1,
                None => {}
            }
        }
    }
}

impl Simulator {
    /// A server whose time begins now.
    ///
    /// # Panics
    /// When the profile does not pass [`Profile::check`].
    pub fn new(settings: Settings) -> Self {
        let Settings { profile, speed, seed, faults } = settings;
        let reasons = profile.answers.reasoning_share > 0.0;
        let served = Served {
            model: profile.model.clone(),
            max_model_len: profile.max_model_len,
            reasoning: if reasons { Reasoning::Reasoning } else { Reasoning::None },
            knows_token_ids: true,
            think_special: false,
            api_key: None,
        };
        let rule = AnswerRule {
            length: Length::HeavyTailed(Lengths::new(&profile.answers)),
            reasoning_share: profile.answers.reasoning_share,
            think_token: reasons,
            seed,
        };
        let faults = Faults::new(faults, seed, profile.answers.mean_tokens as usize);
        let life = LifeCell::new(faults.health(0.0));
        Self(Arc::new(Inner {
            served,
            rule,
            speed,
            started: Instant::now(),
            state: Mutex::new(State::fresh(profile, 0)),
            work: Notify::new(),
            life,
            faults: Mutex::new(faults),
            ended: AtomicBool::new(false),
            replies: AtomicU64::new(0),
            connections: watch::Sender::new(0),
        }))
    }

    /// Computes steps and follows the script, for ever.
    pub async fn run(&self) {
        tokio::join!(self.0.compute(), self.0.follow_script());
    }

    /// Serves one connection until it ends.
    pub async fn serve<S: ByteStream>(&self, stream: S) {
        let _open = Open::count(&self.0.connections);
        let mut wire = Wire::new(stream);
        let life = &self.0.life;
        let born = life.now();
        if !born.accepts() {
            return wire.reset();
        }
        let number = || self.0.replies.fetch_add(1, Ordering::Relaxed);
        let served = tokio::select! {
            biased;
            () = life.until(|now| now.incarnation != born.incarnation || !now.accepts()) => None,
            farewell = face::serve(self, &mut wire, number) => Some(farewell),
        };
        match served {
            Some(Farewell::Close) => wire.close().await,
            Some(Farewell::Reset) => wire.reset(),
            None => {
                let gone_for_good = life.until(|now| now.incarnation != born.incarnation || now.health == Health::Dead);
                // Silent until the process is gone or the client is.
                let _ = wire.unless_gone(gone_for_good).await;
                wire.reset();
            }
        }
    }

    /// A connection inside the process, served by a task of the current runtime.
    ///
    /// # Errors
    /// `ConnectionRefused` while the server is down.
    pub fn connect(&self) -> io::Result<DuplexStream> {
        self.connect_by(PIPE_BYTES)
    }

    /// As [`connect`](Self::connect), by a pipe that holds so many bytes: a narrow one cuts what is sent anywhere.
    ///
    /// # Errors
    /// `ConnectionRefused` while the server is down.
    pub fn connect_by(&self, pipe_bytes: usize) -> io::Result<DuplexStream> {
        if !self.0.life.now().accepts() {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let (ours, theirs) = tokio::io::duplex(pipe_bytes);
        let server = self.clone();
        tokio::spawn(async move { server.serve(theirs).await });
        Ok(ours)
    }

    /// What the gauges show now.
    pub fn gauges(&self) -> Gauges {
        Backend::gauges(self)
    }

    /// Ends as vLLM does on SIGTERM: new connections are refused, open ones stay open and silent, nothing is generated.
    pub fn shut_down(&self) {
        self.0.ended.store(true, Ordering::SeqCst);
        self.0.become_(Health::ShutDown);
    }

    /// Waits until no connection is open.
    pub async fn all_gone(&self) {
        // An error would mean that the sender is gone, and it is in `self`.
        let _ = self.0.connections.subscribe().wait_for(|open| *open == 0).await;
    }

    pub(super) fn life(&self) -> &LifeCell {
        &self.0.life
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no code panics while it holds a simulator's lock")
}

/// A connection while it is open.
struct Open<'i>(&'i watch::Sender<usize>);

impl<'i> Open<'i> {
    fn count(connections: &'i watch::Sender<usize>) -> Self {
        connections.send_modify(|open| *open += 1);
        Self(connections)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}

impl Inner {
    /// Seconds of the pretended server since its start.
    pub(super) fn now_s(&self) -> f64 {
        self.started.elapsed().as_secs_f64() * self.speed
    }

    /// A span of the pretended server on our clock.
    pub(super) fn wall(&self, seconds: f64) -> Duration {
        // A longer one could not be added to a clock.
        const LONGEST: Duration = Duration::from_secs(1 << 30);
        Duration::try_from_secs_f64(seconds / self.speed).unwrap_or(LONGEST).min(LONGEST)
    }

    /// Waits until tokens move; says whether that took a wait.
    async fn until_moving(&self) -> bool {
        if self.life.now().health == Health::Serving {
            return false;
        }
        self.life.until(|life| life.health == Health::Serving).await;
        true
    }

    async fn compute(&self) {
        let mut due = Instant::now();
        loop {
            self.until_moving().await;
            let (step, incarnation) = {
                let mut state = lock(&self.state);
                (state.engine.step(), state.incarnation)
            };
            let Some(step) = step else {
                self.work.notified().await;
                due = Instant::now();
                continue;
            };
            if due.elapsed() > LAG_MAX {
                due = Instant::now();
            }
            // Absolute, so that a late step does not delay those after it.
            due += self.wall(step.duration_s);
            tokio::time::sleep_until(due).await;
            if self.until_moving().await {
                due = Instant::now();
            }
            let mut state = lock(&self.state);
            if state.incarnation == incarnation {
                state.deliver(&step);
            }
        }
    }

    async fn follow_script(&self) {
        loop {
            // A timer fires up to a millisecond late, never early; the time asked about is the one that was waited for.
            let now = self.now_s();
            let (health, next) = {
                let faults = lock(&self.faults);
                (faults.health(now), faults.next_change_s(now))
            };
            if !self.ended.load(Ordering::SeqCst) {
                self.become_(health);
            }
            match next {
                Some(next) => tokio::time::sleep_until(self.started + self.wall(next) + Duration::from_nanos(1)).await,
                None => std::future::pending().await,
            }
        }
    }

    fn become_(&self, health: Health) {
        let before = self.life.now();
        let is_up = |health| matches!(health, Health::Serving | Health::Stalled);
        let mut now = Life { health, ..before };
        if health == before.health {
            return;
        }
        if is_up(before.health) != is_up(health) {
            now.incarnation += u64::from(is_up(health));
            let mut state = lock(&self.state);
            let profile = state.engine.profile().clone();
            // Streams learn of it by the end of their connection.
            *state = State::fresh(profile, state.incarnation + 1);
        }
        self.life.becomes(now);
    }
}
