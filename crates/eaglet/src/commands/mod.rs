//! One short file a command.

pub(crate) mod bench;
pub(crate) mod detach;
pub(crate) mod doctor;
pub(crate) mod generate;
pub(crate) mod prepare;
mod prepared;
pub(crate) mod show;
pub(crate) mod simulate;
pub(crate) mod status;
pub(crate) mod stop;
pub(crate) mod verify;
