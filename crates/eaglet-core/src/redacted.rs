//! Secrets that cannot be printed, and text from which they have been taken out.

use std::fmt;

/// What stands in the place of a secret.
pub const MASK: &str = "***";

/// A secret: its `Debug` and `Display` are a mask, and it has no `Serialize`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Takes an API key as people keep it: surrounding white space (the newline of a key file) is trimmed.
    ///
    /// # Errors
    /// When white space or control characters remain inside, which no header can carry; the message does not hold the value.
    pub fn new(name: &str, value: &str) -> crate::Result<Self> {
        let value = value.trim();
        if value.is_empty() {
            return Err(crate::Error::usage(format!("{name} is empty"))
                .hint("set it to the server's API key, or leave the option out"));
        }
        if value.chars().any(|c| c.is_whitespace() || c.is_control() || !c.is_ascii()) {
            return Err(crate::Error::usage(format!(
                "{name} holds white space, a control character or a non-ASCII character inside the key"
            ))
            .hint("check how the key was pasted; it is not shown here"));
        }
        Ok(Secret(value.to_owned()))
    }

    /// The value, for the one place that sends it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK)
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK)
    }
}

/// Takes known secrets out of text that came from outside (error bodies may echo the key they refuse).
#[derive(Clone, Debug, Default)]
pub struct Scrubber(Vec<Secret>);

/// A secret shorter than this is not searched for: it would blank ordinary words.
const SECRET_LENGTH_MIN: usize = 6;

impl Scrubber {
    /// Also takes out this secret, in the forms in which it may appear.
    pub fn add(&mut self, value: &str) {
        for form in [value.to_owned(), value.trim_start_matches("sk-").to_owned()] {
            if form.len() >= SECRET_LENGTH_MIN {
                self.0.push(Secret(form));
            }
        }
        self.0.sort_by_key(|secret| std::cmp::Reverse(secret.0.len()));
    }

    /// The text with each secret replaced by the mask.
    pub fn scrub(&self, text: &str) -> String {
        self.0.iter().fold(text.to_owned(), |text, secret| {
            if text.contains(secret.reveal()) { text.replace(secret.reveal(), MASK) } else { text }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_prints_as_a_mask_everywhere() {
        let secret = Secret::new("KEY", " sk-abcdef123456\n").unwrap();
        assert_eq!(secret.reveal(), "sk-abcdef123456");
        assert_eq!(format!("{secret} {secret:?} {:?}", Some(&secret)), "*** *** Some(***)");
    }

    #[test]
    fn a_broken_key_is_refused_without_its_value() {
        let error = Secret::new("--api-key-env MY_KEY", "sk-abc\ndef").unwrap_err();
        let text = format!("{error} {error:?}");
        assert!(!text.contains("abc") && !text.contains("def"), "{text}");
        assert!(Secret::new("KEY", "  ").is_err());
    }

    #[test]
    fn scrubbing_takes_the_key_out_with_and_without_its_prefix() {
        let mut scrubber = Scrubber::default();
        scrubber.add("sk-abcdef123456");
        let clean = scrubber.scrub("bad key sk-abcdef123456 (abcdef123456)");
        assert_eq!(clean, "bad key *** (***)");
    }
}
