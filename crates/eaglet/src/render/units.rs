//! Numbers for people.

/// `1,234,567`
pub(crate) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `45 s`, `2 m 05 s`, `3 h 07 m`, `2 d 04 h`
pub(crate) fn time(seconds: f64) -> String {
    let total = seconds.max(0.0).round() as u64;
    match total {
        0..60 => format!("{total} s"),
        60..3600 => format!("{} m {:02} s", total / 60, total % 60),
        3600..86_400 => format!("{} h {:02} m", total / 3600, total % 3600 / 60),
        _ => format!("{} d {:02} h", total / 86_400, total % 86_400 / 3600),
    }
}

/// `12 %`, `0.4 %`
pub(crate) fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "0 %".to_owned();
    }
    let value = part as f64 * 100.0 / whole as f64;
    if value > 0.0 && value < 10.0 { format!("{value:.1} %") } else { format!("{value:.0} %") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([count(7), count(1234), count(1_234_567)], ["7", "1,234", "1,234,567"]);
        assert_eq!(
            [time(4.4), time(125.0), time(11_220.0), time(187_200.0)],
            ["4 s", "2 m 05 s", "3 h 07 m", "2 d 04 h"]
        );
        assert_eq!([percent(1, 250), percent(1, 2), percent(0, 0)], ["0.4 %", "50 %", "0 %"]);
    }
}
