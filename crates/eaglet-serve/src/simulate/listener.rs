//! A simulated server on a TCP port, which is closed while the server is down.

use std::{io, net::SocketAddr, time::Duration};

use eaglet_core::{Error, Result, error::io_reason};
use tokio::net::{TcpListener, TcpSocket};

use super::simulator::{Life, Simulator};

/// Connections the kernel holds until they are accepted.
const BACKLOG: u32 = 8192;
/// Between two tries when no connection can be accepted, or the port cannot be had back.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// A port that was bound.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Listens on `address`; port 0 takes a free one. To be called inside a runtime.
    ///
    /// # Errors
    /// `Environment` when it cannot be had.
    pub fn bind(address: SocketAddr) -> Result<Self> {
        let bound = bind(address).and_then(|listener| listener.local_addr().map(|address| Self { listener, address }));
        bound.map_err(|error| {
            Error::environment(format!("cannot listen on {address}: {}", io_reason(&error)))
                .hint("choose another with --port, or let --port 0 take a free one")
                .with_source(error)
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves connections, each in a task of the current runtime, for ever. While the server is down the port is closed.
    pub async fn serve(self, simulator: Simulator) {
        let life = simulator.life();
        let mut listener = Some(self.listener);
        loop {
            if life.now().accepts() {
                let open = match listener.take() {
                    Some(open) => open,
                    None => bind_again(self.address).await,
                };
                tokio::select! {
                    biased;
                    () = life.until(|life| !life.accepts()) => {}
                    () = accept(&open, &simulator) => {}
                }
            } else {
                drop(listener.take());
                life.until(Life::accepts).await;
            }
        }
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A port with connections left over from before can be taken again.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

async fn bind_again(address: SocketAddr) -> TcpListener {
    loop {
        match bind(address) {
            Ok(listener) => return listener,
            Err(_) => tokio::time::sleep(RETRY_INTERVAL).await,
        }
    }
}

async fn accept(listener: &TcpListener, simulator: &Simulator) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let simulator = simulator.clone();
                tokio::spawn(async move { simulator.serve(stream).await });
            }
            // Out of descriptors, most likely: others have to close first.
            Err(_) => tokio::time::sleep(RETRY_INTERVAL).await,
        }
    }
}
