//! Rows of JSONL files and of JSON arrays.
//!
//! Lines end at 0x0A only (U+2028 and its kin are text); CRLF, blank lines and blanks around a row are accepted. An array
//! is cut into its elements by counting brackets outside strings, so it is never held whole, and a bad element is
//! set aside like a bad line. Memory is bounded by one row of at most [`ROW_MAX_BYTES`].

use crate::format::read_error;
use crate::inputs::InputFile;
use crate::json_text;
use crate::reject::{RejectReason, shorten};
use crate::row::Row;
use crate::rows::{Needs, ROW_MAX_BYTES, RawRow, Sink};
use crate::spec::BadText;
use eaglet_core::{Error, Result};
use memchr::{memchr, memchr2};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use std::borrow::Cow;
use std::io::BufRead;
use std::ops::ControlFlow;

/// So many first rows that are all not JSON mean that the file is something else.
const HOPELESS_ROWS: u64 = 20;
/// Names of unused fields are kept up to this many bytes.
const IGNORED_MAX_BYTES: usize = 200;

/// Hands every line of `text` to `sink`.
pub(crate) fn read_lines(
    file: &InputFile,
    text: &mut dyn BufRead,
    needs: &Needs,
    sink: &mut Sink<'_>,
) -> Result<ControlFlow<()>> {
    let mut parser = RowParser::new(file, needs);
    let mut number = 0;
    // Part of a line that did not end inside the reader's buffer; `skipped` counts what of it was over the limit.
    let mut carry: Vec<u8> = Vec::new();
    let mut skipped = 0_u64;
    loop {
        let buffer = text.fill_buf().map_err(|error| read_error(file, error))?;
        if buffer.is_empty() {
            break;
        }
        let mut rest = buffer;
        while let Some(end) = memchr(b'\n', rest) {
            number += 1;
            let (line, next) = (&rest[..end], &rest[end + 1..]);
            rest = next;
            let flow = if carry.is_empty() && skipped == 0 {
                parser.row(number, line, sink)?
            } else {
                extend_bounded(&mut carry, &mut skipped, line);
                let flow = parser.carried(number, &carry, skipped, sink)?;
                carry.clear();
                skipped = 0;
                flow
            };
            if flow.is_break() {
                return Ok(flow);
            }
        }
        extend_bounded(&mut carry, &mut skipped, rest);
        let length = buffer.len();
        text.consume(length);
    }
    if !carry.is_empty() && parser.carried(number + 1, &carry, skipped, sink)?.is_break() {
        return Ok(ControlFlow::Break(()));
    }
    parser.finish()?;
    Ok(ControlFlow::Continue(()))
}

fn extend_bounded(carry: &mut Vec<u8>, skipped: &mut u64, bytes: &[u8]) {
    let room = usize::try_from(ROW_MAX_BYTES).unwrap_or(usize::MAX).saturating_sub(carry.len());
    let kept = bytes.len().min(room);
    carry.extend_from_slice(&bytes[..kept]);
    *skipped += (bytes.len() - kept) as u64;
}

/// Where the cutting of an array stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Before the opening bracket.
    Before,
    /// Between elements, or inside one at this bracket depth (0 = the array itself).
    Inside { depth: u32, in_string: bool },
    /// After the closing bracket.
    After,
}

/// Hands every element of the array in `text` to `sink`.
pub(crate) fn read_array(
    file: &InputFile,
    text: &mut dyn BufRead,
    needs: &Needs,
    sink: &mut Sink<'_>,
) -> Result<ControlFlow<()>> {
    let mut parser = RowParser::new(file, needs);
    let mut cutter = Cutter { place: Place::Before, escaped: false, element: Vec::new(), skipped: 0 };
    let mut number = 0;
    loop {
        let buffer = text.fill_buf().map_err(|error| read_error(file, error))?;
        if buffer.is_empty() {
            break;
        }
        let mut rest = buffer;
        while !rest.is_empty() {
            let (used, complete) = cutter.step(rest).map_err(|what| bad_array(file, number, what))?;
            rest = &rest[used..];
            let blank = cutter.element.iter().all(u8::is_ascii_whitespace);
            if complete && !(blank && cutter.place == Place::After) {
                number += 1;
                let flow = parser.carried(number, &cutter.element, cutter.skipped, sink)?;
                if flow.is_break() {
                    return Ok(flow);
                }
            }
            if complete {
                cutter.element.clear();
                cutter.skipped = 0;
            }
        }
        let length = buffer.len();
        text.consume(length);
    }
    if cutter.place != Place::After {
        return Err(bad_array(file, number, "the file ends before its array is closed"));
    }
    parser.finish()?;
    Ok(ControlFlow::Continue(()))
}

