//! The inside of a running server: its thread, its connections, and what is recorded of each request.
//!
//! Invariants: a request is recorded before it is acted on; it is in flight from then until its last byte is about to be written.

use std::{
    fs::File,
    io::{self, Write},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use serde_json::json;
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    sync::watch,
    task::JoinSet,
};

use eaglet_serve::{
    api::{self, Routed, Served},
    http::Request,
    wire::Incoming,
};

use super::{
    Command, SeenRequest, Wire, bench,
    engine::Engine,
    generate, play,
    script::{Decision, RuleBook, Script},
};

/// Connections the kernel holds until they are accepted.
const BACKLOG: u32 = 8192;

/// What all connections of a server share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) script: Script,
    pub(super) served: Served,
    pub(super) port: u16,
    started: Instant,
    book: Mutex<RuleBook>,
    /// Bounded by `Script::keep_requests`.
    pub(super) seen: Mutex<Vec<SeenRequest>>,
    log: Option<Mutex<File>>,
    pub(super) engine: Arc<Engine>,
    bench: Option<Arc<bench::Replies>>,
    replies: AtomicU64,
    pub(super) in_flight: AtomicUsize,
    pub(super) max_in_flight: AtomicUsize,
    frozen: AtomicUsize,
}

/// Locks; a test that panicked elsewhere must not hide its own message behind a poisoned lock.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What happens to a connection after a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    Next,
    Close,
    Reset,
}

/// A request between its arrival and the last byte of its reply.
///
/// Invariant: it is in flight until [`finish`](Self::finish) or its drop, counted once.
pub(super) struct Ticket<'s> {
    shared: &'s Shared,
    /// Its place among the kept requests.
    record: Option<usize>,
    in_flight: bool,
}

impl<'s> Ticket<'s> {
    /// Counts the request in flight when it is a generation.
    fn new(shared: &'s Shared, request: &Request) -> Self {
        let in_flight = request.method == "POST" && [api::CHAT, api::COMPLETIONS].contains(&request.path.as_str());
        if in_flight {
            let now = shared.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
            shared.max_in_flight.fetch_max(now, Ordering::SeqCst);
        }
        Self { shared, record: None, in_flight }
    }

    /// Marks the request answered. Called just before the last bytes are written, so that a client which has read them finds
    /// it answered and no longer in flight.
    pub(super) fn finish(&mut self) {
        self.leave();
        if let Some(index) = self.record {
            lock(&self.shared.seen)[index].answered = true;
        }
    }

