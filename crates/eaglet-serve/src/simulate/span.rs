//! Spans of time as people write them in fault files: `90`, `1.5`, `90s`, `500ms`, `10m`, `2h`. Unlike on the command line, 0 is a span.

use serde::{Deserialize, Deserializer, de::Error};

/// A span in seconds of the pretended server; never negative.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Span(f64);

impl Span {
    /// In seconds.
    pub fn seconds(self) -> f64 {
        self.0
    }

    fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let scale = match unit {
            "" | "s" => 1.0,
            "ms" => 0.001,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        Self::of(number.trim().parse::<f64>().ok()? * scale)
    }

    fn of(seconds: f64) -> Option<Self> {
        // A million hours: far beyond any rehearsal, and safe to add to a clock.
        const SECONDS_MAX: f64 = 3.6e9;
        (0.0..=SECONDS_MAX).contains(&seconds).then_some(Self(seconds))
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(f64),
            Text(String),
        }
        let (span, written) = match Written::deserialize(deserializer)? {
            Written::Number(seconds) => (Self::of(seconds), seconds.to_string()),
            Written::Text(text) => (Self::parse(&text), text),
        };
        span.ok_or_else(|| {
            D::Error::custom(format!("expected a span of time such as 90, 90s, 10m or 2h, got {written:?}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_with_and_without_a_unit() {
        for (text, seconds) in [("0", 0.0), ("1.5", 1.5), ("90s", 90.0), ("500ms", 0.5), ("10m", 600.0), ("2h", 7200.0)]
        {
            assert_eq!(Span::parse(text), Some(Span(seconds)), "{text}");
        }
        for text in ["", "-1", "soon", "3d", "nan", "1e300"] {
            assert_eq!(Span::parse(text), None, "{text}");
        }
    }
}
