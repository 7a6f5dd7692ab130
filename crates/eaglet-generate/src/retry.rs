//! The one table that says what a failed attempt means, and how long to wait before the next.

use eaglet_core::outcome::{Cause, FailedAs};
use eaglet_core::random::Random;
use std::time::Duration;

/// What to do about a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Send it again after a back-off; charged to the prompt.
    Retry,
    /// Send it again later; the server asks for less. Bounded by time, not by count.
    SlowDown,
    /// The server is away: send it again when it is back. Nothing is charged.
    WaitForServer,
    /// It would fail again: the prompt ends here.
    Final(FailedAs),
    /// It would fail again, and so would every other prompt: final only once another prompt succeeded.
    FinalUnlessAll,
}

/// The table. Read it with `docs/servers.md` beside it.
pub fn verdict(cause: Cause) -> Verdict {
    match cause {
        // The connection: broken now, whole in a second. (A dead server is told apart before this table is asked.)
        Cause::Connect | Cause::Reset | Cause::IdleReset | Cause::CutStream => Verdict::Retry,
        Cause::FirstByteTimeout | Cause::Silence | Cause::TotalTimeout => Verdict::Retry,
        // The server: a fault of the moment.
        Cause::ServerError | Cause::ErrorInStream | Cause::Aborted | Cause::MissingText | Cause::BadReply => {
            Verdict::Retry
        }
        Cause::Overloaded => Verdict::SlowDown,
        Cause::ServerDown => Verdict::WaitForServer,
        // The request: the same bytes get the same answer.
        Cause::ContextTooLong | Cause::Redirect | Cause::ReplyTooLarge => Verdict::Final(FailedAs::Rejected),
        Cause::UnknownFinish => Verdict::Final(FailedAs::SetAside),
        // The set-up: key, path, model or a field of the request are wrong for all.
        Cause::BadRequest | Cause::Unauthorized | Cause::NotFound | Cause::Tls => Verdict::FinalUnlessAll,
    }
}

/// Whether a failure may mean that the server is gone, so that it is asked before the prompt is charged.
pub fn may_mean_server_down(cause: Cause) -> bool {
    matches!(
        cause,
        Cause::Connect
            | Cause::Reset
            | Cause::CutStream
            | Cause::FirstByteTimeout
            | Cause::Silence
            | Cause::ServerError
            | Cause::Overloaded
            | Cause::ErrorInStream
            | Cause::Aborted
    )
}

/// Whether a failure speaks against the server it happened on, so that another one is preferred for the next attempt.
pub fn is_the_servers(cause: Cause) -> bool {
    matches!(
        cause,
        Cause::Connect
            | Cause::Tls
            | Cause::Reset
            | Cause::CutStream
            | Cause::FirstByteTimeout
            | Cause::Silence
            | Cause::ServerError
            | Cause::ServerDown
            | Cause::ErrorInStream
    )
}

/// How often and how long a prompt is tried.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy {
    /// Retries after the first attempt, those of [`Verdict::SlowDown`] not counted.
    pub retries_max: u32,
    /// No retry begins later than this after the first attempt ended.
    pub retry_for: Duration,
    /// Back-off before the first retry, on average half of it (full jitter); doubles each time.
    pub backoff_first: Duration,
    /// Longest back-off.
    pub backoff_max: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        RetryPolicy {
            retries_max: 8,
            retry_for: Duration::from_secs(3600),
            backoff_first: Duration::from_secs(1),
            backoff_max: Duration::from_secs(60),
        }
    }
}

/// A prompt's account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetryAccount {
    /// Charged retries.
    pub retries: u32,
    /// Times the server asked for less.
    pub slow_downs: u32,
    /// Time since the first failed attempt, the server's absences not counted.
    pub spent: Duration,
}

/// What comes next for a prompt. Pure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Wait, without a slot, then send.
    After(Duration),
    /// Send when the server is up.
    WhenServerIsUp,
    /// The prompt ends.
    End(FailedAs),
    /// The prompt ends if another one succeeds.
    EndUnlessAll,
}

impl RetryPolicy {
    /// Books a failed attempt and says what comes next. `jitter` is uniform in 0..1.
    pub fn next(&self, account: &mut RetryAccount, cause: Cause, retry_after: Option<Duration>, jitter: f64) -> Next {
        match verdict(cause) {
            Verdict::WaitForServer => return Next::WhenServerIsUp,
            Verdict::Final(end) => return Next::End(end),
            Verdict::FinalUnlessAll => return Next::EndUnlessAll,
            Verdict::Retry => account.retries += 1,
            Verdict::SlowDown => account.slow_downs += 1,
        }
        let wait = retry_after.unwrap_or_else(|| self.backoff(account.retries + account.slow_downs, jitter));
        if account.retries > self.retries_max || account.spent + wait > self.retry_for {
            return Next::End(FailedAs::Exhausted);
        }
        Next::After(wait)
    }

