//! TCP and TLS connections with HTTP/1.1 keep-alive.
//!
//! The pool is our own because the retry policy needs to know one thing that a ready-made pool hides: whether a request that was reset had gone out on
//! a reused connection. An idle connection is dropped before the server's own idle time-out (uvicorn's is 5 s) can close it under a request.

use super::endpoint::Endpoint;
use bytes::Bytes;
use eaglet_core::outcome::Cause;
use http_body_util::Full;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;

/// Longest time a connection lies idle before it is not used again; below the 5 s after which uvicorn closes it.
pub const IDLE_CONNECTION_MAX: Duration = Duration::from_secs(4);

/// Read buffer of one connection, in bytes at most: hyper lets it grow while reads fill it. Streams (a vLLM chunk has 250 bytes) leave it at 8 KiB,
/// however many are open; a whole reply of a thousand tokens with their ids fits in one piece.
const READ_BUFFER_BYTES_MAX: usize = 64 << 10;

/// Makes connections by other means than TCP: a simulated server, on a clock that stands still, cannot be reached through sockets.
pub trait Connector: std::fmt::Debug {
    /// A new connection.
    fn connect(&self) -> Connecting<'_>;
}

/// A connection on its way.
pub type Connecting<'a> = Pin<Box<dyn Future<Output = io::Result<Box<dyn Duplex>>> + 'a>>;

/// Bytes in both directions.
pub trait Duplex: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> Duplex for T {}

/// No connection was made.
#[derive(Debug)]
pub struct ConnectError {
    /// [`Cause::Connect`] or [`Cause::Tls`].
    pub cause: Cause,
    /// In words.
    pub detail: String,
}

/// A connection ready for one request.
pub struct Connection {
    sender: SendRequest<Full<Bytes>>,
    /// Whether it has carried a request before.
    pub reused: bool,
}

/// Connections to one server. Lives on one thread.
pub struct Pool {
    endpoint: Rc<Endpoint>,
    tls: Option<TlsConnector>,
    connect_timeout: Duration,
    idle: RefCell<Vec<(SendRequest<Full<Bytes>>, Instant)>>,
}

impl Pool {
    /// An empty pool.
    ///
    /// # Errors
    /// Environment: TLS is asked for and cannot be set up.
    pub fn new(endpoint: Rc<Endpoint>, connect_timeout: Duration) -> eaglet_core::Result<Self> {
        let tls = endpoint.tls.then(tls_connector).transpose()?;
        Ok(Pool { endpoint, tls, connect_timeout, idle: RefCell::default() })
    }

    /// The server.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// A connection: the one that was idle for the shortest time, else a new one.
    ///
    /// # Errors
    /// No connection could be made in time.
    pub async fn lease(&self, fresh: bool) -> Result<Connection, ConnectError> {
        while let Some((mut sender, since)) = self.take_idle(fresh) {
            if since.elapsed() > IDLE_CONNECTION_MAX {
                // Everything below it on the stack has been idle for longer.
                self.idle.borrow_mut().clear();
            } else if sender.ready().await.is_ok() {
                return Ok(Connection { sender, reused: true });
            }
        }
        // On the heap, since thousands of requests keep the room for it and few are ever in it; so with TLS below.
        Box::pin(self.connect()).await
    }

    fn take_idle(&self, fresh: bool) -> Option<(SendRequest<Full<Bytes>>, Instant)> {
        if fresh { None } else { self.idle.borrow_mut().pop() }
    }

    /// Takes back a connection whose reply was read to its end.
    fn give_back(&self, sender: SendRequest<Full<Bytes>>) {
        if !sender.is_closed() {
            self.idle.borrow_mut().push((sender, Instant::now()));
        }
    }

    async fn connect(&self) -> Result<Connection, ConnectError> {
        let Endpoint { host, port, connector, .. } = &*self.endpoint;
        let sender = if let Some(connector) = connector {
            handshake(self.in_time(connector.connect()).await?).await
        } else {
            let stream = self.in_time(TcpStream::connect((host.as_str(), *port))).await?;
            // A request is one write; waiting for more to send would only delay it.
            let _ = stream.set_nodelay(true);
            match &self.tls {
                None => handshake(stream).await,
                Some(tls) => handshake(self.encrypt(tls, stream).await?).await,
            }
        };
        let sender = sender.map_err(|error| ConnectError { cause: Cause::Connect, detail: error.to_string() })?;
        Ok(Connection { sender, reused: false })
    }

    async fn in_time<T>(&self, connecting: impl Future<Output = io::Result<T>>) -> Result<T, ConnectError> {
        let failed = |detail: String| ConnectError { cause: Cause::Connect, detail };
        match tokio::time::timeout(self.connect_timeout, connecting).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => Err(failed(eaglet_core::error::io_reason(&error))),
            Err(_) => Err(failed(format!("no connection within {} s", self.connect_timeout.as_secs_f32()))),
        }
    }

    async fn encrypt(
        &self,
        tls: &TlsConnector,
        stream: TcpStream,
    ) -> Result<tokio_rustls::client::TlsStream<TcpStream>, ConnectError> {
        let failed = |cause, detail| ConnectError { cause, detail };
        let name = rustls::pki_types::ServerName::try_from(self.endpoint.host.clone()).map_err(|_| {
            failed(Cause::Tls, format!("{:?} is not a name a certificate can have", self.endpoint.host))
        })?;
        match tokio::time::timeout(self.connect_timeout, tls.connect(name, stream)).await {
            Ok(Ok(stream)) => Ok(stream),
            // rustls reports a certificate it refuses as InvalidData; a broken connection is an ordinary I/O error.
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::InvalidData => {
                Err(failed(Cause::Tls, error.to_string()))
            }
            Ok(Err(error)) => Err(failed(Cause::Connect, format!("TLS: {error}"))),
            Err(_) => Err(failed(Cause::Connect, "no TLS handshake in time".to_owned())),
        }
    }
}

async fn handshake(stream: impl Duplex + 'static) -> hyper::Result<SendRequest<Full<Bytes>>> {
    let io = TokioIo::new(stream);
    let (sender, connection) = http1::Builder::new().max_buf_size(READ_BUFFER_BYTES_MAX).handshake(io).await?;
    // Its errors come out of the request that they hit.
    tokio::task::spawn_local(async move {
        let _ = connection.await;
    });
    Ok(sender)
}

impl Connection {
    /// Sends one request and waits for the head of the reply.
    ///
    /// # Errors
    /// hyper's: the connection broke, or what came is not HTTP.
    pub async fn send(
        &mut self,
        request: hyper::Request<Full<Bytes>>,
    ) -> hyper::Result<hyper::Response<hyper::body::Incoming>> {
        self.sender.send_request(request).await
    }

    /// The reply was read to its end: the connection may serve the next request.
    pub fn reuse(self, pool: &Pool) {
        pool.give_back(self.sender);
    }
}

/// Trusts the system's certificates, and Mozilla's where the system has none.
fn tls_connector() -> eaglet_core::Result<TlsConnector> {
    let mut roots = rustls::RootCertStore::empty();
    let native = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(native.certs);
    if roots.is_empty() {
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| eaglet_core::Error::environment(format!("cannot set up TLS: {e}")))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}
