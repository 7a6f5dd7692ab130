//! `--detach`: the run goes on in a session of its own, instead of `nohup` and a noted process id.
//!
//! The child is this program with the same arguments; it begins a new session and writes its messages to `inference.log`. The parent stays until
//! the child has begun to send, so that a wrong URL is an error on the terminal and not a line in a log.

use crate::Exit;
use eaglet_core::lock::RunLock;
use eaglet_core::progress::Phase;
use eaglet_core::run_dir::RunDir;
use eaglet_core::{Error, Result};
use eaglet_data::DatasetSpec;
use std::fs::File;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Tells the child that it is one.
const DETACHED_VARIABLE: &str = "EAGLET_DETACHED_CHILD";

/// How often the parent looks whether the child has begun.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Whether this process is the detached child; then it leaves the terminal's session.
pub(crate) fn is_detached() -> bool {
    let is_child = std::env::var_os(DETACHED_VARIABLE).is_some();
    if is_child {
        // Fails only when this process leads a session already, which is what is wanted.
        let _ = rustix::process::setsid();
    }
    is_child
}

/// Starts the child and waits until it has begun or ended.
pub(super) fn detach(run_dir: &RunDir, spec: &DatasetSpec) -> Result<Exit> {
    if spec.inputs.iter().any(|input| input == "-") {
        return Err(
            Error::usage("--detach cannot read the data set from stdin").hint("give a file, or leave --detach out")
        );
    }
    if let Some(holder) = RunLock::holder(run_dir.path())? {
        return Err(Error::environment(format!(
            "process {} on {} is already writing {}",
            holder.pid,
            holder.host,
            run_dir.path().display()
        ))
        .hint("eaglet status DIR shows it, eaglet stop DIR ends it"));
    }
    let log_path = run_dir.log();
    let open =
        || File::options().create(true).append(true).open(&log_path).map_err(|e| Error::io("open", &log_path, e));
    let said_before = std::fs::metadata(&log_path).map_or(0, |m| m.len());
    let program = std::env::current_exe().map_err(|e| Error::environment(format!("cannot find this program: {e}")))?;
    let mut child = Command::new(program)
        .args(std::env::args_os().skip(1).filter(|arg| arg != "--detach"))
        .env(DETACHED_VARIABLE, "1")
        .stdin(Stdio::null())
        .stdout(open()?)
        .stderr(open()?)
        .spawn()
        .map_err(|e| Error::environment(format!("cannot start the background process: {e}")))?;
    if let Some(exit) = wait_until_begun(&mut child, run_dir)? {
        let log = std::fs::read(&log_path).unwrap_or_default();
        let said = log.get(usize::try_from(said_before).unwrap_or(0)..).unwrap_or_default();
        // What the child said is what this command has to say.
        let _ = std::io::stderr().write_all(said);
        return Ok(exit);
    }
    let dir = run_dir.path().display();
    let text = format!(
        "running in the background, process {}\n  eaglet status {dir}\n  eaglet stop {dir}\n  log: {}\n",
        child.id(),
        log_path.display()
    );
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(Exit::Done)
}

/// `None` when the child runs; its exit when it ended first.
fn wait_until_begun(child: &mut Child, run_dir: &RunDir) -> Result<Option<Exit>> {
    loop {
        if let Some(status) =
            child.try_wait().map_err(|e| Error::environment(format!("cannot watch the background process: {e}")))?
        {
            return Ok(Some(exit_of(status.code())));
        }
        if has_begun(run_dir, child.id()) {
            return Ok(None);
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}

fn exit_of(code: Option<i32>) -> Exit {
    match code {
        Some(0) => Exit::Done,
        Some(1) => Exit::WithFailures,
        Some(2) => Exit::Usage,
        Some(3) => Exit::Environment,
        Some(4) => Exit::Data,
        Some(130) => Exit::Interrupted,
        _ => Exit::Bug,
    }
}

fn has_begun(run_dir: &RunDir, pid: u32) -> bool {
    #[derive(serde::Deserialize)]
    struct State {
        pid: u32,
        phase: Phase,
    }
    let state: Option<State> =
        std::fs::read(run_dir.progress()).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    state.is_some_and(|state| state.pid == pid && state.phase != Phase::Ended)
}
