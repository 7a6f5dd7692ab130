//! One chat request from its bytes to its verdict, and the watch that tells slow from dead.

use super::answer::{AnswerBuilder, AnswerPolicy, WireEnd};
use super::sse::{LineTooLong, SSE_LINE_BYTES_MAX, SseSplitter};
use super::{
    AttemptFailure, Client, SIDE_REPLY_BYTES_MAX, SILENCE_FACTOR_WHILE_MOVING, Timeouts, status_failure,
    transport_failure,
};
use crate::server_state::ServerState;
use bytes::Bytes;
use eaglet_core::inflight::Unfinished;
use eaglet_core::outcome::Cause;
use eaglet_core::response::{Answer, Status};
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Frame, Incoming};
use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep};

/// How an answer travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Token by token: shows life, and what had come survives an accident.
    Stream,
    /// In one piece: cheaper for server and client; life shows in the server's gauges only.
    Whole,
}

/// An answer and what became of the prompt.
pub type ChatOutcome = (Answer, Status);

/// Which API a request goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`: messages.
    Chat,
    /// `/v1/completions`: the ids of a prompt and of the beginning of its answer.
    Completions,
}

impl Api {
    fn path(self) -> &'static str {
        match self {
            Api::Chat => "/v1/chat/completions",
            Api::Completions => "/v1/completions",
        }
    }
}

/// An answer in the making that others can look at between two events.
pub type LiveAnswer = Rc<RefCell<AnswerBuilder>>;

/// One request.
pub struct Ask {
    /// Where it goes.
    pub api: Api,
    /// Its body.
    pub body: Bytes,
    /// How the answer travels.
    pub mode: Mode,
    /// Where the answer grows; holds its beginning when it is continued.
    pub live: LiveAnswer,
}

/// What came of a request.
#[derive(Debug)]
pub struct Asked {
    /// The answer.
    pub answer: Answer,
    /// What became of the prompt.
    pub status: Status,
    /// Tokens of it that were there before this request.
    pub tokens_before: u64,
    /// The answer as it can be continued, when it was cut at its limit and can.
    pub unfinished: Option<Box<Unfinished>>,
}

impl Asked {
    /// Tokens that this request brought.
    pub fn new_tokens(&self) -> u64 {
        self.answer.completion_tokens().unwrap_or(0).saturating_sub(self.tokens_before)
    }
}

/// What all requests of a run count together. Lives on one thread.
#[derive(Debug)]
pub struct InFlight {
    /// Tokens received, lost attempts included.
    pub tokens: Cell<u64>,
    /// When the last byte of any reply came.
    pub last_byte: Cell<Instant>,
    /// Requests sent again at once because a reused connection was closed under them.
    pub idle_resets: Cell<u64>,
    /// Requests out that have no token yet, and how long each has been so, summed.
    unstarted: Cell<u64>,
    unstarted_s: Cell<f64>,
    unstarted_since: Cell<Instant>,
}

impl Default for InFlight {
    fn default() -> Self {
        InFlight {
            tokens: Cell::new(0),
            last_byte: Cell::new(Instant::now()),
            idle_resets: Cell::new(0),
            unstarted: Cell::new(0),
            unstarted_s: Cell::new(0.0),
            unstarted_since: Cell::new(Instant::now()),
        }
    }
}

impl InFlight {
    /// Seconds that requests have spent without a token, summed over all of them: twice the same number a second apart is no queue.
    pub fn unstarted_s(&self) -> f64 {
        self.count_unstarted(0);
        self.unstarted_s.get()
    }

    fn count_unstarted(&self, change: i64) {
        let now = Instant::now();
        let seconds = (now - self.unstarted_since.replace(now)).as_secs_f64();
        self.unstarted_s.set(self.unstarted_s.get() + self.unstarted.get() as f64 * seconds);
        self.unstarted.set(self.unstarted.get().saturating_add_signed(change));
    }

    fn begin(&self) -> Unstarted<'_> {
        self.count_unstarted(1);
        Unstarted(self)
    }
}

/// A request without a token; dropped with the first one, or with the request.
struct Unstarted<'a>(&'a InFlight);

