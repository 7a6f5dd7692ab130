//! One writer for each run: the lock on `run.lock`.
//!
//! What it is: an flock held for the life of a [`RunLock`], and a line of JSON in the file that says who holds it. What it
//! is not: proof against a file system whose flock is private to each host (some network mounts): there two hosts can both
//! get it.
//!
//! Invariants
//! - The kernel drops an flock with its process, so a file left by a dead one never stands in the way.
//! - The file is never removed: removing a file that another process has just opened to lock it would give two holders.
//!   A clean release empties it instead.
//! - Where the file system has no flock, the line in the file decides: a holder of this host by process id, start time and
//!   boot; a holder of another host cannot be judged from here and is believed to live.

mod process;

use crate::{Error, Result};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name of the lock file in a run directory.
pub const LOCK_FILE_NAME: &str = "run.lock";
/// Name of the file whose creation decides between two takers where there is no flock.
const CLAIM_FILE_NAME: &str = "run.lock.claim";
/// The line of JSON is far shorter; more is not ours.
const HOLDER_BYTES_MAX: usize = 4096;
/// A lock that is held only because somebody just looks whether it is held is free again within microseconds.
const LOCK_TRIES_MAX: u32 = 4;
/// Wait between two of those tries.
const LOCK_RETRY_WAIT: Duration = Duration::from_millis(10);

type TryLock<'a> = &'a dyn Fn(&File) -> Result<(), TryLockError>;

/// Who holds a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockHolder {
    /// Its process id on its host.
    pub pid: u32,
    /// The name of its host.
    pub host: String,
    /// When it took the lock, RFC 3339 in UTC.
    pub started_at: String,
    /// When the process started, clock ticks since boot; `None` where the system does not tell.
    pub process_start_ticks: Option<u64>,
    /// Which boot of the host that was; `None` where the system does not tell.
    pub boot_id: Option<String>,
}

impl LockHolder {
    fn this_process() -> LockHolder {
        let pid = std::process::id();
        let now = jiff::Timestamp::from_second(jiff::Timestamp::now().as_second()).unwrap_or_default();
        LockHolder {
            pid,
            host: process::host_name(),
            started_at: now.to_string(),
            process_start_ticks: process::start_ticks(pid),
            boot_id: process::boot_id(),
        }
    }

    /// Whether it runs, or ran, on this host, so that its process id means something here.
    pub fn is_on_this_host(&self) -> bool {
        self.host == process::host_name()
    }

    /// Whether this very process runs on this host now.
    pub fn is_alive_here(&self) -> bool {
        if !self.is_on_this_host() || (self.boot_id.is_some() && self.boot_id != process::boot_id()) {
            return false;
        }
        match self.process_start_ticks {
            Some(ticks) => process::start_ticks(self.pid) == Some(ticks),
            None => process::exists(self.pid),
        }
    }
}

/// The right to write a run directory, held until dropped.
#[derive(Debug)]
pub struct RunLock {
    file: File,
}

impl RunLock {
    /// Takes the lock of a run directory, which must exist.
    ///
    /// # Errors
    /// An environment error that names the holder, or the file that could not be opened or locked.
    pub fn acquire(dir: &Path) -> Result<RunLock> {
        Self::acquire_with(dir, &File::try_lock)
    }

