//! The servers of a run: who may send a request where, now. Lives on one thread.
//!
//! A [`Lease`] is the right to have one request out at one server; it is given back when dropped, whatever ended it. Leases are given in the order in which
//! they were asked for, by the pure [`balancer`](crate::balancer).
//!
//! Invariants: leases of a server that exist are its `out`; no lease is given above a server's limit (a limit that shrinks takes none back: those out
//! finish); every change that can make room ends in [`Servers::pump`].

use super::Report;
use super::server::Server;
use super::settings::Concurrency;
use crate::balancer::{self, Candidate, Health};
use crate::client::endpoint::Endpoint;
use crate::client::{AttemptFailure, Client, Timeouts};
use crate::limiter::{Change, RateSource};
use crate::retry;
use crate::server_info::{self, ServerInfo};
use eaglet_core::event::Event;
use eaglet_core::outcome::Cause;
use eaglet_core::progress::{ServerGauges, ServerProgress};
use eaglet_core::{Error, Result};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::{Rc, Weak};
use std::time::Duration;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// So soon after the first refusal of a window the limiter hears of it.
const EARLY: Duration = Duration::from_millis(100);
/// A server of the list that cannot be reached is asked again after this time.
const JOIN_INTERVAL: Duration = Duration::from_secs(5);

/// What all servers of a run have in common.
pub(super) struct Common {
    pub(super) concurrency: Concurrency,
    pub(super) source: RateSource,
    pub(super) timeouts: Timeouts,
    /// The model of the run.
    pub(super) info: ServerInfo,
    /// Longest context that requests count on, in tokens.
    pub(super) context: Option<u64>,
}

/// The servers.
pub(super) struct Servers {
    common: Common,
    list: RefCell<Vec<Rc<Server>>>,
    watching: RefCell<HashMap<u64, AbortHandle>>,
    /// Servers of the list that did not join yet, by label.
    joining: RefCell<HashMap<String, AbortHandle>>,
    next_id: Cell<u64>,
    /// Tokens of servers that left.
    tokens_of_left: Cell<u64>,
    waiters: RefCell<VecDeque<(Option<u64>, oneshot::Sender<Lease>)>>,
    is_pumping: Cell<bool>,
    since: Instant,
    /// A server went down, came up, joined or left.
    changed: Notify,
    reports: mpsc::UnboundedSender<Report>,
    me: Weak<Servers>,
}

/// The right to have one request out at one server.
pub(super) struct Lease {
    server: Rc<Server>,
    servers: Rc<Servers>,
    is_probe: bool,
}

impl Lease {
    /// Where the request goes.
    pub(super) fn server(&self) -> &Rc<Server> {
        &self.server
    }

    /// What became of the request: its new tokens, or why it failed.
    pub(super) fn heard(&self, result: std::result::Result<u64, &AttemptFailure>, took: Duration) {
        let (server, servers) = (&self.server, &self.servers);
        let mut record = server.record.get();
        match result {
            Ok(tokens) => {
                server.count_answer(tokens, took);
                record.worked();
            }
            Err(failure) => {
                if failure.cause == Cause::Overloaded {
                    let next = record.refused(servers.now(), failure.retry_after);
                    servers.pump_at(next);
                } else if !retry::is_the_servers(failure.cause) {
                    record.worked();
                } else if record.broke(servers.now()) {
                    server.last_broke.replace(failure.detail.clone());
                    if let Health::Out { until } = record.health() {
                        servers.pump_at(until);
                    }
                }
                if server.count_failure(failure, took) {
                    let (servers, server) = (Rc::clone(servers), Rc::clone(server));
                    tokio::task::spawn_local(async move {
                        tokio::time::sleep(EARLY).await;
                        servers.changed_limit(&server, server.observe(true));
                    });
                }
            }
        }
        server.record.set(record);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.server.count_out(-1);
        if self.is_probe {
            let mut record = self.server.record.get();
            // A probe that said something left this state already.
            record.probe_given_up(self.servers.now());
            self.server.record.set(record);
        }
        self.servers.pump();
    }
}

