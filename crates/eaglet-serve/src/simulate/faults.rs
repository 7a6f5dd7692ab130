//! What goes wrong with a simulated server, by script: rules with a window in time, a probability and a count.
//!
//! Pure: a time goes in, a decision comes out. All times are seconds of the pretended server since its start. Rules are independent of each
//! other; of those that would end a request, the first in the script acts.
//!
//! Invariant: the same script, seed and order of requests give the same decisions.

use eaglet_core::{Error, Result};
use serde::Deserialize;

use super::not_toml_of;
use super::span::Span;
use crate::backend::BreakOff;
use eaglet_core::random::Random;

/// A fault file: `[[fault]]` tables.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultScript {
    /// The rules, in order.
    #[serde(default, rename = "fault")]
    pub faults: Vec<Fault>,
}

/// One rule.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Fault {
    /// What goes wrong.
    pub kind: Kind,
    /// When the first window opens.
    #[serde(default)]
    pub at: Span,
    /// How long a window is; absent: for ever.
    #[serde(default, rename = "for")]
    pub length: Option<Span>,
    /// From the opening of one window to that of the next; absent: one window only.
    pub every: Option<Span>,
    /// Of a request inside a window (of a whole window for `stall`, `restart`, `shutdown`) to be hit.
    #[serde(default = "one")]
    pub probability: f64,
    /// Most requests that are hit (most windows, as above).
    pub times: Option<u64>,
    /// `refuse`: the status, 503 when absent.
    pub status: Option<u16>,
    /// `refuse`: the wait to be named in Retry-After, in seconds of the pretended server; absent: no such header.
    pub retry_after: Option<Span>,
    /// `refuse`: how it is named.
    #[serde(default)]
    pub retry_after_as: RetryAfterAs,
    /// `cut`, `hang`, `abort`, `reset`: after so many tokens. Absent: drawn up to the mean length of answers; for `reset`, before any reply.
    pub after_tokens: Option<usize>,
    /// `slow-first-token`: how long the first token is held back.
    pub delay: Option<Span>,
}

fn one() -> f64 {
    1.0
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Generations are refused with a status.
    Refuse,
    /// Connections are reset.
    Reset,
    /// Replies end in the middle.
    Cut,
    /// Single replies go silent, for ever.
    Hang,
    /// Answers end early, with status 200 and the finish reason `abort`.
    Abort,
    /// The first token comes late.
    SlowFirstToken,
    /// All streams pause.
    Stall,
    /// The engine dies: connections are reset, new ones refused, everything is forgotten; it comes back when the window ends.
    Restart,
    /// As vLLM on SIGTERM: new connections are refused, open ones go silent; it comes back, fresh, when the window ends.
    Shutdown,
    /// `/metrics` is not there.
    MetricsMissing,
    /// The gauges have names that nobody knows.
    MetricsRenamed,
}

/// How Retry-After is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RetryAfterAs {
    /// Whole seconds.
    #[default]
    Seconds,
    /// An HTTP date.
    Date,
}

/// What a request is for, as far as faults go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Chat or plain completions.
    Generation,
    /// `/metrics`.
    Metrics,
    /// Anything else.
    Other,
}

/// What happens to one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hit {
    /// Instead of a reply.
    pub instead: Option<Instead>,
    /// Seconds of the pretended server before the first token.
    pub first_token_delay_s: f64,
    /// After how many tokens the reply breaks off, and how.
    pub break_off: Option<(usize, BreakOff)>,
}

/// Instead of a reply.
#[derive(Clone, Debug, PartialEq)]
pub enum Instead {
    /// This status, with this wait in seconds of the pretended server.
    Refuse(u16, Option<(f64, RetryAfterAs)>),
    /// A reset.
    Reset,
    /// No metrics.
    NoMetrics,
    /// Metrics under other names.
    RenamedMetrics,
}

/// How the whole server is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// As it should be.
    #[default]
    Serving,
    /// Up, and nothing moves.
    Stalled,
    /// Refuses new connections, open ones are silent.
    ShutDown,
    /// Not there.
    Dead,
}

