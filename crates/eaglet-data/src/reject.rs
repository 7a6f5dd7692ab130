//! Why a row cannot be used, and where it stands.
//!
//! What is not here: errors that end the reading of a file; those are [`eaglet_core::Error`].

use std::fmt;

/// Longest piece of foreign text carried in a reason, in bytes; a reason is for reading, not for keeping data.
const DETAIL_MAX_BYTES: usize = 160;

/// Why a row was set aside.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RejectReason {
    /// The text is not JSON (parser's words).
    InvalidJson(String),
    /// The row is JSON, but not an object (what it is).
    NotAnObject(String),
    /// Half of a surrogate pair in an escape, which no UTF-8 text can hold.
    LoneSurrogate,
    /// Bytes that are not UTF-8.
    InvalidUtf8,
    /// Longer than the limit, in bytes.
    TooLong {
        /// The limit.
        limit_bytes: u64,
    },
    /// A CSV row with another number of fields than the header.
    FieldCount {
        /// Fields of the header.
        expected: usize,
        /// Fields of the row.
        got: usize,
    },
    /// None of the fields that may hold a prompt is there (names of the fields that are).
    NoPromptField(String),
    /// A role that is neither known nor mapped.
    UnknownRole(String),
    /// A field holds something else than expected.
    BadField {
        /// The field.
        field: String,
        /// What it should be.
        expected: &'static str,
        /// What it is.
        got: String,
    },
    /// A tool definition or call that cannot be brought into the API's form.
    BadTools(String),
    /// The conversation has no user message.
    NoUserMessage,
    /// The last user message has no text.
    EmptyUserText,
    /// The field named as id is absent or neither text nor a whole number.
    MissingId(String),
}

impl RejectReason {
    /// A short, stable word for counting and for records.
    pub fn label(&self) -> &'static str {
        match self {
            RejectReason::InvalidJson(_) => "invalid_json",
            RejectReason::NotAnObject(_) => "not_an_object",
            RejectReason::LoneSurrogate => "lone_surrogate",
            RejectReason::InvalidUtf8 => "invalid_utf8",
            RejectReason::TooLong { .. } => "too_long",
            RejectReason::FieldCount { .. } => "field_count",
            RejectReason::NoPromptField(_) => "no_prompt_field",
            RejectReason::UnknownRole(_) => "unknown_role",
            RejectReason::BadField { .. } => "bad_field",
            RejectReason::BadTools(_) => "bad_tools",
            RejectReason::NoUserMessage => "no_user_message",
            RejectReason::EmptyUserText => "empty_user_text",
            RejectReason::MissingId(_) => "missing_id",
        }
    }

    /// A field that holds `got` where `expected` belongs.
    pub(crate) fn bad_field(field: &str, expected: &'static str, got: impl Into<String>) -> Self {
        RejectReason::BadField { field: field.to_owned(), expected, got: got.into() }
    }
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RejectReason::InvalidJson(detail) => write!(f, "not JSON: {detail}"),
            RejectReason::NotAnObject(got) => write!(f, "expected a JSON object, got {got}"),
            RejectReason::LoneSurrogate => f.write_str("half of a surrogate pair in an escape"),
            RejectReason::InvalidUtf8 => f.write_str("bytes that are not UTF-8"),
            RejectReason::TooLong { limit_bytes } => {
                write!(f, "longer than {} MiB", limit_bytes >> 20)
            }
            RejectReason::FieldCount { expected, got } => {
                write!(f, "expected {expected} fields as in the header, got {got}")
            }
            RejectReason::NoPromptField(names) if names.is_empty() => f.write_str("no field that holds a prompt"),
            RejectReason::NoPromptField(names) => {
                write!(f, "no field that holds a prompt (has: {names})")
            }
            RejectReason::UnknownRole(role) => write!(f, "unknown role {role:?}"),
            RejectReason::BadField { field, expected, got } => write!(f, "{field}: expected {expected}, got {got}"),
            RejectReason::BadTools(detail) => write!(f, "tools: {detail}"),
            RejectReason::NoUserMessage => f.write_str("no user message"),
            RejectReason::EmptyUserText => f.write_str("the last user message has no text"),
            RejectReason::MissingId(field) => write!(f, "no usable id in field {field:?}"),
        }
    }
}

/// A row that was set aside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedRow {
    /// 0-based position in the data set, over all its files.
    pub row: u64,
    /// Where it stands: `file.jsonl:12` (line) or `file.parquet row 12` (1-based).
    pub origin: String,
    /// The data set's own id, where the row could be read that far.
    pub id: Option<String>,
    /// Why.
    pub reason: RejectReason,
}

/// A row with the id and content of an earlier one: answered once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DuplicateRow {
    /// 0-based position in the data set, over all its files.
    pub row: u64,
    /// Where it stands.
    pub origin: String,
    /// Where the row stands that is answered for both.
    pub first_origin: String,
    /// Their common id.
    pub id: String,
}

/// Foreign text, shortened at a character boundary.
pub(crate) fn shorten(text: &str) -> String {
    if text.len() <= DETAIL_MAX_BYTES {
        return text.to_owned();
    }
    let end = (0..=DETAIL_MAX_BYTES).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    format!("{}…", &text[..end])
}
