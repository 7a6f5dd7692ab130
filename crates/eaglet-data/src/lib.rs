//! From data sets to prompts, and from answers to training examples.
//!
//! What is here: reading rows from files, standard input and the hub; bringing them into the chat API's form; choosing
//! which are sent; the [`plan::Plan`] that is fixed before the first request. Behind the run: [`prepare`], which makes examples of the
//! answers, and the formats they are written in. What is not: sending, the run directory's layout, the environment (the caller passes it in).

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod conversation;
mod csv_rows;
pub mod example;
mod format;
pub mod hub;
mod identified;
mod inputs;
mod json_rows;
pub mod json_text;
mod message;
pub mod outputs;
mod parquet_rows;
pub mod plan;
pub mod prepare;
mod read_ahead;
mod reject;
pub mod row;
mod rows;
pub mod shards;
pub mod spec;
mod spool;
mod tools;
pub mod verify;
pub mod vocab;

pub use hub::{HubSettings, Token};
pub use inputs::STDIN_FILE;
pub use plan::{Plan, PlanEntry, plan};
pub use reject::{DuplicateRow, RejectReason, RejectedRow};
pub use spec::{BadText, DatasetSpec, Duplicates, Filter, Turns};
