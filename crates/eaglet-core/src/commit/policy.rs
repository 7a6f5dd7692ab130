//! When to sync, and what to do when it fails: the decisions of the commit thread, without thread, clock or disk.
//!
//! Times are durations since some fixed start; the caller brings the clock.

use std::io;
use std::time::Duration;

/// The bounds of group commit.
#[derive(Clone, Copy, Debug)]
pub struct CommitSettings {
    /// Longest time a record waits before its sync is begun.
    pub interval: Duration,
    /// Bytes waiting at which a sync is begun earlier.
    pub max_pending_bytes: u64,
    /// Wait after the first failure of an episode; doubled after each further one.
    pub retry_first: Duration,
    /// Longest wait between two attempts.
    pub retry_max: Duration,
    /// How often a failure that is not a full disk is tried again before giving up.
    pub io_retries_max: u32,
}

impl Default for CommitSettings {
    fn default() -> Self {
        CommitSettings {
            interval: Duration::from_secs(1),
            max_pending_bytes: 8 << 20,
            retry_first: Duration::from_millis(200),
            retry_max: Duration::from_secs(5),
            io_retries_max: 3,
        }
    }
}

/// Why nothing can be written just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockKind {
    /// No space or no quota left: somebody can make room, so it is tried for ever.
    DiskFull,
    /// Anything else: tried a few times, then given up.
    Io,
}

impl BlockKind {
    /// Tells the two apart.
    pub fn of(error: &io::Error) -> BlockKind {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => BlockKind::DiskFull,
            _ => BlockKind::Io,
        }
    }
}

/// What the commit thread does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Sync now.
    Sync,
    /// Nothing before this time, unless something is submitted.
    WaitUntil(Duration),
    /// Nothing until something is submitted.
    Idle,
    /// Nothing any more: given up.
    GivenUp,
}

/// What a failure means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It will be tried again; `begins` if this failure begins an episode.
    Blocked {
        /// Whether the episode begins with this failure.
        begins: bool,
    },
    /// It will not be tried again.
    GiveUp,
}

#[derive(Clone, Copy, Debug)]
struct Episode {
    retry_at: Duration,
    wait: Duration,
    io_failures: u32,
}

/// The state machine of group commit.
#[derive(Clone, Debug)]
pub struct GroupCommit {
    settings: CommitSettings,
    pending_bytes: u64,
    oldest_at: Option<Duration>,
    flush_asked: bool,
    episode: Option<Episode>,
    given_up: bool,
}

impl GroupCommit {
    /// Nothing submitted, nothing wrong.
    pub fn new(settings: CommitSettings) -> Self {
        GroupCommit { settings, pending_bytes: 0, oldest_at: None, flush_asked: false, episode: None, given_up: false }
    }

    /// A record of this many bytes was submitted at `at`.
    pub fn submitted(&mut self, bytes: u64, at: Duration) {
        self.pending_bytes += bytes;
        self.oldest_at = Some(self.oldest_at.map_or(at, |oldest| oldest.min(at)));
    }

    /// Whoever waits wants what is there synced now. Does not shorten the wait between attempts.
    pub fn flush(&mut self) {
        self.flush_asked = self.oldest_at.is_some();
    }

    /// The next attempt is due now, whatever was agreed: the last chance before shutdown.
    pub fn retry_now(&mut self, now: Duration) {
        if let Some(episode) = &mut self.episode {
            episode.retry_at = now;
        }
    }

    /// What to do at `now`.
    pub fn next(&self, now: Duration) -> Next {
        let Some(oldest_at) = self.oldest_at else { return Next::Idle };
        if self.given_up {
            return Next::GivenUp;
        }
        let due = match self.episode {
            Some(episode) => episode.retry_at,
            None if self.flush_asked || self.pending_bytes >= self.settings.max_pending_bytes => now,
            None => oldest_at + self.settings.interval,
        };
        if due <= now { Next::Sync } else { Next::WaitUntil(due) }
    }

    /// Below so many pending bytes a further record changes nothing about what is next at `now`.
    pub fn wake_at_bytes(&self, now: Duration) -> u64 {
        match self.next(now) {
            Next::WaitUntil(_) => self.settings.max_pending_bytes,
            Next::Sync | Next::Idle | Next::GivenUp => 0,
        }
    }

    /// Everything submitted is durable; tells whether that ends an episode.
    pub fn synced(&mut self) -> bool {
        self.pending_bytes = 0;
        self.oldest_at = None;
        self.flush_asked = false;
        self.episode.take().is_some()
    }

