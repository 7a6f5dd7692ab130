//! What people see. Every screen is a pure function from values to text; printing is the caller's.

pub(crate) mod bench;
pub(crate) mod error;
pub(crate) mod examples;
pub(crate) mod findings;
pub(crate) mod prepared;
pub(crate) mod progress;
pub(crate) mod simulated;
pub(crate) mod summary;
pub(crate) mod units;