impl Fault {
    /// Reads `at=60s kind=restart for=30s`.
    ///
    /// # Errors
    /// `Usage` when a part is no `key=value`, or the whole is no fault.
    pub fn from_line(line: &str) -> Result<Self> {
        let mut table = toml::Table::new();
        for part in line.split_whitespace() {
            let (key, value) = part
                .split_once('=')
                .ok_or_else(|| Error::usage(format!("a fault is written as key=value pairs, got {part:?}")))?;
            let number = value.parse().map(toml::Value::Integer).ok();
            let number = number.or_else(|| value.parse().map(toml::Value::Float).ok());
            table.insert(key.to_owned(), number.unwrap_or_else(|| toml::Value::String(value.to_owned())));
        }
        let fault: Self = table.try_into().map_err(|e: toml::de::Error| {
            Error::usage(format!("not a fault: {}", e.message()))
                .hint("for example: --fault \"at=60s kind=restart for=30s\"")
        })?;
        fault.check()?;
        Ok(fault)
    }

    fn check(&self) -> Result<()> {
        let must = |holds: bool, what: String| if holds { Ok(()) } else { Err(Error::usage(what)) };
        let kind = self.kind;
        must(
            (0.0..=1.0).contains(&self.probability),
            format!("probability must be from 0 to 1, got {}", self.probability),
        )?;
        must(
            self.status.is_none_or(|status| (400..600).contains(&status)),
            "status must be from 400 to 599".to_owned(),
        )?;
        let belongs = [
            ("status", self.status.is_some(), kind == Kind::Refuse),
            ("retry-after", self.retry_after.is_some(), kind == Kind::Refuse),
            (
                "after-tokens",
                self.after_tokens.is_some(),
                matches!(kind, Kind::Cut | Kind::Hang | Kind::Abort | Kind::Reset),
            ),
            ("delay", self.delay.is_some(), kind == Kind::SlowFirstToken),
        ];
        for (name, is_there, may_be) in belongs {
            must(!is_there || may_be, format!("{name} means nothing for kind {kind:?}"))?;
        }
        must(kind != Kind::SlowFirstToken || self.delay.is_some(), "slow-first-token needs a delay".to_owned())?;
        let Some(every) = self.every else { return Ok(()) };
        let is_apart = self.length.is_some_and(|length| length < every);
        must(is_apart, "every needs a `for` shorter than it, or the windows never close".to_owned())
    }

    /// Which of its windows is open at `now_s`, counted from 0.
    fn window(&self, now_s: f64) -> Option<u64> {
        let since = now_s - self.at.seconds();
        if since < 0.0 {
            return None;
        }
        let (number, into) = match self.every.map(Span::seconds) {
            Some(every) => ((since / every).floor(), since % every),
            None => (0.0, since),
        };
        self.length.is_none_or(|length| into < length.seconds()).then_some(number as u64)
    }

    /// The next time after `now_s` at which a window opens or closes.
    fn next_edge_s(&self, now_s: f64) -> Option<f64> {
        let at = self.at.seconds();
        let every = self.every.map(Span::seconds);
        let round = every.map_or(0.0, |every| ((now_s - at) / every).floor().max(0.0));
        (0..2)
            .map(|ahead| at + every.map_or(0.0, |every| (round + f64::from(ahead)) * every))
            .flat_map(|open| [Some(open), self.length.map(|length| open + length.seconds())])
            .flatten()
            .filter(|&edge| edge > now_s)
            .min_by(f64::total_cmp)
    }
}

impl FaultScript {
    /// Reads a fault file.
    ///
    /// # Errors
    /// `Usage` when the text is no TOML of faults, or a rule cannot be; the message names the place.
    pub fn from_toml(text: &str) -> Result<Self> {
        let script: Self = toml::from_str(text).map_err(|error| not_toml_of("a fault file", text, &error))?;
        for (index, fault) in script.faults.iter().enumerate() {
            fault.check().map_err(|e| e.context(format!("fault {}", index + 1)))?;
        }
        Ok(script)
    }
}

/// A script being played.
#[derive(Debug)]
pub struct Faults {
    faults: Vec<Fault>,
    /// How often each rule has hit.
    hits: Vec<u64>,
    seed: u64,
    random: Random,
    mean_tokens: usize,
}

