//! What answers requests: a vLLM-shaped HTTP face, and behind it a simulated engine to rehearse against without a GPU.
//!
//! Nothing here prints, exits or reads the environment; the clock is tokio's, so tests may stop it.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod answer;
pub mod api;
pub mod backend;
pub mod face;
pub mod http;
pub mod random;
pub mod shapes;
pub mod simulate;
pub mod vocabulary;
pub mod wire;
