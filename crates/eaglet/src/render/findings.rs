//! The findings of preflight and `doctor`.

use eaglet_generate::preflight::{Finding, Level};

/// One line a finding, hints below. `all` also shows what is as it should be.
pub(crate) fn text(findings: &[Finding], all: bool) -> String {
    let mut text = String::new();
    for finding in findings.iter().filter(|f| all || f.level != Level::Ok) {
        let mark = match finding.level {
            Level::Ok => "ok     ",
            Level::Warning => "warning",
            Level::Failure => "FAILED ",
        };
        text.push_str(&format!("{mark}  {}: {}\n", finding.check, finding.found));
        if let Some(hint) = &finding.hint {
            text.push_str(&format!("         hint: {hint}\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_lines() {
        let findings = [Finding::ok("server", "up"), Finding::failure("disk", "full", "make room")];
        assert_eq!(text(&findings, true), "ok       server: up\nFAILED   disk: full\n         hint: make room\n");
        assert_eq!(text(&findings, false).lines().count(), 2);
    }
}
