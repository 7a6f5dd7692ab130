//! Parquet: `parquet/SPLIT.parquet`, for whatever reads Parquet.

use super::columns::{Batch, list_field};
use super::{Encoded, FileEntry, Format, OutFile, Split, Writer};
use crate::example::Example;
use arrow_array::RecordBatch;
use arrow_array::types::Int8Type;
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use eaglet_core::{Error, Result};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of a row group that are held in memory until they are written, about.
const ROW_GROUP_BYTES_MAX: usize = 64 << 20;

pub(super) struct ParquetFile {
    writer: ArrowWriter<OutFile>,
    path: PathBuf,
    schema: SchemaRef,
    batch: Batch,
}

fn item(data_type: DataType) -> Field {
    Field::new("item", data_type, true)
}

fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("id", DataType::Utf8, false),
        Field::new("turn", DataType::Int64, false),
        Field::new("row", DataType::Int64, true),
        Field::new("prompt_hash", DataType::Utf8, false),
        list_field("input_ids", item(DataType::Int32)),
        list_field("loss_mask", item(DataType::Int8)),
        Field::new("seq_len", DataType::Int64, false),
    ]))
}

impl ParquetFile {
    pub(super) fn create(root: &Path, split: Split) -> Result<Self> {
        let file = OutFile::create(root, format!("{}/{}.parquet", Format::Parquet.label(), split.label()))?;
        let (path, schema) = (file.path(), schema());
        let level = ZstdLevel::try_new(3).map_err(|error| failed(&path, &error))?;
        let properties = WriterProperties::builder().set_compression(Compression::ZSTD(level)).build();
        let writer =
            ArrowWriter::try_new(file, schema.clone(), Some(properties)).map_err(|error| failed(&path, &error))?;
        Ok(ParquetFile { writer, path, schema, batch: Batch::default() })
    }

    fn write_batch(&mut self) -> Result<()> {
        if self.batch.examples.is_empty() {
            return Ok(());
        }
        let batch = &self.batch;
        let columns = vec![
            batch.texts(|example| example.id.sample_id.as_str()),
            batch.longs(|example| Some(i64::from(example.id.turn))),
            batch.longs(|example| example.id.row.and_then(|row| i64::try_from(row).ok())),
            batch.texts(|example| example.id.prompt_hash.to_string()),
            batch.ids(item(DataType::Int32)),
            batch.mask::<Int8Type>(item(DataType::Int8)),
            batch.lengths(),
        ];
        let columns = RecordBatch::try_new(self.schema.clone(), columns)
            .map_err(|error| Error::bug(format!("columns that do not fit the schema: {error}")))?;
        self.writer.write(&columns).map_err(|error| failed(&self.path, &error))?;
        if self.writer.in_progress_size() >= ROW_GROUP_BYTES_MAX {
            self.writer.flush().map_err(|error| failed(&self.path, &error))?;
        }
        self.batch.clear();
        Ok(())
    }
}

fn failed(path: &Path, error: &parquet::errors::ParquetError) -> Error {
    Error::environment(format!("cannot write {}: {error}", path.display()))
}

impl Writer for ParquetFile {
    fn add(&mut self, example: &Example, _encoded: Encoded) -> Result<()> {
        if self.batch.push(example) { self.write_batch() } else { Ok(()) }
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<FileEntry>> {
        self.write_batch()?;
        let file = self.writer.into_inner().map_err(|error| failed(&self.path, &error))?;
        Ok(vec![file.finish()?])
    }
}
