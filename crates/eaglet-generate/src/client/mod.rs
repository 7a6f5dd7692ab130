//! One request, one verdict: everything that speaks HTTP to an inference server.
//!
//! [`Client::chat`] sends a chat completion once and returns the answer or an [`AttemptFailure`]. Whether to repeat it is not decided here
//! (see [`crate::retry`]). No redirect is followed, so the key never leaves for another host.

pub mod answer;
mod attempt;
pub mod connection;
pub mod endpoint;
mod id_lists;
pub mod markers;
pub mod request;
pub mod sse;
mod tool_calls;
mod wire;

pub use attempt::{Api, Ask, Asked, ChatOutcome, InFlight, LiveAnswer, Mode};

use bytes::Bytes;
use connection::Pool;
use eaglet_core::inflight::Unfinished;
use eaglet_core::outcome::{Cause, Partial};
use eaglet_core::redacted::Scrubber;
use endpoint::Endpoint;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{ACCEPT, CONTENT_TYPE, HeaderValue, LOCATION, RETRY_AFTER};
use hyper::{Method, Request, StatusCode};
use serde_json::Value;
use std::rc::Rc;
use std::time::Duration;

/// Largest body of anything that is not an answer (model lists, errors, metrics), in bytes.
pub const SIDE_REPLY_BYTES_MAX: usize = 8 << 20;

/// A server that works may leave one request without a token for a while (it was preempted, or a long prefill goes before): its silence
/// may be so many times as long while the server's token counters move. Then the connection is believed dead, whatever the server does.
pub const SILENCE_FACTOR_WHILE_MOVING: u32 = 5;

/// How long a request may take. There is no wall-clock limit on an answer whose tokens flow.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// To open a connection, TLS included.
    pub connect: Duration,
    /// From the request to its first token: queueing and prefill. Not counted while the server's gauges move.
    pub first_byte: Duration,
    /// Longest silence between tokens; [`SILENCE_FACTOR_WHILE_MOVING`] times as long while the server's gauges move.
    pub silence: Duration,
    /// From the request to its end; `None` (the default) = no limit.
    pub total: Option<Duration>,
    /// After the finish reason, for `[DONE]` and the end of the body.
    pub grace: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
            connect: Duration::from_secs(10),
            first_byte: Duration::from_secs(600),
            silence: Duration::from_secs(120),
            total: None,
            grace: Duration::from_secs(2),
        }
    }
}

/// Why one attempt gave no answer.
#[derive(Debug)]
pub struct AttemptFailure {
    /// The class of the failure; the retry table is keyed by it.
    pub cause: Cause,
    /// In words, secrets taken out.
    pub detail: String,
    /// Status of the reply, if one began.
    pub http_status: Option<u16>,
    /// What the server asks to wait.
    pub retry_after: Option<Duration>,
    /// Tokens that had arrived.
    pub tokens: u64,
    /// What had arrived.
    pub partial: Option<Box<Partial>>,
    /// The same, cut where it can be continued, if it can.
    pub unfinished: Option<Box<Unfinished>>,
}

impl AttemptFailure {
    /// A failure before anything arrived.
    pub fn new(cause: Cause, detail: impl Into<String>) -> Self {
        AttemptFailure {
            cause,
            detail: detail.into(),
            http_status: None,
            retry_after: None,
            tokens: 0,
            partial: None,
            unfinished: None,
        }
    }
}

/// A client of one server. Lives on one thread.
pub struct Client {
    pool: Pool,
    timeouts: Timeouts,
}

/// A whole reply to a side request.
#[derive(Debug)]
pub struct SideReply {
    /// Its status.
    pub status: StatusCode,
    /// Its body, bounded by [`SIDE_REPLY_BYTES_MAX`].
    pub body: Bytes,
}

impl SideReply {
    /// The body as JSON.
    pub fn json(&self) -> Option<Value> {
        serde_json::from_slice(&self.body).ok()
    }
}

impl Client {
    /// A client of `endpoint`.
    ///
    /// # Errors
    /// Environment: TLS is needed and cannot be set up.
    pub fn new(endpoint: Rc<Endpoint>, timeouts: Timeouts) -> eaglet_core::Result<Self> {
        Ok(Client { pool: Pool::new(endpoint, timeouts.connect)?, timeouts })
    }

    /// The server.
    pub fn endpoint(&self) -> &Endpoint {
        self.pool.endpoint()
    }

    /// The time-outs in force.
    pub fn timeouts(&self) -> &Timeouts {
        &self.timeouts
    }

    /// GET a side path (`/health`, `/metrics`, `/v1/models`) on a fresh connection: a server that is going down keeps old ones open.
    ///
    /// # Errors
    /// No whole reply within `timeout`.
    pub async fn get(&self, path: &str, timeout: Duration) -> Result<SideReply, AttemptFailure> {
        self.side_request(Method::GET, path, None, timeout).await
    }

    /// POST JSON to a side path (`/tokenize`).
    ///
    /// # Errors
    /// No whole reply within `timeout`.
    pub async fn post(&self, path: &str, body: Vec<u8>, timeout: Duration) -> Result<SideReply, AttemptFailure> {
        self.side_request(Method::POST, path, Some(body), timeout).await
    }

