//! One writer for each run, seen from one process and from two.

#![allow(clippy::unwrap_used)]

use eaglet_core::lock::{LOCK_FILE_NAME, RunLock};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

/// Set in the child that a test starts from this same binary: the directory whose lock it holds until it is killed.
const HOLD_IN: &str = "EAGLET_TEST_HOLD_LOCK_IN";

#[test]
fn the_second_is_refused_with_the_name_of_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let lock = RunLock::acquire(dir.path()).unwrap();
    let error = RunLock::acquire(dir.path()).unwrap_err();
    let holder = RunLock::holder(dir.path()).unwrap().unwrap();
    assert_eq!(holder.pid, std::process::id());
    assert!(holder.is_on_this_host() && holder.is_alive_here());
    let message = error.to_string();
    for part in [&format!("process {}", holder.pid), &holder.host, &holder.started_at] {
        assert!(message.contains(part.as_str()), "{message} lacks {part}");
    }
    let hint = error.hint_text().unwrap();
    assert!(hint.contains("eaglet status") && hint.contains("eaglet stop"), "{hint}");
    drop(lock);
    assert_eq!(RunLock::holder(dir.path()).unwrap(), None);
    RunLock::acquire(dir.path()).unwrap();
}

#[test]
fn the_file_of_a_dead_process_is_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let lock = RunLock::acquire(dir.path()).unwrap();
    let mut holder = RunLock::holder(dir.path()).unwrap().unwrap();
    drop(lock);
    holder.process_start_ticks = Some(3);
    let path = dir.path().join(LOCK_FILE_NAME);
    // Longer than the line that replaces it: nothing of it may stay.
    let stale = format!("{}{}", serde_json::to_string(&holder).unwrap(), " ".repeat(100));
    std::fs::write(&path, stale).unwrap();
    assert_eq!(RunLock::holder(dir.path()).unwrap(), None);
    let _lock = RunLock::acquire(dir.path()).unwrap();
    let line = std::fs::read_to_string(&path).unwrap();
    assert_eq!(line.lines().count(), 1);
    assert_ne!(RunLock::holder(dir.path()).unwrap().unwrap(), holder);
}

#[test]
fn a_file_that_is_not_ours_is_no_obstacle() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(LOCK_FILE_NAME), [0xff; 9000]).unwrap();
    assert_eq!(RunLock::holder(dir.path()).unwrap(), None);
    RunLock::acquire(dir.path()).unwrap();
}

#[test]
fn nobody_holds_a_run_that_was_never_locked() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(RunLock::holder(dir.path()).unwrap(), None);
    assert!(RunLock::acquire(&dir.path().join("gone")).unwrap_err().to_string().contains(LOCK_FILE_NAME));
}

#[test]
fn a_killed_process_gives_the_lock_back() {
    if let Some(dir) = std::env::var_os(HOLD_IN) {
        return hold_the_lock_until_killed(Path::new(&dir));
    }
    let dir = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_killed_process_gives_the_lock_back", "--nocapture"])
        .env(HOLD_IN, dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let held = BufReader::new(child.stdout.take().unwrap()).lines().any(|line| line.unwrap().contains("lock held"));
    assert!(held);
    let holder = RunLock::holder(dir.path()).unwrap().unwrap();
    assert_eq!(holder.pid, child.id());
    let error = RunLock::acquire(dir.path()).unwrap_err();
    assert!(error.to_string().contains(&format!("process {}", child.id())), "{error}");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(RunLock::holder(dir.path()).unwrap(), None);
    let _lock = RunLock::acquire(dir.path()).unwrap();
    assert_eq!(RunLock::holder(dir.path()).unwrap().unwrap().pid, std::process::id());
}

fn hold_the_lock_until_killed(dir: &Path) {
    let _lock = RunLock::acquire(dir).unwrap();
    #[allow(clippy::print_stdout, reason = "the parent waits for this line")]
    {
        println!("lock held");
    }
    // Ends when the parent does, however that goes.
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}
