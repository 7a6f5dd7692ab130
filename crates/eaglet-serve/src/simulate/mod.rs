//! The simulated engine: what it pretends to be ([`profile`]) and how its batch moves ([`engine`]).

pub mod engine;
pub mod profile;

pub use self::{
    engine::{Engine, Gauges, NewSequence, Refused, SequenceId, Step},
    profile::Profile,
};
