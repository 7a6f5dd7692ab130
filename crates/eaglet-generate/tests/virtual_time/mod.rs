//! A run in virtual time: controllers, the balancer and simulated engines; no sockets, no clock, no runtime.
//!
//! What the run does around a request is done here in its simplest form: slots per server, refused requests come back after a wait, broken
//! ones go to another server. Prompt `n` is the same in every run, whatever the controller.

pub(crate) mod alternatives;
pub(crate) mod scenario;

use eaglet_core::random::Random;
use eaglet_generate::balancer::{self, Candidate, Record};
use eaglet_generate::limiter::{Change, Gauges, Limiter, LimiterSettings, RateSource, Window};
use eaglet_serve::simulate::profile::Lengths;
use eaglet_serve::simulate::{Engine, NewSequence, SequenceId, Step};
use scenario::Scenario;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::time::Duration;

/// What decides how many requests are out at one server.
pub(crate) trait Controller {
    fn limit(&self) -> usize;
    fn observe(&mut self, window: &Window) -> Option<Change>;
    fn restarted(&mut self) {}
}

impl Controller for Limiter {
    fn limit(&self) -> usize {
        Limiter::limit(self)
    }
    fn observe(&mut self, window: &Window) -> Option<Change> {
        Limiter::observe(self, window)
    }
    fn restarted(&mut self) {
        Limiter::restarted(self);
    }
}

/// Always the same.
pub(crate) struct Fixed(pub(crate) usize);

impl Controller for Fixed {
    fn limit(&self) -> usize {
        self.0
    }
    fn observe(&mut self, _: &Window) -> Option<Change> {
        None
    }
}

/// The product for one server of a scenario.
pub(crate) fn product(scenario: &Scenario) -> Box<dyn Controller> {
    let source = if scenario.stream { RateSource::Stream } else { RateSource::Replies };
    Box::new(Limiter::new(LimiterSettings { source, ..LimiterSettings::up_to(scenario.limit_max) }))
}

/// What a run came to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// Tokens per second between ramp and end.
    pub(crate) rate: f64,
    /// Answers, all of them.
    pub(crate) answered: usize,
    /// Prompts started and not answered, or answered twice: must be none.
    pub(crate) lost: usize,
    pub(crate) refused: usize,
    /// Limits of the first server at each window after the ramp.
    pub(crate) limits: Vec<usize>,
    /// Time, server and change, for people.
    pub(crate) changes: Vec<(f64, usize, Change)>,
}

impl Outcome {
    pub(crate) fn median_limit(&self) -> usize {
        let mut limits = self.limits.clone();
        limits.sort_unstable();
        limits.get(limits.len() / 2).copied().unwrap_or(0)
    }
}

/// Time in nanoseconds, so that it can be ordered.
type Nanos = u64;
/// A refusal takes so long.
const REFUSAL: Nanos = 20_000_000;
/// A window ends so soon after the first refusal in it: each second at too high a limit is many requests sent in vain.
const EARLY: Nanos = 100_000_000;
/// A gateway's bucket holds the requests of so many seconds.
const BUCKET_S: f64 = 10.0;
/// The monitor looks at the gauges so often.
const GAUGES: Nanos = 5_000_000_000;

fn nanos(seconds: f64) -> Nanos {
    (seconds * 1e9) as Nanos
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    StepEnds(usize),
    Refused(usize, usize),
    Ready(usize),
    Down(usize),
    Up(usize),
    WindowEnds(usize),
    HoldOffEnds,
    Tick,
}

struct Out {
    prompt: usize,
    since: Nanos,
    tokens: u64,
}

struct SimServer {
    engine: Engine,
    step: Option<Step>,
    controller: Box<dyn Controller>,
    record: Record,
    is_up: bool,
    out: HashMap<SequenceId, Out>,
    unstarted: HashSet<SequenceId>,
    refusing: usize,
    window: Window,
    slots: f64,
    slots_unstarted: f64,
    last: Nanos,
    window_began: Nanos,
    gauges: Gauges,
    gauges_at: Nanos,
    preemptions: u64,
    counter: u64,
    bucket: f64,
    bucket_at: Nanos,
}

impl SimServer {
    fn in_flight(&self) -> usize {
        self.out.len() + self.refusing
    }

    fn advance(&mut self, now: Nanos) {
        let seconds = (now - self.last) as f64 / 1e9;
        self.slots += self.in_flight() as f64 * seconds;
        self.slots_unstarted += (self.unstarted.len() + self.refusing) as f64 * seconds;
        self.last = now;
    }

