//! The batch of a simulated engine, step by step: who runs, who waits, how full the key-value cache is, how long a step takes.
//!
//! Pure: no clock, no runtime, no tokens' contents. It follows vLLM v1: first come, first served; prompts are computed in pieces
//! that share the step with decoding sequences; the cache grows block by block; when no block is free the latest admitted
//! sequence is thrown out, goes to the front of the queue, and is computed again from its first token.
//!
//! Invariants: blocks in use never pass the profile's; a sequence is waiting, running or gone, in one of these only; the oldest
//! running sequence is never thrown out for another, so every sequence comes to its end; a step costs O(running).

use std::collections::VecDeque;

use super::profile::Profile;

/// The name of a sequence, unique within its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(u64);

impl SequenceId {
    /// The number, counted from 0 in the order of submission.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// A sequence to be generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewSequence {
    /// Tokens that are there already; at least 1.
    pub prompt_tokens: usize,
    /// Tokens to be generated; at least 1.
    pub answer_tokens: usize,
}

/// Why a sequence was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The queue holds `max_queued` sequences.
    QueueFull,
    /// Prompt and answer together pass `max_model_len`, or one of them is empty.
    BadLength,
}

/// What one step did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// How long it takes, in seconds of the pretended server.
    pub duration_s: f64,
    /// Sequences that gain one token when the step ends, in the order of their admission.
    pub progressed: Vec<SequenceId>,
    /// Those of them whose token was the last; they are gone from the engine.
    pub finished: Vec<SequenceId>,
    /// Sequences thrown out for want of blocks; they wait again.
    pub preempted: Vec<SequenceId>,
}

/// What the server's gauges show.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gauges {
    /// Sequences in the batch.
    pub running: usize,
    /// Sequences in the queue.
    pub waiting: usize,
    /// Blocks in use, from 0 to 1.
    pub kv_use: f64,
    /// Sequences thrown out since the start.
    pub preemptions: u64,
    /// Tokens generated since the start.
    pub generation_tokens: u64,
    /// Prompt tokens of sequences that gave their first token since the start; recomputation does not count.
    pub prompt_tokens: u64,
}

#[derive(Clone, Debug)]
struct Sequence {
    id: SequenceId,
    prompt: usize,
    answer: usize,
    generated: usize,
    /// Tokens whose keys and values are in the cache.
    computed: usize,
    blocks: usize,
}

impl Sequence {
    fn length(&self) -> usize {
        self.prompt + self.generated
    }

    /// Tokens still to be computed before the next one comes out; 1 while decoding.
    fn pending(&self) -> usize {
        self.length() - self.computed
    }
}

/// The engine.
#[derive(Clone, Debug)]
pub struct Engine {
    profile: Profile,
    /// In the order of admission; at most `max_num_seqs`.
    running: Vec<Sequence>,
    /// Bounded by `max_queued` where the profile says so, otherwise by who submits.
    waiting: VecDeque<Sequence>,
    free_blocks: usize,
    next_id: u64,
    warm: bool,
    preemptions: u64,
    generation_tokens: u64,
    prompt_tokens: u64,
}

/// What a step works on: tokens for each running sequence, by index.
struct Schedule {
    tokens: Vec<usize>,
    budget: usize,
    preempted: Vec<SequenceId>,
}

impl Engine {
    /// An empty engine.
    ///
    /// # Panics
    /// When the profile does not pass [`Profile::check`].
    pub fn new(profile: Profile) -> Self {
        if let Err(error) = profile.check() {
            panic!("a profile is checked before it is used: {error}");
        }
        Self {
            free_blocks: profile.kv_blocks,
            profile,
            running: Vec::new(),
            waiting: VecDeque::new(),
            next_id: 0,
            warm: false,
            preemptions: 0,
            generation_tokens: 0,
            prompt_tokens: 0,
        }
    }

    /// What it pretends to be.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Puts a sequence at the end of the queue.
    ///
    /// # Errors
    /// When it cannot be taken; nothing is changed then.
    pub fn submit(&mut self, new: NewSequence) -> Result<SequenceId, Refused> {
        let NewSequence { prompt_tokens, answer_tokens } = new;
        if prompt_tokens == 0 || answer_tokens == 0 || prompt_tokens + answer_tokens > self.profile.max_model_len {
            return Err(Refused::BadLength);
        }
        if self.profile.max_queued.is_some_and(|most| self.waiting.len() >= most) {
            return Err(Refused::QueueFull);
        }
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.waiting.push_back(Sequence {
            id,
            prompt: prompt_tokens,
            answer: answer_tokens,
            generated: 0,
            computed: 0,
            blocks: 0,
        });
        Ok(id)
    }

