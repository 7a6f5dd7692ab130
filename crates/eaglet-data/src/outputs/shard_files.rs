//! `shards/SPLIT-NNNNN.examples`: one shard after another.

use super::{Encoded, FileEntry, Format, OutFile, Split, Writer, not_for_this};
use crate::example::Example;
use crate::shards::{SHARD_BYTES_MAX, ShardWriter};
use eaglet_core::Result;
use std::path::{Path, PathBuf};

pub(super) struct ShardFiles {
    root: PathBuf,
    split: Split,
    open: Option<ShardWriter<OutFile>>,
    done: Vec<FileEntry>,
}

impl ShardFiles {
    pub(super) fn new(root: &Path, split: Split) -> Self {
        ShardFiles { root: root.to_owned(), split, open: None, done: Vec::new() }
    }

    fn end_shard(&mut self) -> Result<()> {
        if let Some(shard) = self.open.take() {
            let file = shard.finish().map_err(|error| error.context(self.root.display()))?;
            self.done.push(file.finish()?);
        }
        Ok(())
    }
}

impl Writer for ShardFiles {
    fn add(&mut self, example: &Example, encoded: Encoded) -> Result<()> {
        let Encoded::Block(block) = encoded else { return Err(not_for_this(Format::Shards)) };
        let mut shard = match self.open.take() {
            Some(shard) => shard,
            None => {
                let name = format!("{}/{}-{:05}.examples", Format::Shards.label(), self.split.label(), self.done.len());
                ShardWriter::new(OutFile::create(&self.root, name)?)?
            }
        };
        let bytes = shard.add(&example.id, example.marks, &example.tokens, &block)?;
        self.open = Some(shard);
        if bytes >= SHARD_BYTES_MAX { self.end_shard() } else { Ok(()) }
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<FileEntry>> {
        self.end_shard()?;
        Ok(self.done)
    }
}
