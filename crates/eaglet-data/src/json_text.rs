//! Repairs on raw JSON text, before it is parsed.
//!
//! What is here: pure functions on bytes. What is not: parsing, policy (whether to repair is the caller's choice).
//!
//! Python and JavaScript write half of a surrogate pair as `\ud83e` when a text was cut inside a character; JSON
//! grammar allows it, UTF-8 cannot hold it, and `serde_json` refuses the whole document.

use memchr::memchr;
use std::borrow::Cow;

/// Replaces each lone half of a surrogate pair (`\ud800` to `\udfff`) by `\ufffd`; correct pairs are left alone.
///
/// `None` when there is nothing to repair. The result has the length of the input, so byte positions in later error
/// messages still fit. Works on any JSON text, since a backslash has a meaning inside strings only.
pub fn repair_lone_surrogates(text: &[u8]) -> Option<Vec<u8>> {
    let mut repaired: Option<Vec<u8>> = None;
    let mut at = 0;
    while let Some(found) = memchr(b'\\', text.get(at..)?) {
        let escape = at + found;
        at = match unicode_escape(text, escape) {
            Some(0xd800..=0xdbff) if matches!(unicode_escape(text, escape + 6), Some(0xdc00..=0xdfff)) => escape + 12,
            Some(0xd800..=0xdfff) => {
                repaired.get_or_insert_with(|| text.to_vec())[escape..escape + 6].copy_from_slice(b"\\ufffd");
                escape + 6
            }
            Some(_) => escape + 6,
            // Any other escape, `\\` included, is two bytes; skipping both keeps `\\ud83e` (text) apart from `\ud83e`.
            None => escape + 2,
        };
        if at >= text.len() {
            break;
        }
    }
    repaired
}

/// The code unit of a `\uXXXX` escape that begins at `at`, if one does.
fn unicode_escape(text: &[u8], at: usize) -> Option<u16> {
    let escape = text.get(at..at + 6)?;
    if escape[0] != b'\\' || escape[1] != b'u' {
        return None;
    }
    escape[2..].iter().try_fold(0, |code: u16, digit| {
        let value = char::from(*digit).to_digit(16)?;
        Some((code << 4) | u16::try_from(value).ok()?)
    })
}

/// JSON text made parseable: invalid UTF-8 and lone surrogates become U+FFFD. `None` when neither occurs.
pub fn repair(text: &[u8]) -> Option<Vec<u8>> {
    match String::from_utf8_lossy(text) {
        Cow::Borrowed(_) => repair_lone_surrogates(text),
        Cow::Owned(lossy) => {
            let lossy = lossy.into_bytes();
            Some(repair_lone_surrogates(&lossy).unwrap_or(lossy))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn repaired(text: &str) -> Option<String> {
        repair_lone_surrogates(text.as_bytes()).map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn lone_halves_are_replaced_one_by_one() {
        assert_eq!(repaired(r#""cut \ud83e""#).as_deref(), Some(r#""cut \ufffd""#));
        assert_eq!(repaired(r#""\uDE00\uD83D""#).as_deref(), Some(r#""\ufffd\ufffd""#));
        assert_eq!(repaired(r#""\ud83d\ud83d\ude00!""#).as_deref(), Some(r#""\ufffd\ud83d\ude00!""#));
        assert_eq!(repaired(r#""\ud83d\n""#).as_deref(), Some(r#""\ufffd\n""#));
    }

    #[test]
    fn what_is_not_a_lone_half_stays() {
        for text in [r#""\ud83d\ude00""#, r#""\\ud83d is text""#, r#""\u00e9 \u2028""#, r#""\ud8"#, r#""\"#, ""] {
            assert_eq!(repaired(text), None, "{text}");
        }
    }

    #[test]
    fn invalid_bytes_are_repaired_too() {
        assert_eq!(repair(b"\"a\xff\\ud800\"").unwrap(), "\"a\u{fffd}\\ufffd\"".as_bytes());
        assert_eq!(repair("\"\u{fffd}\"".as_bytes()), None);
    }

    proptest! {
        #[test]
        fn any_sequence_of_code_units_parses_after_repair(units in proptest::collection::vec(any::<u16>(), 0..20)) {
            let text = format!("\"{}\"", units.iter().map(|unit| format!("\\u{unit:04x}")).collect::<String>());
            let bytes = repair_lone_surrogates(text.as_bytes()).unwrap_or_else(|| text.clone().into_bytes());
            let parsed: String = serde_json::from_slice(&bytes).unwrap();
            prop_assert_eq!(parsed, String::from_utf16_lossy(&units));
        }
    }
}
