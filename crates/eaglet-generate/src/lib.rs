//! Everything of eaglet that talks to an inference server.
//!
//! What is here: the client, the retry table, the monitor of the server, the run that answers every prompt once. What is not: the disk
//! ([`eaglet_core`]), reading data sets ([`eaglet_data`]), terminals, the environment.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod balancer;
pub mod bench;
pub mod client;
pub mod limiter;
pub mod metrics;
pub mod monitor;
pub mod preflight;
pub mod retry;
pub mod run;
pub mod server_info;
pub mod server_state;
pub mod turns;
