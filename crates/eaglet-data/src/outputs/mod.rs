//! The files that examples become, in the formats of several trainers.
//!
//! What it is: for each [`Format`] a pure [`encode`] (run by many threads) and a [`Writer`] (fed by one, in order). What it is not: a decision about what is
//! written. A writer makes files below the directory it was given, syncs them at the end and says what it made; that the directory appears as a whole is
//! [`crate::prepare`]'s business.

mod columns;
mod conversations;
mod jsonl;
mod out_file;
mod parquet_file;
mod shard_files;
mod speculators;

pub(crate) use conversations::ConversationSource;
pub use out_file::FileEntry;
pub(crate) use out_file::OutFile;
pub use speculators::SPECULATORS_FEATURES;

use crate::example::Example;
use crate::shards;
use eaglet_core::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A format of training examples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// eaglet's own (docs/formats.md): checksummed, read at any example without a parser.
    Shards,
    /// SpecForge's `data.prompts_path`: ids and mask, no template.
    Specforge,
    /// SpecForge's `data.train_data_path`: conversations, which SpecForge renders and masks itself.
    SpecforgeConversations,
    /// The directory that speculators trains from.
    Speculators,
    /// The JSONL that speculators' `prepare-data` takes.
    SpeculatorsJsonl,
    /// Parquet, for everything else.
    Parquet,
}

impl Format {
    /// All of them.
    pub const ALL: [Format; 6] = [
        Format::Shards,
        Format::Specforge,
        Format::SpecforgeConversations,
        Format::Speculators,
        Format::SpeculatorsJsonl,
        Format::Parquet,
    ];

    /// Its name on the command line, in the summary, and as a directory.
    pub fn label(self) -> &'static str {
        match self {
            Format::Shards => "shards",
            Format::Specforge => "specforge",
            Format::SpecforgeConversations => "specforge-conversations",
            Format::Speculators => "speculators",
            Format::SpeculatorsJsonl => "speculators-jsonl",
            Format::Parquet => "parquet",
        }
    }
}

/// A side of the split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// To learn from.
    Train,
    /// To measure with.
    Validation,
}

impl Split {
    /// Both.
    pub const ALL: [Split; 2] = [Split::Train, Split::Validation];

    /// Its name in paths and in the summary.
    pub fn label(self) -> &'static str {
        match self {
            Split::Train => "train",
            Split::Validation => "validation",
        }
    }
}

/// An example in one format, as far as it can be made without its neighbours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Encoded {
    /// The bytes that go into the file.
    Bytes(Vec<u8>),
    /// A block of a shard.
    Block(shards::Block),
    /// The writer takes the example itself.
    AsItIs,
    /// The format cannot say what the example says; the word says why.
    LeftOut(&'static str),
    /// The format has one row for the whole conversation, with its last turn.
    WithLastTurn,
}

/// Brings an example into a format.
pub(crate) fn encode(format: Format, example: &Example, conversation: &ConversationSource<'_>) -> Encoded {
    match format {
        Format::Shards => Encoded::Block(shards::Block::of(&example.tokens)),
        Format::Specforge => Encoded::Bytes(jsonl::specforge(example)),
        Format::SpeculatorsJsonl => Encoded::Bytes(jsonl::speculators(example)),
        Format::SpecforgeConversations => conversations::specforge(conversation),
        Format::Speculators | Format::Parquet => Encoded::AsItIs,
    }
}

/// Takes the examples of one split in one format, in order.
pub(crate) trait Writer {
    /// Appends one.
    ///
    /// # Errors
    /// Environment: the disk does not take it.
    fn add(&mut self, example: &Example, encoded: Encoded) -> Result<()>;

    /// Ends and syncs the files.
    ///
    /// # Errors
    /// Environment: the disk does not take them.
    fn finish(self: Box<Self>) -> Result<Vec<FileEntry>>;
}

/// A writer for a format and a split, below `root`.
///
/// # Errors
/// Environment: the directory or the file cannot be made.
pub(crate) fn writer(format: Format, split: Split, root: &Path) -> Result<Box<dyn Writer>> {
    Ok(match format {
        Format::Shards => Box::new(shard_files::ShardFiles::new(root, split)),
        Format::Specforge | Format::SpecforgeConversations | Format::SpeculatorsJsonl => {
            Box::new(jsonl::LineFile::create(root, format, split)?)
        }
        Format::Speculators => Box::new(speculators::ArrowDirectory::new(root, split)),
        Format::Parquet => Box::new(parquet_file::ParquetFile::create(root, split)?),
    })
}

/// What a writer was given that another format encodes.
fn not_for_this(format: Format) -> Error {
    Error::bug(format!("an example encoded for another format came to the {} writer", format.label()))
}
