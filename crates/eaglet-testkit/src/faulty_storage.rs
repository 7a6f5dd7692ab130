//! A file system in memory that fails on purpose and can lose its power.
//!
//! What it is: [`Storage`] over [`disk`]'s model, with a plan of one fault and a crash. What it is not: a mock of any logic;
//! the code under test runs unchanged on it.
//!
//! Faults that the storage code must survive, each at every operation of a run:
//!
//! | fault                | on a write                     | on a sync                          | on open, rename, set_len, remove |
//! |----------------------|--------------------------------|------------------------------------|----------------------------------|
//! | `NoSpace`            | ENOSPC, nothing written        | ENOSPC, dirty pages lost           | ENOSPC, nothing done             |
//! | `Io`                 | EIO, nothing written           | EIO, dirty pages lost              | EIO, nothing done                |
//! | `ShortWrite`         | half is written, `Ok(half)`    | does not apply                     | does not apply                   |
//! | `ShortThenNoSpace`   | half is written, then ENOSPC   | does not apply                     | does not apply                   |
//! | `PowerCut`           | EIO for ever, nothing done: call [`FaultyStorage::crash`] next                                       |
//!
//! Reads never fail. Clones share one disk: a clone is the same machine after its process was started again.

mod disk;

pub use disk::CrashMode;

use disk::Disk;
use eaglet_core::storage::{Storage, StorageFile};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// `errno` of a full disk on Linux.
const ENOSPC: i32 = 28;
/// `errno` of a broken one.
const EIO: i32 = 5;

/// The operations that are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Opening or creating for writing.
    Open,
    /// One write.
    Write,
    /// Syncing a file or a directory.
    Sync,
    /// A rename.
    Rename,
    /// Cutting or extending.
    SetLen,
    /// Removing.
    Remove,
    /// Any of them.
    Any,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No space left on the device.
    NoSpace,
    /// Input/output error.
    Io,
    /// Half of the bytes are taken.
    ShortWrite,
    /// Half of the bytes are taken, and the next write finds no space.
    ShortThenNoSpace,
    /// The machine is off.
    PowerCut,
}

/// How long it goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// At that operation only.
    Once,
    /// From that operation on, until [`FaultyStorage::heal`].
    Sticky,
}

/// One fault: at the `nth` operation of a kind, counted from 1 since the plan was set.
#[derive(Clone, Copy, Debug)]
pub struct FaultPlan {
    /// Which operations are counted and fail.
    pub operation: Operation,
    /// At which of them.
    pub nth: u64,
    /// What goes wrong.
    pub fault: Fault,
    /// For how long.
    pub persistence: Persistence,
}

#[derive(Default)]
struct State {
    disk: Disk,
    plan: Option<FaultPlan>,
    matching: u64,
    fired: u64,
    no_space_next: bool,
    operations: u64,
}

/// The file system in memory.
#[derive(Clone, Default)]
pub struct FaultyStorage(Arc<Mutex<State>>);

/// What an operation does.
enum Verdict {
    Proceed,
    Half,
    Fail { errno: i32, machine_is_on: bool },
}

impl State {
    fn judge(&mut self, operation: Operation) -> Verdict {
        self.operations += 1;
        if operation == Operation::Write && std::mem::take(&mut self.no_space_next) {
            return Verdict::Fail { errno: ENOSPC, machine_is_on: true };
        }
        let Some(plan) = self.plan else {
            return Verdict::Proceed;
        };
        if plan.operation != Operation::Any && plan.operation != operation {
            return Verdict::Proceed;
        }
        self.matching += 1;
        let due = match plan.persistence {
            Persistence::Once => self.matching == plan.nth,
            Persistence::Sticky => self.matching >= plan.nth,
        };
        let short = matches!(plan.fault, Fault::ShortWrite | Fault::ShortThenNoSpace);
        if !due || (short && operation != Operation::Write) {
            return Verdict::Proceed;
        }
        self.fired += 1;
        match plan.fault {
            Fault::NoSpace => Verdict::Fail { errno: ENOSPC, machine_is_on: true },
            Fault::Io => Verdict::Fail { errno: EIO, machine_is_on: true },
            Fault::PowerCut => Verdict::Fail { errno: EIO, machine_is_on: false },
            Fault::ShortWrite => Verdict::Half,
            Fault::ShortThenNoSpace => {
                self.no_space_next = true;
                Verdict::Half
            }
        }
    }