    fn acquire_with(dir: &Path, try_lock: TryLock<'_>) -> Result<RunLock> {
        let path = dir.join(LOCK_FILE_NAME);
        for _ in 0..LOCK_TRIES_MAX {
            let file = open(&path)?;
            match try_lock(&file) {
                // If somebody removed the file between opening and locking, this lock guards nothing.
                Ok(()) if names_this_file(&path, &file) => return Self::take(&path, file),
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_RETRY_WAIT),
                Err(TryLockError::Error(error)) if has_no_flock(&error) => return Self::acquire_by_claim(dir, file),
                Err(TryLockError::Error(error)) => return Err(Error::io("lock", &path, error)),
            }
        }
        let holder = read_holder(&open(&path)?).map_err(|error| Error::io("read", &path, error))?;
        Err(in_use(dir, holder.as_ref()))
    }

    /// Takes the lock where there is no flock: whoever creates the claim file may look at the line and replace it.
    fn acquire_by_claim(dir: &Path, file: File) -> Result<RunLock> {
        let path = dir.join(LOCK_FILE_NAME);
        let claim = dir.join(CLAIM_FILE_NAME);
        match OpenOptions::new().write(true).create_new(true).open(&claim) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(Error::environment(format!("another process is just taking {}", dir.display()))
                    .hint(format!("if none is, it died doing so: remove {}", claim.display())));
            }
            Err(error) => return Err(Error::io("create", &claim, error)),
        }
        let taken = match read_holder(&file) {
            Err(error) => Err(Error::io("read", &path, error)),
            Ok(Some(holder)) if !holder.is_on_this_host() => Err(held_elsewhere(dir, &path, &holder)),
            Ok(Some(holder)) if holder.is_alive_here() => Err(in_use(dir, Some(&holder))),
            Ok(_) => Self::take(&path, file),
        };
        fs::remove_file(&claim).map_err(|error| Error::io("remove", &claim, error))?;
        taken
    }

    /// Writes who holds it now.
    fn take(path: &Path, file: File) -> Result<RunLock> {
        // The lock first, so that a failure below releases and empties it again.
        let lock = RunLock { file };
        let mut line = serde_json::to_vec(&LockHolder::this_process())
            .map_err(|error| Error::bug("cannot write the holder of a lock as JSON").with_source(error))?;
        line.push(b'\n');
        // Over the old line, then cut: the file is never seen empty while it is held.
        let written = lock.file.write_all_at(&line, 0).and_then(|()| lock.file.set_len(line.len() as u64));
        written.map_err(|error| Error::io("write", path, error))?;
        Ok(lock)
    }

    /// Who holds the run now; `None` if nobody does, whatever a dead process may have left in the file.
    ///
    /// # Errors
    /// An environment error if the file cannot be read, or if it is held by somebody who has left no name.
    pub fn holder(dir: &Path) -> Result<Option<LockHolder>> {
        Self::holder_with(dir, &File::try_lock_shared)
    }

    fn holder_with(dir: &Path, try_lock_shared: TryLock<'_>) -> Result<Option<LockHolder>> {
        let path = dir.join(LOCK_FILE_NAME);
        let reading = |error| Error::io("read", &path, error);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io("open", &path, error)),
        };
        let named = read_holder(&file).map_err(reading)?;
        // Asked first, because it disturbs nobody; a probe of the lock is felt by a process that takes it just then.
        if let Some(holder) = named.as_ref().filter(|holder| holder.is_alive_here()) {
            return Ok(Some(holder.clone()));
        }
        match try_lock_shared(&file) {
            Ok(()) => Ok(None),
            // Held by a process that this process table does not show: another container or host.
            Err(TryLockError::WouldBlock) => {
                // One that is just taking it has not written its name yet; one that is just leaving has wiped it.
                for _ in 0..LOCK_TRIES_MAX {
                    if let Some(holder) = read_holder(&file).map_err(reading)? {
                        return Ok(Some(holder));
                    }
                    std::thread::sleep(LOCK_RETRY_WAIT);
                    if try_lock_shared(&file).is_ok() {
                        return Ok(None);
                    }
                }
                Err(in_use(dir, None))
            }
            Err(TryLockError::Error(error)) if has_no_flock(&error) => {
                Ok(named.filter(|holder| !holder.is_on_this_host()))
            }
            Err(TryLockError::Error(error)) => Err(Error::io("lock", &path, error)),
        }
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // Closing the file releases the flock; the empty file says so where there is none. A failure leaves a line that
        // is found stale later.
        let _ = self.file.set_len(0);
    }
}

fn open(path: &Path) -> Result<File> {
    let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    options.map_err(|error| Error::io("open", path, error))
}

fn names_this_file(path: &Path, file: &File) -> bool {
    match (fs::metadata(path), file.metadata()) {
        (Ok(named), Ok(open)) => (named.dev(), named.ino()) == (open.dev(), open.ino()),
        _ => false,
    }
}

fn has_no_flock(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    error.kind() == io::ErrorKind::Unsupported
        || [Errno::NOLCK, Errno::NOSYS, Errno::OPNOTSUPP].map(Some).contains(&errno)
}

/// The line in the file; `None` for an empty file or one that is not ours.
fn read_holder(file: &File) -> io::Result<Option<LockHolder>> {
    let mut bytes = vec![0; HOLDER_BYTES_MAX];
    let taken = crate::storage::read_full_at(|buffer, at| file.read_at(buffer, at), &mut bytes, 0)?;
    // Only the first line: an older, longer one may still stand behind it.
    let line = bytes[..taken].split(|&byte| byte == b'\n').next().unwrap_or_default();
    Ok(serde_json::from_slice(line).ok())
}

