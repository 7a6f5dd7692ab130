//! The prepared directory as a whole: whether one is there, where the new one grows, and how it takes its place.
//!
//! It grows as `OUT.unfinished/`, locked by the process that makes it, and is renamed to `OUT/` when everything in it is synced. A crash leaves `OUT.unfinished/`, which the
//! next attempt empties. Only names that eaglet gives are ever removed; anything else in the way is an error.

use super::Existing;
use super::summary::{DROPPED_FILE, SUMMARY_FILE, Summary};
use crate::outputs::{Format, OutFile};
use eaglet_core::storage::{RealStorage, Storage, parent_dir};
use eaglet_core::{Error, Result, run_file};
use serde_json::Value;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

/// The finished set with this fingerprint, if it is there.
///
/// # Errors
/// Usage: something else is there and is not to be replaced. Data: the set is damaged.
pub(super) fn existing(out: &Path, fingerprint: &Value, existing: Existing) -> Result<Option<Summary>> {
    let summary = match Summary::read(out) {
        Ok(Some(summary)) => summary,
        Ok(None) => return is_free(out, existing).map(|()| None),
        Err(_) if existing == Existing::Replace => return is_free(out, existing).map(|()| None),
        Err(error) => return Err(error),
    };
    let shown = out.display();
    if summary.fingerprint != *fingerprint {
        if existing == Existing::Replace {
            return is_free(out, existing).map(|()| None);
        }
        let differences = run_file::differences(&summary.fingerprint, fingerprint).join("; ");
        let differences = differences.replace("in the run", "there");
        return Err(Error::usage(format!("{shown} holds another prepared set: {differences}"))
            .hint("--overwrite replaces it, --out DIR writes elsewhere"));
    }
    for file in &summary.files {
        let length = RealStorage.len(&out.join(&file.path)).ok().flatten();
        if length != Some(file.bytes) {
            if existing == Existing::Replace {
                return is_free(out, existing).map(|()| None);
            }
            let found = length
                .map_or("is not there".to_owned(), |bytes| format!("has {bytes} bytes instead of {}", file.bytes));
            return Err(Error::data(format!("{shown}: {} {found}", file.path)).hint("--overwrite makes the set again"));
        }
    }
    Ok(Some(summary))
}

/// Whether a new set may take this name: nothing is there, or nothing but what eaglet put there.
fn is_free(out: &Path, existing: Existing) -> Result<()> {
    if !out.exists() {
        return Ok(());
    }
    if !out.is_dir() {
        return Err(Error::usage(format!("{} is a file, not a directory", out.display())).hint("choose another --out"));
    }
    match (first_foreign(out)?, fs::read_dir(out).map_err(|error| Error::io("read", out, error))?.next()) {
        (Some(name), _) => Err(Error::usage(format!("{} holds {name:?}, which eaglet did not write", out.display()))
            .hint("choose another directory with --out")),
        (None, Some(_)) if existing == Existing::Refuse => {
            Err(Error::usage(format!("{} holds a prepared set without its {SUMMARY_FILE}", out.display()))
                .hint("--overwrite replaces it, --out DIR writes elsewhere"))
        }
        _ => Ok(()),
    }
}

/// A name at the top of a directory that eaglet does not give.
fn first_foreign(directory: &Path) -> Result<Option<OsString>> {
    let failed = |error| Error::io("read", directory, error);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if !is_ours(&name) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

fn is_ours(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else { return false };
    let is_map = (name.starts_with("d2t-") || name.starts_with("t2d-")) && name.ends_with(".npy");
    name == DROPPED_FILE || name == SUMMARY_FILE || is_map || Format::ALL.iter().any(|format| format.label() == name)
}

/// Removes what eaglet wrote into a directory, the summary first: without it nothing takes the rest for finished.
fn clear(directory: &Path) -> Result<()> {
    if let Some(name) = first_foreign(directory)? {
        return Err(Error::environment(format!("{} holds {name:?}, which eaglet did not write", directory.display()))
            .hint("move it away"));
    }
    let summary = directory.join(SUMMARY_FILE);
    if summary.exists() {
        fs::remove_file(&summary).map_err(|error| Error::io("remove", &summary, error))?;
    }
    remove_below(directory)
}

fn remove_below(directory: &Path) -> Result<()> {
    let failed = |error| Error::io("read", directory, error);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let (path, kind) = (entry.path(), entry.file_type().map_err(failed)?);
        // A link is removed, not followed.
        let removed = if kind.is_dir() {
            remove_below(&path)?;
            fs::remove_dir(&path)
        } else {
            fs::remove_file(&path)
        };
        removed.map_err(|error| Error::io("remove", &path, error))?;
    }
    Ok(())
}

/// A prepared directory that grows.
pub(super) struct Unfinished {
    path: PathBuf,
    out: PathBuf,
    /// The directory itself, locked while this process works on it.
    lock: File,
}

impl Unfinished {
    /// Makes the directory, or empties what a crash left of it.
    ///
    /// # Errors
    /// Environment: another process works on it, or it cannot be made.
    pub(super) fn begin(out: &Path) -> Result<Self> {
        let mut name = OsString::from(out.file_name().unwrap_or(OsStr::new("prepared")));
        name.push(".unfinished");
        let path = out.with_file_name(name);
        RealStorage.create_dir_all(&path).map_err(|error| Error::io("make the directory", &path, error))?;
        let lock = File::open(&path).map_err(|error| Error::io("open", &path, error))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Error::environment(format!("another process works on {}", path.display()))
                    .hint("wait for its end, or give another --out"));
            }
            // A file system without locks: two processes at once are then the user's business.
            Err(TryLockError::Error(_)) => {}
        }
        clear(&path)?;
        Ok(Unfinished { path, out: out.to_owned(), lock })
    }

    /// Where to write.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the summary and gives the directory its name.
    pub(super) fn finish(self, summary: &Summary, existing: Existing) -> Result<()> {
        let mut file = OutFile::create(&self.path, SUMMARY_FILE)?;
        file.append(&summary.to_bytes()?)?;
        file.finish()?;
        sync_directories(&self.path)?;
        if self.out.exists() {
            if existing == Existing::Replace {
                clear(&self.out)?;
            }
            // Only an empty directory goes; whatever came into it meanwhile stays.
            fs::remove_dir(&self.out).map_err(|error| Error::io("replace", &self.out, error))?;
        }
        fs::rename(&self.path, &self.out).map_err(|error| Error::io("rename", &self.path, error))?;
        let parent = parent_dir(&self.out);
        RealStorage.sync_dir(parent).map_err(|error| Error::io("sync", parent, error))?;
        drop(self.lock);
        Ok(())
    }
}

/// Makes the names durable, from the inside out.
fn sync_directories(directory: &Path) -> Result<()> {
    let failed = |error| Error::io("sync", directory, error);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_type().map_err(failed)?.is_dir() {
            sync_directories(&entry.path())?;
        }
    }
    RealStorage.sync_dir(directory).map_err(failed)
}
