//! What one seed draws: servers, their accidents, a data set, settings, and what befalls the process itself.

use eaglet_core::random::Random;
use eaglet_data::Turns;
use eaglet_generate::client::{Mode, Timeouts};
use eaglet_generate::retry::RetryPolicy;
use eaglet_generate::run::{Concurrency, GenerateSettings, Interrupted, Stop};
use eaglet_serve::simulate::profile::{Answers, StepCost};
use eaglet_serve::simulate::{Fault, FaultScript, Profile};
use eaglet_testkit::faulty_storage::CrashMode;
use std::num::NonZeroUsize;
use std::time::Duration;

/// How much the settings forgive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Temper {
    /// So many retries that no prompt may fail, whatever the script says.
    Patient,
    /// Few retries, and requests that are refused for good: prompts may fail, for a reason that the script gives.
    Strict,
}

/// What befalls a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Somebody asks it to stop.
    Asked(Stop),
    /// The process is killed, or with it the whole machine: the mode says what of the disk is left.
    Killed(CrashMode),
}

/// Everything that a seed decides.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) seed: u64,
    pub(crate) temper: Temper,
    pub(crate) prompts: usize,
    pub(crate) profile: Profile,
    pub(crate) settings: GenerateSettings,
    /// Lines of a fault script for each server.
    pub(crate) scripts: Vec<Vec<String>>,
    /// Bytes that a connection holds.
    pub(crate) pipe_bytes: usize,
    /// For each server, from when to when connections to it are neither made nor refused, in seconds.
    pub(crate) unreachable_s: Vec<Option<(u64, u64)>>,
    /// How the list of servers changes: at which second of a session it holds which.
    pub(crate) lists: Vec<(u64, Vec<usize>)>,
    /// What befalls the first sessions, each so many seconds after its beginning.
    pub(crate) fates: Vec<(u64, Fate)>,
    /// From when to when the disk of the first session is full, in seconds.
    pub(crate) disk_full_s: Option<(u64, u64)>,
}

impl Case {
    pub(crate) fn of(seed: u64) -> Self {
        let mut draw = Draw(Random::new(seed));
        let temper = if draw.one_in(4) { Temper::Strict } else { Temper::Patient };
        let servers = draw.within(1, 3);
        let profile = draw.profile();
        let settings = draw.settings(temper, &profile);
        let scripts = (0..servers).map(|_| draw.script(temper, settings.mode)).collect();
        let fates = if draw.one_in(2) { 0 } else { draw.within(1, 3) };
        Case {
            seed,
            temper,
            prompts: draw.within(20, 60) as usize,
            profile,
            settings,
            scripts,
            pipe_bytes: draw.of(&[64 << 10, 64 << 10, 64 << 10, 61]),
            unreachable_s: (0..servers).map(|_| draw.one_in(6).then(|| draw.span())).collect(),
            lists: draw.lists(servers as usize),
            fates: (0..fates).map(|_| (draw.within(1, 60), draw.fate())).collect(),
            disk_full_s: draw.one_in(6).then(|| draw.span()),
        }
    }

    /// The scripts as the simulated servers read them.
    pub(crate) fn fault_scripts(&self) -> Vec<FaultScript> {
        let read = |line: &String| Fault::from_line(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        self.scripts.iter().map(|lines| FaultScript { faults: lines.iter().map(read).collect() }).collect()
    }

    /// Rows of the data set: mostly one question, some conversations.
    pub(crate) fn rows(&self) -> String {
        let mut draw = Draw(Random::new(self.seed ^ 0xDA7A));
        (0..self.prompts).map(|n| draw.row(n)).collect()
    }
}

struct Draw(Random);

impl Draw {
    /// Evenly, both ends included.
    fn within(&mut self, low: u64, high: u64) -> u64 {
        low + u64::from(self.0.below((high - low + 1) as u32))
    }

    fn one_in(&mut self, n: u32) -> bool {
        self.0.below(n) == 0
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.0.below(all.len() as u32) as usize]
    }

    /// From when to when.
    fn span(&mut self) -> (u64, u64) {
        let from = self.within(1, 60);
        (from, from + self.within(1, 20))
    }

    /// Mostly one list for ever. Whatever is taken off comes back at the end, so that no prompt waits for ever.
    fn lists(&mut self, servers: usize) -> Vec<(u64, Vec<usize>)> {
        if servers == 1 || !self.one_in(4) {
            return vec![];
        }
        let mut at = 0;
        let mut some = |draw: &mut Self, all: bool| {
            at += draw.within(1, 30);
            let kept = draw.within(0, servers as u64 - 1) as usize;
            (at, (0..servers).filter(|&n| all || n == kept || draw.one_in(2)).collect())
        };
        let changes = self.within(1, 3);
        let mut lists: Vec<_> = (0..changes).map(|_| some(self, false)).collect();
        lists.push(some(self, true));
        lists
    }

