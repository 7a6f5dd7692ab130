//! Reads the rows of the formats back, as their users do.

use crate::example::MaskedIds;
use crate::outputs::Format;
use arrow_array::cast::AsArray;
use arrow_array::types::{Int8Type, Int32Type, Int64Type};
use arrow_array::{Array, RecordBatch};
use arrow_ipc::reader::StreamReader;
use arrow_schema::DataType;
use eaglet_core::{Error, Result};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde::Deserialize;
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// A row of some format.
pub(super) struct Row {
    /// Its ids and mask; `None` for conversations.
    pub(super) tokens: Option<MaskedIds>,
}

type Take<'a> = dyn FnMut(Result<Row, String>) + 'a;

/// Hands out the rows of a file, or in words what is wrong with one.
///
/// # Errors
/// Environment: the file cannot be read. Data: it is not of this format.
pub(super) fn for_each(format: Format, path: &Path, take: &mut Take<'_>) -> Result<()> {
    match format {
        Format::Specforge | Format::SpeculatorsJsonl => for_each_line(path, &mut |_, line| take(tokens_of_line(line))),
        Format::SpecforgeConversations => for_each_line(path, &mut |_, line| take(conversation(line))),
        Format::Speculators => {
            let file = open(path)?;
            let damaged = |error: arrow_schema::ArrowError| Error::data(format!("{}: {error}", path.display()));
            let reader = StreamReader::try_new_buffered(file, None).map_err(damaged)?;
            reader.into_iter().try_for_each(|batch| {
                rows_of_batch(&batch.map_err(damaged)?, take)
                    .map_err(|what| Error::data(format!("{}: {what}", path.display())))
            })
        }
        Format::Parquet => {
            let damaged = |error: String| Error::data(format!("{}: {error}", path.display()));
            let builder =
                ParquetRecordBatchReaderBuilder::try_new(open(path)?).map_err(|error| damaged(error.to_string()))?;
            let reader = builder.build().map_err(|error| damaged(error.to_string()))?;
            for batch in reader {
                rows_of_batch(&batch.map_err(|error| damaged(error.to_string()))?, take).map_err(damaged)?;
            }
            Ok(())
        }
        // Read by the caller, who wants to know more of them.
        Format::Shards => Err(Error::bug("shards are not read row by row")),
    }
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|error| Error::io("open", path, error))
}

/// Hands out the lines of a file with their numbers from 1.
pub(super) fn for_each_line(path: &Path, each: &mut dyn FnMut(u64, &[u8])) -> Result<()> {
    let mut reader = BufReader::with_capacity(1 << 20, open(path)?);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        if reader.read_until(b'\n', &mut line).map_err(|error| Error::io("read", path, error))? == 0 {
            break;
        }
        each(number, line.strip_suffix(b"\n").unwrap_or(&line));
    }
    Ok(())
}

fn tokens_of_line(line: &[u8]) -> Result<Row, String> {
    #[derive(Deserialize)]
    struct Line {
        id: String,
        input_ids: Vec<u32>,
        loss_mask: Vec<u8>,
    }
    let line: Line = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    masked(line.input_ids, &line.loss_mask).map_err(|what| format!("{:?}: {what}", line.id))
}

fn masked(ids: Vec<u32>, mask: &[u8]) -> Result<Row, String> {
    MaskedIds::from_mask(ids, mask).map(|tokens| Row { tokens: Some(tokens) }).map_err(|error| error.to_string())
}

/// The fields of a conversation that SpecForge's parser takes.
const CONVERSATION_FIELDS: [&str; 3] = ["id", "conversations", "tools"];
/// The fields of its messages.
const MESSAGE_FIELDS: [&str; 6] = ["role", "content", "reasoning_content", "tool_calls", "name", "tool_call_id"];

fn conversation(line: &[u8]) -> Result<Row, String> {
    let row: Value = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    let unknown =
        |of: &Value, known: &[&str]| of.as_object()?.keys().find(|key| !known.contains(&key.as_str())).cloned();
    if let Some(field) = unknown(&row, &CONVERSATION_FIELDS) {
        return Err(format!("has a field {field:?}"));
    }
    let messages = row.get("conversations").and_then(Value::as_array).ok_or("has no conversations")?;
    if let Some(field) = messages.iter().find_map(|message| unknown(message, &MESSAGE_FIELDS)) {
        return Err(format!("has a message with a field {field:?}"));
    }
    let role = |message: &Value| message.get("role").and_then(Value::as_str).map(str::to_owned);
    match messages.last().and_then(role).as_deref() {
        Some("assistant") => Ok(Row { tokens: None }),
        other => Err(format!("ends with a message of {other:?}")),
    }
}

/// Rows of Arrow columns `input_ids`, `loss_mask`, `seq_len`.
fn rows_of_batch(batch: &RecordBatch, take: &mut Take<'_>) -> Result<(), String> {
    let column = |name: &str| batch.column_by_name(name).ok_or(format!("there is no column {name}"));
    let list = |name: &str| column(name)?.as_list_opt::<i32>().ok_or(format!("{name} is no list"));
    let (ids, masks) = (list("input_ids")?, list("loss_mask")?);
    let lengths = column("seq_len")?.as_primitive_opt::<Int64Type>().ok_or("seq_len is not int64")?;
    for at in 0..batch.num_rows() {
        let row = integers(ids.value(at).as_ref())
            .zip(integers(masks.value(at).as_ref()))
            .ok_or("an item is no integer".to_owned())
            .and_then(|(ids, mask)| {
                if lengths.is_null(at) || lengths.value(at) != ids.len() as i64 {
                    return Err("seq_len is not the number of ids".to_owned());
                }
                let ids = ids.into_iter().map(|id| u32::try_from(id).map_err(|_| format!("id {id} is out of range")));
                // What is no bit becomes 2, which is refused.
                let mask: Vec<u8> = mask.into_iter().map(|bit| u8::try_from(bit).unwrap_or(2)).collect();
                masked(ids.collect::<Result<_, _>>()?, &mask)
            });
        take(row);
    }
    Ok(())
}

/// The values of a list without nulls, of any of the widths that are written.
fn integers(values: &dyn Array) -> Option<Vec<i64>> {
    if values.null_count() > 0 {
        return None;
    }
    match values.data_type() {
        DataType::Int8 => Some(values.as_primitive::<Int8Type>().values().iter().map(|v| i64::from(*v)).collect()),
        DataType::Int32 => Some(values.as_primitive::<Int32Type>().values().iter().map(|v| i64::from(*v)).collect()),
        DataType::Int64 => Some(values.as_primitive::<Int64Type>().values().to_vec()),
        _ => None,
    }
}