    /// Exponential back-off with full jitter before the `n`th try again (1-based).
    fn backoff(&self, n: u32, jitter: f64) -> Duration {
        let doubled = self.backoff_first.saturating_mul(1 << n.saturating_sub(1).min(20));
        doubled.min(self.backoff_max).mul_f64(jitter.clamp(0.0, 1.0))
    }
}

/// Draws the jitter of back-offs.
#[derive(Clone, Debug)]
pub struct Jitter(Random);

impl Jitter {
    /// Starts from a seed.
    pub fn new(seed: u64) -> Self {
        Jitter(Random::new(seed))
    }

    /// Uniform in 0..1.
    pub fn draw(&mut self) -> f64 {
        self.0.unit()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The whole table, so that a change of it is seen in review.
    #[test]
    fn the_table() {
        use Cause::*;
        let expected = [
            (Connect, Verdict::Retry),
            (Tls, Verdict::FinalUnlessAll),
            (Reset, Verdict::Retry),
            (IdleReset, Verdict::Retry),
            (CutStream, Verdict::Retry),
            (FirstByteTimeout, Verdict::Retry),
            (Silence, Verdict::Retry),
            (TotalTimeout, Verdict::Retry),
            (Overloaded, Verdict::SlowDown),
            (ServerError, Verdict::Retry),
            (ErrorInStream, Verdict::Retry),
            (Aborted, Verdict::Retry),
            (MissingText, Verdict::Retry),
            (BadReply, Verdict::Retry),
            (ReplyTooLarge, Verdict::Final(FailedAs::Rejected)),
            (UnknownFinish, Verdict::Final(FailedAs::SetAside)),
            (ContextTooLong, Verdict::Final(FailedAs::Rejected)),
            (BadRequest, Verdict::FinalUnlessAll),
            (Unauthorized, Verdict::FinalUnlessAll),
            (NotFound, Verdict::FinalUnlessAll),
            (Redirect, Verdict::Final(FailedAs::Rejected)),
            (ServerDown, Verdict::WaitForServer),
        ];
        for (cause, expected) in expected {
            assert_eq!(verdict(cause), expected, "{cause:?}");
        }
    }

    #[test]
    fn retries_are_bounded_by_count() {
        let (policy, mut account) = (RetryPolicy { retries_max: 3, ..RetryPolicy::default() }, RetryAccount::default());
        let next: Vec<_> = (0..4).map(|_| policy.next(&mut account, Cause::Reset, None, 0.5)).collect();
        let second = Duration::from_secs;
        assert_eq!(
            next,
            [
                Next::After(second(1) / 2),
                Next::After(second(1)),
                Next::After(second(2)),
                Next::End(FailedAs::Exhausted)
            ]
        );
    }

    #[test]
    fn slowing_down_is_bounded_by_time_only_and_follows_the_server() {
        let (policy, mut account) = (RetryPolicy::default(), RetryAccount::default());
        for _ in 0..100 {
            assert_eq!(
                policy.next(&mut account, Cause::Overloaded, Some(Duration::from_secs(7)), 0.5),
                Next::After(Duration::from_secs(7))
            );
        }
        assert_eq!(account.retries, 0);
        account.spent = policy.retry_for;
        assert_eq!(policy.next(&mut account, Cause::Overloaded, None, 0.5), Next::End(FailedAs::Exhausted));
    }

    #[test]
    fn a_server_that_is_down_costs_nothing() {
        let mut account = RetryAccount::default();
        assert_eq!(RetryPolicy::default().next(&mut account, Cause::ServerDown, None, 0.5), Next::WhenServerIsUp);
        assert_eq!(account, RetryAccount::default());
    }

    #[test]
    fn jitter_fills_the_whole_range() {
        let mut jitter = Jitter::new(1);
        let values: Vec<f64> = (0..1000).map(|_| jitter.draw()).collect();
        assert!(values.iter().all(|v| (0.0..1.0).contains(v)));
        let mean = values.iter().sum::<f64>() / 1000.0;
        assert!((mean - 0.5).abs() < 0.05, "{mean}");
    }
}
