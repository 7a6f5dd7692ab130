//! What a file is: compression and layout, by its first bytes and its name.
//!
//! What is here: sniffing and opening. What is not: rows. Invariants: compression and Parquet are told by content alone; one
//! leading byte-order mark is stripped; text that is not UTF-8-based is refused with its encoding named.

use crate::inputs::InputFile;
use eaglet_core::{Error, Result};
use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Read, Seek};
use std::path::Path;

/// Bytes looked at to tell what a file is.
const HEAD_BYTES: u64 = 4096;
/// Size of read buffers in bytes.
const BUFFER_BYTES: usize = 256 << 10;
/// Extensions that are read, without a compression suffix.
const EXTENSIONS: [&str; 7] = ["parquet", "pq", "jsonl", "ndjson", "json", "csv", "tsv"];

/// An opened file, ready to be read from its first row.
pub(crate) struct Opened {
    pub(crate) layout: Layout,
}

/// How the rows lie in a file.
pub(crate) enum Layout {
    /// Parquet, which is read by seeking.
    Parquet(File),
    /// One JSON object a line.
    Lines(Box<dyn BufRead>),
    /// One JSON array of objects.
    Array(Box<dyn BufRead>),
    /// Comma- or tab-separated values with a header.
    Csv {
        /// The text.
        text: Box<dyn BufRead>,
        /// Between fields.
        delimiter: u8,
    },
}

impl Layout {
    /// Whether rows are numbered by the line they stand on.
    pub(crate) fn numbered_by_line(&self) -> bool {
        matches!(self, Layout::Lines(_) | Layout::Csv { .. })
    }
}

/// The extension that says the format (`jsonl` of `x.jsonl.gz`), in lower case, if it is a supported one.
pub(crate) fn extension(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_str()?.to_ascii_lowercase();
    let name = name.strip_suffix(".gz").or_else(|| name.strip_suffix(".zst")).unwrap_or(&name);
    let extension = name.rsplit_once('.')?.1;
    EXTENSIONS.into_iter().find(|known| *known == extension)
}

/// Opens a file and tells its layout.
pub(crate) fn open(file: &InputFile) -> Result<Opened> {
    let mut handle = File::open(&file.path).map_err(|error| Error::io("open", &file.path, error))?;
    let head = read_head(&mut handle).map_err(|error| Error::io("read", &file.path, error))?;
    if head.starts_with(b"PAR1") {
        return Ok(Opened { layout: Layout::Parquet(handle) });
    }
    handle.rewind().map_err(|error| Error::io("read", &file.path, error))?;
    let raw = BufReader::with_capacity(BUFFER_BYTES, handle);
    let text: Box<dyn BufRead> = if head.starts_with(&[0x1f, 0x8b]) {
        Box::new(BufReader::with_capacity(BUFFER_BYTES, flate2::bufread::MultiGzDecoder::new(raw)))
    } else if head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        let decoder =
            zstd::stream::read::Decoder::with_buffer(raw).map_err(|error| Error::io("read", &file.path, error))?;
        Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder))
    } else {
        Box::new(raw)
    };
    Ok(Opened { layout: text_layout(file, text)? })
}

fn text_layout(file: &InputFile, mut text: Box<dyn BufRead>) -> Result<Layout> {
    let mut head = read_head(&mut text).map_err(|error| read_error(file, error))?;
    refuse_other_kinds(file, &head)?;
    if head.starts_with(&[0xef, 0xbb, 0xbf]) {
        head.drain(..3);
    }
    let first = head.iter().copied().find(|byte| !byte.is_ascii_whitespace());
    let text: Box<dyn BufRead> = Box::new(Cursor::new(head).chain(text));
    let by_name = extension(&file.path);
    match (by_name, first) {
        (Some("csv"), _) => Ok(Layout::Csv { text, delimiter: b',' }),
        (Some("tsv"), _) => Ok(Layout::Csv { text, delimiter: b'\t' }),
        (_, Some(b'[')) => Ok(Layout::Array(text)),
        (_, Some(b'{') | None) | (Some("json" | "jsonl" | "ndjson"), _) => Ok(Layout::Lines(text)),
        (Some("parquet" | "pq"), _) => Err(Error::data(format!("{}: not a Parquet file", file.shown))
            .hint("it does not begin with PAR1; if the download was cut short, fetch it again")),
        _ => Err(Error::data(format!("{}: cannot tell its format", file.shown))
            .hint("name it .jsonl, .json, .csv or .parquet (each also with .gz or .zst), or give it content that begins with '{' or '['")),
    }
}

