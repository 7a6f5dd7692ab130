//! The simulator as the face sees it: generations, gauges, and what goes wrong with a request.

use serde_json::{Value, json};
use tokio::sync::watch;

use super::{
    engine::{NewSequence, Refused, SequenceId},
    faults::{Hit, Instead as Fate, RetryAfterAs, Target},
    simulator::{Progress, Simulator, lock},
};
use crate::{
    answer::Plan,
    api::{self, Counters, Gauges, Job, Reply, Served},
    backend::{Backend, Disturbance, Instead, TokenStream, Tokens},
    http::Request,
};

/// What the gauges are called while they are renamed.
const RENAMED_PREFIX: &str = "engine_v2:";

impl Backend for Simulator {
    type Stream = SimulatedStream;

    fn served(&self) -> &Served {
        &self.0.served
    }

    fn gauges(&self) -> Gauges {
        let state = lock(&self.0.state);
        let gauges = state.engine.gauges();
        Gauges {
            running: gauges.running,
            waiting: gauges.waiting,
            kv_cache_usage: gauges.kv_use,
            counters: Counters {
                prompt_tokens: gauges.prompt_tokens,
                generation_tokens: gauges.generation_tokens,
                preemptions: gauges.preemptions,
                stopped: state.stopped,
                cut_by_length: state.cut_by_length,
            },
        }
    }

    fn submit(&self, job: &Job) -> Result<Vec<SimulatedStream>, Reply> {
        // Those already begun are given up with the vector when a later one is refused.
        (0..job.choices).map(|choice| self.begin(self.0.rule.plan(&job.prompt, job.limits(choice)), job)).collect()
    }

    fn disturb(&self, request: &Request) -> Disturbance {
        let target = match request.path.as_str() {
            api::CHAT | api::COMPLETIONS => Target::Generation,
            "/metrics" => Target::Metrics,
            _ => Target::Other,
        };
        let hit = lock(&self.0.faults).decide(self.0.now_s(), target);
        self.disturbance(hit)
    }
}

/// One choice on its way: its tokens are planned, and shown as the engine gets to them.
#[derive(Debug)]
pub struct SimulatedStream {
    simulator: Simulator,
    incarnation: u64,
    id: SequenceId,
    plan: Plan,
    shown: usize,
    generated: watch::Receiver<usize>,
}

impl TokenStream for SimulatedStream {
    async fn next(&mut self) -> Option<Tokens> {
        let end = self.plan.ids.len();
        if self.shown == end {
            return None;
        }
        loop {
            let generated = (*self.generated.borrow_and_update()).min(end);
            if generated > self.shown {
                let tokens = self.plan.tokens(self.shown, generated);
                self.shown = generated;
                return Some(Tokens { tokens, finish: (generated == end).then_some(self.plan.finish) });
            }
            if self.generated.changed().await.is_err() {
                // The engine was made anew; the end of the connection tells the client.
                return std::future::pending().await;
            }
        }
    }
}

impl Drop for SimulatedStream {
    fn drop(&mut self) {
        let mut state = lock(&self.simulator.0.state);
        if state.incarnation == self.incarnation && state.streams.remove(&self.id).is_some() {
            state.engine.abort(self.id);
        }
    }
}

impl Simulator {
    fn begin(&self, plan: Plan, job: &Job) -> Result<SimulatedStream, Reply> {
        let mut state = lock(&self.0.state);
        let new = NewSequence { prompt_tokens: job.prompt.len(), answer_tokens: plan.ids.len() };
        let id = state.engine.submit(new).map_err(|refused| match refused {
            Refused::QueueFull => self.refusal(503, None),
            Refused::BadLength => api::refuse(400, "BadRequestError", Value::Null, "Nothing can be generated here."),
        })?;
        let (sender, generated) = watch::channel(0);
        state.streams.insert(id, Progress { generated: sender, finish: plan.finish });
        let incarnation = state.incarnation;
        drop(state);
        self.0.work.notify_one();
        Ok(SimulatedStream { simulator: self.clone(), incarnation, id, plan, shown: 0, generated })
    }

    /// Puts what faults say into the face's words.
    fn disturbance(&self, hit: Hit) -> Disturbance {
        let instead = hit.instead.map(|fate| match fate {
            Fate::Reset => Instead::Reset,
            Fate::Refuse(status, retry_after) => Instead::Reply(self.refusal(status, retry_after)),
            Fate::NoMetrics => Instead::Reply(api::json_reply(404, &json!({"detail": "Not Found"}))),
            Fate::RenamedMetrics => {
                let text = api::metrics(&self.0.served.model, &self.gauges()).replace("vllm:", RENAMED_PREFIX);
                Instead::Reply(api::exposition(&text))
            }
        });
        Disturbance { instead, first_token_delay: self.0.wall(hit.first_token_delay_s), break_off: hit.break_off }
    }

    fn refusal(&self, status: u16, retry_after: Option<(f64, RetryAfterAs)>) -> Reply {
        let (kind, message) = match status {
            429 => ("RateLimitError", "Too many requests (simulated)."),
            _ => ("ServiceUnavailableError", "The server cannot take this request now (simulated)."),
        };
        let mut reply = api::refuse(status, kind, Value::Null, message);
        if let Some((span, how)) = retry_after {
            // Clients wait on our clock.
            let seconds = self.0.wall(span).as_secs_f64().ceil() as i64;
            let value = match how {
                RetryAfterAs::Seconds => seconds.to_string(),
                RetryAfterAs::Date => http_date(seconds),
            };
            reply.headers.push(("retry-after", value));
        }
        reply
    }
}

/// The date so many seconds from now, as HTTP writes it.
fn http_date(seconds: i64) -> String {
    let now = jiff::Timestamp::now();
    let then = now.checked_add(jiff::SignedDuration::from_secs(seconds)).unwrap_or(now);
    then.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()
}