    fn look_at_gauges(&mut self, now: Nanos) {
        let gauges = self.engine.gauges();
        self.gauges = Gauges {
            running: Some(gauges.running as f64),
            waiting: Some(gauges.waiting as f64),
            kv_use: Some(gauges.kv_use),
            preemptions: Some((gauges.preemptions - self.preemptions) as f64),
        };
        self.preemptions = gauges.preemptions;
        self.gauges_at = now;
    }
}

/// Drives a scenario.
pub(crate) struct Drive<'a> {
    scenario: &'a Scenario,
    servers: Vec<SimServer>,
    events: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    number: u64,
    now: Nanos,
    ready: Vec<(usize, Option<usize>)>,
    waits: usize,
    refusals: HashMap<usize, u32>,
    next_prompt: usize,
    done: HashSet<usize>,
    doubled: usize,
    lengths: Vec<(Nanos, Lengths, usize)>,
    random: Random,
    tokens_after_ramp: u64,
    outcome: Outcome,
}

/// Runs a scenario with a controller for each server.
pub(crate) fn drive(scenario: &Scenario, controller: impl Fn() -> Box<dyn Controller>) -> Outcome {
    let mut drive = Drive::new(scenario, controller);
    drive.go();
    drive.outcome
}

impl<'a> Drive<'a> {
    fn new(scenario: &'a Scenario, controller: impl Fn() -> Box<dyn Controller>) -> Self {
        let servers = scenario.servers.iter().map(|server| SimServer {
            engine: Engine::new(server.profile()),
            step: None,
            controller: controller(),
            record: Record::default(),
            is_up: true,
            out: HashMap::new(),
            unstarted: HashSet::new(),
            refusing: 0,
            window: Window::default(),
            slots: 0.0,
            slots_unstarted: 0.0,
            last: 0,
            window_began: 0,
            gauges: Gauges::default(),
            gauges_at: 0,
            preemptions: 0,
            counter: 0,
            bucket: server.gateway_per_s.unwrap_or(0.0) * BUCKET_S,
            bucket_at: 0,
        });
        let lengths = scenario.answers.iter().map(|a| (nanos(a.from_s), Lengths::new(&a.answers()), a.max_tokens));
        let mut drive = Drive {
            scenario,
            servers: servers.collect(),
            events: BinaryHeap::new(),
            number: 0,
            now: 0,
            ready: vec![],
            waits: 0,
            refusals: HashMap::new(),
            next_prompt: 0,
            done: HashSet::new(),
            doubled: 0,
            lengths: lengths.collect(),
            random: Random::new(7),
            tokens_after_ramp: 0,
            outcome: Outcome::default(),
        };
        for (index, server) in scenario.servers.iter().enumerate() {
            for [from, to] in &server.down {
                drive.at(nanos(*from), Event::Down(index));
                drive.at(nanos(*to), Event::Up(index));
            }
        }
        drive.at(drive.tick(), Event::Tick);
        drive
    }

    /// Whole replies show in the server's counters only, and these are looked at every five seconds.
    fn tick(&self) -> Nanos {
        if self.scenario.stream { 1_000_000_000 } else { GAUGES }
    }

    fn at(&mut self, time: Nanos, event: Event) {
        self.number += 1;
        self.events.push(Reverse((time, self.number, event)));
    }

