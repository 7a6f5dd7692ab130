//! Reads a JSON Lines journal fast: many threads, big positioned reads, one pass.
//!
//! What it is: the splitting of a file into lines, map-reduce fashion. What it is not: a JSON parser; what a line means is
//! the caller's business, and so is what to do about a damaged one.
//!
//! Invariants
//! - A line ends at byte 0x0A and nowhere else: U+2028, U+0085 and a carriage return are content.
//! - Every byte of the file belongs to exactly one line, and every line is handed out exactly once, by the thread that owns
//!   the chunk with the line feed before it.
//! - Memory: for each thread one chunk and the rest of one line: usually 5 MiB, at most 4 MiB + 64 MiB, or twice that
//!   while the buffer grows.

use crate::journal::is_whole_record;
use crate::storage::{Storage, StorageFile, read_full_at};
use crate::{Error, Result};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes a thread takes on at a time.
pub const CHUNK_BYTES: usize = 4 << 20;
/// The longest line that is handed out whole, bytes.
pub const LINE_BYTES_MAX: usize = 64 << 20;
/// How much is read at a time behind a chunk to find the end of its last line, bytes.
const OVERHANG_BYTES: usize = 64 << 10;
/// Alignment of the buffer, bytes.
const PAGE_BYTES: usize = 4096;
/// What a buffer keeps for usual lines beside its chunk, bytes.
const BUFFER_SPARE_BYTES: usize = 1 << 20;

/// The two sizes of a scan; only tests have a reason to change them.
#[derive(Clone, Copy, Debug)]
pub struct ScanLimits {
    /// Bytes a thread takes on at a time, at least 1.
    pub chunk_bytes: usize,
    /// The longest line handed out whole, bytes.
    pub line_bytes_max: usize,
}

impl Default for ScanLimits {
    fn default() -> Self {
        ScanLimits { chunk_bytes: CHUNK_BYTES, line_bytes_max: LINE_BYTES_MAX }
    }
}

/// How a line ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineKind {
    /// With a line feed.
    Complete,
    /// With the end of the file: torn, or being written just now.
    Partial,
    /// Past the limit: only its beginning is given.
    TooLong,
}

/// One line of a scanned file.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    /// Where in the file it starts, bytes.
    pub offset: u64,
    /// Its bytes without the line feed (a carriage return stays).
    pub bytes: &'a [u8],
    /// How it ends.
    pub kind: LineKind,
}

/// What is wrong with a line of a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Damage {
    /// It has no line feed: torn, or being written just now.
    Partial,
    /// It is longer than the limit.
    TooLong,
    /// It holds a raw zero byte, which no JSON does: a block that never reached the disk.
    ZeroBytes,
    /// It is not UTF-8.
    NotUtf8,
    /// It is not one JSON object.
    NotAnObject,
}

impl Line<'_> {
    /// What is wrong with the line, if anything. It reads the whole line: ask only after parsing it has failed.
    pub fn damage(&self) -> Option<Damage> {
        match self.kind {
            LineKind::Partial => Some(Damage::Partial),
            LineKind::TooLong => Some(Damage::TooLong),
            LineKind::Complete if is_whole_record(self.bytes) => None,
            LineKind::Complete if memchr::memchr(0, self.bytes).is_some() => Some(Damage::ZeroBytes),
            LineKind::Complete if std::str::from_utf8(self.bytes).is_err() => Some(Damage::NotUtf8),
            LineKind::Complete => Some(Damage::NotAnObject),
        }
    }
}

/// Reads a file on up to `threads` threads, each with an accumulator of its own; returns the accumulators in no order.
/// `per_line` sees every line once, in no order across threads; the offset orders them.
///
/// # Errors
/// An environment error if the file cannot be opened or read.
pub fn scan<A, F>(path: &Path, per_line: F, threads: usize) -> Result<Vec<A>>
where
    A: Default + Send,
    F: Fn(&mut A, Line<'_>) + Sync,
{
    scan_with(path, ScanLimits::default(), threads, per_line)
}

/// [`scan`] with other limits.
///
/// # Errors
/// As [`scan`].
pub fn scan_with<A, F>(path: &Path, limits: ScanLimits, threads: usize, per_line: F) -> Result<Vec<A>>
where
    A: Default + Send,
    F: Fn(&mut A, Line<'_>) + Sync,
{
    let file = File::open(path).map_err(|error| Error::io("open", path, error))?;
    let len = file.metadata().map_err(|error| Error::io("read the length of", path, error))?.len();
    let chunks = len.div_ceil(limits.chunk_bytes as u64);
    let next_chunk = AtomicU64::new(0);
    let failed = AtomicBool::new(false);
    let work = || -> io::Result<A> {
        let mut accumulator = A::default();
        let mut reader = ChunkReader::new(&file, len, limits);
        while !failed.load(Ordering::Relaxed) {
            let chunk = next_chunk.fetch_add(1, Ordering::Relaxed);
            if chunk >= chunks {
                break;
            }
            let read = reader.lines_of(chunk, &mut |line| per_line(&mut accumulator, line));
            read.inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
        }
        Ok(accumulator)
    };
    let threads = threads.min(usize::try_from(chunks).unwrap_or(usize::MAX)).max(1);
    std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        let joined = helpers.into_iter().map(|helper| match helper.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        std::iter::once(own).chain(joined).collect::<io::Result<Vec<A>>>()
    })
    .map_err(|error| Error::io("read", path, error))
}

/// The same pass over a file of a [`Storage`], on the calling thread and in order.
///
/// # Errors
/// As [`scan`].
pub fn scan_storage(
    storage: &dyn Storage,
    path: &Path,
    limits: ScanLimits,
    mut per_line: impl FnMut(Line<'_>),
) -> Result<()> {
    let file = storage.open_read(path).map_err(|error| Error::io("open", path, error))?;
    let len = file.len().map_err(|error| Error::io("read the length of", path, error))?;
    let mut reader = ChunkReader::new(&*file, len, limits);
    (0..len.div_ceil(limits.chunk_bytes as u64))
        .try_for_each(|chunk| reader.lines_of(chunk, &mut per_line))
        .map_err(|error| Error::io("read", path, error))
}

/// Where the bytes come from.
trait ReadAt {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl ReadAt for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, buffer, offset)
    }
}

