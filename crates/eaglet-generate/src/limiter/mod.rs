//! How many requests are out at one server: climbs to the knee, holds it, follows it. Pure: no clock, no I/O; it is fed windows of measurements.
//!
//! What is sought is the smallest limit whose token rate is within 1 to 2 % of the best. The signals, strongest first:
//!
//! 1. Back-pressure (429, 503): one decrease, then none until the requests that were out have been answered; back up while replies are clean.
//! 2. The server's queue and preemptions, where it reports them: requests that wait, or are thrown out of the batch, bring nothing.
//! 3. The token rate, in paired trials: the same server at two limits, one after the other. A step is worth it by its elasticity, the share of the
//!    change in requests out that came back as a change in rate; so the rule is the same at 8 and at 800.
//!
//! Not here: the time of a request. It grows with the limit on any batching server, saturated or not (`docs/design/0004-concurrency.md`).
//!
//! Invariants: the limit is always within the bounds of the settings; one window lowers it at most once; what it does depends on nothing but the
//! windows it was given.

mod ceiling;
mod search;
mod trial;
mod window;

pub use window::{Gauges, RateSource, Window};

use ceiling::Ceiling;
use search::Search;
use std::fmt;
use trial::{COARSE, FINE, Measured, Trial};

/// Bounds and start.
#[derive(Clone, Copy, Debug)]
pub struct LimiterSettings {
    /// The first limit.
    pub initial: usize,
    /// Never below; at least 1.
    pub min: usize,
    /// Never above.
    pub max: usize,
    /// Where the token rate comes from.
    pub source: RateSource,
}

impl LimiterSettings {
    /// The first limit, unless the highest is lower: small enough for any server, four doublings from 256.
    pub const INITIAL: usize = 16;

    /// From 1 to `max`, starting at [`INITIAL`](Self::INITIAL).
    pub fn up_to(max: usize) -> Self {
        let max = max.max(1);
        LimiterSettings { initial: Self::INITIAL.min(max), min: 1, max, source: RateSource::Stream }
    }
}

/// Why the limit changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reason {
    /// The climb: the rate still grew.
    Climbing {
        /// Tokens per second at the old limit.
        rate: f64,
    },
    /// The climb is over: the last step brought too little.
    KneePassed {
        /// Change of the rate by the last doubling, as a share.
        gain: f64,
    },
    /// A trial of another limit.
    Trying,
    /// The limit tried was no better.
    NotBetter {
        /// Change of the rate, as a share.
        gain: f64,
    },
    /// The limit tried was better, and the next one is tried.
    Better {
        /// Change of the rate, as a share.
        gain: f64,
    },
    /// The peak between the limits tried.
    Peak,
    /// The server asks for less.
    BackPressure {
        /// Such replies in the window.
        replies: u64,
    },
    /// Replies are clean again.
    Recovering,
    /// Requests wait in the server's queue.
    Queue {
        /// Requests that wait, mean.
        waiting: f64,
    },
    /// The server throws sequences out of its batch.
    Preemptions {
        /// For each answer.
        per_answer: f64,
    },
    /// The server was away.
    Restarted,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |gain: f64| gain * 100.0;
        match self {
            Reason::Climbing { rate } => write!(f, "the rate still grows ({rate:.0} tok/s)"),
            Reason::KneePassed { gain } => write!(f, "the last doubling brought {:+.1} %", percent(*gain)),
            Reason::Trying => f.write_str("trying"),
            Reason::NotBetter { gain } => write!(f, "no better ({:+.1} %)", percent(*gain)),
            Reason::Better { gain } => write!(f, "better ({:+.1} %)", percent(*gain)),
            Reason::Peak => f.write_str("the peak between the limits tried"),
            Reason::BackPressure { replies } => write!(f, "the server asked for less ({replies} times)"),
            Reason::Recovering => f.write_str("no refusals since"),
            Reason::Queue { waiting } => write!(f, "{waiting:.0} requests wait in the server's queue"),
            Reason::Preemptions { per_answer } => write!(f, "{per_answer:.2} preemptions for each answer"),
            Reason::Restarted => f.write_str("the server was away"),
        }
    }
}

/// A change of the limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// Before.
    pub from: usize,
    /// Now.
    pub to: usize,
    /// Why.
    pub reason: Reason,
}

