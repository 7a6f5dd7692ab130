//! What stands behind the face: the trait between HTTP and whatever generates, a simulator or a real model.
//!
//! The face asks, the backend generates; the face knows no engine, the backend no HTTP.

use std::future::Future;
use std::time::Duration;

use crate::{
    answer::{Finish, Token},
    api::{Gauges, Job, Reply, Served},
    http::Request,
};

/// Something that answers accepted generations.
pub trait Backend: Send + Sync + 'static {
    /// The tokens of one choice.
    type Stream: TokenStream;

    /// What is served, as the face tells it.
    fn served(&self) -> &Served;

    /// What the gauges show now.
    fn gauges(&self) -> Gauges;

    /// Begins a generation: one stream for each choice of the job.
    ///
    /// # Errors
    /// The refusal to be sent, when it is not taken.
    fn submit(&self, job: &Job) -> Result<Vec<Self::Stream>, Reply>;

    /// What is to go wrong with this request; nothing, unless the backend rehearses accidents.
    fn disturb(&self, _request: &Request) -> Disturbance {
        Disturbance::default()
    }
}

/// The tokens of one choice as they come. Dropping it gives the generation up.
pub trait TokenStream: Send {
    /// The next tokens, one or more; `None` after the last ones, which came with their finish reason.
    fn next(&mut self) -> impl Future<Output = Option<Tokens>> + Send;
}

/// Consecutive tokens of one choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// In their order; never empty.
    pub tokens: Vec<Token>,
    /// Why the answer ended, when these are its last.
    pub finish: Option<Finish>,
}

/// What goes wrong with one request.
#[derive(Debug, Default)]
pub struct Disturbance {
    /// Instead of doing what was asked for.
    pub instead: Option<Instead>,
    /// Silence before the first token, on the wall clock.
    pub first_token_delay: Duration,
    /// The reply breaks off after so many tokens, unless it is over by then.
    pub break_off: Option<(usize, BreakOff)>,
}

/// What happens instead of a reply.
#[derive(Debug)]
pub enum Instead {
    /// Another reply.
    Reply(Reply),
    /// The connection is reset.
    Reset,
}

/// How a reply breaks off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakOff {
    /// The connection is closed inside the body, without an error.
    Cut,
    /// The connection is reset inside the body.
    Reset,
    /// Nothing comes any more, and the connection stays open.
    Hang,
    /// The stream ends properly, with the finish reason `abort`.
    Abort,
}