impl Drop for Unstarted<'_> {
    fn drop(&mut self) {
        self.0.count_unstarted(-1);
    }
}

/// How often a request that waits looks at the clock.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// A request that was out when the server went down, and has been silent since, is given up after this time.
const DOWN_GRACE: Duration = Duration::from_secs(5);

/// Longest wait for the body of an error reply.
const ERROR_BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// What a waiting request knows about itself.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    mode: Mode,
    started: Instant,
    /// Last byte of this reply, or the start.
    last_byte: Instant,
    has_tokens: bool,
    has_finished: bool,
}

impl Waiting {
    /// Whether to go on waiting: `None`, or why not. Pure.
    fn verdict(&self, now: Instant, timeouts: &Timeouts, server: &ServerState) -> Option<(Cause, String)> {
        let silent = |since: Instant| now.saturating_duration_since(since);
        if let Some(total) = timeouts.total.filter(|total| silent(self.started) >= *total) {
            return Some((Cause::TotalTimeout, format!("not finished after {} s", total.as_secs_f32())));
        }
        if let Some(down) = server.last_down().filter(|down| self.last_byte <= *down && silent(*down) >= DOWN_GRACE) {
            return Some((
                Cause::ServerDown,
                format!("silent since the server went down {:.0} s ago", silent(down).as_secs_f32()),
            ));
        }
        // Gauges that move say that the server works; the request is then queued or far down the batch, not dead.
        let alive = server.gauges_moved().map_or(self.last_byte, |moved| moved.max(self.last_byte));
        if self.has_tokens {
            let silence = silent(self.last_byte);
            let longest = timeouts.silence.saturating_mul(SILENCE_FACTOR_WHILE_MOVING);
            return (silence >= longest || silent(alive) >= timeouts.silence)
                .then(|| (Cause::Silence, format!("no token for {:.0} s", silence.as_secs_f32())));
        }
        if self.mode == Mode::Whole && server.gauges_moved().is_none() {
            return None;
        }
        (silent(alive) >= timeouts.first_byte).then(|| {
            (Cause::FirstByteTimeout, format!("no token within {:.0} s", silent(self.last_byte).as_secs_f32()))
        })
    }
}

/// A clock beside something that is awaited: one timer a request, re-armed once a second, not once a token.
struct Watch<'a> {
    waiting: Waiting,
    timeouts: &'a Timeouts,
    server: &'a ServerState,
    tick: Pin<Box<Sleep>>,
    unstarted: Option<Unstarted<'a>>,
}

impl<'a> Watch<'a> {
    fn new(mode: Mode, timeouts: &'a Timeouts, server: &'a ServerState, in_flight: &'a InFlight) -> Self {
        let now = Instant::now();
        let waiting = Waiting { mode, started: now, last_byte: now, has_tokens: false, has_finished: false };
        let tick = Box::pin(tokio::time::sleep(WATCH_INTERVAL));
        Watch { waiting, timeouts, server, tick, unstarted: Some(in_flight.begin()) }
    }

    fn poll_trouble(&mut self, cx: &mut Context<'_>) -> Poll<(Cause, String)> {
        while self.tick.as_mut().poll(cx).is_ready() {
            if self.waiting.has_finished {
                let over = self.waiting.last_byte.elapsed() >= self.timeouts.grace;
                if over {
                    return Poll::Ready((Cause::CutStream, "no end of the body after the finish reason".to_owned()));
                }
            } else if let Some(trouble) = self.waiting.verdict(Instant::now(), self.timeouts, self.server) {
                return Poll::Ready(trouble);
            }
            self.tick.as_mut().reset(Instant::now() + WATCH_INTERVAL);
        }
        Poll::Pending
    }

    async fn guard<T>(&mut self, future: impl Future<Output = T>) -> Result<T, AttemptFailure> {
        let mut future = std::pin::pin!(future);
        std::future::poll_fn(|cx| {
            if let Poll::Ready(value) = future.as_mut().poll(cx) {
                return Poll::Ready(Ok(value));
            }
            self.poll_trouble(cx).map(|(cause, detail)| Err(AttemptFailure::new(cause, detail)))
        })
        .await
    }

