//! Carries out an accepted generation: waits for a place, keeps the pace, writes the events or the whole reply.
//!
//! Decisions are elsewhere (`eaglet_serve`). Invariant: when the client leaves, the place among the running is given
//! back at once and no more tokens are counted.

use std::{io, time::Duration};

use tokio::time::Instant;

use eaglet_serve::{
    answer::Plan,
    api::{Job, Served, json_reply},
    http::head,
    shapes::{self, Choice, Delta, push_event},
};

use super::{
    Wire,
    engine::Slot,
    serve::{Shared, Ticket},
};

/// Runs the job to its end and sends its reply.
pub(super) async fn generate(shared: &Shared, wire: &mut Wire, job: &Job, ticket: &mut Ticket<'_>) -> io::Result<()> {
    let answer = &shared.script.answer;
    let mut slot = wire.unless_gone(shared.engine.admit(job.prompt.len())).await?;
    shared.engine.count_prompt(job.prompt.len());
    let pace = Pace { start: Instant::now(), first: ms(answer.first_token_ms), token: ms(answer.token_ms) };
    let rule = answer.rule();
    let plans: Vec<Plan> = (0..job.choices).map(|choice| rule.plan(&job.prompt, job.limits(choice))).collect();
    let work = Work { served: &shared.served, job, plans: &plans, step: answer.tokens_per_chunk.max(1), pace };
    let whole = if job.stream {
        work.stream(wire, &mut slot).await?;
        None
    } else {
        Some(work.run(wire, &mut slot).await?)
    };
    for plan in &plans {
        shared.engine.count_finish(plan.finish);
    }
    // Before the last bytes, so that a client that has read them also sees the gauges without this request.
    drop(slot);
    ticket.finish();
    match whole {
        None => wire.send(&work.ending()).await,
        Some(deltas) => wire.send(&json_reply(200, &shapes::whole(&shared.served, job, &deltas)).bytes()).await,
    }
}

/// The longest wait; a longer one could not be added to a clock.
const LONGEST: Duration = Duration::from_secs(1 << 30);

/// What is no duration (a negative number, say) is none at all.
fn ms(milliseconds: f64) -> Duration {
    Duration::try_from_secs_f64(milliseconds / 1e3).unwrap_or_default()
}

/// When tokens are due.
#[derive(Clone, Copy)]
struct Pace {
    start: Instant,
    first: Duration,
    token: Duration,
}

impl Pace {
    /// Waits until `tokens` tokens are due. The schedule is absolute, so a late step does not delay those after it.
    async fn wait(self, wire: &mut Wire, tokens: usize) -> io::Result<()> {
        let steps = u32::try_from(tokens.saturating_sub(1)).unwrap_or(u32::MAX);
        let due = self.first.saturating_add(self.token.saturating_mul(steps)).min(LONGEST);
        if due.is_zero() {
            return Ok(());
        }
        wire.unless_gone(tokio::time::sleep_until(self.start + due)).await
    }
}

/// One generation.
struct Work<'w> {
    served: &'w Served,
    job: &'w Job,
    plans: &'w [Plan],
    /// Tokens in one event.
    step: usize,
    pace: Pace,
}

impl Work<'_> {
    fn longest(&self) -> usize {
        self.plans.iter().map(|plan| plan.ids.len()).max().unwrap_or(0)
    }

    /// How many tokens all choices together gain between `from` and `to`.
    fn gained(&self, from: usize, to: usize) -> usize {
        self.plans.iter().map(|plan| plan.ids.len().min(to).saturating_sub(from)).sum()
    }

    /// Generates without showing anything.
    async fn run(&self, wire: &mut Wire, slot: &mut Slot) -> io::Result<Vec<Delta>> {
        let longest = self.longest();
        for from in (0..longest).step_by(self.step) {
            let to = (from + self.step).min(longest);
            self.pace.wait(wire, to).await?;
            wire.unless_gone(slot.generated(self.gained(from, to))).await?;
        }
        let choices = Choice::all(self.job).into_iter().zip(self.plans);
        Ok(choices.filter_map(|(mut choice, plan)| delta(&mut choice, plan, 0, plan.ids.len())).collect())
    }

    /// Generates and sends each step; the terminating events are not sent here.
    async fn stream(&self, wire: &mut Wire, slot: &mut Slot) -> io::Result<()> {
        let longest = self.longest();
        let mut choices = Choice::all(self.job);
        let mut bytes = head(200, &shapes::STREAM_HEADERS);
        for from in (0..longest).step_by(self.step) {
            let to = (from + self.step).min(longest);
            if from == 0 {
                self.pace.wait(wire, 1).await?;
                for event in (0..choices.len()).filter_map(|index| shapes::opening(self.served, self.job, index)) {
                    push_event(&mut bytes, &event.to_string());
                }
                wire.send(&bytes).await?;
            }
            self.pace.wait(wire, to).await?;
            wire.unless_gone(slot.generated(self.gained(from, to))).await?;
            for (index, choice) in choices.iter_mut().enumerate() {
                let Some(delta) = delta(choice, &self.plans[index], from, to) else {
                    continue;
                };
                bytes.clear();
                let event = shapes::progress(self.served, self.job, index, &delta, from == 0);
                push_event(&mut bytes, &event.to_string());
                wire.send(&bytes).await?;
            }
        }
        Ok(())
    }

    fn ending(&self) -> Vec<u8> {
        shapes::ending(self.served, self.job, self.gained(0, usize::MAX))
    }
}

/// The tokens of a plan from `from` up to `to`, `None` after its end.
fn delta(choice: &mut Choice, plan: &Plan, from: usize, to: usize) -> Option<Delta> {
    let end = plan.ids.len();
    let to = to.min(end);
    (from < to).then(|| choice.take(&plan.tokens(from, to), (to == end).then_some(plan.finish)))
}