    fn go(&mut self) {
        let end = nanos(self.scenario.seconds);
        self.dispatch();
        while let Some(Reverse((time, _, event))) = self.events.pop() {
            self.now = time;
            if time >= end && self.done.len() == self.next_prompt {
                break;
            }
            assert!(time < end * 20, "prompts that never end: {} of {}", self.done.len(), self.next_prompt);
            self.happens(event);
            self.dispatch();
        }
        let outcome = &mut self.outcome;
        outcome.rate = self.tokens_after_ramp as f64 / (self.scenario.seconds - self.scenario.ramp_s);
        outcome.answered = self.done.len();
        outcome.lost = self.next_prompt - self.done.len() + self.doubled;
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::StepEnds(index) => self.step_ends(index),
            Event::Refused(index, prompt) => {
                let server = &mut self.servers[index];
                server.advance(self.now);
                server.refusing -= 1;
                server.window.back_pressure += 1;
                server.window.refused_time += Duration::from_nanos(REFUSAL);
                let next = server.record.refused(Duration::from_nanos(self.now), None).as_nanos() as Nanos;
                let ends_early = server.window.back_pressure == 1;
                // Only so that the next request is sent when it may be.
                self.at(next, Event::HoldOffEnds);
                self.outcome.refused += 1;
                let times = self.refusals.entry(prompt).or_default();
                *times += 1;
                let wait = self.random.unit() * f64::from(1u32 << (*times - 1).min(6)).min(60.0);
                self.waits += 1;
                self.at(self.now + nanos(wait), Event::Ready(prompt));
                if ends_early {
                    self.at(self.now + EARLY, Event::WindowEnds(index));
                }
            }
            Event::Ready(prompt) => {
                self.waits -= 1;
                self.ready.push((prompt, None));
            }
            Event::Down(index) => self.goes_down(index),
            Event::Up(index) => {
                let server = &mut self.servers[index];
                server.engine = Engine::new(self.scenario.servers[index].profile());
                (server.is_up, server.preemptions, server.counter) = (true, 0, 0);
                server.record.is_back();
                server.controller.restarted();
            }
            Event::WindowEnds(index) => self.window_ends(index),
            Event::HoldOffEnds => {}
            Event::Tick => self.tick_ends(),
        }
    }

    fn goes_down(&mut self, index: usize) {
        let server = &mut self.servers[index];
        server.advance(self.now);
        server.is_up = false;
        server.step = None;
        server.unstarted.clear();
        // In the order of their prompts: a map has none of its own.
        let mut broken: Vec<usize> = server.out.drain().map(|(_, out)| out.prompt).collect();
        broken.sort_unstable();
        self.ready.extend(broken.into_iter().map(|prompt| (prompt, Some(index))));
    }

    fn step_ends(&mut self, index: usize) {
        let now = self.now;
        let (ramp, end) = (nanos(self.scenario.ramp_s), nanos(self.scenario.seconds));
        let server = &mut self.servers[index];
        let Some(step) = server.step.take() else { return };
        server.advance(now);
        let came = step.progressed.len() as u64;
        if self.scenario.stream {
            server.window.tokens += came;
        }
        if (ramp..end).contains(&now) {
            self.tokens_after_ramp += came;
        }
        if !server.unstarted.is_empty() {
            step.progressed.iter().for_each(|id| {
                server.unstarted.remove(id);
            });
        }
        for id in &step.finished {
            let out = server.out.remove(id).unwrap();
            server.window.completions += 1;
            server.window.completed_tokens += out.tokens;
            server.window.completed_time += Duration::from_nanos(now - out.since);
            server.record.worked();
            self.doubled += usize::from(!self.done.insert(out.prompt));
        }
        self.start_step(index);
    }

    fn start_step(&mut self, index: usize) {
        let server = &mut self.servers[index];
        if server.step.is_some() || !server.is_up {
            return;
        }
        if let Some(step) = server.engine.step() {
            let ends = self.now + nanos(step.duration_s).max(1);
            server.step = Some(step);
            self.at(ends, Event::StepEnds(index));
        }
    }

    fn window_ends(&mut self, index: usize) {
        let now = self.now;
        let spec = &self.scenario.servers[index];
        let server = &mut self.servers[index];
        server.advance(now);
        let ns = now - std::mem::replace(&mut server.window_began, now);
        let seconds = ns as f64 / 1e9;
        let mut window = std::mem::take(&mut server.window);
        window.duration = Duration::from_nanos(ns);
        window.mean_in_flight = std::mem::take(&mut server.slots) / seconds;
        let unstarted = std::mem::take(&mut server.slots_unstarted) / seconds;
        window.mean_unstarted = self.scenario.stream.then_some(unstarted);
        if !server.is_up || ns == 0 {
            return;
        }
        if spec.gauges {
            if now - server.gauges_at >= GAUGES {
                server.look_at_gauges(now);
            } else {
                server.gauges.preemptions = Some(0.0);
            }
            window.gauges = server.gauges;
            if !self.scenario.stream {
                let counter = server.engine.gauges().generation_tokens;
                window.tokens = counter - std::mem::replace(&mut server.counter, counter);
            }
        }
        if let Some(change) = server.controller.observe(&window) {
            self.outcome.changes.push((now as f64 / 1e9, index, change));
        }
    }

    fn tick_ends(&mut self) {
        let (now, tick) = (self.now, self.tick());
        (0..self.servers.len()).for_each(|index| self.window_ends(index));
        if now >= nanos(self.scenario.ramp_s) && now < nanos(self.scenario.seconds) {
            self.outcome.limits.push(self.servers[0].controller.limit());
        }
        self.at(now + tick, Event::Tick);
    }

    fn dispatch(&mut self) {
        let now = Duration::from_nanos(self.now);
        let limits: usize = self.servers.iter().map(|server| server.controller.limit()).sum();
        loop {
            let takes_new = self.now < nanos(self.scenario.seconds) && self.waits < 4 * limits + 64;
            if self.ready.is_empty() && !takes_new {
                return;
            }
            let avoid = self.ready.last().and_then(|(_, avoid)| *avoid);
            let candidates: Vec<Candidate> = self
                .servers
                .iter()
                .map(|server| Candidate {
                    limit: server.controller.limit(),
                    in_flight: server.in_flight(),
                    is_up: server.is_up,
                    health: server.record.health(),
                    hold_off_until: server.record.hold_off_until(),
                })
                .collect();
            let Some(index) = balancer::choose(&candidates, avoid, now) else { return };
            let prompt = self.ready.pop().map_or_else(
                || {
                    self.next_prompt += 1;
                    self.next_prompt - 1
                },
                |(prompt, _)| prompt,
            );
            self.send(index, prompt);
        }
    }

    fn send(&mut self, index: usize, prompt: usize) {
        let new = self.sequence(prompt);
        let is_refused = self.is_refused(index);
        let server = &mut self.servers[index];
        server.advance(self.now);
        if let Some(next) = server.record.sent(Duration::from_nanos(self.now)) {
            self.number += 1;
            self.events.push(Reverse((next.as_nanos() as Nanos, self.number, Event::HoldOffEnds)));
        }
        if is_refused {
            server.refusing += 1;
            return self.at(self.now + REFUSAL, Event::Refused(index, prompt));
        }
        let id = server.engine.submit(new).unwrap();
        server.out.insert(id, Out { prompt, since: self.now, tokens: new.answer_tokens as u64 });
        if self.scenario.stream {
            server.unstarted.insert(id);
        }
        self.start_step(index);
    }

    fn is_refused(&mut self, index: usize) -> bool {
        let spec = &self.scenario.servers[index];
        let server = &mut self.servers[index];
        if spec.gateway_in_flight.is_some_and(|most| server.out.len() >= most) {
            return true;
        }
        if let Some(per_s) = spec.gateway_per_s {
            let since = (self.now - std::mem::replace(&mut server.bucket_at, self.now)) as f64 / 1e9;
            server.bucket = (server.bucket + since * per_s).min(per_s * BUCKET_S);
            if server.bucket < 1.0 {
                return true;
            }
            server.bucket -= 1.0;
        }
        let seconds = self.now as f64 / 1e9;
        let share =
            spec.refusals.iter().find(|[from, to, _]| (*from..*to).contains(&seconds)).map(|[_, _, share]| *share);
        share.is_some_and(|share| self.random.unit() < share)
    }

    fn sequence(&self, prompt: usize) -> NewSequence {
        let mut random = Random::new((prompt as u64 + self.scenario.seed * 1_000_003) * 7919 + 11);
        let [shortest, longest] = self.scenario.prompt_tokens;
        let (_, lengths, cap) = self.lengths.iter().rfind(|(from, ..)| *from <= self.now).unwrap();
        NewSequence {
            prompt_tokens: shortest + random.below((longest - shortest) as u32 + 1) as usize,
            answer_tokens: lengths.draw(&mut random).min(*cap),
        }
    }
}

