//! The simulated server: what it pretends to be ([`profile`]), how its batch moves ([`engine`]), what goes wrong ([`faults`]), and all of that on
//! a clock, behind the face ([`simulator`], [`listener`]).

mod backend;
pub mod engine;
pub mod faults;
pub mod listener;
pub mod profile;
pub mod simulator;
pub mod span;

pub use self::{
    engine::{Engine, Gauges, NewSequence, Refused, SequenceId, Step},
    faults::{Fault, FaultScript},
    profile::Profile,
    simulator::{Settings, Simulator},
};
