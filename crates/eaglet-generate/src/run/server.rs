//! One server of a run: its client, its monitor, its limiter, and what is out at it. Lives on one thread.

use crate::balancer::{Candidate, Health, Record};
use crate::client::{AttemptFailure, Client, InFlight};
use crate::limiter::{Change, Gauges, Limiter, LimiterSettings, RateSource, Window};
use crate::monitor::Monitor;
use crate::run::continuing::Continuing;
use crate::run::settings::Concurrency;
use crate::server_info::ServerInfo;
use eaglet_core::outcome::Cause;
use eaglet_core::progress::{ServerGauges, ServerPhase, ServerProgress};
use std::cell::{Cell, RefCell};
use std::time::Duration;
use tokio::time::Instant;

/// A window lasts so long, where tokens are seen as they stream.
const WINDOW: Duration = Duration::from_millis(900);
/// Whole replies: the server's counter is read every five seconds, and a window ends with it, or without one after this time.
const WINDOW_OF_REPLIES: Duration = Duration::from_secs(6);

/// One server.
pub(super) struct Server {
    pub(super) id: u64,
    pub(super) client: Client,
    pub(super) monitor: Monitor,
    pub(super) in_flight: InFlight,
    pub(super) continuing: Continuing,
    /// Out now: leases that exist.
    pub(super) out: Cell<usize>,
    pub(super) record: Cell<Record>,
    /// Why it leaves the run, if it does.
    pub(super) leaving: RefCell<Option<String>>,
    /// Since when the run knows that it is down.
    pub(super) down_since: Cell<Option<Instant>>,
    /// What broke last on it, and whether people know that it is left out for that.
    pub(super) last_broke: RefCell<String>,
    pub(super) told_ejected: Cell<bool>,
    limiter: Limit,
    source: RateSource,
    meter: RefCell<Meter>,
}

enum Limit {
    Pinned(usize),
    Auto(Box<RefCell<Limiter>>),
}

/// What is counted for the next window.
struct Meter {
    began: Instant,
    last: Instant,
    slots_s: f64,
    tokens: u64,
    unstarted_s: f64,
    looks: u64,
    counter: Option<f64>,
    preemptions: Option<f64>,
    window: Window,
}

impl Server {
    pub(super) fn new(id: u64, client: Client, info: ServerInfo, concurrency: Concurrency, source: RateSource) -> Self {
        let limiter = match concurrency {
            Concurrency::Pinned(number) => Limit::Pinned(number.get()),
            Concurrency::Auto { max } => {
                let settings = LimiterSettings { source, ..LimiterSettings::up_to(max.get()) };
                Limit::Auto(Box::new(RefCell::new(Limiter::new(settings))))
            }
        };
        let now = Instant::now();
        let meter = Meter {
            began: now,
            last: now,
            slots_s: 0.0,
            tokens: 0,
            unstarted_s: 0.0,
            looks: 0,
            counter: None,
            preemptions: None,
            window: Window::default(),
        };
        Server {
            id,
            client,
            monitor: Monitor::new(info),
            in_flight: InFlight::default(),
            continuing: Continuing::default(),
            out: Cell::new(0),
            record: Cell::new(Record::default()),
            leaving: RefCell::new(None),
            down_since: Cell::new(None),
            last_broke: RefCell::default(),
            told_ejected: Cell::new(false),
            limiter,
            source,
            meter: RefCell::new(meter),
        }
    }

    /// The server, without credentials.
    pub(super) fn label(&self) -> String {
        self.client.endpoint().label()
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.borrow().is_some()
    }

    pub(super) fn is_up(&self) -> bool {
        !self.is_leaving() && !self.monitor.state.is_down()
    }

    /// Requests that may be out.
    pub(super) fn limit(&self) -> usize {
        match &self.limiter {
            Limit::Pinned(number) => *number,
            Limit::Auto(limiter) => limiter.borrow().limit(),
        }
    }

    pub(super) fn candidate(&self) -> Candidate {
        let record = self.record.get();
        Candidate {
            limit: self.limit(),
            in_flight: self.out.get(),
            is_up: self.is_up(),
            health: record.health(),
            hold_off_until: record.hold_off_until(),
        }
    }

    /// One request more or less is out.
    pub(super) fn count_out(&self, change: i8) {
        let mut meter = self.meter.borrow_mut();
        let now = Instant::now();
        meter.slots_s += self.out.get() as f64 * (now - meter.last).as_secs_f64();
        meter.last = now;
        self.out.set(self.out.get().saturating_add_signed(change.into()));
    }

