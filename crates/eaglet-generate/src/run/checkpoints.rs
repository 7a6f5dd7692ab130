//! Which answers are out, and what of them is in `inflight.bin`.
//!
//! Beside the streams, not in them: a tick looks at the answers that are due, the one that waits longest first, and hands what is new to the
//! thread that writes. A token costs nothing here.
//!
//! Invariant: an answer's checkpoint is given up only after its record is durable.

use crate::client::LiveAnswer;
use crate::client::answer::Mark;
use eaglet_core::ids::PromptKey;
use eaglet_core::inflight::{Budget, Frame, InflightHandle, InflightLog, Saved, Taken};
use eaglet_core::response::{Answer, Status};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;
use tokio::time::Instant;

/// Most bytes of checkpoints in a second: a hundredth of what the slowest disk in use takes, and more than 100,000 tokens a second need.
const CHECKPOINT_BYTES_PER_S_MAX: u64 = 4 << 20;
/// Answers written at one look; what is left is due at the next.
const CHECKPOINTS_PER_LOOK_MAX: usize = 512;
/// Between two looks, at most.
const LOOK_INTERVAL_MAX: Duration = Duration::from_millis(250);
/// Between two looks, at least.
const LOOK_INTERVAL_MIN: Duration = Duration::from_millis(20);

/// The checkpoint file as a session finds it.
pub struct Inflight {
    /// Its writer.
    pub log: InflightLog,
    /// What earlier sessions left.
    pub saved: HashMap<PromptKey, Saved>,
}

/// Number of a generation in the file.
pub(super) type Generation = u64;

struct Entry {
    key: PromptKey,
    turn: u64,
    live: LiveAnswer,
    endpoint: String,
    /// Up to where it is written; `None` when all of it must be.
    written: Option<Mark>,
    /// When it was written last, or began.
    since: Instant,
    epoch: u64,
}

#[derive(Default)]
struct State {
    next: Generation,
    entries: BTreeMap<Generation, Entry>,
    /// Generations of which the file says something.
    in_file: HashSet<Generation>,
    /// Generations whose record is submitted, by ticket.
    submitted: HashMap<u64, Generation>,
    saved: HashMap<PromptKey, Saved>,
}

/// The checkpoints of a run. Lives on one thread.
pub(super) struct Checkpoints {
    log: Option<InflightHandle>,
    interval: Duration,
    started: Instant,
    budget: RefCell<Budget>,
    state: RefCell<State>,
}

impl Checkpoints {
    /// Without a log nothing is written, and nothing was left.
    pub(super) fn new(log: Option<InflightHandle>, saved: HashMap<PromptKey, Saved>, interval: Duration) -> Self {
        let state = State {
            next: saved.values().map(|saved| saved.generation + 1).max().unwrap_or(0),
            in_file: saved.values().map(|saved| saved.generation).collect(),
            saved,
            ..State::default()
        };
        Checkpoints {
            log,
            interval,
            started: Instant::now(),
            budget: RefCell::new(Budget::new(CHECKPOINT_BYTES_PER_S_MAX)),
            state: RefCell::new(state),
        }
    }

    /// Time between two looks.
    pub(super) fn look_interval(&self) -> Duration {
        (self.interval / 8).clamp(LOOK_INTERVAL_MIN, LOOK_INTERVAL_MAX)
    }

    /// Whether an earlier session left something of this prompt.
    pub(super) fn has_saved(&self, key: PromptKey) -> bool {
        self.state.borrow().saved.contains_key(&key)
    }

    /// What an earlier session left of this prompt, and the generation under which it goes on.
    pub(super) fn begin(&self, key: PromptKey) -> (Generation, Option<Saved>) {
        let mut state = self.state.borrow_mut();
        if let Some(saved) = state.saved.remove(&key) {
            return (saved.generation, Some(saved));
        }
        state.next += 1;
        (state.next - 1, None)
    }

    /// An answer grows in `live`, sent by this server.
    pub(super) fn watch(&self, generation: Generation, key: PromptKey, turn: u64, live: &LiveAnswer, endpoint: String) {
        let Some(log) = &self.log else { return };
        let entry =
            Entry { key, turn, live: live.clone(), endpoint, written: None, since: Instant::now(), epoch: log.epoch() };
        let mut state = self.state.borrow_mut();
        let since = state.entries.get(&generation).map(|before| before.since);
        state.entries.insert(generation, Entry { since: since.unwrap_or(entry.since), ..entry });
    }

    /// A turn of a conversation is answered, and another one follows.
    pub(super) fn turn_answered(
        &self,
        generation: Generation,
        key: PromptKey,
        turn: u64,
        answer: &Answer,
        status: Status,
    ) {
        let Some(log) = &self.log else { return };
        let frame = Frame::Turn { generation, key, turn, answer: Box::new(answer.clone()), status };
        let mut state = self.state.borrow_mut();
        state.entries.remove(&generation);
        if log.offer(&[frame]) == Taken::Yes {
            state.in_file.insert(generation);
        }
    }

