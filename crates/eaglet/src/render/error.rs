//! Errors: one line what and where, one line what to do.

use eaglet_core::Error;
use std::io::Write;

/// `error: …` and, if there is one, `hint: …`.
pub(crate) fn text(error: &Error) -> String {
    match error.hint_text() {
        Some(hint) => format!("error: {error}\nhint: {hint}\n"),
        None => format!("error: {error}\n"),
    }
}

/// Prints an error on stderr. A stderr that is closed is no reason to fail once more.
pub(crate) fn print(error: &Error) {
    let _ = std::io::stderr().write_all(text(error).as_bytes());
}
