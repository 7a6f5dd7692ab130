//! Who this process is and whether another one of this host still lives.
//!
//! A process id alone is no identity: it is given out again, after a reboot from the start. The time since boot at which
//! a process started, together with the boot's id, tells two holders of one id apart.

use rustix::process::Pid;
use std::fs;

/// This host's name.
pub(super) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The id of this boot of the machine, where the system tells.
pub(super) fn boot_id() -> Option<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned())
}

/// When the process started, in clock ticks since boot, where the system tells; `None` also for a dead one.
pub(super) fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    start_ticks_in(&stat)
}

/// Whether a process of this host has this id.
pub(super) fn exists(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    // A process that may not be signalled exists.
    pid.is_some_and(|pid| !matches!(rustix::process::test_kill_process(pid), Err(rustix::io::Errno::SRCH)))
}

/// Reads the start time out of a `/proc/PID/stat` line; `None` for a zombie, which holds no lock any more.
///
/// The second field is the command's name in brackets and may itself hold spaces and brackets (proc(5)), so fields are
/// counted from the last closing one: state is the first there, start time the twentieth.
fn start_ticks_in(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_does_not_shift_the_fields() {
        let rest = "4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 987654 23 24";
        assert_eq!(start_ticks_in(&format!("71 (odd) name) S {rest}")), Some(987_654));
        assert_eq!(start_ticks_in(&format!("71 (odd) name) Z {rest}")), None);
        assert_eq!(start_ticks_in("71 (cut"), None);
    }

    #[test]
    fn this_process_exists_and_an_impossible_one_does_not() {
        assert!(exists(std::process::id()));
        assert!(!exists(u32::MAX));
        assert!(!exists(i32::MAX as u32));
    }
}