    /// For operations that either happen or do not.
    fn allow(&mut self, operation: Operation) -> io::Result<()> {
        match self.judge(operation) {
            Verdict::Fail { errno, .. } => Err(io::Error::from_raw_os_error(errno)),
            Verdict::Proceed | Verdict::Half => Ok(()),
        }
    }
}

impl FaultyStorage {
    /// An empty disk without faults.
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Sets the fault and starts counting.
    pub fn plan(&self, plan: FaultPlan) {
        let mut state = self.state();
        state.plan = Some(plan);
        state.matching = 0;
        state.fired = 0;
    }

    /// Lifts the fault.
    pub fn heal(&self) {
        let mut state = self.state();
        state.plan = None;
        state.no_space_next = false;
    }

    /// How often the fault of the latest plan has struck.
    pub fn fired(&self) -> u64 {
        self.state().fired
    }

    /// How many operations there were, faults included.
    pub fn operations(&self) -> u64 {
        self.state().operations
    }

    /// The disk after a power cut, without any fault. The same seed gives the same disk.
    pub fn crash(&self, mode: CrashMode, seed: u64) -> FaultyStorage {
        let disk = self.state().disk.after_crash(mode, seed);
        FaultyStorage(Arc::new(Mutex::new(State { disk, ..State::default() })))
    }

    /// Puts a file there, durably, past any fault.
    pub fn put(&self, path: &Path, content: &[u8]) {
        let mut state = self.state();
        let parent = path.parent().unwrap_or(Path::new(""));
        state.disk.make_directories(parent);
        let inode = state.disk.open(path, true).unwrap();
        state.disk.set_len(inode, 0);
        state.disk.append(inode, content);
        state.disk.sync(inode);
        state.disk.sync_directory(parent);
    }

    /// All files, in order of name.
    pub fn files(&self) -> Vec<PathBuf> {
        self.state().disk.names().map(Path::to_owned).collect()
    }

    fn handle(&self, inode: usize) -> Box<dyn StorageFile> {
        Box::new(FaultyFile { storage: self.clone(), inode })
    }
}

impl Storage for FaultyStorage {
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        self.state().disk.make_directories(path);
        Ok(())
    }

    fn open_append(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        let mut state = self.state();
        state.allow(Operation::Open)?;
        state.disk.open(path, true).map(|inode| self.handle(inode))
    }

    fn open_read(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        self.state().disk.open(path, false).map(|inode| self.handle(inode))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        let mut state = self.state();
        state.allow(Operation::Open)?;
        let inode = state.disk.open(path, true)?;
        state.disk.set_len(inode, 0);
        Ok(self.handle(inode))
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let mut state = self.state();
        let inode = state.disk.open(path, false)?;
        Ok(state.disk.content(inode).to_vec())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.allow(Operation::Rename)?;
        state.disk.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.allow(Operation::Remove)?;
        state.disk.remove(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.allow(Operation::Sync)?;
        state.disk.sync_directory(path);
        Ok(())
    }

    fn len(&self, path: &Path) -> io::Result<Option<u64>> {
        let mut state = self.state();
        let inode = state.disk.open(path, false).ok();
        Ok(inode.map(|inode| state.disk.content(inode).len() as u64))
    }
}

struct FaultyFile {
    storage: FaultyStorage,
    inode: usize,
}

