//! The journal against a model: a list of what is durable and a list of what is not.

#![allow(clippy::unwrap_used)]

use eaglet_core::journal::Journal;
use eaglet_core::scan::{ScanLimits, scan_storage};
use eaglet_core::storage::Storage;
use eaglet_testkit::faulty_storage::{CrashMode, FaultyStorage};
use proptest::prelude::*;
use std::path::Path;
use std::sync::Arc;

const PATH: &str = "run/answers.jsonl";

#[derive(Clone, Debug)]
enum Step {
    Append(String),
    Commit,
    /// The process dies; what it had in memory is gone.
    Restart,
    PowerCut(CrashMode, u64),
}

fn any_text() -> impl Strategy<Value = String> {
    let unusual =
        prop::sample::select(vec!['\u{2028}', '\u{0}', '\u{85}', '\n', '\r', '"', '\\', '}', '\u{feff}', '😀']);
    prop::collection::vec(prop_oneof![2 => any::<char>(), 1 => unusual], 0..40).prop_map(String::from_iter)
}

fn any_step() -> impl Strategy<Value = Step> {
    let mode = prop::sample::select(vec![CrashMode::Dropped, CrashMode::Kept, CrashMode::Torn]);
    prop_oneof![
        6 => any_text().prop_map(Step::Append),
        3 => Just(Step::Commit),
        1 => Just(Step::Restart),
        1 => (mode, any::<u64>()).prop_map(|(mode, seed)| Step::PowerCut(mode, seed)),
    ]
}

fn open(storage: &FaultyStorage) -> Journal {
    let shared: Arc<dyn Storage> = Arc::new(storage.clone());
    Journal::open(shared, Path::new(PATH)).unwrap().0
}

fn texts_in(storage: &FaultyStorage, chunk_bytes: usize) -> Vec<String> {
    let mut texts = Vec::new();
    let limits = ScanLimits { chunk_bytes, ..ScanLimits::default() };
    scan_storage(storage, Path::new(PATH), limits, |line| {
        let value: serde_json::Value = serde_json::from_slice(line.bytes).unwrap();
        texts.push(value["text"].as_str().unwrap().to_owned());
    })
    .unwrap();
    texts
}

proptest! {
    #[test]
    fn what_was_committed_is_there_in_order_whatever_happens(
        steps in prop::collection::vec(any_step(), 0..40),
        chunk_bytes in 1usize..100,
    ) {
        let mut storage = FaultyStorage::new();
        storage.create_dir_all(Path::new("run")).unwrap();
        let mut journal = open(&storage);
        let mut durable: Vec<String> = Vec::new();
        let mut pending: Vec<String> = Vec::new();
        for step in steps {
            match step {
                Step::Append(text) => {
                    journal.append(&serde_json::to_vec(&serde_json::json!({ "text": text })).unwrap()).unwrap();
                    pending.push(text);
                    continue;
                }
                Step::Commit => {
                    journal.commit().unwrap();
                    durable.append(&mut pending);
                }
                Step::Restart => {
                    pending.clear();
                    journal = open(&storage);
                }
                Step::PowerCut(mode, seed) => {
                    pending.clear();
                    storage = storage.crash(mode, seed);
                    journal = open(&storage);
                }
            }
            prop_assert_eq!(&texts_in(&storage, chunk_bytes), &durable);
            prop_assert_eq!(journal.durable_len(), storage.len(Path::new(PATH)).unwrap().unwrap());
        }
    }
}