fn bad_array(file: &InputFile, number: u64, what: &str) -> Error {
    Error::data(format!("{}: {what} (after row {number})", file.shown))
        .hint("nothing of it was used; the file is damaged or cut short: fetch or write it again")
}

/// Cuts an array into elements, byte run by byte run.
struct Cutter {
    place: Place,
    /// The byte before was a backslash inside a string.
    escaped: bool,
    element: Vec<u8>,
    skipped: u64,
}

impl Cutter {
    /// Consumes some of `bytes` (never zero of them); true when `element` has just been completed.
    fn step(&mut self, bytes: &[u8]) -> Result<(usize, bool), &'static str> {
        match self.place {
            Place::Before => match bytes[0] {
                b'[' => {
                    self.place = Place::Inside { depth: 0, in_string: false };
                    Ok((1, false))
                }
                byte if byte.is_ascii_whitespace() => Ok((1, false)),
                _ => Err("expected '[' at the beginning"),
            },
            Place::After if bytes[0].is_ascii_whitespace() => Ok((1, false)),
            Place::After => Err("more text after the end of its array"),
            Place::Inside { depth, in_string: true } => {
                let used = self.string_run(bytes, depth);
                extend_bounded(&mut self.element, &mut self.skipped, &bytes[..used]);
                Ok((used, false))
            }
            Place::Inside { depth, in_string: false } => {
                let (used, complete) = self.structure_run(bytes, depth);
                let kept = if complete { used - 1 } else { used };
                extend_bounded(&mut self.element, &mut self.skipped, &bytes[..kept]);
                Ok((used, complete))
            }
        }
    }

    fn string_run(&mut self, bytes: &[u8], depth: u32) -> usize {
        if self.escaped {
            self.escaped = false;
            return 1;
        }
        match memchr2(b'"', b'\\', bytes) {
            Some(at) if bytes[at] == b'"' => {
                self.place = Place::Inside { depth, in_string: false };
                at + 1
            }
            Some(at) => {
                self.escaped = true;
                at + 1
            }
            None => bytes.len(),
        }
    }

    fn structure_run(&mut self, bytes: &[u8], mut depth: u32) -> (usize, bool) {
        for (at, byte) in bytes.iter().enumerate() {
            match byte {
                b'"' => {
                    self.place = Place::Inside { depth, in_string: true };
                    return (at + 1, false);
                }
                b'[' | b'{' => depth = depth.saturating_add(1),
                b']' | b'}' if depth > 0 => depth -= 1,
                b']' => {
                    self.place = Place::After;
                    return (at + 1, true);
                }
                b',' if depth == 0 => {
                    self.place = Place::Inside { depth, in_string: false };
                    return (at + 1, true);
                }
                _ => {}
            }
        }
        self.place = Place::Inside { depth, in_string: false };
        (bytes.len(), false)
    }
}

/// Turns the text of one row into its needed fields.
struct RowParser<'a> {
    file: &'a InputFile,
    needs: &'a Needs,
    ignored: String,
    /// Rows so far, while every one of them was not JSON.
    hopeless: Option<u64>,
    first_fault: Option<String>,
}

impl<'a> RowParser<'a> {
    fn new(file: &'a InputFile, needs: &'a Needs) -> Self {
        RowParser { file, needs, ignored: String::new(), hopeless: Some(0), first_fault: None }
    }

    fn carried(&mut self, number: u64, text: &[u8], skipped: u64, sink: &mut Sink<'_>) -> Result<ControlFlow<()>> {
        if skipped == 0 {
            return self.row(number, text, sink);
        }
        self.hopeless = None;
        let reason = RejectReason::TooLong { limit_bytes: ROW_MAX_BYTES };
        sink(RawRow { number, fields: Err(reason), ignored: "", repaired: false })
    }

