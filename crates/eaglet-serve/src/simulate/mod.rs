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

/// What is wrong with a TOML text, in one line with its place.
fn not_toml_of(what: &str, text: &str, error: &toml::de::Error) -> eaglet_core::Error {
    let place = error.span().and_then(|span| text.get(..span.start)).map(|before| {
        let (line, start) = (before.matches('\n').count() + 1, before.rfind('\n').map_or(0, |end| end + 1));
        format!(" (line {line}, column {})", before[start..].chars().count() + 1)
    });
    let message = error.message().replace('\n', ", ");
    eaglet_core::Error::usage(format!("not {what}: {message}{}", place.unwrap_or_default()))
        .hint("docs/simulate.md shows all keys; `eaglet simulate --print-profile` writes a profile to change")
}