    async fn frame(&mut self, body: &mut Incoming) -> Result<Option<hyper::Result<Frame<Bytes>>>, AttemptFailure> {
        std::future::poll_fn(|cx| {
            if let Poll::Ready(frame) = Pin::new(&mut *body).poll_frame(cx) {
                return Poll::Ready(Ok(frame));
            }
            self.poll_trouble(cx).map(|(cause, detail)| Err(AttemptFailure::new(cause, detail)))
        })
        .await
    }

    fn byte_came(&mut self, in_flight: &InFlight) {
        self.waiting.last_byte = Instant::now();
        in_flight.last_byte.set(self.waiting.last_byte);
    }
}

impl Client {
    /// Sends a chat request once.
    ///
    /// # Errors
    /// As [`Client::ask`].
    pub async fn chat(
        &self,
        body: Bytes,
        mode: Mode,
        policy: &AnswerPolicy,
        server: &ServerState,
        in_flight: &InFlight,
    ) -> Result<ChatOutcome, AttemptFailure> {
        let ask = Ask { api: Api::Chat, body, mode, live: LiveAnswer::default() };
        self.ask(ask, policy, server, in_flight).await.map(|asked| (asked.answer, asked.status))
    }

    /// Sends a request once.
    ///
    /// A reset before any byte of the reply on a *reused* connection is the keep-alive race, not an answer of the server: the request goes out again at once on
    /// a fresh connection, here, and nobody is charged for it.
    ///
    /// # Errors
    /// Why there is no answer, with what had come.
    pub async fn ask(
        &self,
        ask: Ask,
        policy: &AnswerPolicy,
        server: &ServerState,
        in_flight: &InFlight,
    ) -> Result<Asked, AttemptFailure> {
        let Ask { api, body, mode, live } = ask;
        let tokens_before = live.borrow().tokens_before();
        let mut watch = Watch::new(mode, self.timeouts(), server, in_flight);
        let mut fresh = false;
        let (reply, connection) = loop {
            let leased = self.pool.lease(fresh).await;
            let mut connection = leased.map_err(|e| AttemptFailure::new(e.cause, e.detail))?;
            let request = self.request(hyper::Method::POST, api.path(), body.clone());
            match watch.guard(connection.send(request)).await? {
                Ok(reply) => break (reply, connection),
                Err(error) if connection.reused && !error.is_parse() => {
                    in_flight.idle_resets.set(in_flight.idle_resets.get() + 1);
                    fresh = true;
                }
                Err(error) => return Err(self.scrubbed(transport_failure(&error))),
            }
        };
        watch.byte_came(in_flight);
        let (head, mut body) = reply.into_parts();
        if !head.status.is_success() {
            let limited = Limited::new(body, SIDE_REPLY_BYTES_MAX).collect();
            let collected = tokio::time::timeout(ERROR_BODY_TIMEOUT, limited).await;
            let bytes = collected.ok().and_then(Result::ok).map(http_body_util::Collected::to_bytes);
            if bytes.is_some() {
                connection.reuse(&self.pool);
            }
            return Err(status_failure(head.status, &head.headers, &bytes.unwrap_or_default(), self.endpoint()));
        }
        // A server that was asked for a stream may answer in one piece all the same; its content type says so.
        let is_json = head
            .headers
            .get(hyper::header::CONTENT_TYPE)
            .is_some_and(|v| v.as_bytes().starts_with(b"application/json"));
        let mut first_token = None;
        let read = if mode == Mode::Whole || is_json {
            self.read_whole(&mut body, &live, policy, &mut watch, in_flight).await
        } else {
            self.read_stream(&mut body, &live, policy, &mut watch, in_flight, &mut first_token).await
        };
        let end = match read {
            Ok(ReadEnd::Complete(end)) => {
                connection.reuse(&self.pool);
                end
            }
            Ok(ReadEnd::LeftOpen) => WireEnd::NoDone,
            Err(failure) => return Err(self.scrubbed(with_partial(failure, live.take(), &self.endpoint().label()))),
        };
        let endpoint = self.endpoint().label();
        let builder = live.take();
        let unfinished = if builder.is_cut_at_limit(policy) { builder.unfinished(&endpoint) } else { None };
        let (mut answer, status) = builder.finish(end, policy, &endpoint)?;
        answer.first_token_s = first_token.map(|at: Duration| seconds(at));
        answer.latency_s = seconds(watch.waiting.started.elapsed());
        Ok(Asked { answer, status, tokens_before, unfinished: unfinished.map(Box::new) })
    }

