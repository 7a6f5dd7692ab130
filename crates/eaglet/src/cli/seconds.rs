//! Times on the command line: seconds, or with a unit.

use eaglet_core::span::parse_seconds;
use std::time::Duration;

/// Reads `90`, `1.5`, `90s`, `500ms`, `10m`, `2h`.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    Duration::try_from_secs_f64(parse_seconds(text)?)
        .ok()
        .filter(|time| !time.is_zero())
        .ok_or_else(|| "a time must be more than zero".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_with_and_without_a_unit() {
        let cases = [("90", 90_000), ("1.5", 1500), ("500ms", 500), ("10m", 600_000), ("2h", 7_200_000)];
        for (text, ms) in cases {
            assert_eq!(parse(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "0", "-1", "soon", "3d", "nan"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