impl Servers {
    pub(super) fn new(common: Common, reports: mpsc::UnboundedSender<Report>) -> Rc<Self> {
        Rc::new_cyclic(|me| Servers {
            common,
            list: RefCell::default(),
            watching: RefCell::default(),
            joining: RefCell::default(),
            next_id: Cell::new(0),
            tokens_of_left: Cell::new(0),
            waiters: RefCell::default(),
            is_pumping: Cell::new(false),
            since: Instant::now(),
            changed: Notify::new(),
            reports,
            me: me.clone(),
        })
    }

    /// Time since the run began, for the balancer.
    fn now(&self) -> Duration {
        self.since.elapsed()
    }

    fn report(&self, event: Event) {
        // The log is a by-product.
        let _ = self.reports.send(Report::Event(event));
    }

    /// Takes a server in and begins to watch it.
    pub(super) fn add(self: &Rc<Self>, client: Client, info: ServerInfo) {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        let server = Rc::new(Server::new(id, client, info, self.common.concurrency, self.common.source));
        self.list.borrow_mut().push(Rc::clone(&server));
        let servers = Rc::clone(self);
        let task = tokio::task::spawn_local(async move {
            let watch = server.monitor.watch(&server.client, &server.in_flight);
            let mut watch = std::pin::pin!(watch);
            loop {
                tokio::select! {
                    biased;
                    () = &mut watch => {}
                    () = server.monitor.state.changed() => {
                        servers.changed.notify_waiters();
                        servers.pump();
                    }
                }
            }
        });
        self.watching.borrow_mut().insert(id, task.abort_handle());
        self.changed.notify_waiters();
        self.pump();
    }

    /// Asks a server for its model again and again until it can join.
    pub(super) fn join(self: &Rc<Self>, endpoint: Rc<Endpoint>) {
        let servers = Rc::clone(self);
        let label = endpoint.label();
        let task = tokio::task::spawn_local(async move {
            let label = endpoint.label();
            let mut told = false;
            loop {
                match servers.admit(&endpoint).await {
                    Ok((client, info)) => {
                        servers.joining.borrow_mut().remove(&label);
                        servers.report(Event::ServerAdded { endpoint: label });
                        return servers.add(client, info);
                    }
                    Err(error) if !told => {
                        told = true;
                        servers.report(Event::Notice { text: format!("{label} does not join yet: {error}") });
                    }
                    Err(_) => {}
                }
                tokio::time::sleep(JOIN_INTERVAL).await;
            }
        });
        self.joining.borrow_mut().insert(label, task.abort_handle());
    }

    async fn admit(&self, endpoint: &Rc<Endpoint>) -> Result<(Client, ServerInfo)> {
        let client = Client::new(Rc::clone(endpoint), self.common.timeouts)?;
        let info = server_info::server_info(&client, Some(&self.common.info.model), None).await?;
        server_info::same_model(&self.common.info, &info, &endpoint.label())?;
        match (self.common.context, info.max_model_len) {
            (Some(needed), Some(has)) if has < needed => {
                Err(Error::server(format!("its context has {has} tokens, the run counts on {needed}")))
            }
            _ => Ok((client, info)),
        }
    }

    /// The list of servers changed: new ones join, those no longer on it finish what is out.
    pub(super) fn follow(self: &Rc<Self>, endpoints: &[Rc<Endpoint>]) {
        let wanted: Vec<String> = endpoints.iter().map(|endpoint| endpoint.label()).collect();
        for server in self.list.borrow().iter().filter(|server| !wanted.contains(&server.label())) {
            server.leaving.borrow_mut().get_or_insert_with(|| "it is no longer on the list".to_owned());
        }
        self.joining.borrow_mut().retain(|label, task| {
            let stays = wanted.contains(label);
            if !stays {
                task.abort();
            }
            stays
        });
        let is_known = |label: &String| {
            self.joining.borrow().contains_key(label)
                || self.list.borrow().iter().any(|server| server.label() == *label && !server.is_leaving())
        };
        for endpoint in endpoints.iter().filter(|endpoint| !is_known(&endpoint.label())) {
            self.join(Rc::clone(endpoint));
        }
        self.remove_left();
        self.changed.notify_waiters();
        self.pump();
    }