    fn scrubbed(&self, failure: AttemptFailure) -> AttemptFailure {
        AttemptFailure { detail: self.endpoint().scrubber.scrub(&failure.detail), ..failure }
    }

    async fn read_stream(
        &self,
        body: &mut Incoming,
        live: &LiveAnswer,
        policy: &AnswerPolicy,
        watch: &mut Watch<'_>,
        in_flight: &InFlight,
        first_token: &mut Option<Duration>,
    ) -> Result<ReadEnd, AttemptFailure> {
        let mut splitter = SseSplitter::default();
        let scrubber = &self.endpoint().scrubber;
        let before = live.borrow().tokens();
        let mut tokens = before;
        loop {
            let chunk = match watch.frame(body).await {
                Ok(Some(Ok(frame))) => frame.into_data().unwrap_or_default(),
                Ok(None) => break,
                // What follows a finish reason adds nothing: a connection that breaks or stays open there does not spoil the answer.
                Ok(Some(Err(_))) | Err(_) if live.borrow().has_finish_reason() => return Ok(ReadEnd::LeftOpen),
                Ok(Some(Err(error))) => return Err(transport_failure(&error)),
                Err(failure) => return Err(failure),
            };
            watch.byte_came(in_flight);
            // Borrowed between two waits only, so that a checkpoint never finds it taken.
            let mut builder = live.borrow_mut();
            splitter.push(&chunk, |data| builder.push_event(data, policy, scrubber))?;
            let now = builder.tokens();
            if now > tokens {
                if tokens == before {
                    *first_token = Some(watch.waiting.started.elapsed());
                }
                in_flight.tokens.set(in_flight.tokens.get() + now - tokens);
                tokens = now;
                watch.waiting.has_tokens = true;
                watch.unstarted = None;
            }
            watch.waiting.has_finished = builder.has_finish_reason();
        }
        splitter.finish(|data| live.borrow_mut().push_event(data, policy, scrubber))?;
        Ok(ReadEnd::Complete(WireEnd::NoDone))
    }

    async fn read_whole(
        &self,
        body: &mut Incoming,
        live: &LiveAnswer,
        policy: &AnswerPolicy,
        watch: &mut Watch<'_>,
        in_flight: &InFlight,
    ) -> Result<ReadEnd, AttemptFailure> {
        // A reply that came in one piece is parsed where it lies.
        let mut whole = Bytes::new();
        let mut joined: Vec<u8> = Vec::new();
        let announced = usize::try_from(body.size_hint().lower()).unwrap_or(0).min(1 << 20);
        while let Some(frame) = watch.frame(body).await? {
            let chunk = frame.map_err(|e| transport_failure(&e))?.into_data().unwrap_or_default();
            watch.byte_came(in_flight);
            // Text doubles at most when escaped, an id takes about 7 bytes: four times the bound is beyond any answer within it.
            if whole.len() + joined.len() + chunk.len() > policy.reply_bytes_max.saturating_mul(4) {
                return Err(AttemptFailure::new(
                    Cause::ReplyTooLarge,
                    format!("the reply is larger than {} bytes", policy.reply_bytes_max),
                ));
            }
            if whole.is_empty() && joined.is_empty() {
                whole = chunk;
                continue;
            }
            if joined.is_empty() {
                joined.reserve(announced.max(whole.len() + chunk.len()));
                joined.extend_from_slice(&std::mem::take(&mut whole));
            }
            joined.extend_from_slice(&chunk);
        }
        let mut builder = live.borrow_mut();
        let before = builder.tokens();
        builder.push_whole(if joined.is_empty() { &whole } else { &joined }, policy, &self.endpoint().scrubber)?;
        in_flight.tokens.set(in_flight.tokens.get() + builder.tokens() - before);
        Ok(ReadEnd::Complete(WireEnd::Orderly))
    }
}

