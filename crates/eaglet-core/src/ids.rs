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

impl PromptKey {
    /// The key of a prompt with this id and this content.
    pub fn new(id: &str, hash: ContentHash) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&hash.0.to_be_bytes());
        hasher.update(id.as_bytes());
        PromptKey(first128(&hasher.finalize()))
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

    #[test]
    fn the_key_tells_same_id_different_text_apart() {
        let one = PromptKey::new("x", ContentHash(1));
        assert_ne!(one, PromptKey::new("x", ContentHash(2)));
        assert_ne!(one, PromptKey::new("y", ContentHash(1)));
        assert_eq!(one, PromptKey::new("x", ContentHash(1)));
    }
}
