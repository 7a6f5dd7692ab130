//! Watches the server beside the requests: its gauges, and whether it is there at all.
//!
//! A server that is down pauses the run: requests wait for it and are not charged. It is up again only when it serves the same model.

use crate::client::{Client, InFlight};
use crate::metrics;
use crate::server_info::{self, ServerInfo};
use crate::server_state::ServerState;
use eaglet_core::Error;
use eaglet_core::outcome::Cause;
use eaglet_core::progress::ServerGauges;
use std::cell::{Cell, RefCell};
use std::time::Duration;
use tokio::time::Instant;

/// Between two looks at a healthy server.
const INTERVAL: Duration = Duration::from_secs(5);
/// Between two looks at a server that is down.
const DOWN_INTERVAL: Duration = Duration::from_secs(1);
/// Longest wait for a health probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// A busy server may be late with a probe; so many in a row make it down.
const LATE_PROBES_MAX: u32 = 3;
/// Without gauges, they are asked for again after so many looks: a server may get them by a restart.
const NO_GAUGES_LOOKS: u32 = 12;

/// The monitor of one server.
pub struct Monitor {
    /// What it keeps up to date.
    pub state: ServerState,
    expected: ServerInfo,
    probe_lock: tokio::sync::Mutex<()>,
    last_probe: Cell<Option<Instant>>,
    late_probes: Cell<u32>,
    metrics_path: Cell<Option<&'static str>>,
    looks_without_gauges: Cell<u32>,
    /// How often gauges were read.
    pub looks: Cell<u64>,
    /// The server came back as another one: nothing may be sent to it any more.
    pub fatal: RefCell<Option<Error>>,
}

/// What one probe of the server says.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Probe {
    Up,
    Down(String),
    Late,
}

impl Monitor {
    /// A monitor of the server that `expected` describes.
    pub fn new(expected: ServerInfo) -> Self {
        Monitor {
            state: ServerState::default(),
            expected,
            probe_lock: tokio::sync::Mutex::new(()),
            last_probe: Cell::new(None),
            late_probes: Cell::new(0),
            metrics_path: Cell::new(None),
            looks_without_gauges: Cell::new(0),
            looks: Cell::new(0),
            fatal: RefCell::new(None),
        }
    }

    /// Looks at the server until the run ends (the caller drops this future).
    pub async fn watch(&self, client: &Client, in_flight: &InFlight) {
        loop {
            if self.state.is_down() {
                self.try_recover(client).await;
                if self.state.is_down() {
                    tokio::time::sleep(DOWN_INTERVAL).await;
                }
                continue;
            }
            self.look_at_gauges(client).await;
            // Bytes that arrive are the best proof of life; only silence is a reason to ask.
            if in_flight.last_byte.get().elapsed() >= INTERVAL {
                self.ask(client).await;
            }
            if !self.state.is_down() {
                tokio::time::sleep(INTERVAL).await;
            }
        }
    }

    /// Whether the server is up, asked now; calls that come together ask once.
    pub async fn is_up(&self, client: &Client) -> bool {
        if !self.state.is_down() {
            self.ask(client).await;
        }
        !self.state.is_down()
    }

    async fn ask(&self, client: &Client) {
        let asked = Instant::now();
        let _one_at_a_time = self.probe_lock.lock().await;
        if self.last_probe.get().is_some_and(|last| last >= asked) || self.state.is_down() {
            return;
        }
        let began = Instant::now();
        let probe = probe(client).await;
        // When it began: an answer that was given before somebody asked says nothing about what broke their request.
        self.last_probe.set(Some(began));
        match probe {
            Probe::Up => {
                self.late_probes.set(0);
                // It may have been restarted between two looks, with another model.
                self.serves_our_model(client).await;
            }
            Probe::Down(reason) => self.state.down_at(began, reason),
            Probe::Late => {
                self.late_probes.set(self.late_probes.get() + 1);
                if self.late_probes.get() >= LATE_PROBES_MAX {
                    self.state.down_at(began, format!("{LATE_PROBES_MAX} health probes without an answer"));
                }
            }
        }
    }

