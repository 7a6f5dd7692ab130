//! One prompt from its first request to its end.

use super::books::{End, Submitted};
use super::breaker::Ending;
use super::checkpoints::Generation;
use super::continuing::{Broke, Draft, PROGRESS_TOKENS_MIN, Step};
use super::server::Server;
use super::servers::Lease;
use super::token_limit::TokenLimit;
use super::{Run, Stop};
use crate::client::{Asked, AttemptFailure, LiveAnswer};
use crate::retry::{self, Next, RetryAccount};
use crate::turns::Conversation;
use eaglet_core::commit::Stream;
use eaglet_core::inflight::Saved;
use eaglet_core::outcome::{Cause, FailedAs, FailedAttempt, Failure, Partial, Place};
use eaglet_core::prompt::Prompt;
use eaglet_core::provenance::now;
use eaglet_core::response::{Answer, RECORD_VERSION, Response, Status};
use std::rc::Rc;
use std::time::Duration;
use tokio::time::Instant;

/// So many attempts are told in a failure record; the first ones go.
const ATTEMPTS_TOLD_MAX: usize = 20;

/// Where a prompt is in the books; an unfinished prompt goes back to "not started" when its task is dropped.
struct Placed<'a> {
    run: &'a Run,
    place: Place,
}

impl Placed<'_> {
    fn step(&mut self, to: Place) {
        self.run.books.borrow_mut().tally.step(self.place, to);
        self.place = to;
    }

    fn ended(mut self) -> Place {
        // Whoever takes the place over books the rest.
        std::mem::replace(&mut self.place, Place::NotStarted)
    }
}

impl Drop for Placed<'_> {
    fn drop(&mut self) {
        if self.place != Place::NotStarted {
            self.step(Place::NotStarted);
        }
    }
}

/// A prompt that ended without an answer, held back or booked.
pub(super) struct EndedPrompt {
    pub(super) failure: Failure,
    pub(super) generation: Generation,
}

/// What the loop over attempts came to.
enum Attempts {
    Answered(Box<Answer>, Status),
    Ended(FailedAs, Cause, Option<Box<Partial>>),
    /// The run stops; the prompt is left for a later session.
    Left,
}

struct Attempting<'a> {
    run: &'a Run,
    prompt: &'a Prompt,
    placed: Placed<'a>,
    lease: Option<Lease>,
    /// The server on which the last attempt broke: another one is preferred.
    avoid: Option<u64>,
    /// The server that answered.
    endpoint: String,
    account: RetryAccount,
    told: Vec<FailedAttempt>,
    attempts: u32,
    source: usize,
    generation: Generation,
    turn: u64,
    draft: Draft,
}

/// Answers one prompt, or books why not.
pub(super) async fn answer_prompt(run: Rc<Run>, index: usize, lease: Lease) {
    let prompt = match run.plan.prompt(index) {
        Ok(prompt) => prompt,
        Err(error) => return run.fail(error),
    };
    let placed = Placed { run: &run, place: Place::NotStarted };
    let (generation, saved) = run.checkpoints.begin(prompt.key());
    let mut conversation = Conversation::new(&prompt.messages, run.settings.turns);
    let (turn, draft) = saved.map_or_else(Default::default, |saved| go_on(&run, saved, &mut conversation, &prompt));
    let mut attempting = Attempting {
        run: &run,
        prompt: &prompt,
        placed,
        lease: Some(lease),
        avoid: None,
        endpoint: String::new(),
        account: RetryAccount::default(),
        told: vec![],
        attempts: 0,
        source: run.plan.entries()[index].source(),
        generation,
        turn,
        draft,
    };
    loop {
        attempting.account = RetryAccount::default();
        attempting.attempts = 0;
        match attempting.until_answered(&conversation).await {
            Attempts::Answered(answer, status) => {
                let mut answer = *answer;
                if !answer.segments.is_empty() {
                    Box::pin(run.check_joined(&mut answer)).await;
                }
                if conversation.goes_on_after(&answer, status) {
                    run.checkpoints.turn_answered(generation, prompt.key(), attempting.turn, &answer, status);
                }
                if let Some(last) = conversation.answered(answer, status) {
                    return attempting.commit(conversation, last, status);
                }
                attempting.turn += 1;
                attempting.draft = Draft::default();
            }
            Attempts::Ended(end, cause, partial) => return attempting.end(end, cause, partial),
            Attempts::Left => return,
        }
    }
}

/// Takes up what an earlier session left of a prompt: the turns that are answered, and the beginning of the answer to the next.
fn go_on(run: &Run, saved: Saved, conversation: &mut Conversation, prompt: &Prompt) -> (u64, Draft) {
    let turn = saved.turns.len() as u64;
    for (answer, status) in saved.turns {
        if !conversation.goes_on_after(&answer, status) {
            // What was saved does not fit this conversation.
            *conversation = Conversation::new(&prompt.messages, run.settings.turns);
            return (0, Draft::default());
        }
        conversation.answered(answer, status);
    }
    let begun = saved.unfinished.filter(|_| run.may_continue(prompt));
    let draft = begun.map(|begun| Draft::of_earlier_session(begun, &run.settings.answers.truncated));
    let draft = draft.unwrap_or_default();
    run.books.borrow_mut().broke_off(draft.tokens(), 0);
    (turn, draft)
}

