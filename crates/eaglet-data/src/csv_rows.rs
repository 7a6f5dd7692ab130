//! Rows of CSV (or tab-separated) files with a header: every field is text.
//!
//! A row is numbered by the line it begins on. Memory is bounded by one record of at most [`ROW_MAX_BYTES`]: an
//! unclosed quote would otherwise swallow the rest of the file.

use crate::conversation::{is_prompt_field, names};
use crate::format::read_error;
use crate::inputs::InputFile;
use crate::reject::RejectReason;
use crate::row::Row;
use crate::rows::{Needs, ROW_MAX_BYTES, RawRow, Sink};
use crate::spec::BadText;
use eaglet_core::{Error, Result};
use serde_json::Value;
use std::borrow::Cow;
use std::cell::Cell;
use std::io::{BufRead, Read};
use std::ops::ControlFlow;
use std::rc::Rc;

/// Hands every record to `sink`.
pub(crate) fn read(
    file: &InputFile,
    text: Box<dyn BufRead>,
    delimiter: u8,
    needs: &Needs,
    sink: &mut Sink<'_>,
) -> Result<ControlFlow<()>> {
    let budget = Rc::new(Cell::new(ROW_MAX_BYTES));
    let text = Bounded { text, budget: Rc::clone(&budget) };
    let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).flexible(true).has_headers(false).from_reader(text);
    let mut record = csv::ByteRecord::new();
    if !next(file, &mut reader, &mut record)? {
        return Ok(ControlFlow::Continue(()));
    }
    let header = header(file, &record)?;
    loop {
        budget.set(ROW_MAX_BYTES);
        if !next(file, &mut reader, &mut record)? {
            return Ok(ControlFlow::Continue(()));
        }
        let number = record.position().map_or(0, csv::Position::line);
        let (fields, repaired) = fields(&header, &record, needs);
        if sink(RawRow { number, fields, ignored: "", repaired })?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
}

fn header(file: &InputFile, record: &csv::ByteRecord) -> Result<Vec<String>> {
    let header: Vec<String> =
        record.iter().map(|name| String::from_utf8_lossy(name.trim_ascii()).into_owned()).collect();
    if header.iter().any(|name| is_prompt_field(name)) {
        return Ok(header);
    }
    let got = names(header.iter().map(String::as_str));
    Err(Error::data(format!("{}: no column that holds a prompt (columns: {got})", file.shown)).hint(
        "the first line must name the columns, one of them messages, conversations, prompt, question, problem, query, instruction or text",
    ))
}

fn next<R: Read>(file: &InputFile, reader: &mut csv::Reader<R>, record: &mut csv::ByteRecord) -> Result<bool> {
    reader.read_byte_record(record).map_err(|error| match error.into_kind() {
        csv::ErrorKind::Io(error) => read_error(file, error),
        other => Error::data(format!("{}: not readable as CSV: {other:?}", file.shown)),
    })
}

type Fields = Result<Row, RejectReason>;

fn fields(header: &[String], record: &csv::ByteRecord, needs: &Needs) -> (Fields, bool) {
    if record.len() != header.len() {
        return (Err(RejectReason::FieldCount { expected: header.len(), got: record.len() }), false);
    }
    let mut row = Row::default();
    let mut repaired = false;
    for (name, cell) in header.iter().zip(record).filter(|(name, cell)| !cell.is_empty() && needs.field(name)) {
        let text = match String::from_utf8_lossy(cell) {
            Cow::Borrowed(text) => text.to_owned(),
            Cow::Owned(_) if needs.bad_text == BadText::SetAside => {
                return (Err(RejectReason::InvalidUtf8), false);
            }
            Cow::Owned(text) => {
                repaired = true;
                text
            }
        };
        row.insert(name.clone().into(), Value::String(text));
    }
    (Ok(row), repaired)
}

/// Refuses to read on when one record has used up its budget.
struct Bounded {
    text: Box<dyn BufRead>,
    budget: Rc<Cell<u64>>,
}

impl Read for Bounded {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.budget.get() == 0 {
            return Err(std::io::Error::other(format!(
                "a record is longer than {} MiB: a quote may not be closed",
                ROW_MAX_BYTES >> 20
            )));
        }
        let read = self.text.read(buffer)?;
        self.budget.set(self.budget.get().saturating_sub(read as u64));
        Ok(read)
    }
}
