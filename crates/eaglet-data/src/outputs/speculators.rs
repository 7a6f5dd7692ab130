//! The directory that speculators trains from: what Hugging Face `datasets` writes with `save_to_disk`.
//!
//! `speculators/SPLIT/` holds `data-*.arrow` (Arrow IPC streams), `dataset_info.json` and `state.json`. Read in speculators 0.9.0 and datasets 5.1: the trainer
//! compares rows with torch, so `state.json` must say `"_format_type": "torch"`; it batches by `seq_len`, so that column must be there.

use super::columns::{Batch, list_field};
use super::out_file::write_whole;
use super::{Encoded, FileEntry, Format, OutFile, Split, Writer};
use crate::example::Example;
use arrow_array::RecordBatch;
use arrow_array::types::Int64Type;
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use eaglet_core::{Error, Result};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of a data file, about; as `datasets` splits them.
const DATA_FILE_BYTES_MAX: u64 = 500 << 20;

/// The columns in the words of `datasets`. The ids are int32 and the mask int64, as `datasets` itself stores columns of these names.
pub const SPECULATORS_FEATURES: &str = concat!(
    r#"{"input_ids":{"feature":{"dtype":"int32","_type":"Value"},"_type":"List"},"#,
    r#""loss_mask":{"feature":{"dtype":"int64","_type":"Value"},"_type":"List"},"#,
    r#""seq_len":{"dtype":"int64","_type":"Value"}}"#
);

pub(super) struct ArrowDirectory {
    root: PathBuf,
    /// Below the root.
    directory: String,
    schema: SchemaRef,
    batch: Batch,
    open: Option<StreamWriter<OutFile>>,
    done: Vec<FileEntry>,
}

fn item(data_type: DataType) -> Field {
    Field::new("item", data_type, true)
}

impl ArrowDirectory {
    pub(super) fn new(root: &Path, split: Split) -> Self {
        let metadata = format!(r#"{{"info":{{"features":{SPECULATORS_FEATURES}}}}}"#);
        let fields = vec![
            list_field("input_ids", item(DataType::Int32)),
            list_field("loss_mask", item(DataType::Int64)),
            Field::new("seq_len", DataType::Int64, true),
        ];
        let schema = Schema::new_with_metadata(fields, HashMap::from([("huggingface".to_owned(), metadata)]));
        ArrowDirectory {
            root: root.to_owned(),
            directory: format!("{}/{}", Format::Speculators.label(), split.label()),
            schema: Arc::new(schema),
            batch: Batch::default(),
            open: None,
            done: Vec::new(),
        }
    }

    fn failed(&self, error: &ArrowError) -> Error {
        Error::environment(format!("cannot write {}: {error}", self.root.join(&self.directory).display()))
    }

    /// The name says how many files there are, which is known at the end.
    fn passing_name(&self, number: usize) -> String {
        format!("{}/data-{number:05}.unfinished", self.directory)
    }

    fn write_batch(&mut self) -> Result<()> {
        if self.batch.examples.is_empty() {
            return Ok(());
        }
        let ids = self.batch.ids(item(DataType::Int32));
        let mask = self.batch.mask::<Int64Type>(item(DataType::Int64));
        let columns = RecordBatch::try_new(self.schema.clone(), vec![ids, mask, self.batch.lengths()])
            .map_err(|error| Error::bug(format!("columns that do not fit the schema: {error}")))?;
        let mut stream = match self.open.take() {
            Some(stream) => stream,
            None => {
                let file = OutFile::create(&self.root, self.passing_name(self.done.len()))?;
                StreamWriter::try_new(file, &self.schema).map_err(|error| self.failed(&error))?
            }
        };
        stream.write(&columns).map_err(|error| self.failed(&error))?;
        self.batch.clear();
        let full = stream.get_ref().bytes() >= DATA_FILE_BYTES_MAX;
        self.open = Some(stream);
        if full { self.end_file() } else { Ok(()) }
    }

    fn end_file(&mut self) -> Result<()> {
        let Some(stream) = self.open.take() else { return Ok(()) };
        let file = stream.into_inner().map_err(|error| self.failed(&error))?;
        self.done.push(file.finish()?);
        Ok(())
    }

    /// Gives the data files their names.
    fn rename(&mut self) -> Result<Vec<String>> {
        let count = self.done.len();
        let mut names = Vec::with_capacity(count);
        for (number, entry) in self.done.iter_mut().enumerate() {
            let name = format!("data-{number:05}-of-{count:05}.arrow");
            let path = format!("{}/{name}", self.directory);
            let (from, to) = (self.root.join(&entry.path), self.root.join(&path));
            std::fs::rename(&from, &to).map_err(|error| Error::io("rename", &from, error))?;
            entry.path = path;
            names.push(name);
        }
        Ok(names)
    }
}

impl Writer for ArrowDirectory {
    fn add(&mut self, example: &Example, _encoded: Encoded) -> Result<()> {
        if self.batch.push(example) { self.write_batch() } else { Ok(()) }
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<FileEntry>> {
        self.write_batch()?;
        self.end_file()?;
        let names = self.rename()?;
        let hashes: String = self.done.iter().map(|entry| entry.blake3.as_str()).collect();
        // `datasets` wants 16 digits that change with the data.
        let fingerprint = &blake3::hash(hashes.as_bytes()).to_hex()[..16];
        let features: Value = serde_json::from_str(SPECULATORS_FEATURES)
            .map_err(|error| Error::bug(format!("the features are no JSON: {error}")))?;
        let state = json!({
            "_data_files": names.iter().map(|name| json!({"filename": name})).collect::<Vec<_>>(),
            "_fingerprint": fingerprint,
            "_format_columns": null,
            "_format_kwargs": {},
            "_format_type": "torch",
            "_output_all_columns": false,
            "_split": null,
        });
        let info = json!({"citation": "", "description": "", "features": features, "homepage": "", "license": ""});
        let mut entries = std::mem::take(&mut self.done);
        for (name, value) in [("state.json", state), ("dataset_info.json", info)] {
            let content = format!("{value:#}\n");
            entries.push(write_whole(&self.root, &format!("{}/{name}", self.directory), content.as_bytes())?);
        }
        Ok(entries)
    }
}
