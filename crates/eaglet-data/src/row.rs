//! The fields of one row that are needed: a few names and their values.
//!
//! A list, not a map: rows have two to five such fields, and a million rows are read before the first request. Hashing names, and a
//! copy of each name a row, took a quarter of that time.

use serde_json::{Map, Value};
use std::borrow::Cow;

/// A row's needed fields, each name once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row(Vec<(Cow<'static, str>, Value)>);

impl Row {
    /// The value under this name.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|(own, _)| own == name).map(|(_, value)| value)
    }

    /// Takes the value under this name out.
    pub fn remove(&mut self, name: &str) -> Option<Value> {
        let at = self.0.iter().position(|(own, _)| own == name)?;
        Some(self.0.swap_remove(at).1)
    }

    /// Puts a value in; of two under one name the later stays, as in any JSON reader.
    pub fn insert(&mut self, name: Cow<'static, str>, value: Value) {
        match self.0.iter_mut().find(|(own, _)| *own == name) {
            Some((_, old)) => *old = value,
            None => self.0.push((name, value)),
        }
    }

    /// A field by its name, or by a dotted path through nested objects; a field whose own name has the dot wins.
    pub fn lookup(&self, path: &str) -> Option<&Value> {
        if let Some(value) = self.get(path) {
            return Some(value);
        }
        let (head, rest) = path.split_once('.')?;
        lookup(self.get(head)?.as_object()?, rest)
    }

    /// Takes a text out; anything but text counts as absent.
    pub(crate) fn take_text(&mut self, name: &str) -> Option<String> {
        self.remove(name).and_then(crate::tools::text_of)
    }
}

fn lookup<'a>(members: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    if let Some(value) = members.get(path) {
        return Some(value);
    }
    let (head, rest) = path.split_once('.')?;
    lookup(members.get(head)?.as_object()?, rest)
}

impl From<Map<String, Value>> for Row {
    fn from(members: Map<String, Value>) -> Self {
        let mut row = Row::default();
        members.into_iter().for_each(|(name, value)| row.insert(name.into(), value));
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_name_that_comes_twice_the_later_value_stays() {
        let mut row = Row::default();
        row.insert("id".into(), 1.into());
        row.insert("prompt".into(), "x".into());
        row.insert("id".into(), 2.into());
        assert_eq!((row.remove("id"), row.remove("id")), (Some(2.into()), None));
        assert_eq!(row.get("prompt"), Some(&"x".into()));
    }
}
