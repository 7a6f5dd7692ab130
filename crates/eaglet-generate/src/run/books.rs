//! The books of a run: counts, rates, lengths, losses, and the snapshot made of them. No I/O.

use super::tail::TailMeter;
use eaglet_core::outcome::{Place, Tally};
use eaglet_core::progress::{Continued, Phase, ServerGauges, ServerPhase, ServerProgress, Snapshot, eta};
use eaglet_core::provenance::now;
use eaglet_core::response::Status;
use eaglet_core::stats::{LossTable, Percentiles, RateWindow, percentiles};
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;
use tokio::time::Instant;

/// The window of the "now" rates.
const RATE_WINDOW: Duration = Duration::from_secs(30);

/// What a submitted record was, to be booked when it is durable.
#[derive(Clone, Debug)]
pub struct Submitted {
    /// Bytes of the prompt.
    pub prompt_bytes: u64,
    /// Source of the row.
    pub source: Option<String>,
    /// How it ended.
    pub end: End,
}

/// How a prompt ended.
#[derive(Clone, Debug)]
pub enum End {
    /// With a response.
    Answered {
        /// Its status.
        status: Status,
        /// Its finish reason.
        finish_reason: String,
        /// Its tokens, if known.
        completion_tokens: Option<u64>,
    },
    /// Without one, of this cause.
    Failed(String),
}

/// The books.
#[derive(Debug)]
pub struct Books {
    /// Where each prompt is.
    pub tally: Tally,
    started: Instant,
    ended_before: u64,
    next_ticket: u64,
    unsynced: HashMap<u64, Submitted>,
    completion_tokens: Vec<u32>,
    cached_percentiles: (usize, Option<Percentiles>),
    usable_tokens: u64,
    by_status: BTreeMap<&'static str, u64>,
    by_finish_reason: BTreeMap<String, u64>,
    losses: LossTable,
    continued: Continued,
    /// The end of the run.
    pub(super) tail: TailMeter,
    token_rate: RateWindow,
    request_rate: RateWindow,
}

impl Books {
    /// Opens the books with what earlier sessions left.
    pub fn new(planned: u64, done: u64, failed: u64, completion_tokens: Vec<u32>) -> Self {
        Books {
            tally: Tally::new(planned, done, failed),
            started: Instant::now(),
            ended_before: done + failed,
            next_ticket: 0,
            unsynced: HashMap::new(),
            completion_tokens,
            cached_percentiles: (0, None),
            usable_tokens: 0,
            by_status: BTreeMap::new(),
            by_finish_reason: BTreeMap::new(),
            losses: LossTable::default(),
            continued: Continued::default(),
            tail: TailMeter::default(),
            token_rate: RateWindow::new(RATE_WINDOW),
            request_rate: RateWindow::new(RATE_WINDOW),
        }
    }

    /// A record goes to the disk: the ticket to know it by.
    pub fn submit(&mut self, from: Place, submitted: Submitted) -> u64 {
        self.tally.step(from, Place::Unsynced);
        self.next_ticket += 1;
        self.unsynced.insert(self.next_ticket, submitted);
        self.next_ticket
    }

    /// The record of a ticket is durable. Tickets of rows that are no prompts are unknown here and pass.
    pub fn durable(&mut self, ticket: u64) {
        let Some(Submitted { prompt_bytes, source, end }) = self.unsynced.remove(&ticket) else { return };
        self.losses.add(prompt_bytes, source.as_deref(), matches!(end, End::Failed(_)));
        match end {
            End::Failed(cause) => self.tally.failed(Place::Unsynced, &cause),
            End::Answered { status, finish_reason, completion_tokens } => {
                self.tally.done(Place::Unsynced);
                *self.by_status.entry(status.label()).or_default() += 1;
                *self.by_finish_reason.entry(finish_reason).or_default() += 1;
                if let Some(tokens) = completion_tokens {
                    self.usable_tokens += tokens;
                    self.completion_tokens.push(u32::try_from(tokens).unwrap_or(u32::MAX));
                }
            }
        }
    }

    /// Of the tokens of an attempt that broke off, so many are kept, and so many lost.
    pub fn broke_off(&mut self, kept: u64, lost: u64) {
        self.continued.tokens_kept += kept;
        self.continued.tokens_lost += lost;
    }

    /// An answer of which so many tokens were kept starts again.
    pub fn started_again(&mut self, tokens: u64) {
        self.continued.started_again += 1;
        self.continued.tokens_kept = self.continued.tokens_kept.saturating_sub(tokens);
        self.continued.tokens_lost += tokens;
    }

    /// An answer in several segments is finished.
    pub fn joined(&mut self) {
        self.continued.answers += 1;
    }

    /// Prompts that ended in this session.
    pub fn ended_this_session(&self) -> u64 {
        self.tally.done_count() + self.tally.failed_count() - self.ended_before
    }

    /// Called about once a second.
    pub fn tick(&mut self, tokens: u64) {
        let now = self.started.elapsed();
        self.token_rate.push(now, tokens as f64);
        let ended = self.ended_this_session();
        self.request_rate.push(now, ended as f64);
    }

    /// The lengths' percentiles; sorted again only when 2 % more answers are in, since there may be a million.
    fn lengths(&mut self, is_final: bool) -> Option<Percentiles> {
        let count = self.completion_tokens.len();
        if is_final
            || self.cached_percentiles.1.is_none()
            || count > self.cached_percentiles.0 + self.cached_percentiles.0 / 50
        {
            self.cached_percentiles = (count, percentiles(&self.completion_tokens));
        }
        self.cached_percentiles.1.clone()
    }

    /// The state of the run now.
    pub fn snapshot(
        &mut self,
        phase: Phase,
        tokens: u64,
        server: ServerGauges,
        servers: Vec<ServerProgress>,
    ) -> Snapshot {
        let elapsed_s = self.started.elapsed().as_secs_f64();
        let ended = self.ended_this_session();
        let tally = &self.tally;
        let left = tally.planned() - tally.done_count() - tally.failed_count();
        let (eta_s, eta_basis) = eta(left, ended, self.request_rate.per_second(), elapsed_s);
        let per_second = |count: u64| if elapsed_s > 0.0 { count as f64 / elapsed_s } else { 0.0 };
        Snapshot {
            v: 1,
            at: now(),
            pid: std::process::id(),
            phase,
            elapsed_s,
            planned: tally.planned(),
            done: tally.done_count(),
            failed: tally.failed_count(),
            in_flight: tally.in_flight(),
            waiting: tally.waiting(),
            unsynced: tally.unsynced(),
            not_started: tally.not_started(),
            concurrency: servers.iter().filter(|s| s.state != ServerPhase::Leaving).map(|s| s.limit).sum(),
            requests_per_s: self.request_rate.per_second(),
            tokens_per_s: self.token_rate.per_second(),
            tokens_per_s_overall: per_second(tokens),
            tokens,
            usable_tokens_per_s: per_second(self.usable_tokens),
            eta_s,
            eta_basis,
            retries_by_cause: tally.retries_by_cause().iter().map(|(cause, count)| (cause.label(), *count)).collect(),
            failed_by_cause: tally.failed_by_cause().clone(),
            by_status: self.by_status.clone(),
            by_finish_reason: self.by_finish_reason.clone(),
            server,
            servers,
            losses: self.losses.clone(),
            continued: self.continued,
            tail: self.tail.tail(),
            completion_tokens: self.lengths(phase == Phase::Ended),
        }
    }
}
