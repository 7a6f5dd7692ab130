//! One accepted connection: requests in, bytes out, and the notice that the client has left.
//!
//! Invariant: at most [`PIPELINE_LIMIT_BYTES`] are read ahead while a reply is under way.

use std::{future::Future, io, time::Duration};

use bytes::{Buf, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream},
    net::TcpStream,
};

use crate::http::{Malformed, Request, parse};

/// How much of later requests is read while one is being answered.
const PIPELINE_LIMIT_BYTES: usize = 1 << 20;

/// What a connection can be made of: a socket, or a pipe inside a test that runs on a stopped clock.
pub trait ByteStream: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// Told once, before the first byte.
    fn prepare(&self) {}

    /// Ends the connection as a process that was killed would; a kind of stream that knows no resets just ends.
    fn reset(self)
    where
        Self: Sized,
    {
    }
}

impl ByteStream for TcpStream {
    fn prepare(&self) {
        // Each event must leave by itself; a platform that refuses loses only that.
        let _ = self.set_nodelay(true);
    }

    fn reset(self) {
        // Where the option is refused the client sees a plain close, and a test that needs the reset fails on it.
        let _ = self.set_zero_linger();
    }
}

impl ByteStream for DuplexStream {}

/// A connection with what was read of it and not yet used.
#[derive(Debug)]
pub struct Wire<S> {
    stream: S,
    buffer: BytesMut,
}

/// What came instead of, or as, the next request.
#[derive(Debug)]
pub enum Incoming {
    /// A whole request.
    Request(Request),
    /// The client left, or was silent for too long.
    Over,
    /// What came is no request.
    Malformed(Malformed),
}

impl<S: ByteStream> Wire<S> {
    /// A connection of which nothing was read.
    pub fn new(stream: S) -> Self {
        stream.prepare();
        Self { stream, buffer: BytesMut::new() }
    }

    /// The next request; `idle` bounds the silence before its first byte.
    pub async fn next_request(&mut self, idle: Option<Duration>) -> Incoming {
        loop {
            match parse(&self.buffer) {
                Ok(Some((request, used))) => {
                    self.buffer.advance(used);
                    return Incoming::Request(request);
                }
                Ok(None) => {}
                Err(malformed) => return Incoming::Malformed(malformed),
            }
            let idle = idle.filter(|_| self.buffer.is_empty());
            let read = self.stream.read_buf(&mut self.buffer);
            let read = match idle {
                None => read.await,
                Some(limit) => tokio::time::timeout(limit, read).await.unwrap_or(Ok(0)),
            };
            if !matches!(read, Ok(1..)) {
                return Incoming::Over;
            }
        }
    }

    /// Writes all of it.
    ///
    /// # Errors
    /// When the client left.
    pub async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// Waits until the client has closed its side; what it sends meanwhile is kept for later.
    pub async fn peer_gone(&mut self) -> io::Error {
        loop {
            if self.buffer.len() >= PIPELINE_LIMIT_BYTES {
                return std::future::pending().await;
            }
            match self.stream.read_buf(&mut self.buffer).await {
                Ok(0) => return io::ErrorKind::ConnectionAborted.into(),
                Ok(_) => {}
                Err(error) => return error,
            }
        }
    }

    /// Does `work` unless the client leaves first.
    ///
    /// # Errors
    /// When the client left.
    pub async fn unless_gone<T>(&mut self, work: impl Future<Output = T>) -> io::Result<T> {
        tokio::select! {
            biased;
            done = work => Ok(done),
            gone = self.peer_gone() => Err(gone),
        }
    }

    /// Ends the connection with the ordinary farewell.
    pub async fn close(mut self) {
        // The client may have left already; there is nobody to tell.
        let _ = self.stream.shutdown().await;
    }

    /// Ends the connection with a reset.
    pub fn reset(self) {
        self.stream.reset();
    }
}