    fn profile(&mut self) -> Profile {
        let mean_tokens = self.of(&[8.0, 25.0, 60.0, 120.0]);
        let max_model_len = self.of(&[256, 512, 2048]);
        let max_num_seqs = self.of(&[2, 8, 32]);
        let block_tokens = 16;
        // One sequence fits at least; little more makes preemptions.
        let kv_blocks = max_model_len / block_tokens * self.of(&[1, 2, 40]);
        Profile {
            name: "drawn".to_owned(),
            model: "drawn/model".to_owned(),
            max_model_len,
            max_num_seqs,
            max_batched_tokens: self.of(&[64, 512]),
            block_tokens,
            kv_blocks,
            max_queued: self.one_in(6).then(|| self.within(1, 10) as usize),
            warm_up_s: self.of(&[0.0, 3.0]),
            step: StepCost {
                base_s: self.of(&[0.01, 0.05, 0.1]),
                per_running_s: self.of(&[0.0, 0.005]),
                per_prefill_token_s: self.of(&[0.0, 0.0005]),
            },
            answers: Answers {
                mean_tokens,
                sigma: self.of(&[0.0, 0.5, 1.0]),
                max_tokens: 1024,
                reasoning_share: self.of(&[0.0, 0.0, 0.5]),
            },
        }
    }

    fn settings(&mut self, temper: Temper, profile: &Profile) -> GenerateSettings {
        let requests = NonZeroUsize::new(self.of(&[1, 4, 12, 40])).unwrap();
        let concurrency =
            if self.one_in(2) { Concurrency::Pinned(requests) } else { Concurrency::Auto { max: requests } };
        let mut settings = GenerateSettings::new(concurrency);
        if self.one_in(5) {
            settings.mode = Mode::Whole;
        }
        if self.one_in(4) {
            settings.turns = Turns::All;
        }
        settings.max_completion_tokens = self.of(&[None, None, Some(profile.answers.mean_tokens as u64)]);
        settings.timeouts = Timeouts {
            connect: Duration::from_secs(5),
            first_byte: Duration::from_secs(self.of(&[15, 60])),
            silence: Duration::from_secs(self.of(&[8, 30])),
            ..Timeouts::default()
        };
        settings.retry = match temper {
            Temper::Patient => RetryPolicy { retries_max: 10_000, ..RetryPolicy::default() },
            Temper::Strict => RetryPolicy { retries_max: self.within(0, 3) as u32, ..RetryPolicy::default() },
        };
        settings.retry.backoff_max = Duration::from_secs(self.of(&[2, 20, 60]));
        if self.one_in(3) {
            settings.continuation.interrupted = Interrupted::StartAgain;
        }
        if settings.max_completion_tokens.is_some() && self.one_in(2) {
            settings.continuation.truncated_rounds = self.within(1, 3) as u32;
        }
        settings.continuation.checkpoint_interval = Duration::from_millis(self.of(&[250, 2000]));
        settings.drain_deadline = Duration::from_secs(self.of(&[3, 60]));
        settings
    }

    fn script(&mut self, temper: Temper, mode: Mode) -> Vec<String> {
        let mut lines: Vec<String> = (0..self.within(0, 5)).map(|_| self.accident(temper)).collect();
        // A whole reply that hangs on a server without gauges cannot be told from a long one: there, gauges come back.
        if mode == Mode::Stream && self.one_in(6) {
            lines.push(format!("kind={}", self.of(&["metrics-missing", "metrics-renamed"])));
        }
        lines
    }

    fn accident(&mut self, temper: Temper) -> String {
        let at = self.within(0, 120);
        let length = self.within(1, self.0.clone().bits() % 60 + 2);
        let window = format!("at={at}s for={length}s");
        let probability = self.of(&["0.1", "0.5", "1.0"]);
        let hit = format!("{window} probability={probability}");
        let after = if self.one_in(2) { format!(" after-tokens={}", self.within(1, 40)) } else { String::new() };
        match self.within(0, if temper == Temper::Strict { 13 } else { 12 }) {
            0 => format!("kind=refuse status=429 retry-after={}s {hit}", self.within(0, 20)),
            1 => format!("kind=refuse status={} {hit}", self.of(&[500, 502, 503, 429])),
            2 => format!("kind=reset {hit}{after}"),
            3 => format!("kind=cut {hit}{after}"),
            4 => format!("kind=hang times={} {hit}{after}", self.within(1, 6)),
            5 => format!("kind=abort {hit}{after}"),
            6 => format!("kind=slow-first-token delay={}s {hit}", self.within(1, 40)),
            7 => format!("kind=stall {window}"),
            8 => format!("kind=restart {window}"),
            9 => format!("kind=restart at={}s for=2s every={}s times=3", self.within(0, 30), self.within(5, 30)),
            10 => format!("kind=shutdown {window}"),
            11 => format!("kind=metrics-missing {window}"),
            12 => format!("kind=metrics-renamed {window}"),
            _ => format!("kind=refuse status=400 times={} {hit}", self.within(1, 4)),
        }
    }

    fn fate(&mut self) -> Fate {
        let kill = self.of(&[CrashMode::Kept, CrashMode::Kept, CrashMode::Dropped, CrashMode::Torn]);
        self.of(&[
            Fate::Asked(Stop::Abort),
            Fate::Asked(Stop::Drain),
            Fate::Asked(Stop::DrainWithDeadline),
            Fate::Killed(kill),
            Fate::Killed(kill),
        ])
    }

    fn row(&mut self, n: usize) -> String {
        let more = " and the one after it".repeat(self.within(0, 6) as usize);
        let turn = |role: &str, text: String| serde_json::json!({"role": role, "content": text});
        let mut messages = vec![turn("user", format!("Describe item {n}{more}."))];
        if self.one_in(4) {
            messages.push(turn("assistant", "It is round.".to_owned()));
            messages.push(turn("user", format!("And its colour, {n}?")));
        }
        format!("{}\n", serde_json::json!({"id": format!("q{n}"), "messages": messages}))
    }
}