    async fn try_recover(&self, client: &Client) {
        if self.fatal.borrow().is_none()
            && probe(client).await == Probe::Up
            && self.serves_our_model(client).await == Some(true)
        {
            self.late_probes.set(0);
            self.state.up();
        }
    }

    /// Whether the server serves the model of this run; `None` when it does not say. Another model ends the run: it stays "down" until then, so that no
    /// prompt goes to it.
    async fn serves_our_model(&self, client: &Client) -> Option<bool> {
        let error = match server_info::server_info(client, Some(&self.expected.model), None).await {
            Ok(info) if info.root == self.expected.root || info.root.is_none() => return Some(true),
            Ok(info) => {
                let (was, is) = (self.expected.root.as_deref().unwrap_or("?"), info.root.as_deref().unwrap_or("?"));
                Error::server(format!(
                    "{} came back with another model: {was} before, {is} now",
                    client.endpoint().label()
                ))
            }
            // A server that answers, but not with this model, is another server now.
            Err(error) if error.to_string().contains("does not serve") => {
                error.context("the server came back as another one")
            }
            Err(_) => return None,
        };
        let error = error.hint(
            "start the server with the model of this run and run the same command again; what is finished is kept",
        );
        self.state.down_at(Instant::now(), "it serves another model".to_owned());
        self.fatal.replace(Some(error));
        Some(false)
    }

    async fn look_at_gauges(&self, client: &Client) {
        let looks = self.looks_without_gauges.get();
        if looks > 0 && !looks.is_multiple_of(NO_GAUGES_LOOKS) {
            self.looks_without_gauges.set(looks + 1);
            return;
        }
        let paths: Vec<&'static str> =
            self.metrics_path.get().map_or(metrics::METRICS_PATHS.to_vec(), |path| vec![path]);
        let mut reason = None;
        for path in paths {
            let Ok(reply) = client.get(path, PROBE_TIMEOUT).await else { continue };
            match metrics::read(reply.status.as_u16(), &reply.body) {
                Ok(gauges) => {
                    self.metrics_path.set(Some(path));
                    self.looks_without_gauges.set(0);
                    return self.take_gauges(gauges);
                }
                Err(why) => reason = reason.or(Some(why)),
            }
        }
        self.metrics_path.set(None);
        self.looks_without_gauges.set(looks + 1);
        let not_available = Some(reason.unwrap_or_else(|| "no answer".to_owned()));
        self.state.set_gauges(ServerGauges { not_available, ..ServerGauges::default() });
    }

    fn take_gauges(&self, gauges: ServerGauges) {
        let before = self.state.gauges();
        let moved = match (before.generation_tokens, gauges.generation_tokens) {
            (Some(before), Some(now)) => before != now,
            (None, Some(_)) => true,
            _ => false,
        };
        if moved {
            self.state.gauges_moved_at(Instant::now());
        }
        self.state.set_gauges(gauges);
        self.looks.set(self.looks.get() + 1);
    }
}

/// `/health` where the server has it, else the model list.
async fn probe(client: &Client) -> Probe {
    for path in ["/health", "/v1/models"] {
        match client.get(path, PROBE_TIMEOUT).await {
            // vLLM answers 503 when its engine is dead.
            Ok(reply) if reply.status.is_server_error() => {
                return Probe::Down(format!("{path} answers HTTP {}", reply.status.as_u16()));
            }
            Ok(reply) if reply.status.as_u16() == 404 => {}
            Ok(_) => return Probe::Up,
            Err(failure) if failure.cause == Cause::FirstByteTimeout => return Probe::Late,
            Err(failure) => return Probe::Down(failure.detail),
        }
    }
    Probe::Up
}
