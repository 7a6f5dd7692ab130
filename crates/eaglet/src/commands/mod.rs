//! One short file a command.

pub(crate) mod detach;
pub(crate) mod doctor;
pub(crate) mod generate;
mod prepared;
pub(crate) mod simulate;
pub(crate) mod status;
pub(crate) mod stop;