    /// A request was answered.
    pub(super) fn count_answer(&self, tokens: u64, took: Duration) {
        let window = &mut self.meter.borrow_mut().window;
        window.completions += 1;
        window.completed_tokens += tokens;
        window.completed_time += took;
    }

    /// A request failed. True when it is the first refusal of its window.
    pub(super) fn count_failure(&self, failure: &AttemptFailure, took: Duration) -> bool {
        let window = &mut self.meter.borrow_mut().window;
        if failure.cause != Cause::Overloaded {
            return false;
        }
        window.back_pressure += 1;
        window.refused_time += took;
        window.back_pressure == 1
    }

    /// The server is back after it was away.
    pub(super) fn came_back(&self) -> Option<Change> {
        let mut record = self.record.get();
        record.is_back();
        self.record.set(record);
        self.take_window(0.0);
        let Limit::Auto(limiter) = &self.limiter else { return None };
        limiter.borrow_mut().restarted()
    }

    /// Ends the window if it is time, and lets the limiter see it.
    pub(super) fn observe(&self, is_early: bool) -> Option<Change> {
        let Limit::Auto(limiter) = &self.limiter else { return None };
        if self.monitor.state.is_down() {
            self.take_window(0.0);
            return None;
        }
        let (age, has_new_look) = {
            let meter = self.meter.borrow();
            (meter.began.elapsed(), self.monitor.looks.get() > meter.looks)
        };
        let is_due = match self.source {
            RateSource::Stream => age >= WINDOW,
            RateSource::Replies => (has_new_look && age >= WINDOW) || age >= WINDOW_OF_REPLIES,
        };
        if !is_due && !is_early {
            return None;
        }
        let window = self.take_window(age.as_secs_f64())?;
        limiter.borrow_mut().observe(&window)
    }

    /// The window so far, and a new one begins.
    fn take_window(&self, seconds: f64) -> Option<Window> {
        self.count_out(0);
        let mut meter = self.meter.borrow_mut();
        let mut window = std::mem::take(&mut meter.window);
        let slots_s = std::mem::take(&mut meter.slots_s);
        let unstarted_s = self.in_flight.unstarted_s();
        let unstarted_s = unstarted_s - std::mem::replace(&mut meter.unstarted_s, unstarted_s);
        let tokens = self.in_flight.tokens.get();
        let tokens = tokens - std::mem::replace(&mut meter.tokens, tokens);
        meter.began = Instant::now();
        window.gauges = meter.gauges(&self.monitor, &mut window.tokens);
        if seconds <= 0.0 {
            return None;
        }
        window.duration = Duration::from_secs_f64(seconds);
        window.mean_in_flight = slots_s / seconds;
        if self.source == RateSource::Stream {
            window.tokens = tokens;
            window.mean_unstarted = Some(unstarted_s / seconds);
        }
        Some(window)
    }

    pub(super) fn progress(&self) -> ServerProgress {
        let state = if self.is_leaving() {
            ServerPhase::Leaving
        } else if self.monitor.state.is_down() {
            ServerPhase::Down
        } else if self.record.get().health() == Health::Good {
            ServerPhase::Up
        } else {
            ServerPhase::Ejected
        };
        ServerProgress {
            endpoint: self.label(),
            state,
            limit: self.limit() as u64,
            in_flight: self.out.get() as u64,
            tokens: self.in_flight.tokens.get(),
            gauges: self.monitor.state.gauges(),
        }
    }
}

impl Meter {
    /// The gauges of a window. Counters become what they grew by; `tokens` gets the growth of the server's own token counter.
    fn gauges(&mut self, monitor: &Monitor, tokens: &mut u64) -> Gauges {
        let ServerGauges { running, waiting, kv_use, preemptions, generation_tokens, .. } = monitor.state.gauges();
        self.looks = monitor.looks.get();
        // A counter that went back belongs to a new process.
        let grew = |before: Option<f64>, now: Option<f64>| Some((now? - before?).max(0.0));
        *tokens = grew(self.counter, generation_tokens).unwrap_or(0.0) as u64;
        let preempted = grew(self.preemptions, preemptions);
        (self.counter, self.preemptions) = (generation_tokens, preemptions);
        Gauges { running, waiting, kv_use, preemptions: preempted }
    }
}
