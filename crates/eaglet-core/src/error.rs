//! The one error type of the libraries: what went wrong, where, and what to do about it.
//!
//! An error carries a [`Class`] (which decides the exit code), one lower-case message, an optional hint kept
//! apart from the message, and the source error if there was one. Messages never hold a secret: text that came
//! from a server passes [`crate::redacted`] before it gets here.

use std::fmt;

/// Whose fault an error is; decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The command line or configuration cannot be acted on (exit code 2).
    Usage,
    /// The machine or file system does not allow it (exit code 3).
    Environment,
    /// The inference server does not allow it (exit code 3).
    Server,
    /// A file holds something it must not hold (exit code 4).
    Data,
    /// Something that was meant to be impossible: eaglet's own fault (exit code 70, `EX_SOFTWARE`).
    Bug,
}

/// An error of any eaglet library.
#[derive(Debug)]
pub struct Error(Box<Inner>);

#[derive(Debug)]
struct Inner {
    class: Class,
    message: String,
    hint: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// Result of any eaglet library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    fn new(class: Class, message: impl Into<String>) -> Self {
        Error(Box::new(Inner { class, message: message.into(), hint: None, source: None }))
    }

    /// The command line or configuration is at fault.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Class::Usage, message)
    }

    /// The machine, file system or operating system is at fault.
    pub fn environment(message: impl Into<String>) -> Self {
        Self::new(Class::Environment, message)
    }

    /// The inference server is at fault.
    pub fn server(message: impl Into<String>) -> Self {
        Self::new(Class::Server, message)
    }

    /// A file's content is at fault.
    pub fn data(message: impl Into<String>) -> Self {
        Self::new(Class::Data, message)
    }

    /// A stated invariant does not hold.
    pub fn bug(message: impl Into<String>) -> Self {
        Self::new(Class::Bug, message)
    }

    /// An I/O error; an I/O error without a path is useless, so the path is not optional.
    pub fn io(what: &str, path: &std::path::Path, source: std::io::Error) -> Self {
        Self::environment(format!("cannot {what} {}: {}", path.display(), io_reason(&source))).with_source(source)
    }

    /// Adds what the reader can do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Keeps the error underneath.
    #[must_use]
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.0.source = Some(Box::new(source));
        self
    }

    /// Puts a message in front: `front: message`.
    #[must_use]
    pub fn context(mut self, front: impl fmt::Display) -> Self {
        self.0.message = format!("{front}: {}", self.0.message);
        self
    }

    /// Whose fault it is.
    pub fn class(&self) -> Class {
        self.0.class
    }

    /// What to do about it, if anything useful can be said.
    pub fn hint_text(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// The I/O error underneath, if there is one.
    pub fn io_source(&self) -> Option<&std::io::Error> {
        self.0.source.as_ref()?.downcast_ref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|s| &**s as _)
    }
}

/// The operating system's reason in plain lower-case words, without `(os error N)`.
pub fn io_reason(error: &std::io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or(&text);
    let mut chars = text.chars();
    match chars.next() {
        // "No such file" reads as "no such file" inside a sentence; "I/O error" and "EOF" keep their capitals.
        Some(first) if chars.clone().next().is_some_and(char::is_lowercase) => {
            first.to_lowercase().chain(chars).collect()
        }
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_io_error_names_its_path_and_drops_the_number() {
        let error = Error::io("open", std::path::Path::new("/data/x"), std::io::Error::from_raw_os_error(2));
        assert_eq!(error.to_string(), "cannot open /data/x: no such file or directory");
        assert_eq!(error.class(), Class::Environment);
    }
}
