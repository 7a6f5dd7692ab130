//! One interface for every format: a file's rows, one after another, handed to a sink.
//!
//! Rows are pushed, never collected: memory is bounded by one row (JSON, CSV) or one batch (Parquet). A fault of a single
//! row goes to the sink as a reason; a fault of the file ends the reading with an error.

use crate::conversation::known_field;
use crate::format::{self, Layout};
use crate::inputs::InputFile;
use crate::reject::RejectReason;
use crate::row::Row;
use crate::spec::{BadText, DatasetSpec};
use crate::{csv_rows, json_rows, parquet_rows};
use eaglet_core::Result;
use std::borrow::Cow;
use std::ops::ControlFlow;

/// Longest row in bytes (JSON text or CSV record); longer JSON lines are set aside, unread.
pub(crate) const ROW_MAX_BYTES: u64 = 64 << 20;

/// A row as the file has it.
pub(crate) struct RawRow<'a> {
    /// 1-based: line of the file (JSONL, CSV) or row of the file (JSON array, Parquet).
    pub(crate) number: u64,
    /// Its needed fields, or why it cannot be used.
    pub(crate) fields: Result<Row, RejectReason>,
    /// Names of fields that were not needed (for messages; may be cut short).
    pub(crate) ignored: &'a str,
    /// Whether its text was repaired.
    pub(crate) repaired: bool,
}

/// Takes rows; `Break` ends the reading early, without an error.
pub(crate) type Sink<'a> = dyn FnMut(RawRow<'_>) -> Result<ControlFlow<()>> + 'a;

/// Which fields are needed, and what happens to bad text.
pub(crate) struct Needs {
    extra: Vec<String>,
    pub(crate) bad_text: BadText,
}

impl Needs {
    pub(crate) fn of(spec: &DatasetSpec) -> Self {
        let asked = spec.filters.iter().map(|filter| filter.field()).chain(spec.id_field.as_deref());
        // A dotted path needs its first part; the whole name is kept too, for a field that is itself named with a dot.
        let extra =
            asked.flat_map(|field| [field, field.split('.').next().unwrap_or(field)]).map(str::to_owned).collect();
        Needs { extra, bad_text: spec.bad_text }
    }

    /// Whether a top-level field is read at all.
    pub(crate) fn field(&self, name: &str) -> bool {
        self.name(name).is_some()
    }

    /// The name of a field that is read.
    pub(crate) fn name(&self, name: &str) -> Option<Cow<'static, str>> {
        let extra = || self.extra.iter().find(|extra| *extra == name).map(|extra| Cow::Owned(extra.clone()));
        known_field(name).map(Cow::Borrowed).or_else(extra)
    }
}

/// Hands every row of `file` to `sink`.
pub(crate) fn read(file: &InputFile, needs: &Needs, sink: &mut Sink<'_>) -> Result<ControlFlow<()>> {
    let opened = format::open(file)?;
    match opened.layout {
        Layout::Parquet(handle) => parquet_rows::read(file, handle, needs, sink),
        Layout::Lines(mut text) => json_rows::read_lines(file, &mut *text, needs, sink),
        Layout::Array(mut text) => json_rows::read_array(file, &mut *text, needs, sink),
        Layout::Csv { text, delimiter } => csv_rows::read(file, text, delimiter, needs, sink),
    }
}

/// How a row of a file is named in messages.
pub(crate) fn origin(file: &InputFile, number: u64) -> String {
    if file.numbered_by_line { format!("{}:{number}", file.shown) } else { format!("{} row {number}", file.shown) }
}