    fn leave(&mut self) {
        if std::mem::take(&mut self.in_flight) {
            self.shared.in_flight.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Serving,
    Hanging,
    Resetting,
}

pub(super) type Started = io::Result<Arc<Shared>>;

/// The body of the server's thread.
pub(super) fn run(
    port: u16,
    script: Script,
    log: Option<File>,
    inbox: tokio::sync::mpsc::Receiver<Command>,
    ready: &mpsc::Sender<Started>,
) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    runtime.block_on(async {
        let (listener, port) = match listen(port) {
            Ok(found) => found,
            Err(error) => {
                let _ = ready.send(Err(error));
                return;
            }
        };
        let shared = Arc::new(Shared::new(script, port, log));
        if ready.send(Ok(Arc::clone(&shared))).is_ok() {
            accept(listener, shared, inbox).await;
        }
    });
}

fn listen(port: u16) -> io::Result<(TcpListener, u16)> {
    let socket = TcpSocket::new_v4()?;
    // A port with connections left over from a stopped server can be taken again.
    socket.set_reuseaddr(true)?;
    socket.bind(([127, 0, 0, 1], port).into())?;
    let listener = socket.listen(BACKLOG)?;
    let port = listener.local_addr()?.port();
    Ok((listener, port))
}

/// Accepts until the handle is gone; carries out its commands.
async fn accept(listener: TcpListener, shared: Arc<Shared>, mut inbox: tokio::sync::mpsc::Receiver<Command>) {
    let (phases, phase) = watch::channel(Phase::Serving);
    let mut listener = Some(listener);
    let mut connections = JoinSet::new();
    let mut number = 0;
    if let Some(bench) = shared.bench.clone() {
        tokio::spawn(async move { bench.beat().await });
    }
    loop {
        tokio::select! {
            command = inbox.recv() => {
                let Some((next, done)) = command else { return };
                listener = None;
                let _ = phases.send(next);
                settle(next, &shared, &mut connections).await;
                let _ = done.send(());
            }
            accepted = next_connection(listener.as_ref()) => {
                number += 1;
                connections.spawn(connection(Arc::clone(&shared), accepted, number, phase.clone()));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn next_connection(listener: Option<&TcpListener>) -> TcpStream {
    let Some(listener) = listener else {
        return std::future::pending().await;
    };
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            // Out of descriptors, most likely: others have to close first.
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

/// Returns when every connection has seen the new phase.
async fn settle(phase: Phase, shared: &Shared, connections: &mut JoinSet<()>) {
    if phase == Phase::Resetting {
        while connections.join_next().await.is_some() {}
        return;
    }
    loop {
        while connections.try_join_next().is_some() {}
        if shared.frozen.load(Ordering::SeqCst) >= connections.len() {
            return;
        }
        tokio::task::yield_now().await;
    }
}

/// Serves one connection until it ends or the server stops.
async fn connection(shared: Arc<Shared>, stream: TcpStream, number: usize, mut phase: watch::Receiver<Phase>) {
    let mut wire = Wire::new(stream);
    let served = tokio::select! {
        biased;
        after = serve(&shared, &mut wire, number) => Some(after),
        _ = phase.wait_for(|phase| *phase != Phase::Serving) => None,
    };
    match served {
        Some(After::Reset) => wire.reset(),
        Some(_) => wire.close().await,
        None => {
            shared.frozen.fetch_add(1, Ordering::SeqCst);
            if phase.wait_for(|phase| *phase == Phase::Resetting).await.is_ok() {
                wire.reset();
            }
        }
    }
}

async fn serve(shared: &Shared, wire: &mut Wire, connection: usize) -> After {
    let idle = shared.script.close_idle_ms.map(Duration::from_millis);
    for nth_on_connection in 1.. {
        let request = match wire.next_request(idle.filter(|_| nth_on_connection > 1)).await {
            Incoming::Request(request) => request,
            Incoming::Over => return After::Close,
            Incoming::Malformed(why) => {
                let reply = api::json_reply(400, &json!({"detail": why.0}));
                let _ = wire.send(&reply.bytes()).await;
                return After::Close;
            }
        };
        let (decision, nth) = lock(&shared.book).decide(&request, nth_on_connection);
        let mut ticket = Ticket::new(shared, &request);
        ticket.record = shared.record(&request, &decision, connection, nth_on_connection, nth);
        // A client that left is an ordinary end of a connection.
        match shared.act(wire, &request, &decision, &mut ticket).await {
            Ok(After::Next) => {}
            Ok(after) => return after,
            Err(_) => return After::Close,
        }
        if !request.keep_alive {
            return After::Close;
        }
    }
    After::Close
}

impl Shared {
    fn new(script: Script, port: u16, log: Option<File>) -> Self {
        let answer = &script.answer;
        Self {
            port,
            started: Instant::now(),
            book: Mutex::new(RuleBook::new(&script)),
            seen: Mutex::default(),
            log: log.map(Mutex::new),
            engine: Engine::new(answer.max_running, answer.kv_cache_tokens),
            bench: script.bench.clone().map(|settings| bench::Replies::new(settings, &answer.model)),
            replies: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            max_in_flight: AtomicUsize::new(0),
            frozen: AtomicUsize::new(0),
            served: answer.served(),
            script,
        }
    }

    /// A header value with its placeholders filled in.
    pub(super) fn fill_in(&self, value: &str) -> String {
        let other = self.script.other.unwrap_or(1);
        value.replace("{port}", &self.port.to_string()).replace("{other}", &other.to_string())
    }

    async fn act(
        &self,
        wire: &mut Wire,
        request: &Request,
        decision: &Decision,
        ticket: &mut Ticket<'_>,
    ) -> io::Result<After> {
        match decision {
            Decision::Kill => return Ok(After::Reset),
            Decision::Play(rule) => return play::play(self, wire, rule, ticket).await,
            Decision::Answer => {}
        }
        if let Some(bench) = self.bench.as_ref().filter(|_| request.path == api::CHAT) {
            bench.send(wire, request, ticket).await?;
            return Ok(After::Next);
        }
        let number = self.replies.fetch_add(1, Ordering::Relaxed);
        match api::route(&self.served, &self.engine.gauges(), request, number) {
            Routed::Reply(reply) => {
                ticket.finish();
                wire.send(&reply.bytes()).await?;
            }
            Routed::Generate(job) => generate::generate(self, wire, &job, ticket).await?,
        }
        Ok(After::Next)
    }

    /// Notes a request; gives its place, or `None` when no more are kept.
    fn record(
        &self,
        request: &Request,
        decision: &Decision,
        connection: usize,
        on_connection: usize,
        nth: usize,
    ) -> Option<usize> {
        let at = self.started.elapsed();
        if let Some(log) = &self.log {
            let resets = match decision {
                Decision::Kill => true,
                Decision::Play(rule) => rule.reset_before_reply,
                Decision::Answer => false,
            };
            let line = json!({"t": at.as_secs_f64(), "method": request.method, "path": request.path, "nth": nth,
                "connection": connection, "nth_on_connection": on_connection, "authorization": request.header("authorization"),
                "reset_before_reply": resets, "body": String::from_utf8_lossy(&request.body)});
            // A log that cannot be written shows itself to whoever reads it.
            let _ = lock(log).write_all(format!("{line}\n").as_bytes());
        }
        let mut seen = lock(&self.seen);
        if seen.len() >= self.script.keep_requests {
            return None;
        }
        seen.push(SeenRequest {
            method: request.method.clone(),
            path: request.path.clone(),
            headers: request.headers.clone(),
            body: request.body.clone(),
            connection,
            nth_on_connection: on_connection,
            nth,
            at,
            answered: false,
        });
        Some(seen.len() - 1)
    }
}