/// What the limiter is doing.
#[derive(Clone, Debug)]
enum Phase {
    /// Doubling, with the measurement before the last doubling.
    Climb(Option<Measured>),
    /// Trying limits on both sides.
    Search(Box<Search>),
    /// Staying, until a time comes or the rate leaves what it was.
    Hold { reference: Measured, until_s: f64, drift: Drift },
    /// After back-pressure: back up in steps while replies are clean.
    Recover,
}

/// A rate that leaves its reference, as a moving mean.
#[derive(Clone, Copy, Debug)]
struct Drift {
    rate: f64,
    seconds: f64,
}

/// A doubling whose elasticity is below this ends the climb.
const CLIMB_ELASTICITY_MIN: f64 = 0.09;
/// A doubling that brings less than this, as a share, is taken back.
const CLIMB_GAIN_MIN: f64 = 0.02;
/// First time in hold before the next search, in seconds; doubles while nothing changes.
const HOLD_FIRST_S: f64 = 120.0;
/// Longest time in hold, in seconds.
const HOLD_MAX_S: f64 = 900.0;
/// A rate that differs so much from the reference, as a share, for a while means that something changed.
const DRIFT_SHARE: f64 = 0.05;
/// For so long, in seconds, and as the time constant of the mean.
const DRIFT_S: f64 = 30.0;
/// Server signals are means over about so many seconds.
const SIGNAL_S: f64 = 8.0;
/// A queue above this share of the limit, and above [`QUEUE_MIN`] requests, is beyond the knee.
const QUEUE_SHARE: f64 = 0.05;
const QUEUE_MIN: f64 = 2.0;
/// Without gauges: requests that have no token yet, as a share of the limit, while nothing is known about lengths.
const UNSTARTED_SHARE: f64 = 0.2;
/// A new request waits for the step that is under way, and then is computed: so many steps without a token are no queue.
const STEPS_TO_START: f64 = 2.0;
/// The same where requests without a token stand for the queue: the step that computes the prompt counts too.
const STEPS_TO_FIRST_TOKEN: f64 = 4.0;
/// More preemptions for each answer than this are beyond the knee: each costs the computation of everything its sequence had.
const PREEMPTIONS_PER_ANSWER_MAX: f64 = 0.5;
/// Fewer answers than this, or an eighth of the limit, say nothing about that.
const ANSWERS_TO_JUDGE: f64 = 16.0;
/// What the server's own signs say is useful is not exact; up to so much more may be tried.
const BEYOND_USEFUL: f64 = 1.08;
/// Back-pressure lowers the limit to this share at most and to [`BACK_PRESSURE_SHARE_MIN`] at least.
const BACK_PRESSURE_SHARE: f64 = 0.85;
const BACK_PRESSURE_SHARE_MIN: f64 = 0.5;
/// Refused replies of all replies, after a decrease: above this share the next one follows, below the other the limit rises.
const REFUSED_SHARE_MAX: f64 = 0.4;
const REFUSED_SHARE_CLEAN: f64 = 0.05;
/// Fewer replies than this say nothing about shares.
const REPLIES_TO_JUDGE: f64 = 16.0;
/// So long after a decrease, in seconds, refusals count although no slot went round.
const REFUSED_S: f64 = 20.0;
/// One step of the recovery.
const RECOVER_FACTOR: f64 = 1.1;

/// The limiter of one server.
#[derive(Clone, Debug)]
pub struct Limiter {
    settings: LimiterSettings,
    limit: usize,
    now_s: f64,
    phase: Phase,
    trial: Trial,
    ceiling: Ceiling,
    hold_s: f64,
    /// Requests that were out at the last decrease and are not answered yet: until then no second decrease.
    cohort_left: f64,
    /// Clean replies since the last step of the recovery.
    clean: f64,
    /// Refused ones since then.
    refused: f64,
    recover_to: usize,
    /// Whether a limit held since the last refusals that lowered it.
    went_well: bool,
    queue: f64,
    preempted: f64,
    answered: f64,
    /// Mean tokens of an answer, of late.
    answer_tokens: Option<f64>,
    since_change_s: f64,
}

