//! What the environment says: variables, limits of the process, free space.

use eaglet_core::redacted::Secret;
use eaglet_core::{Error, Result};
use eaglet_data::{HubSettings, Token};
use std::path::{Path, PathBuf};

/// The variable that is read for the API key when `--api-key-env` names none.
const DEFAULT_KEY_VARIABLE: &str = "EAGLET_API_KEY";

/// The API key from the environment: a key on the command line would stand in the process list.
pub(crate) fn api_key(variable: Option<&str>) -> Result<Option<Secret>> {
    let name = variable.unwrap_or(DEFAULT_KEY_VARIABLE);
    match std::env::var(name) {
        Ok(value) => Secret::new(name, &value).map(Some),
        Err(std::env::VarError::NotPresent) if variable.is_none() => Ok(None),
        Err(std::env::VarError::NotPresent) => {
            Err(Error::usage(format!("--api-key-env {name}: there is no such environment variable"))
                .hint(format!("export {name}=... before the command (the key itself does not go on the command line)")))
        }
        Err(std::env::VarError::NotUnicode(_)) => Err(Error::usage(format!("{name} is not text"))),
    }
}

/// The hub's variables, as its Python client reads them.
pub(crate) fn hub_settings() -> HubSettings {
    let text = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
    HubSettings {
        endpoint: text("HF_ENDPOINT"),
        token: text("HF_TOKEN").map(|token| Token::new(token.trim())),
        home: text("HF_HOME")
            .map(PathBuf::from)
            .or_else(|| text("HOME").map(|home| Path::new(&home).join(".cache/huggingface"))),
        offline: text("HF_HUB_OFFLINE")
            .is_some_and(|value| matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on")),
    }
}

/// File descriptors beside those of the connections: files, terminal, event loop.
const DESCRIPTORS_SPARE: u64 = 64;

/// Raises the limit of open files as far as it may be, so that every connection can have one.
///
/// # Errors
/// Environment: even the hard limit is too low for this concurrency.
pub(crate) fn raise_descriptor_limit(concurrency: u64) -> Result<()> {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let needed = concurrency + DESCRIPTORS_SPARE;
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    limit.current = limit.maximum;
    // Some systems refuse "no limit" as the soft limit; the needed number is enough.
    let raised = setrlimit(Resource::Nofile, limit).is_ok() || {
        limit.current = Some(needed);
        setrlimit(Resource::Nofile, limit).is_ok()
    };
    let now = getrlimit(Resource::Nofile).current;
    if raised && now.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    Err(Error::environment(format!(
        "{needed} open files are needed for this concurrency, {} are allowed",
        now.unwrap_or(0)
    ))
    .hint("raise the hard limit (ulimit -Hn, LimitNOFILE= in a systemd unit) or lower --concurrency"))
}

/// Raises the limit of open files towards what `connections` need; how many connections it allows, `connections` at most.
pub(crate) fn descriptors_for(connections: u64) -> u64 {
    use rustix::process::{Resource, getrlimit};
    if raise_descriptor_limit(connections).is_ok() {
        return connections;
    }
    let now = getrlimit(Resource::Nofile).current.unwrap_or(0);
    now.saturating_sub(DESCRIPTORS_SPARE).clamp(1, connections.max(1))
}

/// Bytes free for an ordinary user on the file system of `path`.
pub(crate) fn free_bytes(path: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(path).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}
