//! First reading of a data set: which rows are prompts, which repeat another, which cannot be used.
//!
//! What is not here: choosing and spooling ([`crate::plan`]). Memory is bounded by about 75 bytes a usable row: an entry, and
//! 17 bytes in a map from ids to entries. No id and no text is kept for the rows that are fine.

use crate::inputs::InputFile;
use crate::plan::{LISTED_ROWS_MAX, PlanEntry, Tally, origin};
use crate::read_ahead::{Became, ReadRow};
use crate::reject::{DuplicateRow, RejectReason, RejectedRow};
use crate::rows;
use crate::spec::{BadText, DatasetSpec, Duplicates};
use eaglet_core::ids::{BuildHashedKeyHasher, PromptKey, hash128};
use eaglet_core::prompt::Prompt;
use eaglet_core::{Error, Result};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Names of sources beyond this number share the last one.
const SOURCES_MAX: usize = u16::MAX as usize;

/// The state of the first reading.
pub(crate) struct Identified<'a> {
    spec: &'a DatasetSpec,
    files: &'a [InputFile],
    pub(crate) entries: Vec<PlanEntry>,
    /// 96 bits of the hash of an id, to the first entry with that id.
    by_id: HashMap<[u32; 3], u32, BuildHashedKeyHasher>,
    /// Further entries under an id that is already in `by_id` ([`Duplicates::Keep`]).
    by_key: HashMap<PromptKey, u32, BuildHashedKeyHasher>,
    /// First id on two contents: the id and both places.
    clash: Option<(String, String, String)>,
    clashes: u64,
    filter_seen: Vec<bool>,
    source_index: HashMap<String, u16>,
    pub(crate) tally: Tally,
}

impl<'a> Identified<'a> {
    pub(crate) fn new(spec: &'a DatasetSpec, files: &'a [InputFile]) -> Self {
        Identified {
            spec,
            files,
            entries: Vec::new(),
            by_id: HashMap::default(),
            by_key: HashMap::default(),
            clash: None,
            clashes: 0,
            filter_seen: vec![false; spec.filters.len()],
            source_index: HashMap::new(),
            tally: Tally { sources: vec![String::new()], ..Tally::default() },
        }
    }