    async fn side_request(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        timeout: Duration,
    ) -> Result<SideReply, AttemptFailure> {
        let exchange = async {
            let mut connection = self.pool.lease(true).await.map_err(|e| AttemptFailure::new(e.cause, e.detail))?;
            let request = self.request(method, path, Bytes::from(body.unwrap_or_default()));
            let reply = connection.send(request).await.map_err(|e| transport_failure(&e))?;
            let status = reply.status();
            let body = Limited::new(reply.into_body(), SIDE_REPLY_BYTES_MAX).collect().await;
            let body = body.map_err(|e| AttemptFailure::new(Cause::Reset, e.to_string()))?.to_bytes();
            Ok(SideReply { status, body })
        };
        match tokio::time::timeout(timeout, exchange).await {
            Ok(result) => result,
            Err(_) => Err(AttemptFailure::new(
                Cause::FirstByteTimeout,
                format!("no reply within {} s", timeout.as_secs_f32()),
            )),
        }
    }

    fn request(&self, method: Method, path: &str, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.uri_mut() = self.endpoint().path(path).parse().unwrap_or_else(|_| hyper::Uri::from_static("/"));
        *request.headers_mut() = self.endpoint().headers().clone();
        if method == Method::POST {
            request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            request.headers_mut().entry(ACCEPT).or_insert(HeaderValue::from_static("*/*"));
        }
        *request.method_mut() = method;
        request
    }
}

/// A failure of the connection itself.
fn transport_failure(error: &hyper::Error) -> AttemptFailure {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    let cause = if error.is_parse() { Cause::BadReply } else { Cause::Reset };
    AttemptFailure::new(cause, text)
}

/// What a reply that is not 2xx means (shapes: `docs/servers.md`).
fn status_failure(status: StatusCode, headers: &hyper::HeaderMap, body: &[u8], endpoint: &Endpoint) -> AttemptFailure {
    let text = error_message(body, &endpoint.scrubber);
    let mut detail = format!("HTTP {}: {text}", status.as_u16());
    let cause = match status.as_u16() {
        300..=399 => {
            let target = headers.get(LOCATION).and_then(|l| l.to_str().ok()).unwrap_or("nowhere");
            detail = format!("HTTP {}: redirect to {} not followed", status.as_u16(), origin_of(target, endpoint));
            Cause::Redirect
        }
        401 | 403 => Cause::Unauthorized,
        404 | 405 | 410 => Cause::NotFound,
        408 | 425 | 500 | 502 | 504..=599 => Cause::ServerError,
        429 | 503 => Cause::Overloaded,
        _ if is_context_error(&text) => Cause::ContextTooLong,
        _ => Cause::BadRequest,
    };
    let retry_after = headers.get(RETRY_AFTER).and_then(|v| v.to_str().ok()).and_then(retry_after);
    AttemptFailure { http_status: Some(status.as_u16()), retry_after, ..AttemptFailure::new(cause, detail) }
}

/// The message of an error body: `error.message` (vLLM, llama.cpp, OpenAI), `detail` (FastAPI), `message`, else the text itself. Secrets are taken
/// out before it is shortened, since half a secret would no longer be known as one.
fn error_message(body: &[u8], scrubber: &Scrubber) -> String {
    let value: Option<Value> = serde_json::from_slice(body).ok();
    let message = value.as_ref().and_then(|v| {
        let error = v.get("error").unwrap_or(v);
        error
            .get("message")
            .or(error.get("detail"))
            .or(Some(error))
            .map(|m| m.as_str().map_or_else(|| m.to_string(), str::to_owned))
    });
    let text = message.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
    let text = scrubber.scrub(&text.split_whitespace().collect::<Vec<_>>().join(" "));
    if text.is_empty() { "(empty body)".to_owned() } else { text.chars().take(400).collect() }
}

/// vLLM: "maximum context length is 4096 tokens"; llama.cpp: `exceed_context_size_error`; SGLang: "longer than the model's context length".
fn is_context_error(message: &str) -> bool {
    let message = message.to_ascii_lowercase();
    message.contains("context length") || message.contains("context size") || message.contains("max_model_len")
}

/// Scheme, host and port of a redirect's target; its path and query may hold a token.
fn origin_of(location: &str, endpoint: &Endpoint) -> String {
    match url::Url::parse(location) {
        Ok(url) if url.has_host() => url.origin().ascii_serialization(),
        Ok(url) => format!("{}:", url.scheme()),
        Err(_) => format!("{} (the same server)", endpoint.label()),
    }
}

/// Longest time that a server's Retry-After is followed.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(600);

/// Reads Retry-After: seconds, or an HTTP date.
fn retry_after(text: &str) -> Option<Duration> {
    let wait = match text.trim().parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && seconds >= 0.0 => {
            Duration::try_from_secs_f64(seconds).unwrap_or(RETRY_AFTER_MAX)
        }
        Ok(_) => return None,
        Err(_) => {
            let date = jiff::fmt::rfc2822::parse(text.trim()).ok()?;
            let seconds = date.timestamp().as_second() - jiff::Timestamp::now().as_second();
            Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
        }
    };
    Some(wait.min(RETRY_AFTER_MAX))
}

#[cfg(test)]
mod tests;