/// The rate of a fixed limit.
fn rate_at(scenario: &Scenario, limit: usize) -> f64 {
    drive(scenario, || Box::new(Fixed(limit.clamp(1, scenario.limit_max)))).rate
}

/// The rate of the best fixed limit that the file names, or of its neighbours if they are better.
pub(crate) fn best_rate_named(scenario: &Scenario) -> f64 {
    let best = scenario.expect.best_fixed as f64;
    [best, best / 1.2, best * 1.2]
        .map(|limit| rate_at(scenario, limit.round() as usize))
        .into_iter()
        .fold(0.0, f64::max)
}

/// The best fixed limit and its rate: a coarse search over the whole range, then finer ones around the best. Of limits that are equally good to half a
/// percent the smallest is the best.
pub(crate) fn best_fixed(scenario: &Scenario) -> (usize, f64) {
    let mut known: BTreeMap<usize, f64> = BTreeMap::new();
    let coarse = (0..).map(|n| (4.0 * 1.5f64.powi(n)).round() as usize);
    let mut grid: Vec<usize> = coarse.take_while(|limit| *limit <= scenario.limit_max).collect();
    for factor in [1.2, 1.08, 1.0] {
        for limit in grid.drain(..) {
            known.entry(limit).or_insert_with(|| rate_at(scenario, limit));
        }
        let best = best_of(&known).0 as f64;
        grid =
            [best / factor, best * factor].map(|limit| (limit.round() as usize).clamp(1, scenario.limit_max)).to_vec();
    }
    best_of(&known)
}

fn best_of(known: &BTreeMap<usize, f64>) -> (usize, f64) {
    let highest = known.values().copied().fold(0.0, f64::max);
    let (limit, rate) = known.iter().find(|(_, rate)| **rate >= highest * 0.995).expect("the highest is one of them");
    (*limit, *rate)
}