    fn remove_left(&self) {
        self.list.borrow_mut().retain(|server| {
            let reason = server.leaving.borrow().clone();
            let Some(reason) = reason.filter(|_| server.out.get() == 0) else { return true };
            if let Some(task) = self.watching.borrow_mut().remove(&server.id) {
                task.abort();
            }
            self.tokens_of_left.set(self.tokens_of_left.get() + server.in_flight.tokens.get());
            self.report(Event::ServerRemoved { endpoint: server.label(), reason });
            false
        });
    }

    /// Called about once a second: windows end, servers that went down or came back are told. The error that ends the run, if there is one.
    pub(super) fn tick(&self) -> Option<Error> {
        let list: Vec<Rc<Server>> = self.list.borrow().clone();
        for server in &list {
            match (server.monitor.state.is_down(), server.down_since.get()) {
                (true, None) => {
                    server.down_since.set(Some(Instant::now()));
                    let (endpoint, reason) = (server.label(), server.monitor.state.reason());
                    self.report(Event::ServerDown { endpoint, reason, others_up: self.others_up(server) });
                }
                (false, Some(since)) => {
                    server.down_since.set(None);
                    self.report(Event::ServerUp { endpoint: server.label(), down_s: since.elapsed().as_secs_f64() });
                    self.changed_limit(server, server.came_back());
                }
                _ => {}
            }
            self.tell_ejection(server);
            self.changed_limit(server, server.observe(false));
        }
        let fatal = self.take_fatal(&list);
        self.remove_left();
        // What a missed notification would leave waiting is found here.
        self.pump();
        fatal
    }

    /// A server that is down is told as that, and the only one is never left out.
    fn tell_ejection(&self, server: &Server) {
        let is_out = server.record.get().health() != Health::Good && server.is_up() && self.others_up(server) > 0;
        match (is_out, server.told_ejected.replace(is_out)) {
            (true, false) => {
                let reason = server.last_broke.borrow().clone();
                self.report(Event::ServerEjected { endpoint: server.label(), reason });
            }
            (false, true) if server.is_up() => self.report(Event::ServerReadmitted { endpoint: server.label() }),
            _ => {}
        }
    }

    /// A server that came back as another one is left out; when no other is there, the run cannot go on.
    fn take_fatal(&self, list: &[Rc<Server>]) -> Option<Error> {
        for server in list {
            let Some(error) = server.monitor.fatal.borrow_mut().take() else { continue };
            let is_alone = !list.iter().any(|other| other.id != server.id && !other.is_leaving());
            if is_alone && self.joining.borrow().is_empty() {
                return Some(error);
            }
            server.leaving.borrow_mut().get_or_insert_with(|| error.to_string());
        }
        None
    }

    fn changed_limit(&self, server: &Server, change: Option<Change>) {
        let Some(Change { from, to, reason }) = change else { return };
        let (from, to, reason) = (from as u64, to as u64, reason.to_string());
        self.report(Event::LimitChanged { endpoint: server.label(), from, to, reason });
        self.pump();
    }

    fn others_up(&self, server: &Server) -> u64 {
        self.list.borrow().iter().filter(|other| other.id != server.id && other.is_up()).count() as u64
    }

    /// Whether no server can take anything: the run pauses.
    pub(super) fn all_down(&self) -> bool {
        !self.list.borrow().iter().any(|server| server.is_up())
    }

    /// A server that is up, if there is one: for questions that any can answer.
    pub(super) fn one_up(&self) -> Option<Rc<Server>> {
        self.list.borrow().iter().find(|server| server.is_up()).map(Rc::clone)
    }