    /// The prompt's record was submitted under this ticket.
    pub(super) fn submitted(&self, generation: Generation, ticket: u64) {
        let mut state = self.state.borrow_mut();
        state.entries.remove(&generation);
        if state.in_file.contains(&generation) {
            state.submitted.insert(ticket, generation);
        }
    }

    /// The records of these tickets are durable: their checkpoints are not needed any more.
    pub(super) fn durable(&self, tickets: &[u64]) {
        let mut state = self.state.borrow_mut();
        let ended: Vec<Generation> = tickets.iter().filter_map(|ticket| state.submitted.remove(ticket)).collect();
        let (Some(log), false) = (&self.log, ended.is_empty()) else { return };
        for generation in &ended {
            state.in_file.remove(generation);
        }
        let frames: Vec<Frame> = ended.into_iter().map(|generation| Frame::End { generation }).collect();
        // If they are not taken, the next session knows by the records.
        log.offer(&frames);
    }

    /// Writes what is due.
    pub(super) fn look(&self) {
        self.write(|entry, now| now.saturating_duration_since(entry.since) >= self.interval);
    }

    /// Writes everything there is: the answers that are out are about to be given up.
    pub(super) fn write_all(&self) {
        while self.write(|_, _| true) == CHECKPOINTS_PER_LOOK_MAX {}
    }

    /// Writes the answers that `is_due` names, oldest first, as far as the budget goes. Returns how many.
    fn write(&self, is_due: impl Fn(&Entry, Instant) -> bool) -> usize {
        let Some(log) = self.log.as_ref().filter(|log| !log.is_blocked()) else { return 0 };
        let now = Instant::now();
        let mut state = self.state.borrow_mut();
        let mut due: Vec<(Instant, Generation)> = state
            .entries
            .iter()
            .filter(|(_, e)| is_due(e, now))
            .map(|(generation, e)| (e.since, *generation))
            .collect();
        due.sort_unstable();
        let mut budget = self.budget.borrow_mut();
        let (mut frames, mut marks) = (Vec::new(), Vec::new());
        for (_, generation) in due {
            if frames.len() == CHECKPOINTS_PER_LOOK_MAX || !budget.is_open(self.started.elapsed()) {
                break;
            }
            let Some(entry) = state.entries.get(&generation) else { continue };
            let Some((frame, mark, bytes)) = entry.frame(generation, log.epoch()) else { continue };
            budget.spend(bytes);
            frames.push(frame);
            marks.push((generation, mark));
        }
        if frames.is_empty() || log.offer(&frames) == Taken::No {
            return 0;
        }
        let epoch = log.epoch();
        for (generation, mark) in &marks {
            if let Some(entry) = state.entries.get_mut(generation) {
                (entry.written, entry.since, entry.epoch) = (Some(*mark), now, epoch);
            }
            state.in_file.insert(*generation);
        }
        marks.len()
    }

    /// Why checkpoints cannot be written, told once.
    pub(super) fn take_notice(&self) -> Option<String> {
        self.log.as_ref().and_then(InflightHandle::take_notice)
    }
}

/// Bytes of a token in a checkpoint, about: three of its id, and some for the numbers around.
const ID_BYTES: usize = 3;

impl Entry {
    /// The next frame of this answer, the mark it reaches, and about how many bytes it takes.
    fn frame(&self, generation: Generation, epoch: u64) -> Option<(Frame, Mark, u64)> {
        let live = self.live.try_borrow().ok()?;
        if let Some(written) = self.written.filter(|_| self.epoch == epoch) {
            let since = live.since(written)?;
            let bytes = since.token_ids.len() * ID_BYTES + since.reasoning.len() + since.content.len() + 32;
            let frame = Frame::More {
                generation,
                follows: [written.ids, written.reasoning, written.content].map(|n| n as u64),
                token_ids: since.token_ids.to_vec(),
                reasoning: since.reasoning.to_owned(),
                content: since.content.to_owned(),
                field: since.field,
                seam: since.mark.seam,
            };
            return Some((frame, since.mark, bytes as u64));
        }
        let unfinished = live.unfinished(&self.endpoint).filter(|_| !live.has_finish_reason())?;
        let mark = Mark {
            ids: unfinished.token_ids.len(),
            reasoning: unfinished.reasoning.len(),
            content: unfinished.content.len(),
            seam: unfinished.seam,
        };
        let ids = mark.ids + unfinished.prompt_token_ids.len();
        let bytes = (ids * ID_BYTES + mark.reasoning + mark.content + 128) as u64;
        let at = u64::try_from(jiff::Timestamp::now().as_second()).unwrap_or(0);
        let unfinished = Box::new(unfinished);
        Some((Frame::Whole { generation, key: self.key, turn: self.turn, at, unfinished }, mark, bytes))
    }
}