impl ReadAt for dyn StorageFile + '_ {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        StorageFile::read_at(self, buffer, offset)
    }
}

/// Hands out the lines of one chunk after another.
struct ChunkReader<'f, R: ?Sized> {
    source: &'f R,
    /// Length of the file when the scan began: what is appended later is not looked at.
    len: u64,
    limits: ScanLimits,
    buffer: Vec<u8>,
    /// Where in the buffer a page begins; chunks are read to there.
    front: usize,
}

impl<'f, R: ReadAt + ?Sized> ChunkReader<'f, R> {
    fn new(source: &'f R, len: u64, limits: ScanLimits) -> Self {
        // A small file does not pay for a big chunk.
        let chunk_bytes = limits.chunk_bytes.min(usize::try_from(len).unwrap_or(usize::MAX));
        let buffer = vec![0; PAGE_BYTES + chunk_bytes + BUFFER_SPARE_BYTES];
        // On AMD the kernel's copy (`rep movsb`) crawls to an address 16 bytes into a page, which is where a big allocation
        // begins: 1.7 GB/s instead of 7 on an EPYC (<https://lunnova.dev/articles/ryzen-slow-short-rep-mov/>).
        let front = buffer.as_ptr().align_offset(PAGE_BYTES).min(PAGE_BYTES);
        ChunkReader { source, len, limits, buffer, front }
    }

    /// Reads up to `wanted` bytes at `offset` behind the `filled` ones; fewer mean that the file ends there.
    fn fill(&mut self, filled: usize, wanted: usize, offset: u64) -> io::Result<usize> {
        let start = self.front + filled;
        if self.buffer.len() < start + wanted {
            self.buffer.resize(start + wanted, 0);
        }
        let target = &mut self.buffer[start..start + wanted];
        read_full_at(|buffer, at| self.source.read_at(buffer, at), target, offset)
    }

    /// Hands out the lines of a chunk: those that start behind a line feed in it, and the first line of the file. So a
    /// chunk needs no look at the byte before it.
    fn lines_of(&mut self, chunk: u64, each: &mut impl FnMut(Line<'_>)) -> io::Result<()> {
        let chunk_start = chunk * self.limits.chunk_bytes as u64;
        let wanted = (self.len - chunk_start).min(self.limits.chunk_bytes as u64) as usize;
        let filled = self.fill(0, wanted, chunk_start)?;
        // A file that became shorter since the scan began ends here.
        let end = if filled < wanted { chunk_start + filled as u64 } else { self.len };
        let bytes = &self.buffer[self.front..self.front + filled];
        let mut line_feeds = memchr::memchr_iter(b'\n', bytes);
        let mut line_start = 0;
        if chunk > 0 {
            let Some(first) = line_feeds.next() else { return Ok(()) };
            line_start = first + 1;
        }
        for line_feed in line_feeds {
            let line = &bytes[line_start..line_feed];
            each(self.limits.line(chunk_start + line_start as u64, line, LineKind::Complete));
            line_start = line_feed + 1;
        }
        let offset = chunk_start + line_start as u64;
        if offset == end {
            return Ok(());
        }
        self.buffer.copy_within(self.front + line_start..self.front + filled, self.front);
        self.line_past_chunk(offset, filled - line_start, end, each)
    }

    /// The line that starts at `offset`, of which `filled` bytes without a line feed are at the front of the buffer.
    fn line_past_chunk(
        &mut self,
        offset: u64,
        mut filled: usize,
        end: u64,
        each: &mut impl FnMut(Line<'_>),
    ) -> io::Result<()> {
        let mut kind = LineKind::Partial;
        while filled <= self.limits.line_bytes_max && offset + (filled as u64) < end {
            let at = offset + filled as u64;
            let wanted = (end - at).min(OVERHANG_BYTES as u64) as usize;
            let taken = self.fill(filled, wanted, at)?;
            if let Some(line_feed) = memchr::memchr(b'\n', &self.buffer[self.front + filled..][..taken]) {
                filled += line_feed;
                kind = LineKind::Complete;
                break;
            }
            filled += taken;
            if taken < wanted {
                break;
            }
        }
        each(self.limits.line(offset, &self.buffer[self.front..][..filled], kind));
        if filled > self.limits.chunk_bytes + BUFFER_SPARE_BYTES {
            // One monstrous line does not make every later chunk hold its memory.
            *self = ChunkReader::new(self.source, self.len, self.limits);
        }
        Ok(())
    }
}

impl ScanLimits {
    fn line<'a>(&self, offset: u64, bytes: &'a [u8], kind: LineKind) -> Line<'a> {
        if bytes.len() > self.line_bytes_max {
            return Line { offset, bytes: &bytes[..self.line_bytes_max], kind: LineKind::TooLong };
        }
        Line { offset, bytes, kind }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    impl ReadAt for [u8] {
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
            let rest = &self[(offset as usize).min(self.len())..];
            // Short reads on purpose.
            let taken = rest.len().min(buffer.len()).min(7);
            buffer[..taken].copy_from_slice(&rest[..taken]);
            Ok(taken)
        }
    }

