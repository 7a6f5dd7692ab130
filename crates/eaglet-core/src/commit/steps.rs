//! The work of the commit thread without the thread: its owner does it step by step, on its own clock.
//!
//! For simulations. The same writer, journals and policy; only who waits is another.

use super::{CommitEvent, CommitSettings, Committer, Finished, Shared, Task, Writer};
use crate::journal::Journal;
use crate::work::Clock;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Steps of a [`Committer`] that has no thread.
#[derive(Clone)]
pub struct CommitSteps(Arc<Mutex<Writer>>);

/// When the next step is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// After this time, or when there is work before.
    After(Duration),
    /// When there is work.
    OnWork,
    /// Never: it has ended.
    Over,
}

impl Committer {
    /// A committer whose owner makes its steps: at once, then as each [`CommitSteps::step`] says. `on_work` is called when there is work; it must
    /// not make the step itself.
    pub fn in_steps(
        responses: Journal,
        failures: Journal,
        settings: CommitSettings,
        clock: Clock,
        on_work: impl Fn() + Send + Sync + 'static,
        on_event: impl Fn(CommitEvent) + Send + 'static,
    ) -> (Committer, CommitSteps) {
        let shared = Shared::new(clock, Some(Box::new(on_work)));
        let writer = Writer::new(&shared, [responses, failures], settings, Box::new(on_event));
        let steps = CommitSteps(Arc::new(Mutex::new(writer)));
        (Committer { shared, thread: None, steps: Some(steps.clone()) }, steps)
    }
}

impl CommitSteps {
    /// Does what is due.
    pub fn step(&self) -> NextStep {
        self.step_of(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn step_of(&self, writer: &mut Writer) -> NextStep {
        let shared = Arc::clone(&writer.shared);
        let mut was_last_chance = false;
        loop {
            let mut queue = shared.lock();
            if queue.stopped {
                return NextStep::Over;
            }
            let submissions = std::mem::take(&mut queue.submissions);
            if !submissions.is_empty() {
                drop(queue);
                writer.append(submissions);
                continue;
            }
            match writer.task(&mut queue, was_last_chance) {
                Task::Wait(wait) => return wait.map_or(NextStep::OnWork, NextStep::After),
                Task::Stop => queue.stopped = true,
                Task::Sync => {
                    was_last_chance = queue.finish_by.is_some();
                    drop(queue);
                    writer.sync();
                }
            }
        }
    }

    /// One last attempt, and the end.
    pub(super) fn finish(&self) -> Finished {
        let mut writer = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = Arc::clone(&writer.shared);
        shared.lock().finish_by = Some((shared.clock)());
        self.step_of(&mut writer);
        drop(writer);
        shared.tell_of_work();
        shared.lock().finished()
    }
}
