//! What the person asked for: which rows of which inputs, read how.
//!
//! Everything here is plain data; parsing never acts. The whole of [`DatasetSpec`] is part of a run's fingerprint.

use crate::row::Row;
use eaglet_core::prompt::Role;
use eaglet_core::{Error, Result};
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::fmt;
use std::str::FromStr;

/// Which data set, and which prompts of it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DatasetSpec {
    /// Each a path, a directory, a glob, a hub data set (`owner/name`, `owner/name:split`, `owner/name:config/split`,
    /// `owner/name:file`), or `-` for standard input. Read in this order.
    pub inputs: Vec<String>,
    /// System message put in front of every prompt; it replaces a row's own.
    pub system: Option<String>,
    /// Rows must pass all of them.
    pub filters: Vec<Filter>,
    /// Order the prompts by a hash of this seed and their row number.
    pub shuffle_seed: Option<u64>,
    /// At most this many usable, distinct prompts (after filters and shuffling).
    pub max_samples: Option<u64>,
    /// How much of a conversation is sent.
    pub turns: Turns,
    /// What to do with text that is not Unicode.
    pub bad_text: BadText,
    /// What to do with one id on two contents.
    pub duplicates: Duplicates,
    /// Names of roles beyond the known ones.
    pub role_map: Vec<(String, Role)>,
    /// Field (dotted for nested) that holds the id, in place of the known names.
    pub id_field: Option<String>,
}

/// How much of a conversation is sent. The data set's own last answer is never sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Turns {
    /// Up to the first user message.
    First,
    /// Everything up to the last user or tool message. A list of user texts without answers (`turns`) is cut to its
    /// first text, because the later ones refer to answers that are not there.
    #[default]
    Last,
    /// As `Last`, and lists of user texts in full: the generator puts its own answers between the user messages.
    All,
}

/// What to do with lone surrogates and bytes that are not UTF-8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BadText {
    /// The row is set aside with that reason.
    #[default]
    SetAside,
    /// They become U+FFFD and the row is counted as repaired.
    Repair,
}

/// What to do when rows share an id but not the content. (Rows that share both are always answered once and listed.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Duplicates {
    /// Refuse the data set, naming both places.
    #[default]
    Refuse,
    /// Both are prompts; their keys differ because a key covers the content.
    Keep,
}

/// `field=value` or `field!=value`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    field: String,
    must_equal: bool,
    value: String,
}

impl Filter {
    /// Field the filter looks at; dotted for nested ones.
    pub fn field(&self) -> &str {
        &self.field
    }

    /// Whether the row passes. Text compares as text, numbers as numbers, booleans as `true` and `false`; an absent or
    /// null field equals nothing (so it passes `!=`).
    pub fn matches(&self, row: &Row) -> bool {
        let equal = match row.lookup(&self.field) {
            Some(Value::String(text)) => *text == self.value,
            Some(Value::Bool(flag)) => self.value == if *flag { "true" } else { "false" },
            Some(Value::Number(number)) => {
                number.to_string() == self.value
                    || matches!((number.as_f64(), self.value.parse::<f64>()), (Some(a), Ok(b)) if a == b)
            }
            _ => false,
        };
        equal == self.must_equal
    }
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.field, if self.must_equal { "=" } else { "!=" }, self.value)
    }
}

impl FromStr for Filter {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = |what: &str| {
            Error::usage(format!("filter {text:?}: {what}"))
                .hint("write field=value or field!=value, for example source=math or meta.lang!=de")
        };
        let (field, value) = text.split_once('=').ok_or_else(|| refuse("no '=' in it"))?;
        let (field, must_equal) = match field.strip_suffix('!') {
            Some(field) => (field.trim(), false),
            None => (field.trim(), true),
        };
        if field.is_empty() || field.split('.').any(str::is_empty) {
            return Err(refuse("no field name in front of '='"));
        }
        Ok(Filter { field: field.to_owned(), must_equal, value: value.to_owned() })
    }
}

impl Serialize for Filter {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn passes(filter: &str, row: Value) -> bool {
        filter.parse::<Filter>().unwrap().matches(&row.as_object().unwrap().clone().into())
    }

    #[test]
    fn filters_compare_by_the_kind_of_the_value() {
        assert!(passes("source=math", json!({"source": "math"})));
        assert!(passes("meta.lang!=de", json!({"meta": {"lang": "en"}})));
        assert!(passes("a.b=1", json!({"a.b": 1, "a": {"b": 2}})));
        assert!(passes("n=3", json!({"n": 3.0})));
        assert!(passes("ok=true", json!({"ok": true})));
        assert!(passes("eq=a=b", json!({"eq": "a=b"})));
        assert!(!passes("source=", json!({"source": null})));
        assert!(passes("source!=x", json!({})));
    }

    #[test]
    fn a_filter_without_a_field_is_a_usage_error() {
        for text in ["math", "=x", "!=x", "a..b=1"] {
            let error = text.parse::<Filter>().unwrap_err();
            assert_eq!(error.class(), eaglet_core::Class::Usage, "{text}");
            assert!(error.hint_text().is_some());
        }
    }

    #[test]
    fn a_filter_is_recorded_as_it_is_written() {
        assert_eq!(serde_json::to_string(&"a!=b".parse::<Filter>().unwrap()).unwrap(), "\"a!=b\"");
    }
}
