//! Which server gets the next request. Pure: no clock, no I/O.
//!
//! The least loaded one, relative to its limit. A server whose requests break one after another is left out for a while (ejected), then gets one
//! request as a probe (half open), and is back when that one is answered. The last usable server is never left out: its failures are then the
//! prompts' retries, as with one server.
//!
//! Invariant: no choice brings a server above its limit, or to a server that is down.

use std::time::Duration;

/// So many requests in a row broken by the transport leave a server out.
pub const FAILURES_IN_A_ROW_MAX: u32 = 3;
/// First time a server is left out; doubles each time its probe fails.
const OUT_FIRST: Duration = Duration::from_secs(5);
/// Longest time a server is left out before a probe.
const OUT_MAX: Duration = Duration::from_secs(60);

/// After a refusal (429, 503) the server gets nothing for so long, or for what it asks: the slot is free at once, and without a pause the next prompt
/// would be refused in it some milliseconds later. Doubles while refusals go on.
const HOLD_OFF: Duration = Duration::from_millis(250);
/// Longest such pause. The prompt itself waits as long as its `Retry-After` says; the server may take others sooner.
const HOLD_OFF_MAX: Duration = Duration::from_secs(2);
/// For some time after a refusal requests go out one by one, so far apart that each could be refused before the next.
const TRICKLE: Duration = Duration::from_millis(50);
/// Refusals further apart than this are not one after another.
const HOLD_OFF_FORGOTTEN: Duration = Duration::from_secs(5);

/// How a server's last requests went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// As they should.
    #[default]
    Good,
    /// Left out until this time (since any fixed start).
    Out {
        /// When a probe may go.
        until: Duration,
    },
    /// One request is out to see whether it is well again.
    Probing,
}

/// The health of one server, from what became of its requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Record {
    health: Health,
    failures: u32,
    times_out: u32,
    hold_off: Duration,
    hold_off_until: Duration,
    refused_at: Duration,
}

impl Record {
    /// How it is.
    pub fn health(&self) -> Health {
        self.health
    }

    /// A request got an answer of any kind: the transport works. True when that brought the server back.
    pub fn worked(&mut self) -> bool {
        let was_out = self.health != Health::Good;
        let Record { hold_off, hold_off_until, refused_at, .. } = *self;
        *self = Record { hold_off, hold_off_until, refused_at, ..Record::default() };
        was_out
    }

    /// The server refused a request for now. When it may get the next one.
    pub fn refused(&mut self, now: Duration, retry_after: Option<Duration>) -> Duration {
        self.worked();
        let goes_on = !self.hold_off.is_zero() && now < self.refused_at + HOLD_OFF_FORGOTTEN;
        // Refusals of requests that were sent together are one.
        if !goes_on || now >= self.refused_at + self.hold_off {
            self.hold_off = if goes_on { (self.hold_off * 2).min(HOLD_OFF_MAX) } else { HOLD_OFF };
            self.refused_at = now;
        }
        let pause = retry_after.unwrap_or(self.hold_off).clamp(self.hold_off, HOLD_OFF_MAX);
        self.hold_off_until = self.hold_off_until.max(now + pause);
        self.hold_off_until
    }

    /// When it may get the next request.
    pub fn hold_off_until(&self) -> Duration {
        self.hold_off_until
    }

    /// A request broke on the way. True when that put the server out.
    pub fn broke(&mut self, now: Duration) -> bool {
        self.failures += 1;
        let is_out =
            self.health == Health::Probing || (self.health == Health::Good && self.failures >= FAILURES_IN_A_ROW_MAX);
        if is_out {
            let wait = OUT_FIRST.saturating_mul(1 << self.times_out.min(10)).min(OUT_MAX);
            self.times_out += 1;
            self.health = Health::Out { until: now + wait };
        }
        is_out
    }

    /// A request goes to it: where it was out, that is its probe. When it may get the next one, if that is not at once.
    pub fn sent(&mut self, now: Duration) -> Option<Duration> {
        if matches!(self.health, Health::Out { .. }) {
            self.health = Health::Probing;
        }
        let refused_of_late = !self.hold_off.is_zero() && now < self.refused_at + HOLD_OFF_FORGOTTEN;
        refused_of_late.then(|| {
            self.hold_off_until = self.hold_off_until.max(now + TRICKLE);
            self.hold_off_until
        })
    }

    /// The probe was given up before it said anything: another may go.
    pub fn probe_given_up(&mut self, now: Duration) {
        if self.health == Health::Probing {
            self.health = Health::Out { until: now };
        }
    }

    /// It was down and is back: what broke before does not count.
    pub fn is_back(&mut self) {
        *self = Record::default();
    }
}

/// A server as the choice sees it.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Requests that may be out.
    pub limit: usize,
    /// Requests that are.
    pub in_flight: usize,
    /// Whether it may get requests at all: not down, not removed.
    pub is_up: bool,
    /// How its last requests went.
    pub health: Health,
    /// It gets nothing before this time.
    pub hold_off_until: Duration,
}

