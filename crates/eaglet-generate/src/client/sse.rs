//! Server-sent events cut out of a byte stream, without copying where one read holds whole lines.
//!
//! Lines end at byte 0x0A only (a CR before it is dropped): U+2028, U+0085 and the like are text. A line is bounded. Only
//! `data` fields matter to the chat API; comments, `event:` and `id:` lines are skipped. Several `data` lines of one event are joined by a
//! newline, as the standard says.

use memchr::memchr;

/// Longest line taken, in bytes: generous, since a first chunk may carry the ids of a long prompt.
pub const SSE_LINE_BYTES_MAX: usize = 1 << 20;

/// The line is longer than [`SSE_LINE_BYTES_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineTooLong;

/// The splitter: feed it chunks, it hands out the data of each event.
#[derive(Debug, Default)]
pub struct SseSplitter {
    /// The beginning of a line whose end has not come.
    carry: Vec<u8>,
    /// Data of an event that has more than one `data` line, or whose blank line has not come.
    pending: Option<Vec<u8>>,
}

impl SseSplitter {
    /// Takes one chunk; calls `event` with the data of each event that ends in it. Stops at the first `Err` of `event`.
    ///
    /// The chat API sends one JSON object in one `data` line, so an event is handed out as soon as its line ends and the next byte does
    /// not begin another `data` line of it.
    ///
    /// # Errors
    /// A line over the bound, as the error type of `event`.
    pub fn push<E: From<LineTooLong>>(
        &mut self,
        chunk: &[u8],
        mut event: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut rest = chunk;
        while let Some(end) = memchr(b'\n', rest) {
            let (line, after) = (&rest[..end], &rest[end + 1..]);
            if self.carry.is_empty() {
                self.line(line, after, &mut event)?;
            } else {
                if self.carry.len() + line.len() > SSE_LINE_BYTES_MAX {
                    return Err(LineTooLong.into());
                }
                let mut whole = std::mem::take(&mut self.carry);
                whole.extend_from_slice(line);
                self.line(&whole, after, &mut event)?;
                whole.clear();
                self.carry = whole;
            }
            rest = after;
        }
        if self.carry.len() + rest.len() > SSE_LINE_BYTES_MAX {
            return Err(LineTooLong.into());
        }
        self.carry.extend_from_slice(rest);
        Ok(())
    }

    fn line<E>(&mut self, line: &[u8], after: &[u8], event: &mut impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            return match self.pending.take() {
                Some(data) => event(&data),
                None => Ok(()),
            };
        }
        let Some(data) = line.strip_prefix(b"data:") else { return Ok(()) };
        let data = data.strip_prefix(b" ").unwrap_or(data);
        match &mut self.pending {
            Some(pending) => {
                pending.push(b'\n');
                pending.extend_from_slice(data);
                Ok(())
            }
            // The blank line is already here: hand the data out without a copy; the blank line then finds nothing pending.
            None if after.starts_with(b"\n") || after.starts_with(b"\r\n") => event(data),
            None => {
                self.pending = Some(data.to_vec());
                Ok(())
            }
        }
    }

    /// The stream ended: an event whose blank line never came is handed out too (some servers leave it off at the end).
    ///
    /// # Errors
    /// Those of `event`.
    pub fn finish<E>(&mut self, mut event: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        if !self.carry.is_empty() {
            let line = std::mem::take(&mut self.carry);
            self.line(&line, b"", &mut event)?;
        }
        match self.pending.take() {
            Some(data) => event(&data),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(chunks: &[&[u8]]) -> Result<Vec<String>, LineTooLong> {
        let mut splitter = SseSplitter::default();
        let mut events = Vec::new();
        let mut take = |data: &[u8]| {
            events.push(String::from_utf8_lossy(data).into_owned());
            Ok::<(), LineTooLong>(())
        };
        for chunk in chunks {
            splitter.push(chunk, &mut take)?;
        }
        splitter.finish(&mut take)?;
        Ok(events)
    }

    const STREAM: &str = ": hello\n\ndata: {\"a\":\"\u{2028}x\u{85}é🦀\"}\n\nevent: m\ndata:one\ndata: two\n\r\ndata: last\r\n\r\ndata: [DONE]";
    const EVENTS: [&str; 4] = ["{\"a\":\"\u{2028}x\u{85}é🦀\"}", "one\ntwo", "last", "[DONE]"];

    #[test]
    fn events_do_not_depend_on_where_the_bytes_were_cut() {
        let bytes = STREAM.as_bytes();
        assert_eq!(split(&[bytes]).unwrap(), EVENTS);
        for cut in 0..=bytes.len() {
            assert_eq!(split(&[&bytes[..cut], &bytes[cut..]]).unwrap(), EVENTS, "cut at {cut}");
        }
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(split(&single).unwrap(), EVENTS);
    }

    proptest! {
        #[test]
        fn any_bytes_any_cuts_give_the_same_events(bytes in proptest::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), Just(b':'), Just(b'd'), any::<u8>()], 0..120), size in 1usize..9) {
            let pieces: Vec<&[u8]> = bytes.chunks(size).collect();
            prop_assert_eq!(split(&[&bytes]), split(&pieces));
        }
    }

    #[test]
    fn a_line_is_bounded_whole_or_in_pieces() {
        let long = vec![b'x'; SSE_LINE_BYTES_MAX + 1];
        assert_eq!(split(&[&long]), Err(LineTooLong));
        let pieces: Vec<&[u8]> = long.chunks(4096).collect();
        assert_eq!(split(&pieces), Err(LineTooLong));
        let fits = [b"data: ".as_slice(), &vec![b'x'; SSE_LINE_BYTES_MAX - 6], b"\n\n"].concat();
        let pieces: Vec<&[u8]> = fits.chunks(4096).collect();
        assert_eq!(split(&pieces).unwrap().len(), 1);
    }
}