fn in_use(dir: &Path, holder: Option<&LockHolder>) -> Error {
    let dir = PathBuf::from(dir);
    let by = match holder {
        Some(holder) => format!("process {} on host {} since {}", holder.pid, holder.host, holder.started_at),
        None => "a process that has not given its name".to_owned(),
    };
    Error::environment(format!("{} is in use by {by}", dir.display()))
        .hint(format!("`eaglet status {0}` shows how far it is, `eaglet stop {0}` ends it", dir.display()))
}

fn held_elsewhere(dir: &Path, path: &Path, holder: &LockHolder) -> Error {
    let hint = format!(
        "this file system has no locks, so nobody here can tell whether that process lives; if it does not, remove {}",
        path.display()
    );
    in_use(dir, Some(holder)).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_flock(_: &File) -> Result<(), TryLockError> {
        Err(TryLockError::Error(Errno::NOLCK.into()))
    }

    fn leave(dir: &Path, holder: &LockHolder) {
        fs::write(dir.join(LOCK_FILE_NAME), serde_json::to_vec(holder).unwrap()).unwrap();
    }

    fn dead_here() -> LockHolder {
        // This process's id, but started at another time: the id was given out again.
        LockHolder { process_start_ticks: Some(1), ..LockHolder::this_process() }
    }

    fn elsewhere() -> LockHolder {
        LockHolder { host: "some-other-host".to_owned(), pid: 77, ..LockHolder::this_process() }
    }

    #[test]
    fn without_flock_the_line_in_the_file_decides() {
        let dir = tempfile::tempdir().unwrap();
        let acquire = || RunLock::acquire_with(dir.path(), &no_flock);
        let lock = acquire().unwrap();
        assert!(acquire().unwrap_err().to_string().contains(&format!("process {}", std::process::id())));
        assert_eq!(RunLock::holder_with(dir.path(), &no_flock).unwrap().unwrap().pid, std::process::id());
        drop(lock);
        assert_eq!(RunLock::holder_with(dir.path(), &no_flock).unwrap(), None);
        leave(dir.path(), &dead_here());
        assert_eq!(RunLock::holder_with(dir.path(), &no_flock).unwrap(), None);
        drop(acquire().unwrap());
        assert!(!dir.path().join(CLAIM_FILE_NAME).exists());
    }

    #[test]
    fn without_flock_a_holder_of_another_host_is_believed() {
        let dir = tempfile::tempdir().unwrap();
        leave(dir.path(), &elsewhere());
        let error = RunLock::acquire_with(dir.path(), &no_flock).unwrap_err();
        assert!(error.to_string().contains("process 77 on host some-other-host"), "{error}");
        assert!(error.hint_text().unwrap().contains("run.lock"), "{error:?}");
        assert_eq!(RunLock::holder_with(dir.path(), &no_flock).unwrap(), Some(elsewhere()));
    }

    #[test]
    fn without_flock_only_one_may_take_it_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(CLAIM_FILE_NAME), "").unwrap();
        let error = RunLock::acquire_with(dir.path(), &no_flock).unwrap_err();
        assert!(error.hint_text().unwrap().contains(CLAIM_FILE_NAME));
    }

    #[test]
    fn with_flock_the_file_of_another_host_is_stale_once_the_lock_is_free() {
        let dir = tempfile::tempdir().unwrap();
        leave(dir.path(), &elsewhere());
        assert_eq!(RunLock::holder(dir.path()).unwrap(), None);
        let _lock = RunLock::acquire(dir.path()).unwrap();
        assert_eq!(RunLock::holder(dir.path()).unwrap().unwrap().pid, std::process::id());
    }

    #[test]
    fn a_lock_that_another_container_holds_is_seen_through_the_lock_itself() {
        let dir = tempfile::tempdir().unwrap();
        let _lock = RunLock::acquire(dir.path()).unwrap();
        leave(dir.path(), &elsewhere());
        assert_eq!(RunLock::holder(dir.path()).unwrap(), Some(elsewhere()));
        leave(dir.path(), &dead_here());
        assert_eq!(RunLock::holder(dir.path()).unwrap(), Some(dead_here()));
        fs::write(dir.path().join(LOCK_FILE_NAME), "").unwrap();
        assert!(RunLock::holder(dir.path()).unwrap_err().to_string().contains("not given its name"));
    }

    #[test]
    fn any_other_lock_error_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let broken = |_: &File| Err(TryLockError::Error(Errno::IO.into()));
        assert!(RunLock::acquire_with(dir.path(), &broken).unwrap_err().to_string().contains(LOCK_FILE_NAME));
    }
}
