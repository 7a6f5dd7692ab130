//! What ran, where and how: enough to repeat a run and to doubt it.

use serde::{Deserialize, Serialize};

/// Who made a run directory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// eaglet's version.
    pub eaglet: String,
    /// The command line, with values of secret-bearing options masked.
    pub command: Vec<String>,
    /// Host name.
    pub host: String,
    /// Kernel and machine, e.g. `Linux 6.1 x86_64`.
    pub system: String,
    /// The server as it describes itself (kind and version), if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
}

impl Provenance {
    /// This process on this machine; `command` must be masked by the caller.
    pub fn here(command: Vec<String>) -> Self {
        let uname = rustix::system::uname();
        let text = |field: &std::ffi::CStr| field.to_string_lossy().into_owned();
        Provenance {
            eaglet: env!("CARGO_PKG_VERSION").to_owned(),
            command,
            host: text(uname.nodename()),
            system: format!("{} {} {}", text(uname.sysname()), text(uname.release()), text(uname.machine())),
            server: None,
        }
    }
}

/// The time now, RFC 3339 in UTC with milliseconds.
pub fn now() -> String {
    format!("{:.3}", jiff::Timestamp::now())
}
