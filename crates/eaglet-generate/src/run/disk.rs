//! How a run comes to its committer: with a thread, or in a simulation with a task that makes the thread's steps.

use eaglet_core::Result;
use eaglet_core::commit::{CommitEvent, CommitSettings, CommitSteps, Committer, NextStep};
use eaglet_core::journal::Journal;
use eaglet_core::work::Work;
use std::sync::Arc;
use tokio::sync::Notify;

pub(super) fn committer(
    work: Work,
    journals: [Journal; 2],
    settings: CommitSettings,
    on_event: impl Fn(CommitEvent) + Send + 'static,
) -> Result<Committer> {
    let [responses, failures] = journals;
    let Work::Caller(clock) = work else { return Committer::start(responses, failures, settings, on_event) };
    let told = Arc::new(Notify::new());
    let tell = Arc::clone(&told);
    let on_work = move || tell.notify_one();
    let (committer, steps) = Committer::in_steps(responses, failures, settings, clock, on_work, on_event);
    tokio::task::spawn_local(make_steps(steps, told));
    Ok(committer)
}

async fn make_steps(steps: CommitSteps, told: Arc<Notify>) {
    loop {
        match steps.step() {
            NextStep::Over => return,
            NextStep::OnWork => told.notified().await,
            // Whether it was told or the time is over, the next step finds out.
            NextStep::After(wait) => drop(tokio::time::timeout(wait, told.notified()).await),
        }
    }
}
