//! eaglet's own file of examples: read at any example, checked on every read, mapped into memory without a parser.
//!
//! ```text
//! bytes 0..16    magic "EAGLETEX", version (u32), 0 (u32)
//! blocks         for each example, at a multiple of 8: ids (u32 each), then the mask (one byte each, 0 or 1), then zero bytes up to a multiple of 8
//! index          at a multiple of 8, 72 bytes for each example, in order:
//!                  offset of the block (u64), tokens (u32), supervised tokens (u32), row of the data set (u64, 2^64-1 = unknown),
//!                  prompt hash (16 bytes, as printed), turn (u32), marks (u32, bits: docs/formats.md), offset of the sample id in the names (u64),
//!                  bytes of the sample id (u32), 0 (u32), checksum of the block (8 bytes)
//! names          the sample ids, UTF-8, one after another
//! last 64 bytes  offset of the index (u64), examples (u64), offset of the names (u64), bytes of the names (u64), tokens (u64), supervised tokens (u64),
//!                checksum of index, names and the 48 bytes before (8 bytes), magic "EAGLETEX"
//! ```
//!
//! Numbers are little-endian. A checksum is the first 8 bytes of BLAKE3. What it is not: a place for hidden states.
//!
//! Invariants
//! - [`ShardReader::open`] believes nothing that its checksum does not cover, and [`ShardReader::example`] gives no example whose block's checksum differs.
//! - The end of the file is written last: a shard without it was not finished.

use crate::example::{Example, ExampleId, Marks, MaskedIds};
use eaglet_core::ids::ContentHash;
use eaglet_core::storage::read_full_at;
use eaglet_core::{Error, Result};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A shard is ended once it has so many bytes.
pub const SHARD_BYTES_MAX: u64 = 256 << 20;
/// Version of the format.
pub const SHARD_VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"EAGLETEX";
const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 72;
const TRAILER_BYTES: usize = 64;
const CHECKSUM_BYTES: usize = 8;
const ALIGNMENT_BYTES: usize = 8;

type Checksum = [u8; CHECKSUM_BYTES];

fn checksum(bytes: &[u8]) -> Checksum {
    first8(&blake3::hash(bytes))
}

fn first8(hash: &blake3::Hash) -> Checksum {
    let mut first = [0; CHECKSUM_BYTES];
    first.copy_from_slice(&hash.as_bytes()[..CHECKSUM_BYTES]);
    first
}

/// The block of an example with its checksum: made by many threads, written by one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    bytes: Vec<u8>,
    checksum: Checksum,
}

impl Block {
    /// The block of these tokens.
    pub fn of(tokens: &MaskedIds) -> Self {
        let mut bytes = Vec::with_capacity(block_bytes(tokens.len()));
        tokens.ids().iter().for_each(|id| bytes.extend_from_slice(&id.to_le_bytes()));
        for (count, supervised) in tokens.runs() {
            bytes.resize(bytes.len() + count, u8::from(supervised));
        }
        bytes.resize(block_bytes(tokens.len()), 0);
        let checksum = checksum(&bytes);
        Block { bytes, checksum }
    }
}

/// Length of a block.
fn block_bytes(tokens: usize) -> usize {
    (tokens * 5).next_multiple_of(ALIGNMENT_BYTES)
}

/// Writes one shard, front to back.
#[derive(Debug)]
pub struct ShardWriter<W> {
    out: W,
    offset: u64,
    index: Vec<u8>,
    names: Vec<u8>,
    examples: u64,
    tokens: u64,
    supervised: u64,
}