    type Owned = (u64, Vec<u8>, LineKind);

    fn lines_of(bytes: &[u8], limits: ScanLimits) -> Vec<Owned> {
        let mut reader = ChunkReader::new(bytes, bytes.len() as u64, limits);
        let mut lines = Vec::new();
        for chunk in 0..bytes.len().div_ceil(limits.chunk_bytes) {
            let mut each = |line: Line<'_>| lines.push((line.offset, line.bytes.to_vec(), line.kind));
            reader.lines_of(chunk as u64, &mut each).unwrap();
        }
        lines
    }

    fn naive(bytes: &[u8], line_bytes_max: usize) -> Vec<Owned> {
        let mut offset = 0;
        let mut lines = Vec::new();
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            let (body, kind) = match piece.strip_suffix(b"\n") {
                Some(body) => (body, LineKind::Complete),
                None => (piece, LineKind::Partial),
            };
            lines.push(if body.len() > line_bytes_max {
                (offset, body[..line_bytes_max].to_vec(), LineKind::TooLong)
            } else {
                (offset, body.to_vec(), kind)
            });
            offset += piece.len() as u64;
        }
        lines
    }

    proptest! {
        #[test]
        fn scan_is_the_naive_split(
            bytes in prop::collection::vec(prop_oneof![3 => Just(b'a'), 1 => Just(b'\n'), 1 => any::<u8>()], 0..200),
            chunk_bytes in 1usize..40,
            line_bytes_max in 0usize..60,
        ) {
            let limits = ScanLimits { chunk_bytes, line_bytes_max };
            prop_assert_eq!(lines_of(&bytes, limits), naive(&bytes, line_bytes_max));
        }
    }

    #[test]
    fn threads_share_a_real_file_without_loss_or_doubling() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let text: String = (0..5000).map(|n| format!("{{\"n\":{n},\"x\":\"{}\"}}\n", "y".repeat(n % 97))).collect();
        std::fs::write(&path, &text).unwrap();
        let limits = ScanLimits { chunk_bytes: 1000, ..ScanLimits::default() };
        let found = scan_with(&path, limits, 3, |found: &mut Vec<Owned>, line| {
            found.push((line.offset, line.bytes.to_vec(), line.kind));
        });
        let mut found = found.unwrap().concat();
        found.sort_by_key(|line| line.0);
        assert_eq!(found, naive(text.as_bytes(), LINE_BYTES_MAX));
    }

    #[test]
    fn an_empty_file_has_no_line_and_a_missing_one_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let count = |path: &Path| scan(path, |lines: &mut u32, _| *lines += 1, 2).map(|all| all.iter().sum::<u32>());
        assert!(count(&path).unwrap_err().to_string().contains("journal.jsonl"));
        std::fs::write(&path, "").unwrap();
        assert_eq!(count(&path).unwrap(), 0);
    }

    #[test]
    fn each_damage_has_its_name() {
        let damage = |bytes: &[u8]| Line { offset: 0, bytes, kind: LineKind::Complete }.damage();
        assert_eq!(damage("{\"separator\":\"\u{2028}\"}\r".as_bytes()), None);
        assert_eq!(damage(b"{\"a\":\0\0}"), Some(Damage::ZeroBytes));
        assert_eq!(damage(b"{\"a\":\"\xc3\"}"), Some(Damage::NotUtf8));
        assert_eq!(damage(b"{\"a\":1}{\"b\":2}"), Some(Damage::NotAnObject));
        assert_eq!(damage(b""), Some(Damage::NotAnObject));
        assert_eq!(Line { offset: 0, bytes: b"{}", kind: LineKind::Partial }.damage(), Some(Damage::Partial));
    }
}
