//! Serves one connection: requests in, replies out, at the pace of the backend.
//!
//! Generic over the byte stream and the backend, so the same code runs on sockets and, in tests, on a pipe with a stopped clock. What replies
//! look like is decided in `api` and `shapes`. No bytes are sent before the engine has something to say, except the head of a stream.
//!
//! Invariants: when the client leaves, its generations are dropped at once; a reply that breaks off never looks whole.

use std::io;

use serde_json::json;

use crate::{
    answer::Finish,
    api::{self, Job, Routed},
    backend::{Backend, BreakOff, Disturbance, Instead, TokenStream, Tokens},
    http::{Request, head},
    shapes::{self, Choice, Delta, push_event},
    wire::{ByteStream, Incoming, Wire},
};

/// What is to happen to a connection now that serving it is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Farewell {
    /// The ordinary end.
    Close,
    /// A reset.
    Reset,
}

/// Serves until the client leaves or a disturbance ends the connection. `number` gives each reply its own number.
pub async fn serve<B: Backend, S: ByteStream>(
    backend: &B,
    wire: &mut Wire<S>,
    mut number: impl FnMut() -> u64,
) -> Farewell {
    loop {
        let request = match wire.next_request(None).await {
            Incoming::Request(request) => request,
            Incoming::Over => return Farewell::Close,
            Incoming::Malformed(why) => {
                // The client may have left already; there is nobody to tell.
                let _ = wire.send(&api::json_reply(400, &json!({"detail": why.0})).bytes()).await;
                return Farewell::Close;
            }
        };
        match answer(backend, wire, &request, number()).await {
            Ok(None) if request.keep_alive => {}
            Ok(None) => return Farewell::Close,
            Ok(Some(farewell)) => return farewell,
            // The client left: an ordinary end of a connection.
            Err(_) => return Farewell::Close,
        }
    }
}

/// Answers one request; a farewell when the connection cannot go on.
async fn answer<B: Backend, S: ByteStream>(
    backend: &B,
    wire: &mut Wire<S>,
    request: &Request,
    number: u64,
) -> io::Result<Option<Farewell>> {
    let disturbance = backend.disturb(request);
    match &disturbance.instead {
        Some(Instead::Reply(reply)) => return wire.send(&reply.bytes()).await.map(|()| None),
        Some(Instead::Reset) => return Ok(Some(Farewell::Reset)),
        None => {}
    }
    match api::route(backend.served(), &backend.gauges(), request, number) {
        Routed::Reply(reply) => wire.send(&reply.bytes()).await.map(|()| None),
        Routed::Generate(job) => match backend.submit(&job) {
            Err(reply) => wire.send(&reply.bytes()).await.map(|()| None),
            Ok(streams) => generate(backend, wire, &job, streams, &disturbance).await,
        },
    }
}

/// A generation on its way.
struct Reply<'r, B: Backend> {
    backend: &'r B,
    job: &'r Job,
    disturbance: &'r Disturbance,
    streams: Vec<B::Stream>,
    choices: Vec<Choice>,
    /// What has come of each choice and was not sent yet: all of it when the reply is no stream, nothing when it is one.
    unsent: Vec<Delta>,
    /// Tokens of each choice so far.
    counts: Vec<usize>,
    /// Choices that are over.
    over: Vec<bool>,
}

async fn generate<B: Backend, S: ByteStream>(
    backend: &B,
    wire: &mut Wire<S>,
    job: &Job,
    streams: Vec<B::Stream>,
    disturbance: &Disturbance,
) -> io::Result<Option<Farewell>> {
    let choices = Choice::all(job);
    let unsent = choices.iter().map(|_| Delta::default()).collect();
    let (counts, over) = (vec![0; job.choices], vec![false; job.choices]);
    let mut reply = Reply { backend, job, disturbance, streams, choices, unsent, counts, over };
    if job.stream {
        wire.send(&head(200, &shapes::STREAM_HEADERS)).await?;
    }
    if !disturbance.first_token_delay.is_zero() {
        wire.unless_gone(tokio::time::sleep(disturbance.first_token_delay)).await?;
    }
    while let Some((index, tokens)) = wire.unless_gone(reply.next()).await? {
        let (tokens, broken) = reply.broken_off(tokens);
        reply.take(wire, index, tokens).await?;
        match broken {
            None | Some(BreakOff::Abort) => {}
            Some(BreakOff::Cut) => {
                let end = reply.end();
                // Half of what a whole reply would have said; of a stream, what was sent already.
                let half = if job.stream { &[][..] } else { &end[..end.len() / 2] };
                wire.send(half).await?;
                return Ok(Some(Farewell::Close));
            }
            Some(BreakOff::Reset) => return Ok(Some(Farewell::Reset)),
            // The engine goes on; what it says no longer arrives.
            Some(BreakOff::Hang) => return Err(wire.peer_gone().await),
        }
    }
    wire.send(&reply.end()).await?;
    Ok(None)
}

impl<B: Backend> Reply<'_, B> {
    /// The next tokens of the choice that is furthest behind, as choices advance together; `None` when all are over.
    async fn next(&mut self) -> Option<(usize, Tokens)> {
        loop {
            let left = (0..self.streams.len()).filter(|&index| !self.over[index]);
            let index = left.min_by_key(|&index| self.counts[index])?;
            match self.streams[index].next().await {
                Some(tokens) => return Some((index, tokens)),
                None => self.over[index] = true,
            }
        }
    }

    /// The last bytes of a stream, or the whole reply.
    fn end(&self) -> Vec<u8> {
        let served = self.backend.served();
        if self.job.stream {
            shapes::ending(served, self.job, self.counts.iter().sum())
        } else {
            api::json_reply(200, &shapes::whole(served, self.job, &self.unsent)).bytes()
        }
    }

    /// The tokens up to where the reply breaks off, and how it does.
    fn broken_off(&mut self, mut tokens: Tokens) -> (Tokens, Option<BreakOff>) {
        let Some((after, how)) = self.disturbance.break_off else { return (tokens, None) };
        let left = after.max(1).saturating_sub(self.counts.iter().sum());
        let is_over_by_then = tokens.finish.is_some() && tokens.tokens.len() <= left && self.streams.len() == 1;
        if tokens.tokens.len() < left || is_over_by_then {
            return (tokens, None);
        }
        tokens.tokens.truncate(left);
        tokens.finish = None;
        if how == BreakOff::Abort {
            tokens.finish = Some(Finish::Abort);
            // All choices end here, and their generations with them.
            self.streams.clear();
        }
        (tokens, Some(how))
    }

    /// Adds tokens to the reply, and sends them when it is a stream.
    async fn take<S: ByteStream>(&mut self, wire: &mut Wire<S>, index: usize, tokens: Tokens) -> io::Result<()> {
        let delta = self.choices[index].take(&tokens.tokens, tokens.finish);
        let first = self.counts[index] == 0;
        self.counts[index] += delta.tokens();
        self.over[index] |= tokens.finish.is_some();
        if !self.job.stream {
            self.unsent[index].append(delta);
            return Ok(());
        }
        let served = self.backend.served();
        let mut bytes = Vec::new();
        if let Some(opening) = shapes::opening(served, self.job, index).filter(|_| first) {
            push_event(&mut bytes, &opening.to_string());
        }
        push_event(&mut bytes, &shapes::progress(served, self.job, index, &delta, first).to_string());
        wire.send(&bytes).await
    }
}