impl Attempting<'_> {
    async fn until_answered(&mut self, conversation: &Conversation) -> Attempts {
        let run = self.run;
        if !self.take_slot().await {
            return Attempts::Left;
        }
        let Some(client) = self.lease.as_ref().map(|lease| &lease.server().client) else { return Attempts::Left };
        let limit = run.limiter.limit(client, &run.server, conversation.messages(), self.prompt.tools.as_deref()).await;
        let limit = match limit {
            TokenLimit::Send(limit) => limit,
            TokenLimit::PromptTooLong(tokens) => {
                let detail = format!("the prompt has {tokens} tokens, as many as the context or more");
                self.tell(&AttemptFailure::new(Cause::ContextTooLong, detail), Duration::ZERO);
                return Attempts::Ended(FailedAs::Rejected, Cause::ContextTooLong, None);
            }
        };
        let body =
            bytes::Bytes::from(run.template.render(conversation.messages(), self.prompt.tools.as_deref(), limit));
        loop {
            if !self.take_slot().await {
                return Attempts::Left;
            }
            let Some(lease) = &self.lease else { return Attempts::Left };
            let server = Rc::clone(lease.server());
            self.placed.step(Place::InFlight);
            let ask = match run.next_step(&mut self.draft, &body, limit, &server).await {
                Step::Ask(ask) => ask,
                Step::Answered(answer, status) => return Attempts::Answered(answer, status),
            };
            self.watch(&ask.live, server.label());
            self.attempts += 1;
            let began = Instant::now();
            let asked = server.client.ask(ask, &run.settings.answers, &server.monitor.state, &server.in_flight).await;
            lease.heard(asked.as_ref().map(Asked::new_tokens), began.elapsed());
            match asked {
                Ok(asked) => {
                    self.endpoint = server.label();
                    match run.goes_on(&mut self.draft, asked, limit, self.prompt, &server) {
                        Some((answer, status)) => return Attempts::Answered(answer, status),
                        None => self.rest(),
                    }
                }
                Err(failure) => {
                    // The slot is free while the prompt waits.
                    self.lease = None;
                    self.placed.step(Place::Waiting);
                    run.changed.notify_waiters();
                    if let Some(end) = Box::pin(self.after_failure(failure, began, &server)).await {
                        return match self.draft.take_truncated().filter(|_| !matches!(end, Attempts::Left)) {
                            Some((answer, status)) => Attempts::Answered(answer, status),
                            None => end,
                        };
                    }
                }
            }
        }
    }

    /// The checkpoints follow this answer.
    fn watch(&self, live: &LiveAnswer, endpoint: String) {
        self.run.checkpoints.watch(self.generation, self.prompt.key(), self.turn, live, endpoint);
    }

    /// No request is out; the checkpoints keep what there is.
    fn rest(&self) {
        if let Some((live, endpoint)) = self.draft.at_rest() {
            self.watch(&live, endpoint);
        }
    }

    /// A slot to send in; false when the run stops first.
    async fn take_slot(&mut self) -> bool {
        loop {
            if self.run.stop() != Stop::No {
                return false;
            }
            if self.lease.as_ref().is_some_and(|lease| lease.server().is_up()) {
                return true;
            }
            self.lease = None;
            if self.placed.place == Place::InFlight {
                // Between two requests its server went away.
                self.placed.step(Place::Waiting);
            }
            tokio::select! {
                biased;
                lease = self.run.servers.lease(self.avoid) => self.lease = Some(lease),
                () = self.run.stopping() => return false,
            }
        }
    }

    /// Waits as the retry table says; `Some` when the prompt ends here.
    async fn after_failure(
        &mut self,
        mut failure: AttemptFailure,
        began: Instant,
        server: &Server,
    ) -> Option<Attempts> {
        let run = self.run;
        if retry::may_mean_server_down(failure.cause) && !server.monitor.is_up(&server.client).await {
            failure.detail = format!("{} ({})", failure.detail, failure.cause.label());
            failure.cause = Cause::ServerDown;
        }
        self.avoid = retry::is_the_servers(failure.cause).then_some(server.id);
        let arrived = failure.tokens;
        let (broke, kept) = run.broke(&mut self.draft, &mut failure, self.prompt, server);
        // What was dropped behind the cut is generated again.
        failure.tokens = arrived.saturating_sub(kept);
        run.books.borrow_mut().broke_off(kept, failure.tokens);
        self.rest();
        self.tell(&failure, began.elapsed());
        if broke == Broke::Refused {
            run.retried(self.prompt, &failure);
            return None;
        }
        if kept >= PROGRESS_TOKENS_MIN {
            self.account = RetryAccount::default();
        }
        let next = run.settings.retry.next(
            &mut self.account,
            failure.cause,
            failure.retry_after,
            run.jitter.borrow_mut().draw(),
        );
        match next {
            Next::End(end) => return Some(Attempts::Ended(end, failure.cause, failure.partial)),
            Next::EndUnlessAll => return Some(Attempts::Ended(FailedAs::Rejected, failure.cause, failure.partial)),
            Next::After(_) | Next::WhenServerIsUp => run.retried(self.prompt, &failure),
        }
        let waited = Instant::now();
        let until_next = async {
            match next {
                Next::After(wait) => tokio::time::sleep(wait).await,
                _ => run.servers.wait_until_one_is_up().await,
            }
        };
        tokio::select! {
            biased;
            () = until_next => {}
            () = run.stopping() => return Some(Attempts::Left),
        }
        if failure.cause != Cause::ServerDown {
            self.account.spent += waited.elapsed() + began.elapsed();
        }
        None
    }

    fn tell(&mut self, failure: &AttemptFailure, took: Duration) {
        if self.told.len() == ATTEMPTS_TOLD_MAX {
            self.told.remove(0);
        }
        self.told.push(FailedAttempt {
            at: now(),
            cause: failure.cause,
            http_status: failure.http_status,
            detail: failure.detail.clone(),
            took_s: (took.as_secs_f64() * 1000.0).round() / 1000.0,
            tokens: failure.tokens,
        });
    }

    fn commit(self, conversation: Conversation, answer: Answer, status: Status) {
        let (run, prompt) = (self.run, self.prompt);
        let (messages, earlier_turns) = conversation.finish();
        let mut tokens = answer.completion_tokens();
        for turn in &earlier_turns {
            tokens = tokens.zip(turn.answer.completion_tokens()).map(|(a, b)| a + b);
        }
        // Of an answer put together from several, the server that ended it.
        let endpoint = answer.segments.last().map_or(self.endpoint, |segment| segment.endpoint.clone());
        let mut response = Response {
            v: RECORD_VERSION,
            sample_id: prompt.id.clone(),
            prompt_hash: prompt.hash,
            status,
            prompt_tokens: answer.prompt_tokens(),
            completion_tokens: tokens,
            prompt_bytes: prompt.text_bytes() as u64,
            row: prompt.row,
            source: prompt.source.clone(),
            model: run.server.model.clone(),
            endpoint,
            finished_at: now(),
            attempts: self.attempts,
            sampling: run.settings.sampling.clone(),
            max_completion_tokens: run.settings.max_completion_tokens,
            messages,
            tools: prompt.tools.clone(),
            answer,
            earlier_turns,
        };
        flag_lengths(&mut response, run);
        if let Some(tokens) = response.completion_tokens {
            run.lengths.borrow_mut().add(self.source, response.prompt_bytes, tokens);
        }
        let submitted = Submitted {
            prompt_bytes: response.prompt_bytes,
            source: response.source.clone(),
            end: End::Answered {
                status,
                finish_reason: response.answer.finish_reason.clone(),
                completion_tokens: response.completion_tokens,
            },
        };
        let line = response.to_line();
        if !response.answer.segments.is_empty() {
            run.books.borrow_mut().joined();
        }
        let from = self.placed.ended();
        run.submit(Stream::Responses, line, from, submitted, self.generation);
        let held = run.breaker.borrow_mut().succeeded();
        held.into_iter().for_each(|ended| run.submit_failure(ended));
    }

    fn end(self, failed_as: FailedAs, cause: Cause, partial: Option<Box<Partial>>) {
        let (run, prompt) = (self.run, self.prompt);
        let failure = Failure {
            v: RECORD_VERSION,
            sample_id: Some(prompt.id.clone()),
            prompt_hash: Some(prompt.hash),
            failed_as,
            cause: cause.label().to_owned(),
            detail: self.told.last().map(|told| told.detail.clone()).unwrap_or_default(),
            origin: None,
            row: prompt.row,
            source: prompt.source.clone(),
            prompt_bytes: prompt.text_bytes() as u64,
            at: now(),
            attempts: self.told,
            partial: partial.map(|partial| *partial),
        };
        let ended = EndedPrompt { failure, generation: self.generation };
        let mut placed = self.placed;
        if placed.place != Place::Waiting {
            placed.step(Place::Waiting);
        }
        placed.ended();
        if matches!(retry::verdict(cause), retry::Verdict::Final(_)) {
            return run.submit_failure(ended);
        }
        let ending = run.breaker.borrow_mut().failed(cause, ended);
        if ending == Ending::Stop {
            run.stop_refused();
        }
    }
}

/// Lengths that training will ask about.
fn flag_lengths(response: &mut Response, run: &Run) {
    let (prompt, completion) = (response.prompt_tokens.unwrap_or(0), response.completion_tokens.unwrap_or(0));
    let flags = &mut response.answer.flags;
    if run.settings.max_seq_len.is_some_and(|max| prompt + completion > max) {
        flags.push("over_max_seq_len".to_owned());
    }
    if run.settings.min_completion_tokens.is_some_and(|min| response.completion_tokens.is_some() && completion < min) {
        flags.push("below_min_completion_tokens".to_owned());
    }
}
