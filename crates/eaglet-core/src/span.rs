//! Spans of time as people write them, on the command line and in files: `90`, `1.5`, `90s`, `500ms`, `10m`, `2h`. Pure.

/// A span in seconds; its sign and size are the caller's to judge.
///
/// # Errors
/// What is wrong with the text, in words.
pub fn parse_seconds(text: &str) -> Result<f64, String> {
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
    Ok(number * scale)
}
