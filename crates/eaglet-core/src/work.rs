//! Who does the work that waits for a disk: threads, or in a simulation the caller, step by step.
//!
//! A simulated run has a clock of its own, which stands still until everybody waits. A thread beside it would work while that clock jumps.

use std::time::Instant;

/// Tells the time.
pub type Clock = fn() -> Instant;

/// Who does it.
#[derive(Clone, Copy, Debug, Default)]
pub enum Work {
    /// A thread for each file or group of files, so that no disk holds up anybody else.
    #[default]
    Threads,
    /// The caller, by this clock: for simulations on a disk in memory.
    Caller(Clock),
}

impl Work {
    /// The clock that the work goes by.
    pub fn clock(self) -> Clock {
        match self {
            Work::Threads => Instant::now,
            Work::Caller(clock) => clock,
        }
    }
}
