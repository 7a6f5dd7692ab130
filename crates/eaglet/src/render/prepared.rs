//! The end of `prepare`: what became of the answers, and what was written.

use super::units::{count, percent, time};
use eaglet_data::outputs::{FileEntry, Split};
use eaglet_data::prepare::Summary;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

/// The summary, in lines. `took` is `None` where nothing had to be done.
pub(crate) fn text(summary: &Summary, out: &Path, took: Option<Duration>) -> String {
    let mut text = String::new();
    let s = summary;
    let _ = writeln!(
        text,
        "answers     {} in {} lines: {} kept, {} dropped",
        count(s.input.items),
        count(s.input.lines),
        count(s.kept),
        count(s.dropped_total())
    );
    list(&mut text, "dropped", &s.dropped);
    list(&mut text, "marked", &s.marks);
    list(&mut text, "finish", &s.by_finish_reason);
    for split in Split::ALL {
        let Some((side, lengths)) = s.splits.get(&split).and_then(|side| Some((side, side.lengths?))) else { continue };
        let _ = writeln!(
            text,
            "{:<12}{} examples, {} tokens, {} supervised ({}); p50 {}, p99 {}, max {}",
            split.label(),
            count(side.examples),
            count(side.tokens),
            count(side.supervised_tokens),
            percent(side.supervised_tokens, side.tokens),
            count(lengths.p50.into()),
            count(lengths.p99.into()),
            count(lengths.max.into())
        );
    }
    vocabulary(&mut text, s);
    for (format, rows) in &s.outputs {
        let left_out: u64 = rows.left_out.values().sum();
        let left_out = if left_out > 0 {
            format!(", {} left out ({})", count(left_out), joined(&rows.left_out))
        } else {
            String::new()
        };
        let _ =
            writeln!(text, "{:<24}{} + {} rows{left_out}", format.label(), count(rows.train), count(rows.validation));
    }
    let bytes: u64 = s.files.iter().map(|file: &FileEntry| file.bytes).sum();
    let how = took.map_or("was there already".to_owned(), |took| format!("in {}", time(took.as_secs_f64())));
    let _ = writeln!(
        text,
        "written     {} files, {} MB, to {} ({how})",
        s.files.len(),
        count(bytes.div_ceil(1_000_000)),
        out.display()
    );
    text
}

fn vocabulary(text: &mut String, summary: &Summary) {
    let Some(vocab) = &summary.vocabulary else { return };
    let share = |covered: u64, split: Split| {
        let all = summary.splits.get(&split).map_or(0, |side| side.supervised_tokens);
        if all == 0 { "-".to_owned() } else { format!("{:.2} %", covered as f64 * 100.0 / all as f64) }
    };
    let _ = writeln!(
        text,
        "vocabulary  {} of {} tokens ({} seen), covers {} of train, {} of validation",
        count(vocab.draft.into()),
        count(vocab.target.into()),
        count(vocab.distinct),
        share(vocab.covered_train, Split::Train),
        share(vocab.covered_validation, Split::Validation)
    );
}

fn list(text: &mut String, label: &str, counts: &BTreeMap<String, u64>) {
    if !counts.is_empty() {
        let _ = writeln!(text, "{label:<12}{}", joined(counts));
    }
}

fn joined(counts: &BTreeMap<String, u64>) -> String {
    counts.iter().map(|(name, n)| format!("{name} {}", count(*n))).collect::<Vec<_>>().join(", ")
}