/// Refuses what people give by accident, each with its way out.
fn refuse_other_kinds(file: &InputFile, head: &[u8]) -> Result<()> {
    let shown = &file.shown;
    if let Some(encoding) = wide_encoding(head) {
        return Err(Error::data(format!("{shown}: is {encoding}, expected UTF-8"))
            .hint(format!("convert it first: iconv -f {encoding} -t UTF-8 {shown} > converted.jsonl")));
    }
    if head.starts_with(b"PAR1") {
        return Err(Error::data(format!("{shown}: a compressed Parquet file"))
            .hint("decompress it first (gunzip or unzstd); Parquet has its own compression inside"));
    }
    if head.starts_with(b"version https://git-lfs.github.com/spec/") {
        return Err(Error::data(format!("{shown}: a Git LFS pointer, not the data"))
            .hint("run git lfs pull in its repository, or download the file itself"));
    }
    let trimmed = head.trim_ascii_start();
    let begins_with = |word: &[u8]| trimmed.get(..word.len()).is_some_and(|t| t.eq_ignore_ascii_case(word));
    if begins_with(b"<!doctype") || begins_with(b"<html") || begins_with(b"<?xml") {
        return Err(Error::data(format!("{shown}: an HTML or XML page, not a data set"))
            .hint("the download link probably led to a web page or an error; download the raw file"));
    }
    if head.starts_with(b"PK\x03\x04") || head.starts_with(b"\x89PNG") || head.starts_with(b"ARROW1") {
        return Err(Error::data(format!("{shown}: a format that is not read"))
            .hint("give Parquet, JSONL, a JSON array or CSV (JSONL, JSON and CSV also as .gz or .zst)"));
    }
    Ok(())
}

/// UTF-16 or UTF-32, by byte-order mark or by where the NUL bytes of its ASCII characters lie.
fn wide_encoding(head: &[u8]) -> Option<&'static str> {
    match *head {
        [0xff, 0xfe, 0, 0, ..] => Some("UTF-32LE"),
        [0, 0, 0xfe, 0xff, ..] => Some("UTF-32BE"),
        [0xff, 0xfe, ..] => Some("UTF-16LE"),
        [0xfe, 0xff, ..] => Some("UTF-16BE"),
        [a, 0, 0, 0, ..] if a != 0 => Some("UTF-32LE"),
        [0, 0, 0, a, ..] if a != 0 => Some("UTF-32BE"),
        [a, 0, b, 0, ..] if a != 0 && b != 0 => Some("UTF-16LE"),
        [0, a, 0, b, ..] if a != 0 && b != 0 => Some("UTF-16BE"),
        _ => None,
    }
}

fn read_head(source: &mut dyn Read) -> std::io::Result<Vec<u8>> {
    let mut head = Vec::new();
    source.take(HEAD_BYTES).read_to_end(&mut head)?;
    Ok(head)
}

/// A read error of possibly compressed text: a fault of the content is told from one of the disk.
pub(crate) fn read_error(file: &InputFile, error: std::io::Error) -> Error {
    use std::io::ErrorKind::{InvalidData, InvalidInput, Other, UnexpectedEof};
    if error.raw_os_error().is_none() && matches!(error.kind(), InvalidData | InvalidInput | Other | UnexpectedEof) {
        let reason = eaglet_core::error::io_reason(&error);
        return Error::data(format!("{}: damaged or cut short ({reason})", file.shown))
            .hint("nothing of it was used; check it with gzip -t or zstd -t, and fetch or write it again")
            .with_source(error);
    }
    Error::io("read", &file.path, error)
}