impl Limiter {
    /// A limiter at its first limit.
    pub fn new(settings: LimiterSettings) -> Self {
        let max = settings.max.max(1);
        let settings = LimiterSettings { max, min: settings.min.clamp(1, max), ..settings };
        Limiter {
            limit: settings.initial.clamp(settings.min, settings.max),
            settings,
            now_s: 0.0,
            phase: Phase::Climb(None),
            trial: Trial::default(),
            ceiling: Ceiling::default(),
            hold_s: HOLD_FIRST_S,
            cohort_left: 0.0,
            clean: 0.0,
            refused: 0.0,
            recover_to: 0,
            went_well: false,
            queue: 0.0,
            preempted: 0.0,
            answered: 0.0,
            answer_tokens: None,
            since_change_s: 0.0,
        }
    }

    /// Requests that may be out.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Whether it stays where it is for now.
    pub fn is_holding(&self) -> bool {
        matches!(self.phase, Phase::Hold { .. })
    }

    /// The server was away and is back: half of what was out comes back at once, the rest if it goes well.
    pub fn restarted(&mut self) -> Option<Change> {
        self.phase = Phase::Climb(None);
        (self.queue, self.preempted, self.answered, self.cohort_left) = (0.0, 0.0, 0.0, 0.0);
        self.set(self.limit as f64 / 2.0, Reason::Restarted)
    }

    /// Takes a window; the change it led to.
    pub fn observe(&mut self, window: &Window) -> Option<Change> {
        let seconds = window.seconds();
        self.now_s += seconds;
        self.since_change_s += seconds;
        self.ceiling.pass(self.now_s);
        self.take_signals(window);
        let replies = (window.completions + window.back_pressure) as f64;
        let is_new_cohort = self.cohort_left <= 0.0;
        self.cohort_left = (self.cohort_left - replies).max(0.0);
        if window.back_pressure > 0 && is_new_cohort && !matches!(self.phase, Phase::Recover) {
            if !self.ceiling.is_known() {
                return self.back_pressure(window);
            }
            // It was so not long ago: whether these are few or many is seen before anything is done.
            (self.clean, self.refused, self.went_well) = (0.0, 0.0, true);
            self.recover_to = self.limit;
            self.phase = Phase::Recover;
        }
        if let Some(change) = self.beyond_the_knee(window) {
            return Some(change);
        }
        match &mut self.phase {
            Phase::Recover => return self.recover(window),
            Phase::Hold { reference, until_s, drift } => {
                let is_full = window.mean_in_flight >= self.limit as f64 * 0.9;
                if is_full && self.settings.source == RateSource::Stream && drift.push(window, reference.rate) {
                    self.hold_s = HOLD_FIRST_S;
                } else if self.now_s < *until_s || !is_full {
                    return None;
                }
                // The limit is measured anew before it is compared with others.
                self.phase = Phase::Search(Box::new(Search::again()));
                self.trial = Trial::default();
                return None;
            }
            Phase::Climb(_) | Phase::Search(_) => {}
        }
        let precision = if matches!(self.phase, Phase::Climb(_)) { COARSE } else { FINE };
        let measured = self.trial.push(window, self.limit, self.settings.source, precision, self.now_s)?;
        self.trial = Trial::default();
        self.measured(measured)
    }

    fn measured(&mut self, now: Measured) -> Option<Change> {
        match std::mem::replace(&mut self.phase, Phase::Recover) {
            Phase::Climb(before) => self.climbed(before, now),
            Phase::Search(mut search) => {
                let bounds = (self.settings.min, self.highest());
                let step = search.measured(now, self.limit, bounds);
                self.phase = Phase::Search(search);
                match step {
                    search::Step::Try(limit, reason) => self.set(limit, reason),
                    search::Step::Measure => None,
                    search::Step::Settle(limit, reference, reason) => {
                        self.hold(reference);
                        self.set(limit, reason)
                    }
                }
            }
            phase @ (Phase::Hold { .. } | Phase::Recover) => {
                self.phase = phase;
                None
            }
        }
    }

