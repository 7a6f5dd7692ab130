//! Times on the command line: seconds, or with a unit.

use std::time::Duration;

/// Reads `90`, `1.5`, `90s`, `500ms`, `10m`, `2h`.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let scale = match unit {
        "" | "s" => 1.0,
        "ms" => 0.001,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("{unit:?} is no unit of time; use ms, s, m or h")),
    };
    let number: f64 = number.trim().parse().map_err(|_| "expected a time such as 90, 90s, 10m or 2h".to_owned())?;
    Duration::try_from_secs_f64(number * scale)
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