impl Faults {
    /// A script at its beginning. `mean_tokens` bounds where replies break off whose rule does not say.
    pub fn new(script: FaultScript, seed: u64, mean_tokens: usize) -> Self {
        let hits = vec![0; script.faults.len()];
        Self { faults: script.faults, hits, seed, random: Random::new(seed), mean_tokens: mean_tokens.max(1) }
    }

    /// What happens to a request that arrives at `now_s`.
    pub fn decide(&mut self, now_s: f64, target: Target) -> Hit {
        let mut hit = Hit::default();
        for index in 0..self.faults.len() {
            let fault = &self.faults[index];
            let is_meant = match fault.kind {
                Kind::Stall | Kind::Restart | Kind::Shutdown => false,
                Kind::MetricsMissing | Kind::MetricsRenamed => target == Target::Metrics,
                _ => target == Target::Generation,
            };
            let is_left = fault.times.is_none_or(|times| self.hits[index] < times);
            if is_meant && is_left && fault.window(now_s).is_some() && self.random.unit() < fault.probability {
                self.hits[index] += 1;
                self.apply(index, &mut hit);
            }
        }
        hit
    }

    fn apply(&mut self, index: usize, hit: &mut Hit) {
        let fault = &self.faults[index];
        let after = |random: &mut Random| {
            fault.after_tokens.unwrap_or_else(|| 1 + random.below(self.mean_tokens as u32) as usize)
        };
        let (instead, break_off) = match fault.kind {
            Kind::Refuse => {
                let retry_after = fault.retry_after.map(|span| (span.seconds(), fault.retry_after_as));
                (Some(Instead::Refuse(fault.status.unwrap_or(503), retry_after)), None)
            }
            Kind::Reset if fault.after_tokens.is_none() => (Some(Instead::Reset), None),
            Kind::Reset => (None, Some(BreakOff::Reset)),
            Kind::MetricsMissing => (Some(Instead::NoMetrics), None),
            Kind::MetricsRenamed => (Some(Instead::RenamedMetrics), None),
            Kind::Cut => (None, Some(BreakOff::Cut)),
            Kind::Hang => (None, Some(BreakOff::Hang)),
            Kind::Abort => (None, Some(BreakOff::Abort)),
            Kind::SlowFirstToken => {
                hit.first_token_delay_s += fault.delay.unwrap_or_default().seconds();
                (None, None)
            }
            Kind::Stall | Kind::Restart | Kind::Shutdown => (None, None),
        };
        let break_off = break_off.map(|how| (after(&mut self.random), how));
        hit.instead = hit.instead.take().or(instead);
        hit.break_off = hit.break_off.or(break_off);
    }

    /// How the server is at `now_s`: the worst of what its rules say.
    pub fn health(&self, now_s: f64) -> Health {
        let states = self.faults.iter().enumerate().filter_map(|(index, fault)| {
            let health = match fault.kind {
                Kind::Stall => Health::Stalled,
                Kind::Restart => Health::Dead,
                Kind::Shutdown => Health::ShutDown,
                _ => return None,
            };
            let window = fault.window(now_s)?;
            (fault.times.is_none_or(|times| window < times) && self.happens(index, window)).then_some(health)
        });
        states.max_by_key(|health| *health as u8).unwrap_or_default()
    }

    /// The next time after `now_s` at which [`health`](Self::health) may differ.
    pub fn next_change_s(&self, now_s: f64) -> Option<f64> {
        let whole_server = |fault: &&Fault| matches!(fault.kind, Kind::Stall | Kind::Restart | Kind::Shutdown);
        self.faults.iter().filter(whole_server).filter_map(|fault| fault.next_edge_s(now_s)).min_by(f64::total_cmp)
    }

    /// Whether this window of this rule is one that happens; asked again, it answers the same.
    fn happens(&self, index: usize, window: u64) -> bool {
        let seed = self.seed ^ (index as u64 + 1).wrapping_mul(0x9E37_79B9) ^ (window << 32);
        Random::new(seed).unit() < self.faults[index].probability
    }
}

#[cfg(test)]
mod tests;
