//! Carries out an accepted generation: waits for a place, keeps the pace, writes the events or the whole reply.
//!
//! Decisions are elsewhere (`answer`, `api`, `shapes`). Invariant: when the client leaves, the place among the running is given
//! back at once and no more tokens are counted.

use std::{io, time::Duration};

use tokio::time::Instant;

use super::{
    answer::Answer,
    api::{Job, Reply, json_reply},
    engine::Slot,
    http::{LAST_CHUNK, head, push_chunk},
    script::{Break, End},
    serve::{Shared, Ticket},
    shapes::{self, Choice},
    wire::Wire,
};

/// Sends a whole reply.
pub(super) async fn send_reply(wire: &mut Wire, reply: &Reply) -> io::Result<()> {
    let length = reply.body.len().to_string();
    let mut bytes =
        head(reply.status, &[("server", "uvicorn"), ("content-type", reply.content_type), ("content-length", &length)]);
    bytes.extend_from_slice(&reply.body);
    wire.send(&bytes).await
}

/// Runs the job to its end and sends its reply, or breaks off; then it says how.
pub(super) async fn generate(
    shared: &Shared,
    wire: &mut Wire,
    job: &Job,
    ticket: &mut Ticket<'_>,
    broken: Option<&Break>,
) -> io::Result<Option<End>> {
    let answer = &shared.script.answer;
    let mut slot = wire.unless_gone(shared.engine.admit(job.prompt.len())).await?;
    shared.engine.count_prompt(job.prompt.len());
    let pace = Pace { start: Instant::now(), first: ms(answer.first_token_ms), token: ms(answer.token_ms) };
    if job.stream {
        let until = broken.map_or(usize::MAX, |broken| broken.after_tokens);
        if !stream(answer, wire, job, &mut slot, pace, until).await? {
            return Ok(broken.map(|broken| broken.end));
        }
    } else {
        run(answer, wire, job, &mut slot, pace).await?;
    }
    for plan in &job.plans {
        shared.engine.count_finish(plan.finish);
    }
    // Before the last bytes, so that a client that has read them also sees the gauges without this request.
    drop(slot);
    ticket.finish();
    if job.stream {
        wire.send(&ending(answer, job)).await?;
    } else {
        send_reply(wire, &json_reply(200, &shapes::whole(answer, job))).await?;
    }
    Ok(None)
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

/// The longest plan's length and the tokens in one step.
fn steps(answer: &Answer, job: &Job) -> (usize, usize) {
    let longest = job.plans.iter().map(|plan| plan.ids.len()).max().unwrap_or(0);
    (longest, answer.tokens_per_chunk.max(1))
}

/// How many tokens all choices together gain between `from` and `to`.
fn gained(job: &Job, from: usize, to: usize) -> usize {
    job.plans.iter().map(|plan| plan.ids.len().min(to).saturating_sub(from)).sum()
}

/// Generates without showing anything.
async fn run(answer: &Answer, wire: &mut Wire, job: &Job, slot: &mut Slot, pace: Pace) -> io::Result<()> {
    let (longest, step) = steps(answer, job);
    for from in (0..longest).step_by(step) {
        let to = (from + step).min(longest);
        pace.wait(wire, to).await?;
        wire.unless_gone(slot.generated(gained(job, from, to))).await?;
    }
    Ok(())
}

/// Generates and sends each step; the terminating events are not sent here. False when it stopped because `until` tokens were sent.
async fn stream(
    answer: &Answer,
    wire: &mut Wire,
    job: &Job,
    slot: &mut Slot,
    pace: Pace,
    until: usize,
) -> io::Result<bool> {
    let (longest, step) = steps(answer, job);
    let mut choices = Choice::all(job);
    let mut bytes = head(
        200,
        &[
            ("server", "uvicorn"),
            ("content-type", "text/event-stream; charset=utf-8"),
            ("transfer-encoding", "chunked"),
        ],
    );
    for from in (0..longest).step_by(step) {
        let to = (from + step).min(longest);
        if from == 0 {
            pace.wait(wire, 1).await?;
            for event in (0..choices.len()).filter_map(|index| shapes::opening(answer, job, index)) {
                push_event(&mut bytes, &event.to_string());
            }
            wire.send(&bytes).await?;
        }
        if from >= until {
            return Ok(false);
        }
        pace.wait(wire, to).await?;
        wire.unless_gone(slot.generated(gained(job, from, to))).await?;
        for (index, choice) in choices.iter_mut().enumerate() {
            let Some(delta) = choice.advance(step) else {
                continue;
            };
            bytes.clear();
            push_event(&mut bytes, &shapes::progress(answer, job, index, delta, from == 0).to_string());
            wire.send(&bytes).await?;
        }
    }
    Ok(true)
}

fn ending(answer: &Answer, job: &Job) -> Vec<u8> {
    let mut bytes = Vec::new();
    if job.include_usage {
        push_event(&mut bytes, &shapes::closing_usage(answer, job).to_string());
    }
    push_event(&mut bytes, "[DONE]");
    bytes.extend_from_slice(LAST_CHUNK);
    bytes
}

/// Appends one event, as a chunk of its own.
pub(super) fn push_event(out: &mut Vec<u8>, data: &str) {
    push_chunk(out, format!("data: {data}\n\n").as_bytes());
}