    fn climbed(&mut self, before: Option<Measured>, now: Measured) -> Option<Change> {
        let gain = before.map_or(f64::INFINITY, |before| now.rate / before.rate - 1.0);
        let elasticity = before.map_or(1.0, |before| before.elasticity_to(&now));
        let highest = self.highest();
        if elasticity >= CLIMB_ELASTICITY_MIN && self.limit < highest {
            self.phase = Phase::Climb(Some(now));
            return self.set(self.limit as f64 * 2.0, Reason::Climbing { rate: now.rate });
        }
        self.phase = Phase::Search(Box::new(Search::first()));
        let before = before.filter(|_| elasticity < CLIMB_ELASTICITY_MIN)?;
        let is_sure = gain + before.error.hypot(now.error) < CLIMB_GAIN_MIN;
        let back_to = if is_sure { before.in_flight } else { (before.in_flight * now.in_flight).sqrt() };
        self.set(back_to, Reason::KneePassed { gain })
    }

    fn hold(&mut self, reference: Measured) {
        self.phase = Phase::Hold {
            reference,
            until_s: self.now_s + self.hold_s,
            drift: Drift { rate: reference.rate, seconds: 0.0 },
        };
        self.hold_s = (self.hold_s * 2.0).min(HOLD_MAX_S);
    }

    /// The highest limit worth a trial now.
    fn highest(&self) -> usize {
        self.ceiling.limit().map_or(self.settings.max, |ceiling| ceiling.clamp(self.settings.min, self.settings.max))
    }

    fn set(&mut self, limit: f64, reason: Reason) -> Option<Change> {
        let to = (limit.round() as usize).clamp(self.settings.min, self.settings.max);
        let from = std::mem::replace(&mut self.limit, to);
        self.trial = Trial::default();
        if from == to {
            return None;
        }
        self.since_change_s = 0.0;
        Some(Change { from, to, reason })
    }

    fn take_signals(&mut self, window: &Window) {
        let share = (window.seconds() / SIGNAL_S).min(1.0);
        let mix = |old: &mut f64, new: f64| *old += (new - *old) * share;
        let (waiting, _) = self.waiting(window);
        mix(&mut self.queue, waiting.unwrap_or(0.0));
        // Counts that fade: preemptions for each answer over about the last turn of the batch.
        let keep = (-(window.completions as f64) / (self.limit as f64).max(4.0)).exp();
        self.preempted = self.preempted * keep + window.gauges.preemptions.unwrap_or(0.0).max(0.0);
        self.answered = self.answered * keep + window.completions as f64;
        if window.completions > 0 {
            let mean = window.completed_tokens as f64 / window.completions as f64;
            let old = self.answer_tokens.unwrap_or(mean);
            self.answer_tokens = Some(old + (mean - old) * (1.0 - keep).max(0.02));
        }
    }

    /// Requests that wait, and how many are no reason to worry.
    fn waiting(&self, window: &Window) -> (Option<f64>, f64) {
        let limit = self.limit as f64;
        // Requests that begin in one step of the server: those out over the tokens of each.
        let begin_in_a_step = self.answer_tokens.map(|tokens| window.mean_in_flight / tokens.max(1.0));
        let few = (limit * QUEUE_SHARE).max(QUEUE_MIN);
        match (window.gauges.waiting, window.mean_unstarted) {
            (Some(waiting), _) => (Some(waiting), few + STEPS_TO_START * begin_in_a_step.unwrap_or(0.0)),
            (None, unstarted) => {
                let more = begin_in_a_step.map_or(limit * UNSTARTED_SHARE, |begin| STEPS_TO_FIRST_TOKEN * begin);
                (unstarted, few + more)
            }
        }
    }

    /// The server's own signs that more is out than it can use.
    fn beyond_the_knee(&mut self, window: &Window) -> Option<Change> {
        // A larger limit first fills the queue with prompts to be computed; that is no sign of anything.
        if self.cohort_left > 0.0 || self.since_change_s < SIGNAL_S {
            return None;
        }
        let (waiting, few) = self.waiting(window);
        let waiting = waiting?.min(self.queue);
        let full = window.mean_in_flight.min(self.limit as f64);
        if waiting > few && full >= self.limit as f64 * 0.8 {
            // Others may use the server too: our share of the queue is taken back, not all of it.
            let running = window.gauges.running.unwrap_or(full - waiting).max(1.0);
            let useful = full * running / (running + waiting);
            return self.lower(useful.max(full * 0.5) + 1.0, Reason::Queue { waiting });
        }
        let per_answer = self.preempted / self.answered.max(1.0);
        let enough = self.answered >= ANSWERS_TO_JUDGE.max(self.limit as f64 / 8.0);
        if enough && per_answer > PREEMPTIONS_PER_ANSWER_MAX {
            let running = window.gauges.running.unwrap_or(full);
            return self
                .lower((self.limit as f64 * 0.9).min(running.max(full * 0.7)), Reason::Preemptions { per_answer });
        }
        None
    }