    /// Takes a sequence out; its blocks are free at once. Says whether it was there.
    pub fn abort(&mut self, id: SequenceId) -> bool {
        if let Some(index) = self.running.iter().position(|sequence| sequence.id == id) {
            let gone = self.running.remove(index);
            self.free_blocks += gone.blocks;
            return true;
        }
        let before = self.waiting.len();
        self.waiting.retain(|sequence| sequence.id != id);
        self.waiting.len() < before
    }

    /// What the gauges show.
    pub fn gauges(&self) -> Gauges {
        let used = self.profile.kv_blocks - self.free_blocks;
        Gauges {
            running: self.running.len(),
            waiting: self.waiting.len(),
            kv_use: used as f64 / self.profile.kv_blocks as f64,
            preemptions: self.preemptions,
            generation_tokens: self.generation_tokens,
            prompt_tokens: self.prompt_tokens,
        }
    }

    /// Moves the batch on by one step, or `None` when there is nothing to do.
    pub fn step(&mut self) -> Option<Step> {
        if self.running.is_empty() && self.waiting.is_empty() {
            return None;
        }
        let mut schedule = self.schedule_running();
        if schedule.preempted.is_empty() {
            self.admit(&mut schedule);
        }
        Some(self.carry_out(schedule))
    }

    /// Gives each running sequence its tokens, oldest first, and throws out the latest while blocks are short.
    fn schedule_running(&mut self) -> Schedule {
        let mut schedule = Schedule {
            tokens: Vec::with_capacity(self.profile.max_num_seqs),
            budget: self.profile.max_batched_tokens,
            preempted: Vec::new(),
        };
        let mut index = 0;
        while index < self.running.len() {
            let tokens = self.running[index].pending().min(schedule.budget);
            if self.make_room(index, tokens, &mut schedule.preempted) {
                schedule.tokens.push(tokens);
                schedule.budget -= tokens;
                index += 1;
            }
        }
        schedule
    }

    /// Takes the blocks for `tokens` more of the running sequence at `index`. False when that sequence itself was thrown out.
    fn make_room(&mut self, index: usize, tokens: usize, preempted: &mut Vec<SequenceId>) -> bool {
        let sequence = &self.running[index];
        let more = self.profile.blocks_for(sequence.computed + tokens).saturating_sub(sequence.blocks);
        while more > self.free_blocks {
            let mut thrown_out = self.running.pop().expect("a sequence is at `index`, and the loop ends when it goes");
            self.free_blocks += std::mem::take(&mut thrown_out.blocks);
            thrown_out.computed = 0;
            self.preemptions += 1;
            preempted.push(thrown_out.id);
            self.waiting.push_front(thrown_out);
            if self.running.len() == index {
                return false;
            }
        }
        self.free_blocks -= more;
        self.running[index].blocks += more;
        true
    }

    /// Admits from the front of the queue while there is a seat, a token in the budget and a block.
    fn admit(&mut self, schedule: &mut Schedule) {
        while self.running.len() < self.profile.max_num_seqs && schedule.budget > 0 {
            let Some(next) = self.waiting.front() else { return };
            let tokens = next.pending().min(schedule.budget);
            let blocks = self.profile.blocks_for(tokens);
            if blocks > self.free_blocks {
                return;
            }
            let Some(mut admitted) = self.waiting.pop_front() else { return };
            self.free_blocks -= blocks;
            admitted.blocks = blocks;
            schedule.budget -= tokens;
            schedule.tokens.push(tokens);
            self.running.push(admitted);
        }
    }

    /// Computes what was scheduled: time, tokens, ends.
    fn carry_out(&mut self, schedule: Schedule) -> Step {
        let cost = self.profile.step;
        let scheduled = schedule.tokens.iter().filter(|&&tokens| tokens > 0).count();
        let prefill: usize = schedule.tokens.iter().map(|tokens| tokens.saturating_sub(1)).sum();
        let mut step = Step {
            duration_s: cost.base_s + cost.per_running_s * scheduled as f64 + cost.per_prefill_token_s * prefill as f64,
            progressed: Vec::with_capacity(self.running.len()),
            preempted: schedule.preempted,
            ..Step::default()
        };
        if !std::mem::replace(&mut self.warm, true) {
            step.duration_s += self.profile.warm_up_s;
        }
        for (sequence, tokens) in self.running.iter_mut().zip(schedule.tokens) {
            if tokens == 0 {
                continue;
            }
            sequence.computed += tokens;
            if sequence.pending() > 0 {
                continue;
            }
            if sequence.generated == 0 {
                self.prompt_tokens += sequence.prompt as u64;
            }
            sequence.generated += 1;
            self.generation_tokens += 1;
            step.progressed.push(sequence.id);
            if sequence.generated == sequence.answer {
                self.free_blocks += std::mem::take(&mut sequence.blocks);
                step.finished.push(sequence.id);
            }
        }
        self.running.retain(|sequence| sequence.generated < sequence.answer);
        step
    }
}

#[cfg(test)]
mod tests;