impl<W: Write> ShardWriter<W> {
    /// Begins a shard.
    ///
    /// # Errors
    /// Environment: the file does not take it.
    pub fn new(out: W) -> Result<Self> {
        let (index, names) = (Vec::new(), Vec::new());
        let mut shard = ShardWriter { out, offset: 0, index, names, examples: 0, tokens: 0, supervised: 0 };
        shard.put(MAGIC)?;
        shard.put(&SHARD_VERSION.to_le_bytes())?;
        shard.put(&[0; 4])?;
        Ok(shard)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|error| {
            Error::environment(format!("cannot write a shard: {}", eaglet_core::error::io_reason(&error)))
                .with_source(error)
        })?;
        self.offset += bytes.len() as u64;
        Ok(())
    }

    /// Appends an example, whose block the caller has made; returns the bytes that the shard has by now.
    ///
    /// # Errors
    /// Environment: the file does not take it.
    pub fn add(&mut self, id: &ExampleId, marks: Marks, tokens: &MaskedIds, block: &Block) -> Result<u64> {
        let (length, supervised) = (tokens.len() as u32, tokens.supervised() as u32);
        let entry = &mut self.index;
        entry.extend_from_slice(&self.offset.to_le_bytes());
        entry.extend_from_slice(&length.to_le_bytes());
        entry.extend_from_slice(&supervised.to_le_bytes());
        entry.extend_from_slice(&id.row.unwrap_or(u64::MAX).to_le_bytes());
        entry.extend_from_slice(&id.prompt_hash.0.to_be_bytes());
        entry.extend_from_slice(&id.turn.to_le_bytes());
        entry.extend_from_slice(&marks.bits().to_le_bytes());
        entry.extend_from_slice(&(self.names.len() as u64).to_le_bytes());
        entry.extend_from_slice(&(id.sample_id.len() as u32).to_le_bytes());
        entry.extend_from_slice(&[0; 4]);
        entry.extend_from_slice(&block.checksum);
        self.names.extend_from_slice(id.sample_id.as_bytes());
        self.examples += 1;
        self.tokens += u64::from(length);
        self.supervised += u64::from(supervised);
        self.put(&block.bytes)?;
        Ok(self.offset + self.index.len() as u64 + self.names.len() as u64)
    }

    /// Writes index and end, and gives the file back.
    ///
    /// # Errors
    /// Environment: the file does not take it.
    pub fn finish(mut self) -> Result<W> {
        let (index, names) = (std::mem::take(&mut self.index), std::mem::take(&mut self.names));
        let index_offset = self.offset;
        let names_offset = index_offset + index.len() as u64;
        let numbers = [index_offset, self.examples, names_offset, names.len() as u64, self.tokens, self.supervised]
            .map(u64::to_le_bytes);
        let mut hasher = blake3::Hasher::new();
        hasher.update(&index).update(&names).update(numbers.as_flattened());
        self.put(&index)?;
        self.put(&names)?;
        self.put(numbers.as_flattened())?;
        self.put(&first8(&hasher.finalize()))?;
        self.put(MAGIC)?;
        Ok(self.out)
    }
}

/// What the index says of an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardEntry {
    /// Which answer it is.
    pub id: ExampleId,
    /// What is to be known about it.
    pub marks: Marks,
    /// Tokens in all.
    pub tokens: u32,
    /// Of these supervised.
    pub supervised: u32,
    offset: u64,
    checksum: Checksum,
}

/// Reads a shard at any example.
#[derive(Debug)]
pub struct ShardReader {
    file: File,
    path: PathBuf,
    entries: Vec<ShardEntry>,
}

