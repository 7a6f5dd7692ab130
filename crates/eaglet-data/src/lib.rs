//! From data sets to prompts: dialects, file formats, selection.
//!
//! What is here: reading rows from files, standard input and the hub; bringing them into the chat API's form; choosing
//! which are sent; the [`plan::Plan`] that is fixed before the first request. What is not: sending, the run directory's
//! layout, the environment (the caller passes it in).

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod conversation;
mod csv_rows;
mod format;
pub mod hub;
mod identified;
mod inputs;
mod json_rows;
pub mod json_text;
mod message;
mod parquet_rows;
pub mod plan;
mod read_ahead;
mod reject;
pub mod row;
mod rows;
pub mod spec;
mod spool;
mod tools;

pub use hub::{HubSettings, Token};
pub use inputs::STDIN_FILE;
pub use plan::{Plan, PlanEntry, plan};
pub use reject::{DuplicateRow, RejectReason, RejectedRow};
pub use spec::{BadText, DatasetSpec, Duplicates, Filter, Turns};
