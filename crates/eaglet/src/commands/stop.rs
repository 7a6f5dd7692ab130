//! `eaglet stop DIR`: asks the process that holds the run to end, and waits until it has.

use crate::Exit;
use crate::cli::StopArgs;
use eaglet_core::lock::{LockHolder, RunLock};
use eaglet_core::{Error, Result};
use rustix::process::{Pid, Signal, kill_process};
use std::io::Write;
use std::time::{Duration, Instant};

/// How often the lock is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Runs the command.
pub(crate) fn stop(args: &StopArgs) -> Result<Exit> {
    let Some(holder) = RunLock::holder(&args.dir)? else {
        let _ = writeln!(std::io::stderr(), "nothing runs in {}", args.dir.display());
        return Ok(Exit::Done);
    };
    if !holder.is_on_this_host() {
        return Err(Error::environment(format!("the run is held by process {} on {}", holder.pid, holder.host))
            .hint("stop it on that host"));
    }
    signal(&holder, Signal::TERM)?;
    if args.now {
        // The second signal is a request of its own only once the first was seen.
        std::thread::sleep(LOOK_INTERVAL * 3);
        if RunLock::holder(&args.dir)?.is_some() {
            signal(&holder, Signal::TERM)?;
        }
    }
    let _ = writeln!(std::io::stderr(), "asked process {} to stop; waiting for it", holder.pid);
    let until = Instant::now() + args.wait;
    while RunLock::holder(&args.dir)?.is_some() {
        if Instant::now() >= until {
            return Err(Error::environment(format!(
                "process {} still runs after {} s",
                holder.pid,
                args.wait.as_secs()
            ))
            .hint("it finishes the requests that are out; wait longer, or give them up with --now"));
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
    let _ = writeln!(std::io::stderr(), "stopped; the command that began the run goes on with it");
    Ok(Exit::Done)
}

fn signal(holder: &LockHolder, signal: Signal) -> Result<()> {
    let pid = i32::try_from(holder.pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| Error::data(format!("the lock names process {}", holder.pid)))?;
    kill_process(pid, signal).map_err(|e| {
        Error::environment(format!(
            "cannot signal process {}: {}",
            holder.pid,
            eaglet_core::error::io_reason(&e.into())
        ))
    })
}