impl ShardReader {
    /// Opens a shard and checks all but its blocks.
    ///
    /// # Errors
    /// Environment: it cannot be read. Data: it is no shard, not whole, of another version, or damaged.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|error| Error::io("open", path, error))?;
        let bytes = file.metadata().map_err(|error| Error::io("read the length of", path, error))?.len();
        let damaged = |what: &str| Error::data(format!("{} {what}", path.display()));
        if bytes < (HEADER_BYTES + TRAILER_BYTES) as u64 {
            return Err(damaged("is too short for a shard"));
        }
        let header = read_at(&file, path, 0, HEADER_BYTES)?;
        if &header[..8] != MAGIC {
            return Err(damaged("is no shard of eaglet"));
        }
        let version = u32_at(&header, 8);
        if version != SHARD_VERSION {
            return Err(damaged(&format!("has shard version {version}, this eaglet reads {SHARD_VERSION}")));
        }
        let trailer = read_at(&file, path, bytes - TRAILER_BYTES as u64, TRAILER_BYTES)?;
        if &trailer[56..] != MAGIC {
            return Err(damaged("has no end: it was not finished, or is cut off"));
        }
        let [index_offset, examples, names_offset, names_bytes] = [0, 8, 16, 24].map(|at| u64_at(&trailer, at));
        let index_bytes = examples.checked_mul(ENTRY_BYTES as u64);
        let adds_up = index_bytes.and_then(|index| index_offset.checked_add(index)) == Some(names_offset)
            && names_offset.checked_add(names_bytes) == Some(bytes - TRAILER_BYTES as u64)
            && index_offset >= HEADER_BYTES as u64;
        if !adds_up {
            return Err(damaged("has an end that does not fit its length"));
        }
        let tail = read_at(&file, path, index_offset, (bytes - index_offset) as usize - TRAILER_BYTES)?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(&tail).update(&trailer[..48]);
        if first8(&hasher.finalize()) != trailer[48..56] {
            return Err(damaged("has a damaged index: its checksum differs"));
        }
        let (index, names) = tail.split_at((names_offset - index_offset) as usize);
        let entries = index.chunks_exact(ENTRY_BYTES).map(|entry| entry_of(entry, names, index_offset));
        let entries =
            entries.collect::<Option<Vec<_>>>().ok_or_else(|| damaged("has an index that contradicts itself"))?;
        Ok(ShardReader { file, path: path.to_owned(), entries })
    }

    /// What the index says, in order.
    pub fn entries(&self) -> &[ShardEntry] {
        &self.entries
    }

    /// Reads an example, checked.
    ///
    /// # Errors
    /// Environment: the file cannot be read. Data: the block is damaged.
    ///
    /// # Panics
    /// `at` is not below the number of entries.
    pub fn example(&self, at: usize) -> Result<Example> {
        let entry = &self.entries[at];
        let damaged = |what: &str| {
            Error::data(format!("{}: example {at} ({:?}) {what}", self.path.display(), entry.id.sample_id))
        };
        let tokens = entry.tokens as usize;
        let block = read_at(&self.file, &self.path, entry.offset, block_bytes(tokens))?;
        if checksum(&block) != entry.checksum {
            return Err(damaged("is damaged: its checksum differs"));
        }
        let (ids, rest) = block.split_at(tokens * 4);
        let ids = ids.chunks_exact(4).map(|id| u32_at(id, 0)).collect();
        let masked =
            MaskedIds::from_mask(ids, &rest[..tokens]).map_err(|error| damaged(&format!("is no example: {error}")))?;
        if masked.supervised() != entry.supervised as usize {
            return Err(damaged("has another number of supervised tokens than its index says"));
        }
        Ok(Example { id: entry.id.clone(), tokens: masked, marks: entry.marks })
    }
}

/// Reads an entry of the index; `None` if it points where no block and no name can be.
fn entry_of(entry: &[u8], names: &[u8], blocks_end: u64) -> Option<ShardEntry> {
    let (offset, tokens, row) = (u64_at(entry, 0), u32_at(entry, 8), u64_at(entry, 16));
    let mut hash = [0; 16];
    hash.copy_from_slice(&entry[24..40]);
    let name_start = usize::try_from(u64_at(entry, 48)).ok()?;
    let name = names.get(name_start..name_start.checked_add(u32_at(entry, 56) as usize)?)?;
    let end = offset.checked_add(block_bytes(tokens as usize) as u64)?;
    if end > blocks_end || offset < HEADER_BYTES as u64 {
        return None;
    }
    let id = ExampleId {
        sample_id: std::str::from_utf8(name).ok()?.to_owned(),
        prompt_hash: ContentHash(u128::from_be_bytes(hash)),
        row: (row != u64::MAX).then_some(row),
        turn: u32_at(entry, 40),
    };
    let mut checksum = [0; CHECKSUM_BYTES];
    checksum.copy_from_slice(&entry[64..72]);
    let marks = Marks::from_bits(u32_at(entry, 44));
    Some(ShardEntry { id, marks, tokens, supervised: u32_at(entry, 12), offset, checksum })
}