    /// A decrease on the server's word, with a ceiling above it for a while.
    fn lower(&mut self, to: f64, reason: Reason) -> Option<Change> {
        if to.round() as usize >= self.limit {
            return None;
        }
        self.ceiling.hit(((to * BEYOND_USEFUL) as usize + 1).min(self.limit), self.now_s);
        self.cohort_left = self.limit as f64 - to;
        (self.queue, self.preempted, self.answered) = (0.0, 0.0, 0.0);
        // The server said where the knee is: only its neighbourhood is searched.
        self.phase = Phase::Search(Box::new(Search::again()));
        self.set(to, reason)
    }

    /// One decrease for all refusals among the requests that are out now.
    fn back_pressure(&mut self, window: &Window) -> Option<Change> {
        let limit = self.limit as f64;
        let proven = self.ceiling.proven().filter(|proven| *proven < self.limit && *proven as f64 >= limit * 0.5);
        let taken = window.mean_in_flight - window.refused_time.as_secs_f64() / window.seconds();
        let to = match proven {
            Some(proven) => proven as f64,
            None => taken.clamp(limit * BACK_PRESSURE_SHARE_MIN, limit * BACK_PRESSURE_SHARE),
        };
        self.cohort_left = limit.max(window.mean_in_flight);
        // Cuts that follow each other before anything went well belong to one accident, whose ceiling is where it began.
        if self.went_well || !matches!(self.phase, Phase::Recover) {
            let is_first = !self.ceiling.is_known();
            self.ceiling.hit(self.limit, self.now_s);
            self.recover_to = if is_first { self.limit } else { self.highest() };
        }
        self.went_well = false;
        (self.clean, self.refused) = (0.0, 0.0);
        self.phase = Phase::Recover;
        self.set(to, Reason::BackPressure { replies: window.back_pressure })
    }

    /// After a decrease: up while replies are clean, down again while many are refused, and in between it stays. A few refusals are how a gateway that
    /// counts requests per minute paces its clients; they cost nothing, and fewer requests out would not avoid them.
    fn recover(&mut self, window: &Window) -> Option<Change> {
        self.clean += window.completions as f64;
        self.refused += window.back_pressure as f64;
        let share = self.refused / (self.clean + self.refused).max(1.0);
        // A quarter of the slots went round, or refusals kept them from it.
        let went_round = self.clean >= (self.limit as f64 / 4.0).max(2.0);
        let is_over = self.clean + self.refused >= REPLIES_TO_JUDGE && share > REFUSED_SHARE_MAX;
        if is_over && self.cohort_left <= 0.0 && (went_round || self.since_change_s >= REFUSED_S) {
            return self.back_pressure(window);
        }
        if !went_round {
            return None;
        }
        if share > REFUSED_SHARE_CLEAN {
            if self.clean + self.refused >= REPLIES_TO_JUDGE {
                (self.clean, self.refused) = (0.0, 0.0);
            }
            return None;
        }
        (self.clean, self.refused) = (0.0, 0.0);
        self.ceiling.held(self.limit);
        self.went_well = true;
        if self.limit >= self.recover_to {
            self.phase = Phase::Search(Box::new(Search::first()));
            return None;
        }
        let to = (self.limit as f64 * RECOVER_FACTOR).max(self.limit as f64 + 1.0).min(self.recover_to as f64);
        self.set(to, Reason::Recovering)
    }
}

impl Drift {
    /// Takes a window; whether the rate has left the reference for good.
    fn push(&mut self, window: &Window, reference: f64) -> bool {
        let seconds = window.seconds();
        self.rate += (window.tokens as f64 / seconds - self.rate) * (seconds / DRIFT_S).min(1.0);
        let is_off = (self.rate / reference - 1.0).abs() > DRIFT_SHARE;
        self.seconds = if is_off { self.seconds + seconds } else { 0.0 };
        self.seconds >= DRIFT_S
    }
}

#[cfg(test)]
mod tests;