    fn row(&mut self, number: u64, text: &[u8], sink: &mut Sink<'_>) -> Result<ControlFlow<()>> {
        let text = text.trim_ascii();
        if text.is_empty() {
            return Ok(ControlFlow::Continue(()));
        }
        let (fields, repaired) = self.fields(text);
        if let Some(so_far) = self.hopeless {
            self.hopeless = match &fields {
                Err(reason @ (RejectReason::InvalidJson(_) | RejectReason::NotAnObject(_))) => {
                    self.first_fault.get_or_insert_with(|| format!("row {number}: {reason}"));
                    Some(so_far + 1)
                }
                _ => None,
            };
            if self.hopeless == Some(HOPELESS_ROWS) {
                return Err(self.not_json());
            }
        }
        sink(RawRow { number, fields, ignored: &self.ignored, repaired })
    }

    /// The end of the file: an error if it had rows and none of them was JSON.
    fn finish(&self) -> Result<()> {
        if self.hopeless.is_some_and(|rows| rows > 0) { Err(self.not_json()) } else { Ok(()) }
    }

    fn not_json(&self) -> Error {
        let rows = self.hopeless.unwrap_or(0);
        let fault = self.first_fault.as_deref().unwrap_or("");
        let which = if rows == 1 {
            "its first row is no JSON object".to_owned()
        } else {
            format!("none of its first {rows} rows is a JSON object")
        };
        Error::data(format!("{}: {which} ({fault})", self.file.shown))
            .hint("expected one complete JSON object a line, or one JSON array of objects; an object spread over several lines is not JSONL")
    }

    fn fields(&mut self, text: &[u8]) -> (Result<Row, RejectReason>, bool) {
        let error = match self.parse(text) {
            Ok(fields) => return (Ok(fields), false),
            Err(error) => error,
        };
        let reason = if std::str::from_utf8(text).is_err() {
            RejectReason::InvalidUtf8
        } else if json_text::repair_lone_surrogates(text).is_some() {
            RejectReason::LoneSurrogate
        } else if error.is_data() {
            return (Err(RejectReason::NotAnObject(not_an_object(text))), false);
        } else {
            return (Err(RejectReason::InvalidJson(shorten(&error.to_string()))), false);
        };
        match json_text::repair(text).map(|fixed| self.parse(&fixed)) {
            Some(Ok(fields)) if self.needs.bad_text == BadText::Repair => (Ok(fields), true),
            // Broken beyond its characters: the parser's complaint about the repaired text is the true one.
            Some(Err(error)) => (Err(RejectReason::InvalidJson(shorten(&error.to_string()))), false),
            _ => (Err(reason), false),
        }
    }

    fn parse(&mut self, text: &[u8]) -> serde_json::Result<Row> {
        self.ignored.clear();
        let mut deserializer = serde_json::Deserializer::from_slice(text);
        let fields = NeededFields { needs: self.needs, ignored: &mut self.ignored }.deserialize(&mut deserializer)?;
        deserializer.end()?;
        Ok(fields)
    }
}

fn not_an_object(text: &[u8]) -> String {
    match text.first() {
        Some(b'[') => "a list",
        Some(b'"') => "text",
        Some(b'{') => "an object that cannot be read",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        _ => "a number",
    }
    .to_owned()
}

/// Reads a field's name without copying it: the name if the field is needed, else noted as ignored.
struct NeededName<'a> {
    needs: &'a Needs,
    ignored: &'a mut String,
}

impl<'de> DeserializeSeed<'de> for NeededName<'_> {
    type Value = Option<Cow<'static, str>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for NeededName<'_> {
    type Value = Option<Cow<'static, str>>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        let needed = self.needs.name(name);
        if needed.is_none() && self.ignored.len() + name.len() < IGNORED_MAX_BYTES {
            if !self.ignored.is_empty() {
                self.ignored.push_str(", ");
            }
            self.ignored.push_str(name);
        }
        Ok(needed)
    }
}

/// Reads an object, keeping only the needed fields: the rest is skipped without being built.
struct NeededFields<'a> {
    needs: &'a Needs,
    ignored: &'a mut String,
}

impl<'de> DeserializeSeed<'de> for NeededFields<'_> {
    type Value = Row;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for NeededFields<'_> {
    type Value = Row;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let NeededFields { needs, ignored } = self;
        let mut fields = Row::default();
        while let Some(name) = access.next_key_seed(NeededName { needs, ignored: &mut *ignored })? {
            match name {
                Some(name) => fields.insert(name, access.next_value()?),
                None => {
                    access.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(fields)
    }
}