enum ReadEnd {
    /// The body was read to its end; the connection can be used again.
    Complete(WireEnd),
    /// The answer is finished, the body is not; the connection is dropped.
    LeftOpen,
}

impl From<LineTooLong> for AttemptFailure {
    fn from(_: LineTooLong) -> Self {
        AttemptFailure::new(
            Cause::ReplyTooLarge,
            format!("a line of the stream is longer than {SSE_LINE_BYTES_MAX} bytes"),
        )
    }
}

fn with_partial(failure: AttemptFailure, builder: AnswerBuilder, endpoint: &str) -> AttemptFailure {
    let tokens = builder.tokens() - builder.tokens_before();
    let unfinished = builder.unfinished(endpoint).map(Box::new);
    AttemptFailure { tokens, partial: builder.into_partial().map(Box::new), unfinished, ..failure }
}

/// Seconds with milliseconds: finer is noise, and makes the records longer.
fn seconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(mode: Mode, has_tokens: bool) -> Waiting {
        let now = Instant::now();
        Waiting { mode, started: now, last_byte: now, has_tokens, has_finished: false }
    }

    fn after(waiting: Waiting, seconds: u64, server: &ServerState) -> Option<Cause> {
        let now = waiting.started + Duration::from_secs(seconds);
        waiting.verdict(now, &Timeouts::default(), server).map(|(cause, _)| cause)
    }

    #[test]
    fn slow_is_not_dead() {
        let server = ServerState::default();
        let mut flowing = waiting(Mode::Stream, true);
        flowing.last_byte = flowing.started + Duration::from_secs(86_400);
        assert_eq!(after(flowing, 86_400 + 60, &server), None, "a day long answer whose tokens flow goes on");
        assert_eq!(after(waiting(Mode::Stream, true), 121, &server), Some(Cause::Silence));
        assert_eq!(after(waiting(Mode::Stream, false), 599, &server), None);
        assert_eq!(after(waiting(Mode::Stream, false), 601, &server), Some(Cause::FirstByteTimeout));
    }

    #[test]
    fn moving_gauges_keep_a_request_without_tokens_alive() {
        let server = ServerState::default();
        assert_eq!(after(waiting(Mode::Whole, false), 86_400, &server), None, "nothing to judge a whole reply by");
        let request = waiting(Mode::Whole, false);
        server.gauges_moved_at(request.started + Duration::from_secs(1000));
        assert_eq!(after(request, 1500, &server), None);
        assert_eq!(after(request, 1601, &server), Some(Cause::FirstByteTimeout));
    }

    /// A preempted request is silent while the server works on others; only a connection that died is silent for ever.
    #[test]
    fn a_silent_request_on_a_server_that_works_is_waited_for_up_to_a_bound() {
        let server = ServerState::default();
        let request = waiting(Mode::Stream, true);
        let moved = |seconds| server.gauges_moved_at(request.started + Duration::from_secs(seconds));
        moved(300);
        assert_eq!(after(request, 400, &server), None, "the gauges moved 100 s ago");
        assert_eq!(after(request, 420, &server), Some(Cause::Silence), "nothing moves any more");
        moved(598);
        assert_eq!(after(request, 599, &server), None);
        assert_eq!(after(request, 600, &server), Some(Cause::Silence), "five times the silence is the bound");
    }

    /// vLLM on SIGTERM refuses new connections and leaves the open ones hanging.
    #[test]
    fn a_request_silent_since_the_server_went_down_is_given_up() {
        let server = ServerState::default();
        let request = waiting(Mode::Stream, true);
        server.down_at(request.started + Duration::from_secs(10), "refused".into());
        assert_eq!(after(request, 12, &server), None);
        assert_eq!(after(request, 15, &server), Some(Cause::ServerDown));
        server.up();
        assert_eq!(
            after(request, 15, &server),
            Some(Cause::ServerDown),
            "the new process does not know the old request"
        );
        let mut recovered = request;
        recovered.last_byte = request.started + Duration::from_secs(11);
        assert_eq!(after(recovered, 60, &server), None);
    }
}
