//! Identities. A prompt is known by its [`PromptId`] (what people see) and its [`ContentHash`] (what it says);
//! both together make the [`PromptKey`] by which a run counts, resumes and never answers twice.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The name of a prompt in records and messages: the data set's own id, or `hash-…` when the row has none.
///
/// An id is data, never a path: nothing in eaglet builds a file name from it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PromptId(String);

impl PromptId {
    /// Takes a data set's own id as it stands.
    pub fn given(id: impl Into<String>) -> Self {
        PromptId(id.into())
    }

    /// The id of a row that has none: it follows the content, so it survives reordering.
    pub fn from_hash(hash: ContentHash) -> Self {
        PromptId(format!("hash-{}", &hash.to_string()[..16]))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for PromptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// 128 bits of BLAKE3 over a prompt's messages and tools in canonical form.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContentHash(pub u128);

/// 128 bits that stand for one prompt of a run: its id and its content together.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PromptKey(pub u128);

/// First 128 bits of the BLAKE3 hash of `bytes`.
pub fn hash128(bytes: &[u8]) -> u128 {
    first128(&blake3::hash(bytes))
}

fn first128(hash: &blake3::Hash) -> u128 {
    let mut first = [0; 16];
    first.copy_from_slice(&hash.as_bytes()[..16]);
    u128::from_be_bytes(first)
}

/// Ids up to this length in bytes are hashed in one block on the stack: setting up a streaming hasher costs more than the hash.
const SHORT_ID_MAX_BYTES: usize = 112;

impl PromptKey {
    /// The key of a prompt with this id and this content.
    pub fn new(id: &str, hash: ContentHash) -> Self {
        let (content, id) = (hash.0.to_be_bytes(), id.as_bytes());
        if id.len() <= SHORT_ID_MAX_BYTES {
            let mut joined = [0; 16 + SHORT_ID_MAX_BYTES];
            joined[..16].copy_from_slice(&content);
            joined[16..16 + id.len()].copy_from_slice(id);
            return PromptKey(hash128(&joined[..16 + id.len()]));
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(&content).update(id);
        PromptKey(first128(&hasher.finalize()))
    }
}

/// Hashes what is a hash already, for maps keyed by one: any 64 of its bits are as good as all of them.
#[derive(Clone, Copy, Default)]
pub struct HashedKeyHasher(u64);

/// For `HashMap` and `HashSet` over keys that are BLAKE3 hashes.
pub type BuildHashedKeyHasher = std::hash::BuildHasherDefault<HashedKeyHasher>;

impl std::hash::Hasher for HashedKeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..piece.len()].copy_from_slice(piece);
            self.0 ^= u64::from_ne_bytes(word);
        }
    }

    fn write_u32(&mut self, word: u32) {
        self.0 = self.0.rotate_left(32) ^ u64::from(word);
    }

    fn write_u128(&mut self, word: u128) {
        self.0 ^= word as u64;
    }

    fn write_usize(&mut self, _length: usize) {
        // Lengths of fixed-size keys say nothing.
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContentHash({self})")
    }
}

impl fmt::Debug for PromptKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PromptKey({:032x})", self.0)
    }
}

impl std::str::FromStr for ContentHash {
    type Err = ();

    /// Reads exactly what [`ContentHash`]'s `Display` writes: 32 hexadecimal digits.
    fn from_str(text: &str) -> Result<Self, ()> {
        if text.len() != 32 || text.starts_with('+') {
            return Err(());
        }
        u128::from_str_radix(text, 16).map(ContentHash).map_err(|_| ())
    }
}

impl Serialize for ContentHash {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ContentHash {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        text.parse().map_err(|()| serde::de::Error::custom("expected 32 hexadecimal digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_content_hash_reads_back_what_it_prints() {
        for value in [0, 1, u128::MAX, 0x00ab << 100] {
            let hash = ContentHash(value);
            assert_eq!(hash.to_string().parse(), Ok(hash));
        }
        assert!("+0000000000000000000000000000000".parse::<ContentHash>().is_err());
    }

    /// Keys are compared across sessions: both ways to compute them must agree, for ever.
    #[test]
    fn short_and_long_ids_are_hashed_by_the_same_rule() {
        for length in [0, 1, SHORT_ID_MAX_BYTES, SHORT_ID_MAX_BYTES + 1, 5000] {
            let id = "x".repeat(length);
            let whole = [&7_u128.to_be_bytes()[..], id.as_bytes()].concat();
            assert_eq!(PromptKey::new(&id, ContentHash(7)), PromptKey(hash128(&whole)));
        }
    }

    #[test]
    fn the_key_tells_same_id_different_text_apart() {
        let one = PromptKey::new("x", ContentHash(1));
        assert_ne!(one, PromptKey::new("x", ContentHash(2)));
        assert_ne!(one, PromptKey::new("y", ContentHash(1)));
        assert_eq!(one, PromptKey::new("x", ContentHash(1)));
    }
}