fn read_at(file: &File, path: &Path, offset: u64, bytes: usize) -> Result<Vec<u8>> {
    let mut buffer = vec![0; bytes];
    let filled = read_full_at(|buffer, at| file.read_at(buffer, at), &mut buffer, offset)
        .map_err(|error| Error::io("read", path, error))?;
    if filled < bytes {
        return Err(Error::data(format!("{} became shorter while it was read", path.display())));
    }
    Ok(buffer)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example(sample: &str, hash: u128, row: Option<u64>, marks: u32, pairs: Vec<(u32, u8)>) -> Option<Example> {
        let (ids, mask): (Vec<u32>, Vec<u8>) = pairs.into_iter().unzip();
        let tokens = MaskedIds::from_mask(ids, &mask).ok()?;
        let id = ExampleId { sample_id: sample.to_owned(), prompt_hash: ContentHash(hash), row, turn: marks };
        Some(Example { id, tokens, marks: Marks::from_bits(marks) })
    }

    fn shard_of(examples: &[Example]) -> Vec<u8> {
        let mut shard = ShardWriter::new(Vec::new()).unwrap();
        for example in examples {
            shard.add(&example.id, example.marks, &example.tokens, &Block::of(&example.tokens)).unwrap();
        }
        shard.finish().unwrap()
    }

    fn read_all(bytes: &[u8]) -> Result<Vec<Example>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.examples");
        std::fs::write(&path, bytes).unwrap();
        let shard = ShardReader::open(&path)?;
        (0..shard.entries().len()).map(|at| shard.example(at)).collect()
    }

    fn some_examples() -> impl Strategy<Value = Vec<Example>> {
        let pairs = proptest::collection::vec((0..=i32::MAX as u32, 0u8..2), 1..20);
        let one = (".{0,6}", any::<u128>(), proptest::option::of(0u64..u64::MAX), 0u32..16, pairs);
        proptest::collection::vec(one, 0..8).prop_map(|all| {
            all.into_iter()
                .filter_map(|(sample, hash, row, marks, pairs)| example(&sample, hash, row, marks, pairs))
                .collect()
        })
    }

    proptest! {
        #[test]
        fn a_shard_reads_back(examples in some_examples()) {
            let bytes = shard_of(&examples);
            prop_assert_eq!(bytes.len() % 8, examples.iter().map(|e| e.id.sample_id.len()).sum::<usize>() % 8);
            prop_assert_eq!(read_all(&bytes).unwrap(), examples);
        }

        #[test]
        fn a_changed_byte_is_noticed(examples in some_examples(), at in any::<prop::sample::Index>(), change in 1u8..=255) {
            prop_assume!(!examples.is_empty());
            let mut bytes = shard_of(&examples);
            let at = at.index(bytes.len());
            // Bytes 12 to 16 say nothing yet.
            prop_assume!(!(12..16).contains(&at));
            bytes[at] ^= change;
            prop_assert!(read_all(&bytes).is_err());
        }

        #[test]
        fn a_cut_shard_is_noticed(examples in some_examples(), cut in any::<prop::sample::Index>()) {
            let bytes = shard_of(&examples);
            prop_assert!(read_all(&bytes[..cut.index(bytes.len())]).is_err());
        }
    }

    /// The bytes themselves: other programs read them.
    #[test]
    fn the_layout_is_as_documented() {
        let example = example("ab", 0x0102, Some(7), 2, vec![(10, 0), (300, 1)]).unwrap();
        let bytes = shard_of(&[example]);
        assert_eq!(&bytes[..16], b"EAGLETEX\x01\0\0\0\0\0\0\0");
        assert_eq!(&bytes[16..32], [10, 0, 0, 0, 44, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
        let entry = &bytes[32..104];
        assert_eq!([u64_at(entry, 0), u64_at(entry, 16), u64_at(entry, 48)], [16, 7, 0]);
        assert_eq!([8, 12, 40, 44, 56].map(|at| u32_at(entry, at)), [2, 1, 2, 2, 2]);
        assert_eq!((&entry[24..38], &entry[38..40]), ([0; 14].as_slice(), [1, 2].as_slice()));
        assert_eq!(entry[64..72], checksum(&bytes[16..32]));
        assert_eq!(&bytes[104..106], b"ab");
        let trailer = &bytes[106..];
        assert_eq!([0, 8, 16, 24, 32, 40].map(|at| u64_at(trailer, at)), [32, 1, 104, 2, 2, 1]);
        assert_eq!(trailer[48..56], checksum(&[&bytes[32..106], &trailer[..48]].concat()));
        assert_eq!((trailer.len(), &trailer[56..]), (64, b"EAGLETEX".as_slice()));
    }
}
