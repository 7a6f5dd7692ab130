//! A small driver that keeps a run's records the way eaglet does, so that faults can strike at any of its steps.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code)]

use eaglet_core::journal::Journal;
use eaglet_core::scan::{LineKind, ScanLimits, scan_storage};
use eaglet_core::storage::Storage;
use eaglet_testkit::faulty_storage::FaultyStorage;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// Records of a whole run.
pub(crate) const TOTAL: u64 = 11;
/// Records in a commit.
const GROUP: usize = 3;
/// Bytes of the half record.
const TORN_BYTES: usize = 9;
/// Where the journal lies.
pub(crate) const JOURNAL: &str = "run/answers.jsonl";

/// The record of a number: of uneven length, with characters that once broke line readers.
pub(crate) fn record(id: u64) -> Vec<u8> {
    let text = "kettle \u{2028}\u{0}ö ".repeat(id as usize % 4);
    serde_json::to_vec(&serde_json::json!({ "id": id, "text": text })).unwrap()
}

/// A disk on which an earlier process left two records and the half of a third.
pub(crate) fn disk_with_torn_tail() -> FaultyStorage {
    let storage = FaultyStorage::new();
    let mut content = Vec::new();
    for id in 0..2 {
        content.extend_from_slice(&record(id));
        content.push(b'\n');
    }
    content.extend_from_slice(&record(2)[..TORN_BYTES]);
    storage.put(Path::new(JOURNAL), &content);
    storage
}

/// Whether the bytes of the half record are still somewhere: at the end of the journal or set aside.
pub(crate) fn torn_bytes_are_kept(storage: &FaultyStorage) -> bool {
    let torn = &record(2)[..TORN_BYTES];
    storage.files().iter().any(|path| storage.read(path).unwrap().ends_with(torn))
}

/// The numbers in the journal in order; every line must be exactly the record of its number.
pub(crate) fn ids_in(storage: &FaultyStorage) -> Vec<u64> {
    let mut ids = Vec::new();
    // Smaller than most records, so that lines span chunks.
    let limits = ScanLimits { chunk_bytes: 16, ..ScanLimits::default() };
    scan_storage(storage, Path::new(JOURNAL), limits, |line| {
        assert_eq!((line.kind, line.damage()), (LineKind::Complete, None), "{:?}", line.bytes);
        let value: serde_json::Value = serde_json::from_slice(line.bytes).unwrap();
        let id = value["id"].as_u64().unwrap();
        assert_eq!(line.bytes, record(id));
        ids.push(id);
    })
    .unwrap();
    ids
}

/// One process: opens the journal, takes what is in it for done and saves the rest in groups, trying each commit up to
/// `tries` times. Returns what it may call done, whether or not it got to the end.
pub(crate) fn process(storage: &FaultyStorage, tries: u32, mut after_failure: impl FnMut()) -> BTreeSet<u64> {
    let shared: Arc<dyn Storage> = Arc::new(storage.clone());
    let Ok((mut journal, _)) = Journal::open(shared, Path::new(JOURNAL)) else { return BTreeSet::new() };
    let mut done: BTreeSet<u64> = ids_in(storage).into_iter().collect();
    let missing: Vec<u64> = (0..TOTAL).filter(|id| !done.contains(id)).collect();
    for group in missing.chunks(GROUP) {
        for &id in group {
            journal.append(&record(id)).unwrap();
        }
        let committed = (0..tries).any(|_| journal.commit().inspect_err(|_| after_failure()).is_ok());
        if !committed {
            return done;
        }
        done.extend(group);
    }
    done
}

/// A process without faults, after which everything must be there once and nothing that was done before may be missing.
pub(crate) fn complete_and_check(storage: &FaultyStorage, done_before: &BTreeSet<u64>, what: &str) {
    storage.heal();
    let shared: Arc<dyn Storage> = Arc::new(storage.clone());
    drop(Journal::open(shared, Path::new(JOURNAL)).unwrap());
    let found = ids_in(storage);
    let found_set: BTreeSet<u64> = found.iter().copied().collect();
    assert_eq!(found.len(), found_set.len(), "{what}: doubled in {found:?}");
    assert!(done_before.is_subset(&found_set), "{what}: lost from {done_before:?}, found {found:?}");
    let done = process(storage, 1, || {});
    assert_eq!(done.len() as u64, TOTAL, "{what}: did not get to the end");
    let mut all = ids_in(storage);
    all.sort_unstable();
    assert_eq!(all, (0..TOTAL).collect::<Vec<_>>(), "{what}");
}
