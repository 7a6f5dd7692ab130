//! An OpenAI-compatible inference server that does what a script says, on 127.0.0.1 only.
//!
//! It speaks HTTP/1.1 by itself, because tests need what no HTTP library gives: resets, bodies cut in the middle, heads that
//! never come, connections killed on reuse. It holds no model: the face and the answers made up from prompts are those of
//! `eaglet simulate` (`eaglet_serve`).
//!
//! Invariants: each server has a thread and a runtime of its own, so a blocked test cannot stop it and the clock of a test does not
//! drive it; nothing is printed; every request is recorded before it is acted on.

pub mod answer;
pub mod bench;
mod engine;
mod generate;
mod play;
pub mod script;
mod serve;

use std::{
    fs::File,
    io,
    sync::{Arc, atomic::Ordering, mpsc},
    thread::JoinHandle,
    time::Duration,
};

use bytes::Bytes;

use self::serve::{Phase, Shared, lock};
pub use eaglet_serve::{http, vocabulary};

pub use self::{
    answer::{Answer, Reasoning},
    bench::Bench,
    script::{Body, End, Rule, Script},
};

/// One request as the server saw it.
#[derive(Clone, Debug)]
pub struct SeenRequest {
    /// The method.
    pub method: String,
    /// The path without its query.
    pub path: String,
    /// Names in lower case, values as they came, the API key too.
    pub headers: Vec<(String, String)>,
    /// The body without its framing.
    pub body: Bytes,
    /// The connection, counted from 1.
    pub connection: usize,
    /// Which request it was on that connection, counted from 1.
    pub nth_on_connection: usize,
    /// Which request it was on that path, counted from 1 without killed ones.
    pub nth: usize,
    /// When it was read, since the server's start.
    pub at: Duration,
    /// Whether its reply was whole: set just before the last bytes are written, never for a reply that breaks off.
    pub answered: bool,
}

impl SeenRequest {
    /// The first header of that lower-case name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    /// The body as JSON; `Null` when it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

/// A connection of this server.
type Wire = eaglet_serve::wire::Wire<tokio::net::TcpStream>;

type Command = (Phase, mpsc::Sender<()>);

/// A running server. Dropping it stops it and closes its connections.
#[derive(Debug)]
pub struct ScriptedServer {
    shared: Arc<Shared>,
    commands: Option<tokio::sync::mpsc::Sender<Command>>,
    thread: Option<JoinHandle<()>>,
}

impl ScriptedServer {
    /// Starts a server on a free port.
    ///
    /// # Panics
    /// When it cannot listen.
    pub fn start(script: Script) -> Self {
        Self::start_on(0, script)
    }

    /// Starts a server on `port`, for one that comes back after it was stopped; 0 is a free port.
    ///
    /// # Panics
    /// When it cannot listen.
    pub fn start_on(port: u16, script: Script) -> Self {
        Self::try_start(port, script, None).unwrap_or_else(|error| panic!("listen on 127.0.0.1:{port}: {error}"))
    }

    /// Starts a server that writes one JSON line per request to `log`.
    ///
    /// # Errors
    /// When it cannot listen or start its thread.
    pub fn try_start(port: u16, script: Script, log: Option<File>) -> io::Result<Self> {
        let (commands, inbox) = tokio::sync::mpsc::channel(4);
        let (ready, started) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("scripted-server".to_owned())
            .spawn(move || serve::run(port, script, log, inbox, &ready))?;
        let shared = started.recv().map_err(|_| io::Error::other("the server's thread ended at its start"))??;
        Ok(Self { shared, commands: Some(commands), thread: Some(thread) })
    }

    /// Where it listens, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port())
    }

    /// The port it listens on, also after it stopped.
    pub fn port(&self) -> u16 {
        self.shared.port
    }

    /// All requests so far, in the order they were read.
    pub fn requests(&self) -> Vec<SeenRequest> {
        lock(&self.shared.seen).clone()
    }

    /// The requests on one path.
    pub fn requests_on(&self, path: &str) -> Vec<SeenRequest> {
        lock(&self.shared.seen).iter().filter(|request| request.path == path).cloned().collect()
    }

    /// Generations read and not yet answered, queued ones among them.
    pub fn in_flight(&self) -> usize {
        self.shared.in_flight.load(Ordering::SeqCst)
    }

    /// The most that were in flight at once.
    pub fn max_in_flight(&self) -> usize {
        self.shared.max_in_flight.load(Ordering::SeqCst)
    }

    /// Stops as vLLM does on SIGTERM: new connections are refused, open ones stay open and silent. When this returns, no more
    /// bytes are sent.
    pub fn stop_hanging(&self) {
        self.stop(Phase::Hanging);
    }

    /// Stops as a killed process does: new connections are refused, open ones are reset. When this returns, all are.
    pub fn stop_resetting(&self) {
        self.stop(Phase::Resetting);
    }

    fn stop(&self, phase: Phase) {
        let (done, confirmed) = mpsc::channel();
        if let Some(commands) = &self.commands
            && commands.try_send((phase, done)).is_ok()
        {
            // An error here is a thread that ended, and with it every connection.
            let _ = confirmed.recv();
        }
    }
}

impl Drop for ScriptedServer {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // A panic of that thread was printed where it happened.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