/// Index of the server for the next request; `None` when all have what they may have. `avoid`: where the request broke before; it goes there again only
/// if no other server may take any.
pub fn choose(servers: &[Candidate], avoid: Option<usize>, now: Duration) -> Option<usize> {
    let is_usable = |c: &Candidate| c.is_up && c.health == Health::Good;
    let others_usable = servers.iter().enumerate().any(|(index, c)| Some(index) != avoid && is_usable(c));
    // A probe goes first: it is one request, and what is waited for is a whole server.
    let probe = servers.iter().position(|c| {
        matches!(c.health, Health::Out { until } if until <= now) && c.is_up && c.in_flight < c.limit.max(1)
    });
    if probe.is_some() && probe != avoid {
        return probe;
    }
    let none_is_usable = !servers.iter().any(is_usable);
    let may_take = |index: usize, c: &Candidate| {
        c.is_up
            && c.in_flight < c.limit
            && c.hold_off_until <= now
            && (c.health == Health::Good || none_is_usable)
            && (Some(index) != avoid || !others_usable)
    };
    let load = |c: &Candidate| (c.in_flight as f64 + 1.0) / c.limit as f64;
    let free = servers.iter().enumerate().filter(|(index, c)| may_take(*index, c));
    free.min_by(|(_, a), (_, b)| load(a).total_cmp(&load(b))).map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NOW: Duration = Duration::from_secs(100);

    fn server(limit: usize, in_flight: usize) -> Candidate {
        Candidate { limit, in_flight, is_up: true, health: Health::Good, hold_off_until: Duration::ZERO }
    }

    #[test]
    fn the_least_loaded_relative_to_its_limit_gets_it() {
        assert_eq!(choose(&[server(100, 50), server(10, 4)], None, NOW), Some(1));
        assert_eq!(choose(&[server(100, 50), server(10, 6)], None, NOW), Some(0));
        assert_eq!(choose(&[server(2, 2), server(1, 1)], None, NOW), None);
    }

    #[test]
    fn a_server_that_broke_requests_is_left_out_probed_and_back() {
        let mut record = Record::default();
        assert!(!record.broke(NOW) && !record.broke(NOW));
        assert!(record.broke(NOW), "the third in a row");
        let as_candidate = |record: &Record| Candidate { health: record.health(), ..server(8, 0) };
        let servers = |record: &Record| [as_candidate(record), server(8, 5)];
        assert_eq!(choose(&servers(&record), None, NOW), Some(1));
        assert_eq!(choose(&servers(&record), None, NOW + OUT_FIRST), Some(0), "its probe");
        record.sent(NOW);
        assert_eq!(choose(&servers(&record), None, NOW + OUT_FIRST), Some(1), "one probe only");
        assert!(record.broke(NOW + OUT_FIRST));
        assert_eq!(record.health(), Health::Out { until: NOW + OUT_FIRST + 2 * OUT_FIRST });
        record.sent(NOW);
        assert!(record.worked());
        assert_eq!(choose(&servers(&record), None, NOW), Some(0));
    }

    #[test]
    fn a_server_that_refused_gets_nothing_for_a_moment() {
        let mut record = Record::default();
        record.refused(NOW, None);
        let servers = [Candidate { hold_off_until: record.hold_off_until(), ..server(8, 0) }];
        assert_eq!(choose(&servers, None, NOW), None);
        assert_eq!(choose(&servers, None, NOW + HOLD_OFF), Some(0));
        assert_eq!(record.sent(NOW + HOLD_OFF), Some(NOW + HOLD_OFF + TRICKLE), "one by one at first");
        assert_eq!(record.refused(NOW + HOLD_OFF, None), NOW + 3 * HOLD_OFF, "twice as long");
        assert_eq!(record.refused(NOW + HOLD_OFF, None), NOW + 3 * HOLD_OFF, "refused together");
        assert_eq!(record.refused(NOW + HOLD_OFF, Some(Duration::from_secs(600))), NOW + HOLD_OFF + HOLD_OFF_MAX);
        let later = NOW + HOLD_OFF + HOLD_OFF_FORGOTTEN;
        assert_eq!(record.sent(later), None, "all is forgotten");
        assert_eq!(record.refused(later, None), later + HOLD_OFF);
    }

    #[test]
    fn a_success_between_failures_starts_the_count_anew() {
        let mut record = Record::default();
        for _ in 0..10 {
            assert!(!record.broke(NOW) && !record.broke(NOW));
            record.worked();
        }
    }

    #[test]
    fn the_last_usable_server_is_never_left_out() {
        let out = Candidate { health: Health::Out { until: NOW * 2 }, ..server(4, 1) };
        assert_eq!(choose(&[out], Some(0), NOW), Some(0));
        let down = Candidate { is_up: false, ..server(4, 0) };
        assert_eq!(choose(&[out, down], None, NOW), Some(0));
        assert_eq!(choose(&[down], None, NOW), None);
    }

    #[test]
    fn a_retry_prefers_another_server() {
        assert_eq!(choose(&[server(8, 0), server(8, 7)], Some(0), NOW), Some(1));
        assert_eq!(choose(&[server(8, 0), server(8, 8)], Some(0), NOW), None, "it waits for the other one");
        let down = Candidate { is_up: false, ..server(8, 0) };
        assert_eq!(choose(&[server(8, 0), down], Some(0), NOW), Some(0), "there is no other");
    }

    proptest! {
        #[test]
        fn a_choice_is_up_and_below_its_limit(
            servers in prop::collection::vec((0usize..9, 0usize..9, any::<bool>(), 0u8..4), 1..6),
            avoid in prop::option::of(0usize..6),
        ) {
            let health = [Health::Good, Health::Probing, Health::Out { until: NOW * 2 }, Health::Out { until: NOW / 2 }];
            let servers: Vec<Candidate> = servers
                .into_iter()
                .map(|(limit, in_flight, is_up, h)| Candidate { limit: limit.max(1), in_flight, is_up, health: health[usize::from(h)], hold_off_until: Duration::ZERO })
                .collect();
            match choose(&servers, avoid, NOW) {
                Some(index) => prop_assert!(servers[index].is_up && servers[index].in_flight < servers[index].limit),
                // Nobody waits while a good server other than the avoided one has room.
                None => prop_assert!(!servers.iter().enumerate().any(|(index, c)| c.is_up && c.in_flight < c.limit
                    && c.health == Health::Good && Some(index) != avoid)),
            }
        }
    }
}
