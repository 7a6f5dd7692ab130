//! Rows of Parquet files: Arrow values become JSON values.
//!
//! Only the needed columns are read, in bounded batches, row group by row group. Null struct members are left out, because
//! in Arrow every struct of a column has every member.

use crate::conversation::{is_prompt_field, names};
use crate::inputs::InputFile;
use crate::reject::RejectReason;
use crate::row::Row;
use crate::rows::{Needs, RawRow, Sink};
use crate::spec::BadText;
use arrow_array::cast::AsArray;
use arrow_array::types;
use arrow_array::{Array, FixedSizeListArray, LargeListArray, ListArray, MapArray, RecordBatch, StructArray};
use arrow_schema::DataType;
use eaglet_core::{Error, Result};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Map, Number, Value};
use std::borrow::Cow;
use std::fs::File;
use std::ops::ControlFlow;

/// Rows decoded at once; bounds memory to so many rows of the needed columns (plus Parquet's own pages).
const BATCH_ROWS: usize = 256;

/// Hands every row to `sink`.
pub(crate) fn read(file: &InputFile, handle: File, needs: &Needs, sink: &mut Sink<'_>) -> Result<ControlFlow<()>> {
    let damaged = |error: &dyn std::fmt::Display| {
        Error::data(format!("{}: not a whole Parquet file ({error})", file.shown))
            .hint("nothing of it was used; the file is damaged or cut short: fetch or write it again")
    };
    let builder = ParquetRecordBatchReaderBuilder::try_new(handle).map_err(|error| damaged(&error))?;
    let schema = builder.schema().clone();
    let wanted: Vec<usize> = (0..schema.fields().len()).filter(|at| needs.field(schema.field(*at).name())).collect();
    if !wanted.iter().any(|at| is_prompt_field(schema.field(*at).name())) {
        let got = names(schema.fields().iter().map(|field| field.name().as_str()));
        return Err(Error::data(format!("{}: no column that holds a prompt (columns: {got})", file.shown)).hint(
            "one column must be named messages, conversations, prompt, question, problem, query, instruction, turns or text",
        ));
    }
    let mask = ProjectionMask::roots(builder.parquet_schema(), wanted);
    let reader = builder.with_projection(mask).with_batch_size(BATCH_ROWS).build().map_err(|error| damaged(&error))?;
    let mut number = 0;
    for batch in reader {
        let batch = batch.map_err(|error| damaged(&error))?;
        for at in 0..batch.num_rows() {
            number += 1;
            let mut converter = Converter { bad_text: needs.bad_text, repaired: false };
            let fields = converter.row(&batch, at);
            let row = RawRow { number, fields, ignored: "", repaired: converter.repaired };
            if sink(row)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// Converts the values of one row.
struct Converter {
    bad_text: BadText,
    repaired: bool,
}

impl Converter {
    fn row(&mut self, batch: &RecordBatch, at: usize) -> Result<Row, RejectReason> {
        let mut fields = Row::default();
        for (field, column) in batch.schema_ref().fields().iter().zip(batch.columns()) {
            let value = self.value(column.as_ref(), at)?;
            if !value.is_null() {
                fields.insert(field.name().clone().into(), value);
            }
        }
        Ok(fields)
    }

    fn value(&mut self, array: &dyn Array, at: usize) -> Result<Value, RejectReason> {
        if array.is_null(at) {
            return Ok(Value::Null);
        }
        Ok(match array.data_type() {
            DataType::Null => Value::Null,
            DataType::Boolean => Value::Bool(array.as_boolean().value(at)),
            DataType::Int8 => array.as_primitive::<types::Int8Type>().value(at).into(),
            DataType::Int16 => array.as_primitive::<types::Int16Type>().value(at).into(),
            DataType::Int32 => array.as_primitive::<types::Int32Type>().value(at).into(),
            DataType::Int64 => array.as_primitive::<types::Int64Type>().value(at).into(),
            DataType::UInt8 => array.as_primitive::<types::UInt8Type>().value(at).into(),
            DataType::UInt16 => array.as_primitive::<types::UInt16Type>().value(at).into(),
            DataType::UInt32 => array.as_primitive::<types::UInt32Type>().value(at).into(),
            DataType::UInt64 => array.as_primitive::<types::UInt64Type>().value(at).into(),
            DataType::Float16 => float(f64::from(array.as_primitive::<types::Float16Type>().value(at).to_f32())),
            DataType::Float32 => {
                let value = array.as_primitive::<types::Float32Type>().value(at);
                // By way of its shortest text, so that 0.1 stays 0.1 as it would be in JSONL.
                float(value.to_string().parse().unwrap_or(f64::from(value)))
            }
            DataType::Float64 => float(array.as_primitive::<types::Float64Type>().value(at)),
            DataType::Utf8 => array.as_string::<i32>().value(at).into(),
            DataType::LargeUtf8 => array.as_string::<i64>().value(at).into(),
            DataType::Utf8View => array.as_string_view().value(at).into(),
            DataType::Binary => self.bytes(array.as_binary::<i32>().value(at))?,
            DataType::LargeBinary => self.bytes(array.as_binary::<i64>().value(at))?,
            DataType::BinaryView => self.bytes(array.as_binary_view().value(at))?,
            DataType::List(_) => self.list(downcast::<ListArray>(array).value(at).as_ref())?,
            DataType::LargeList(_) => self.list(downcast::<LargeListArray>(array).value(at).as_ref())?,
            DataType::FixedSizeList(..) => self.list(downcast::<FixedSizeListArray>(array).value(at).as_ref())?,
            DataType::Struct(_) => self.object(array.as_struct(), at)?,
            DataType::Map(..) => self.map(&downcast::<MapArray>(array).value(at))?,
            DataType::Dictionary(..) => self.dictionary(array, at)?,
            // Dates, times and decimals are no part of a chat message; where they stand beside one (a turn's time) they count as absent.
            _ => Value::Null,
        })
    }

    fn list(&mut self, items: &dyn Array) -> Result<Value, RejectReason> {
        (0..items.len()).map(|at| self.value(items, at)).collect::<Result<Vec<_>, _>>().map(Value::Array)
    }

    fn object(&mut self, members: &StructArray, at: usize) -> Result<Value, RejectReason> {
        let mut object = Map::new();
        for (field, column) in members.fields().iter().zip(members.columns()) {
            let value = self.value(column.as_ref(), at)?;
            if !value.is_null() {
                object.insert(field.name().clone(), value);
            }
        }
        Ok(Value::Object(object))
    }

    fn map(&mut self, entries: &StructArray) -> Result<Value, RejectReason> {
        let (keys, values) = (entries.column(0), entries.column(1));
        let mut object = Map::new();
        for at in 0..entries.len() {
            let key = match self.value(keys.as_ref(), at)? {
                Value::String(text) => text,
                other => other.to_string(),
            };
            let value = self.value(values.as_ref(), at)?;
            if !value.is_null() {
                object.insert(key, value);
            }
        }
        Ok(Value::Object(object))
    }

    fn dictionary(&mut self, array: &dyn Array, at: usize) -> Result<Value, RejectReason> {
        let dictionary = array.as_any_dictionary();
        let key = self.value(dictionary.keys(), at)?.as_u64().and_then(|key| usize::try_from(key).ok());
        match key {
            Some(key) if key < dictionary.values().len() => self.value(dictionary.values().as_ref(), key),
            _ => Err(RejectReason::bad_field("column", "a key of its dictionary", "another one")),
        }
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<Value, RejectReason> {
        match String::from_utf8_lossy(bytes) {
            Cow::Borrowed(text) => Ok(text.into()),
            Cow::Owned(_) if self.bad_text == BadText::SetAside => Err(RejectReason::InvalidUtf8),
            Cow::Owned(text) => {
                self.repaired = true;
                Ok(text.into())
            }
        }
    }
}

/// Not-a-number and infinities have no JSON form; they count as absent.
fn float(value: f64) -> Value {
    Number::from_f64(value).map_or(Value::Null, Value::Number)
}

fn downcast<T: 'static>(array: &dyn Array) -> &T {
    array.as_any().downcast_ref().expect("an array's type is what its data type says")
}
