//! The model under [`super::FaultyStorage`]: what the kernel shows, and what the platter holds.
//!
//! What it is: files as a cached content, a durable content and the operations between them; names likewise. What it is
//! not: timing, permissions, or directories that can be lost (a made directory is durable at once).
//!
//! The model is as harsh as POSIX allows: syncing a file does not make its name durable, a rename may reach the disk
//! before the data it names, and a failed sync drops the dirty pages while the cache goes on showing them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

/// Longest stretch of zero bytes that a torn crash adds behind the data, bytes.
const ZERO_TAIL_BYTES_MAX: u64 = 700;

/// What becomes of data that was not synced when the power went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashMode {
    /// Nothing of it is there.
    Dropped,
    /// All of it is there.
    Kept,
    /// A random part of it is there, sometimes with zero bytes where length got there and data did not.
    Torn,
}

/// A change to a file that is in the cache only.
#[derive(Clone, Debug)]
enum Change {
    Write { offset: usize, bytes: Vec<u8> },
    SetLen(usize),
}

#[derive(Clone, Debug, Default)]
struct Inode {
    cached: Vec<u8>,
    durable: Vec<u8>,
    unsynced: Vec<Change>,
}

/// A change to a directory that is in the cache only.
#[derive(Clone, Debug)]
enum NameChange {
    Link { path: PathBuf, inode: usize },
    Unlink { path: PathBuf },
    Rename { from: PathBuf, to: PathBuf, inode: usize },
}

/// Files and names, cached and durable.
#[derive(Clone, Debug, Default)]
pub(super) struct Disk {
    inodes: Vec<Inode>,
    names: BTreeMap<PathBuf, usize>,
    durable_names: BTreeMap<PathBuf, usize>,
    unsynced_names: Vec<NameChange>,
    directories: BTreeSet<PathBuf>,
}

impl Change {
    fn apply(&self, content: &mut Vec<u8>) {
        match self {
            Change::Write { offset, bytes } => {
                let end = offset + bytes.len();
                if content.len() < end {
                    content.resize(end, 0);
                }
                content[*offset..end].copy_from_slice(bytes);
            }
            Change::SetLen(len) => content.resize(*len, 0),
        }
    }
}

impl NameChange {
    fn apply(&self, names: &mut BTreeMap<PathBuf, usize>) {
        match self {
            NameChange::Link { path, inode } => {
                names.insert(path.clone(), *inode);
            }
            NameChange::Unlink { path } => {
                names.remove(path);
            }
            NameChange::Rename { from, to, inode } => {
                names.remove(from);
                names.insert(to.clone(), *inode);
            }
        }
    }

    fn is_in(&self, directory: &Path) -> bool {
        let path = match self {
            NameChange::Link { path, .. } | NameChange::Unlink { path } | NameChange::Rename { to: path, .. } => path,
        };
        path.parent() == Some(directory)
    }
}

fn not_found() -> io::Error {
    io::Error::from(io::ErrorKind::NotFound)
}

impl Disk {
    pub(super) fn make_directories(&mut self, path: &Path) {
        self.directories.extend(path.ancestors().map(Path::to_owned));
    }

    pub(super) fn open(&mut self, path: &Path, create: bool) -> io::Result<usize> {
        if let Some(&inode) = self.names.get(path) {
            return Ok(inode);
        }
        let parent = path.parent().unwrap_or(Path::new(""));
        if !create || !self.directories.contains(parent) {
            return Err(not_found());
        }
        self.inodes.push(Inode::default());
        let inode = self.inodes.len() - 1;
        self.change_names(NameChange::Link { path: path.to_owned(), inode });
        Ok(inode)
    }