    /// Whether there is a server that continues answers, as far as anybody knows.
    pub(super) fn any_continues(&self) -> bool {
        self.list.borrow().iter().any(|server| server.continuing.is_on())
    }

    /// Longest context that requests count on, in tokens.
    pub(super) fn context(&self) -> Option<u64> {
        self.common.context
    }

    /// Waits until a server is up.
    pub(super) async fn wait_until_one_is_up(&self) {
        loop {
            let changed = self.changed.notified();
            if !self.all_down() {
                return;
            }
            changed.await;
        }
    }

    /// Requests that may be out, all servers together.
    pub(super) fn limit(&self) -> usize {
        self.list.borrow().iter().filter(|server| !server.is_leaving()).map(|server| server.limit()).sum()
    }

    /// Tokens received, lost attempts included.
    pub(super) fn tokens(&self) -> u64 {
        self.tokens_of_left.get() + self.list.borrow().iter().map(|server| server.in_flight.tokens.get()).sum::<u64>()
    }

    pub(super) fn progress(&self) -> (ServerGauges, Vec<ServerProgress>) {
        let servers: Vec<ServerProgress> = self.list.borrow().iter().map(|server| server.progress()).collect();
        let gauges =
            servers.iter().map(|server| server.gauges.clone()).reduce(ServerGauges::joined).unwrap_or_default();
        (gauges, servers)
    }

    /// A lease, in turn; another server than `avoid` is preferred.
    pub(super) async fn lease(self: &Rc<Self>, avoid: Option<u64>) -> Lease {
        loop {
            let (give, given) = oneshot::channel();
            self.waiters.borrow_mut().push_back((avoid, give));
            self.pump();
            // The sender is dropped unused only with the queue itself.
            if let Ok(lease) = given.await {
                return lease;
            }
        }
    }

    fn pump_at(self: &Rc<Self>, at: Duration) {
        let servers = Rc::clone(self);
        tokio::task::spawn_local(async move {
            tokio::time::sleep_until(servers.since + at).await;
            servers.pump();
        });
    }

    /// Gives leases to those who wait, as long as there are any to give.
    pub(super) fn pump(&self) {
        // A lease that nobody takes any more comes back here through its drop.
        if self.is_pumping.replace(true) {
            return;
        }
        while self.give_one() {}
        self.is_pumping.set(false);
    }

    fn give_one(&self) -> bool {
        let Some(servers) = self.me.upgrade() else { return false };
        let now = self.now();
        let found = {
            let list = self.list.borrow();
            let candidates: Vec<Candidate> = list.iter().map(|server| server.candidate()).collect();
            let mut waiters = self.waiters.borrow_mut();
            waiters.retain(|(_, give)| !give.is_closed());
            // Who waits for a server other than the one that failed them does not hold up those behind.
            let choose = |avoid: Option<u64>| {
                let avoid = avoid.and_then(|id| list.iter().position(|server| server.id == id));
                balancer::choose(&candidates, avoid, now)
            };
            let found = waiters.iter().enumerate().find_map(|(place, (avoid, _))| Some((place, choose(*avoid)?)));
            found.and_then(|(place, index)| Some((waiters.remove(place)?.1, Rc::clone(&list[index]))))
        };
        let Some((give, server)) = found else { return false };
        server.count_out(1);
        let mut record = server.record.get();
        if let Some(next) = record.sent(now) {
            servers.pump_at(next);
        }
        server.record.set(record);
        let is_probe = record.health() == Health::Probing;
        // Given back by its drop if nobody waits any more.
        let _ = give.send(Lease { server, servers, is_probe });
        true
    }

    /// The run is over: nothing is watched any more.
    pub(super) fn close(&self) {
        self.watching.borrow_mut().drain().for_each(|(_, task)| task.abort());
        self.joining.borrow_mut().drain().for_each(|(_, task)| task.abort());
    }
}

#[cfg(test)]
mod tests;
