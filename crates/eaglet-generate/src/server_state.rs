//! What the run knows about its server right now. Lives on one thread; written by the monitor, read by every request.

use eaglet_core::progress::ServerGauges;
use std::cell::{Cell, RefCell};
use tokio::sync::Notify;
use tokio::time::Instant;

/// Up or down, and since when.
#[derive(Debug, Default)]
pub struct ServerState {
    down: Cell<bool>,
    last_down: Cell<Option<Instant>>,
    gauges_moved: Cell<Option<Instant>>,
    gauges: RefCell<ServerGauges>,
    reason: RefCell<String>,
    changed: Notify,
}

impl ServerState {
    /// The server is down since `at`.
    pub fn down_at(&self, at: Instant, reason: String) {
        if !self.down.replace(true) {
            self.last_down.set(Some(at));
            self.reason.replace(reason);
            self.changed.notify_waiters();
        }
    }

    /// The server is up (again).
    pub fn up(&self) {
        if self.down.replace(false) {
            self.changed.notify_waiters();
        }
    }

    /// Whether it is down.
    pub fn is_down(&self) -> bool {
        self.down.get()
    }

    /// Why it was last found down.
    pub fn reason(&self) -> String {
        self.reason.borrow().clone()
    }

    /// When the latest time of being down began, whether or not it is over.
    pub fn last_down(&self) -> Option<Instant> {
        self.last_down.get()
    }

    /// The server's token counters moved at this time.
    pub fn gauges_moved_at(&self, at: Instant) {
        self.gauges_moved.set(Some(at));
    }

    /// When the token counters moved last; `None` when the server has none.
    pub fn gauges_moved(&self) -> Option<Instant> {
        self.gauges_moved.get()
    }

    /// Takes the latest gauges.
    pub fn set_gauges(&self, gauges: ServerGauges) {
        self.gauges.replace(gauges);
    }

    /// The latest gauges.
    pub fn gauges(&self) -> ServerGauges {
        self.gauges.borrow().clone()
    }

    /// Waits until the server goes down or comes up.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Waits until the server is up.
    pub async fn wait_until_up(&self) {
        while self.is_down() {
            let changed = self.changed.notified();
            if !self.is_down() {
                return;
            }
            changed.await;
        }
    }
}