impl StorageFile for FaultyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.storage.state();
        let taken = match state.judge(Operation::Write) {
            Verdict::Proceed => bytes.len(),
            Verdict::Half => bytes.len().div_ceil(2),
            Verdict::Fail { errno, .. } => return Err(io::Error::from_raw_os_error(errno)),
        };
        state.disk.append(self.inode, &bytes[..taken]);
        Ok(taken)
    }

    fn sync_data(&mut self) -> io::Result<()> {
        let mut state = self.storage.state();
        match state.judge(Operation::Sync) {
            Verdict::Proceed | Verdict::Half => {
                state.disk.sync(self.inode);
                Ok(())
            }
            Verdict::Fail { errno, machine_is_on } => {
                if machine_is_on {
                    state.disk.lose_dirty_pages(self.inode);
                }
                Err(io::Error::from_raw_os_error(errno))
            }
        }
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.storage.state().disk.content(self.inode).len() as u64)
    }

    fn set_len(&mut self, len: u64) -> io::Result<()> {
        let mut state = self.storage.state();
        state.allow(Operation::SetLen)?;
        state.disk.set_len(self.inode, len as usize);
        Ok(())
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let state = self.storage.state();
        let content = state.disk.content(self.inode);
        let rest = &content[(offset as usize).min(content.len())..];
        let taken = rest.len().min(buffer.len());
        buffer[..taken].copy_from_slice(&rest[..taken]);
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOURNAL: &str = "run/journal";

    fn started() -> (FaultyStorage, Box<dyn StorageFile>) {
        let storage = FaultyStorage::new();
        storage.create_dir_all(Path::new("run")).unwrap();
        let file = storage.open_append(Path::new(JOURNAL)).unwrap();
        storage.sync_dir(Path::new("run")).unwrap();
        (storage, file)
    }

    fn after(storage: &FaultyStorage, mode: CrashMode) -> Vec<u8> {
        storage.crash(mode, 1).read(Path::new(JOURNAL)).unwrap()
    }

    #[test]
    fn a_power_cut_takes_what_was_not_synced() {
        let (storage, mut file) = started();
        file.write(b"safe").unwrap();
        file.sync_data().unwrap();
        file.write(b"unsafe").unwrap();
        assert_eq!(after(&storage, CrashMode::Dropped), b"safe");
        assert_eq!(after(&storage, CrashMode::Kept), b"safeunsafe");
        for seed in 0..200 {
            let torn = storage.crash(CrashMode::Torn, seed).read(Path::new(JOURNAL)).unwrap();
            let zeros = torn.iter().rev().take_while(|&&byte| byte == 0).count();
            let data = &torn[..torn.len() - zeros];
            assert!(data.starts_with(b"safe") && b"safeunsafe".starts_with(data), "seed {seed}");
        }
    }

    #[test]
    fn a_second_sync_after_a_failed_one_lies() {
        let (storage, mut file) = started();
        file.write(b"data").unwrap();
        storage.plan(FaultPlan {
            operation: Operation::Sync,
            nth: 1,
            fault: Fault::Io,
            persistence: Persistence::Once,
        });
        assert!(file.sync_data().is_err());
        file.sync_data().unwrap();
        assert_eq!(storage.fired(), 1);
        assert_eq!(storage.read(Path::new(JOURNAL)).unwrap(), b"data");
        assert_eq!(after(&storage, CrashMode::Dropped), b"");
    }

    #[test]
    fn a_name_lives_only_after_its_directory_was_synced() {
        let (storage, _) = started();
        let other = Path::new("run/other");
        storage.create(other).unwrap().sync_data().unwrap();
        assert!(storage.crash(CrashMode::Dropped, 0).read(other).is_err());
        assert!(storage.crash(CrashMode::Kept, 0).read(other).is_ok());
    }

    #[test]
    fn a_sticky_fault_stays_until_healed() {
        let (storage, mut file) = started();
        let plan =
            FaultPlan { operation: Operation::Write, nth: 2, fault: Fault::NoSpace, persistence: Persistence::Sticky };
        storage.plan(plan);
        assert_eq!(file.write(b"12").unwrap(), 2);
        assert_eq!(file.write(b"34").unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(file.write(b"34").is_err());
        storage.heal();
        assert_eq!(file.write(b"34").unwrap(), 2);
        assert_eq!(storage.fired(), 2);
    }
}