    /// A sync failed at `now`; everything submitted still waits, less what `durable_bytes` says.
    pub fn failed(&mut self, kind: BlockKind, durable_bytes: u64, now: Duration) -> Verdict {
        self.pending_bytes = self.pending_bytes.saturating_sub(durable_bytes);
        let begins = self.episode.is_none();
        let mut episode =
            self.episode.unwrap_or(Episode { retry_at: now, wait: self.settings.retry_first, io_failures: 0 });
        episode.io_failures += u32::from(kind == BlockKind::Io);
        episode.retry_at = now + episode.wait;
        episode.wait = (episode.wait * 2).min(self.settings.retry_max);
        self.given_up = episode.io_failures > self.settings.io_retries_max;
        self.episode = Some(episode);
        if self.given_up { Verdict::GiveUp } else { Verdict::Blocked { begins } }
    }

    /// Whether everything submitted is durable.
    pub fn is_idle(&self) -> bool {
        self.oldest_at.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn fresh() -> GroupCommit {
        GroupCommit::new(CommitSettings { max_pending_bytes: 100, ..CommitSettings::default() })
    }

    #[test]
    fn the_oldest_record_sets_the_time() {
        let mut group = fresh();
        assert_eq!(group.next(ms(5)), Next::Idle);
        group.submitted(10, ms(20));
        group.submitted(10, ms(900));
        assert_eq!(group.next(ms(900)), Next::WaitUntil(ms(1020)));
        assert_eq!(group.next(ms(1020)), Next::Sync);
        assert!(!group.synced());
        assert_eq!(group.next(ms(1020)), Next::Idle);
    }

    #[test]
    fn many_bytes_or_a_flush_do_not_wait() {
        let mut group = fresh();
        group.submitted(99, ms(0));
        assert_eq!(group.next(ms(1)), Next::WaitUntil(ms(1000)));
        group.submitted(1, ms(1));
        assert_eq!(group.next(ms(1)), Next::Sync);
        group.synced();
        group.flush();
        group.submitted(1, ms(2));
        assert_eq!(group.next(ms(2)), Next::WaitUntil(ms(1002)), "a flush of nothing is over at once");
        group.flush();
        assert_eq!(group.next(ms(2)), Next::Sync);
    }

    #[test]
    fn a_full_disk_is_tried_for_ever_with_growing_waits() {
        let mut group = fresh();
        group.submitted(1000, ms(0));
        let mut now = ms(0);
        let mut waits = Vec::new();
        for attempt in 0..100 {
            let verdict = group.failed(BlockKind::DiskFull, 0, now);
            assert_eq!(verdict, Verdict::Blocked { begins: attempt == 0 });
            group.flush();
            let Next::WaitUntil(then) = group.next(now) else { panic!("no wait after attempt {attempt}") };
            waits.push((then - now).as_millis());
            now = then;
        }
        assert_eq!(waits[..7], [200, 400, 800, 1600, 3200, 5000, 5000]);
        assert!(group.synced(), "the episode ends");
        group.submitted(1, now);
        assert_eq!(group.failed(BlockKind::DiskFull, 0, now), Verdict::Blocked { begins: true });
        assert_eq!(group.next(now), Next::WaitUntil(now + ms(200)), "waits start small again");
    }

    #[test]
    fn other_errors_are_tried_three_times_and_never_again() {
        let mut group = fresh();
        group.submitted(1, ms(0));
        assert_eq!(group.failed(BlockKind::Io, 0, ms(0)), Verdict::Blocked { begins: true });
        assert_eq!(group.failed(BlockKind::DiskFull, 0, ms(1)), Verdict::Blocked { begins: false });
        assert_eq!(group.failed(BlockKind::Io, 0, ms(2)), Verdict::Blocked { begins: false });
        assert_eq!(group.failed(BlockKind::Io, 0, ms(3)), Verdict::Blocked { begins: false });
        assert_eq!(group.failed(BlockKind::Io, 0, ms(4)), Verdict::GiveUp);
        group.retry_now(ms(5));
        assert_eq!(group.next(ms(100_000)), Next::GivenUp);
    }

    #[test]
    fn shutdown_does_not_wait_for_the_next_attempt() {
        let mut group = fresh();
        group.submitted(1, ms(0));
        group.failed(BlockKind::DiskFull, 0, ms(0));
        assert_eq!(group.next(ms(10)), Next::WaitUntil(ms(200)));
        group.retry_now(ms(10));
        assert_eq!(group.next(ms(10)), Next::Sync);
    }

    #[test]
    fn quota_and_space_are_told_from_a_broken_disk() {
        assert_eq!(BlockKind::of(&io::Error::from(rustix::io::Errno::NOSPC)), BlockKind::DiskFull);
        assert_eq!(BlockKind::of(&io::Error::from(rustix::io::Errno::DQUOT)), BlockKind::DiskFull);
        assert_eq!(BlockKind::of(&io::Error::from(rustix::io::Errno::IO)), BlockKind::Io);
        assert_eq!(BlockKind::of(&io::Error::from(rustix::io::Errno::ROFS)), BlockKind::Io);
    }
}
