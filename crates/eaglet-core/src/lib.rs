//! The words and the disk of eaglet.
//!
//! What is here: identities, prompts, sampling, responses, outcomes, the append-only journal, the run directory, and the
//! pure decisions about them. What is not: HTTP, an async runtime, tensors, terminals, the environment.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod atomic_file;
pub mod commit;
pub mod error;
pub mod event;
pub mod ids;
pub mod inflight;
pub mod journal;
pub mod lock;
pub mod outcome;
pub mod progress;
pub mod prompt;
pub mod provenance;
pub mod random;
pub mod redacted;
pub mod response;
pub mod resume;
pub mod run_dir;
pub mod run_file;
pub mod sampling;
pub mod scan;
pub mod span;
pub mod stats;
pub mod storage;
pub mod work;

pub use error::{Class, Error, Result};