    pub(super) fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let inode = *self.names.get(from).ok_or_else(not_found)?;
        self.change_names(NameChange::Rename { from: from.to_owned(), to: to.to_owned(), inode });
        Ok(())
    }

    pub(super) fn remove(&mut self, path: &Path) -> io::Result<()> {
        self.names.get(path).ok_or_else(not_found)?;
        self.change_names(NameChange::Unlink { path: path.to_owned() });
        Ok(())
    }

    fn change_names(&mut self, change: NameChange) {
        change.apply(&mut self.names);
        self.unsynced_names.push(change);
    }

    pub(super) fn sync_directory(&mut self, directory: &Path) {
        let durable_names = &mut self.durable_names;
        self.unsynced_names.retain(|change| {
            let synced = change.is_in(directory);
            if synced {
                change.apply(durable_names);
            }
            !synced
        });
    }

    pub(super) fn content(&self, inode: usize) -> &[u8] {
        &self.inodes[inode].cached
    }

    pub(super) fn append(&mut self, inode: usize, bytes: &[u8]) {
        let offset = self.inodes[inode].cached.len();
        self.change(inode, Change::Write { offset, bytes: bytes.to_vec() });
    }

    pub(super) fn set_len(&mut self, inode: usize, len: usize) {
        self.change(inode, Change::SetLen(len));
    }

    fn change(&mut self, inode: usize, change: Change) {
        let inode = &mut self.inodes[inode];
        change.apply(&mut inode.cached);
        inode.unsynced.push(change);
    }

    pub(super) fn sync(&mut self, inode: usize) {
        let inode = &mut self.inodes[inode];
        for change in inode.unsynced.drain(..) {
            change.apply(&mut inode.durable);
        }
    }

    /// The write-back failed: the kernel marks the pages clean, so no later sync writes them, yet reads still show them.
    pub(super) fn lose_dirty_pages(&mut self, inode: usize) {
        self.inodes[inode].unsynced.clear();
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &Path> {
        self.names.keys().map(PathBuf::as_path)
    }

    /// What is on the disk after the power went.
    pub(super) fn after_crash(&self, mode: CrashMode, seed: u64) -> Disk {
        let mut random = Random(seed);
        let mut names = self.durable_names.clone();
        let names_kept = random.part_of(mode, self.unsynced_names.len());
        self.unsynced_names[..names_kept].iter().for_each(|change| change.apply(&mut names));
        let inodes = self.inodes.iter().map(|inode| {
            let content = inode.after_crash(mode, &mut random);
            Inode { cached: content.clone(), durable: content, unsynced: Vec::new() }
        });
        Disk {
            inodes: inodes.collect(),
            names: names.clone(),
            durable_names: names,
            unsynced_names: Vec::new(),
            directories: self.directories.clone(),
        }
    }
}

impl Inode {
    fn after_crash(&self, mode: CrashMode, random: &mut Random) -> Vec<u8> {
        let mut content = self.durable.clone();
        let kept = random.part_of(mode, self.unsynced.len());
        self.unsynced[..kept].iter().for_each(|change| change.apply(&mut content));
        if mode != CrashMode::Torn {
            return content;
        }
        if let Some(Change::Write { offset, bytes }) = self.unsynced.get(kept) {
            let bytes = bytes[..random.below(bytes.len() as u64 + 1) as usize].to_vec();
            Change::Write { offset: *offset, bytes }.apply(&mut content);
        }
        // Zeros only where something unsynced lies: a file at rest does not grow in a power cut.
        if !self.unsynced.is_empty() && random.below(3) == 0 {
            let longer = content.len() as u64 + random.below(ZERO_TAIL_BYTES_MAX);
            content.resize(longer as usize, 0);
        }
        content
    }
}

/// SplitMix64: a few lines, one seed, the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// How many of `count` unsynced changes survive.
    fn part_of(&mut self, mode: CrashMode, count: usize) -> usize {
        match mode {
            CrashMode::Dropped => 0,
            CrashMode::Kept => count,
            CrashMode::Torn => self.below(count as u64 + 1) as usize,
        }
    }
}