    /// Counts a row; gives the prompt if it is a new one.
    pub(crate) fn take<'r>(&mut self, file: usize, row: &'r ReadRow) -> Result<Option<(&'r Prompt, PlanEntry)>> {
        let position = self.tally.rows_read;
        self.tally.rows_read += 1;
        for (field, seen) in self.filter_seen.iter_mut().enumerate() {
            *seen |= row.filters_seen & (1 << field.min(63)) != 0;
        }
        let prompt = match &row.became {
            Became::Prompt(prompt) => prompt,
            Became::Filtered => {
                self.tally.filtered += 1;
                return Ok(None);
            }
            Became::Rejected(id, reason) => return Ok(self.reject(position, file, row.number, id, reason)),
        };
        self.tally.repaired += u64::from(row.repaired);
        let key = prompt.key();
        let entry = PlanEntry {
            key: [(key.0 >> 64) as u64, key.0 as u64],
            row: position,
            offset: 0,
            length: 0,
            number: u32::try_from(row.number).unwrap_or(u32::MAX),
            file: u32::try_from(file).unwrap_or(u32::MAX),
            text_bytes: u32::try_from(prompt.text_bytes()).unwrap_or(u32::MAX),
            source: self.source(prompt.source.as_deref()),
            done: false,
        };
        Ok(self.is_new(prompt, &entry, row.id_given)?.then_some((prompt, entry)))
    }

    /// Whether no earlier row is the same; duplicates and clashes are noted.
    fn is_new(&mut self, prompt: &Prompt, entry: &PlanEntry, given: bool) -> Result<bool> {
        let index = u32::try_from(self.entries.len()).map_err(|_| {
            Error::usage(format!("more than {} prompts in one run", u32::MAX)).hint("split the data set")
        })?;
        let first = match self.by_id.entry(id_hash(prompt.id.as_str())) {
            Entry::Occupied(first) => *first.get(),
            Entry::Vacant(free) => {
                free.insert(index);
                return Ok(true);
            }
        };
        let same = if self.entries[first as usize].key() == entry.key() {
            Some(first)
        } else {
            self.by_key.get(&entry.key()).copied()
        };
        if let Some(same) = same {
            self.tally.duplicates_total += 1;
            if self.tally.duplicates.len() < LISTED_ROWS_MAX {
                self.tally.duplicates.push(DuplicateRow {
                    row: entry.row,
                    origin: origin(self.files, entry),
                    first_origin: origin(self.files, &self.entries[same as usize]),
                    id: prompt.id.as_str().to_owned(),
                });
            }
            return Ok(false);
        }
        // Ids made from the content share 64 bits of it only by chance, which is no fault of the data set.
        if given && self.spec.duplicates == Duplicates::Refuse {
            self.clashes += 1;
            if self.clash.is_none() {
                let places = (origin(self.files, &self.entries[first as usize]), origin(self.files, entry));
                self.clash = Some((prompt.id.as_str().to_owned(), places.0, places.1));
            }
        }
        self.by_key.insert(entry.key(), index);
        Ok(true)
    }

    fn reject<T>(
        &mut self,
        row: u64,
        file: usize,
        number: u64,
        id: &Option<String>,
        reason: &RejectReason,
    ) -> Option<T> {
        *self.tally.rejected_counts.entry(reason.label()).or_default() += 1;
        if self.tally.rejected.len() < LISTED_ROWS_MAX {
            let origin = rows::origin(&self.files[file], number);
            self.tally.rejected.push(RejectedRow { row, origin, id: id.clone(), reason: reason.clone() });
        }
        None
    }

    fn source(&mut self, name: Option<&str>) -> u16 {
        let Some(name) = name else { return 0 };
        if let Some(index) = self.source_index.get(name) {
            return *index;
        }
        let sources = &mut self.tally.sources;
        if sources.len() == SOURCES_MAX {
            sources.push("(other)".to_owned());
        }
        let index = u16::try_from(sources.len().min(SOURCES_MAX)).unwrap_or(u16::MAX);
        if sources.len() < SOURCES_MAX {
            sources.push(name.to_owned());
            self.source_index.insert(name.to_owned(), index);
        }
        index
    }

    /// The entries, or why there is no plan.
    pub(crate) fn finish(self) -> Result<(Vec<PlanEntry>, Tally)> {
        if let Some((id, first, second)) = self.clash {
            let more = match self.clashes - 1 {
                0 => String::new(),
                more => format!(" ({more} more rows like this)"),
            };
            return Err(Error::usage(format!("id {id:?} has different content at {first} and {second}{more}"))
                .hint("give the rows ids of their own, or keep both as separate prompts: --duplicates keep"));
        }
        if self.entries.is_empty() {
            return Err(nothing_usable(self.spec, &self.tally, &self.filter_seen));
        }
        Ok((self.entries, self.tally))
    }
}

fn nothing_usable(spec: &DatasetSpec, tally: &Tally, filter_seen: &[bool]) -> Error {
    let rows = tally.rows_read;
    if let Some(first) = tally.rejected.first() {
        let counts: Vec<String> =
            tally.rejected_counts.iter().map(|(label, count)| format!("{label} {count}")).collect();
        let error = Error::data(format!(
            "none of {rows} rows can be used: {}; first: {}: {}",
            counts.join(", "),
            first.origin,
            first.reason
        ));
        return match (&first.reason, spec.bad_text) {
            (RejectReason::UnknownRole(role), _) => {
                error.hint(format!("say what the role stands for: --map-role {role}=user"))
            }
            (RejectReason::LoneSurrogate | RejectReason::InvalidUtf8, BadText::SetAside) => {
                error.hint("have the text repaired: --bad-text repair")
            }
            (RejectReason::MissingId(field), _) => error.hint(format!(
                "the first row has no id in {field:?}; without an id field prompts are named after their content"
            )),
            _ => {
                error.hint("expected a field messages, conversations, prompt, question, problem, query or instruction")
            }
        };
    }
    let filters: Vec<String> = spec.filters.iter().map(ToString::to_string).collect();
    let error = Error::usage(format!("none of {rows} rows passes the filters ({})", filters.join(", ")));
    match spec.filters.iter().zip(filter_seen).find(|(_, seen)| !**seen) {
        Some((filter, _)) => error.hint(format!("no row has a field {:?}", filter.field())),
        None => error.hint("compare the values with those in the data set; upper and lower case differ"),
    }
}

fn id_hash(id: &str) -> [u32; 3] {
    let hash = hash128(id.as_bytes());
    [(hash >> 96) as u32, (hash >> 64) as u32, (hash >> 32) as u32]
}
