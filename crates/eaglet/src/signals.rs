//! Ctrl-C and SIGTERM: the first drains, the second saves and leaves, the third leaves at once.

use eaglet_core::{Error, Result};
use eaglet_generate::run::Stop;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// What the `n`th signal asks for; SIGTERM's first has a deadline, since nobody may be there to send a second. Pure.
fn asked(n: u32, is_terminate: bool) -> Option<Stop> {
    match (n, is_terminate) {
        (1, false) => Some(Stop::Drain),
        (1, true) => Some(Stop::DrainWithDeadline),
        (2, _) => Some(Stop::Abort),
        _ => None,
    }
}

/// The signals of this process.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Signals {
    /// Takes the signals over from their default action.
    pub(crate) fn take() -> Result<Self> {
        let take = |kind| signal(kind).map_err(|e| Error::environment(format!("cannot handle signals: {e}")));
        Ok(Signals {
            interrupt: take(SignalKind::interrupt())?,
            terminate: take(SignalKind::terminate())?,
            hang_up: take(SignalKind::hangup())?,
        })
    }

    /// Passes signals on for ever.
    pub(crate) async fn pass_on(mut self, stop: watch::Sender<Stop>) {
        let mut count = 0;
        loop {
            // A terminal that closes hangs up: nobody watches any more, as with SIGTERM.
            let is_terminate = tokio::select! {
                _ = self.interrupt.recv() => false,
                _ = self.terminate.recv() => true,
                _ = self.hang_up.recv() => true,
            };
            count += 1;
            match asked(count, is_terminate) {
                Some(next) => {
                    stop.send_replace(next);
                }
                None => leave(),
            }
        }
    }
}

#[allow(
    clippy::exit,
    clippy::disallowed_methods,
    reason = "the third Ctrl-C means now; what was reported as done is on the disk"
)]
fn leave() -> ! {
    std::process::exit(INTERRUPTED)
}

/// Exit code of [`crate::Exit::Interrupted`].
const INTERRUPTED: i32 = 130;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_signal_asks_for_more() {
        assert_eq!([asked(1, false), asked(2, false), asked(3, false)], [Some(Stop::Drain), Some(Stop::Abort), None]);
        assert_eq!([asked(1, true), asked(2, true)], [Some(Stop::DrainWithDeadline), Some(Stop::Abort)]);
    }
}
