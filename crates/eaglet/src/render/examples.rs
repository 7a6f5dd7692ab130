//! A training example, and what `verify` found.

use super::units::count;
use eaglet_data::example::Example;
use eaglet_data::outputs::Split;
use eaglet_data::verify::Report;
use std::fmt::Write;

/// Columns that ids are wrapped to.
const WIDTH: usize = 100;
/// What is supervised, on a terminal: green and bold.
const SUPERVISED: &str = "\x1b[1;32m";
/// What is not: dim.
const GIVEN: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// How supervised tokens stand out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Marking {
    /// By colour.
    Colour,
    /// Between `[` and `]`.
    Brackets,
}

/// An example by its ids.
pub(crate) fn example(example: &Example, split: Split, marking: Marking) -> String {
    let (id, tokens, marks) = (&example.id, &example.tokens, example.marks);
    let row = id.row.map_or("?".to_owned(), |row| row.to_string());
    let mut text = format!(
        "{:?} turn {}, row {row}, {}: {} tokens, {} supervised",
        id.sample_id,
        id.turn,
        split.label(),
        count(tokens.len() as u64),
        count(tokens.supervised() as u64)
    );
    let set = [
        (marks.cut_at_limit, "cut at the token limit"),
        (marks.clipped, "clipped"),
        (marks.cut_in_thought, "cut in thought"),
        (marks.repetition, "repeats itself"),
    ];
    set.iter().filter(|(set, _)| *set).for_each(|(_, words)| {
        let _ = write!(text, ", {words}");
    });
    text.push('\n');
    let mut at = 0;
    for (length, supervised) in tokens.runs() {
        text.push_str(&run(&tokens.ids()[at..at + length], supervised, marking));
        at += length;
    }
    text
}

/// One run of the mask, on lines of its own.
fn run(ids: &[u32], supervised: bool, marking: Marking) -> String {
    let (before, after) = match (marking, supervised) {
        (Marking::Colour, true) => (SUPERVISED, PLAIN),
        (Marking::Colour, false) => (GIVEN, PLAIN),
        (Marking::Brackets, true) => ("[", "]"),
        (Marking::Brackets, false) => (" ", ""),
    };
    let (mut text, mut column) = (before.to_owned(), 1);
    for (at, id) in ids.iter().enumerate() {
        let id = id.to_string();
        if at > 0 {
            let fits = column + 1 + id.len() < WIDTH;
            text.push_str(if fits { " " } else { "\n " });
            column = if fits { column + 1 } else { 1 };
        }
        column += id.len();
        text.push_str(&id);
    }
    text.push_str(after);
    text.push('\n');
    text
}

/// What was checked, and what is wrong.
pub(crate) fn report(name: &str, report: &Report) -> String {
    let mut text = String::new();
    for (what, n) in &report.checked {
        let _ = writeln!(text, "{name:<10} {:>15} {what}", count(*n));
    }
    for note in &report.notes {
        let _ = writeln!(text, "{name:<10} note: {note}");
    }
    for finding in &report.findings {
        let _ = writeln!(text, "{name:<10} WRONG: {finding}");
    }
    let more = report.findings_total - report.findings.len() as u64;
    if more > 0 {
        let _ = writeln!(text, "{name:<10} and {} more", count(more));
    }
    if report.findings_total == 0 {
        let _ = writeln!(text, "{name:<10} is sound");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use eaglet_core::ids::ContentHash;
    use eaglet_data::example::{ExampleId, Marks, MaskedIds};

    #[test]
    fn an_example_is_shown_with_what_is_trained_marked() {
        let tokens = MaskedIds::new(vec![1, 22, 333, 4444, 5], std::iter::once(2..4)).unwrap();
        let id = ExampleId { sample_id: "q\n1".into(), prompt_hash: ContentHash(1), row: Some(7), turn: 0 };
        let shown = Example { id, tokens, marks: Marks { clipped: true, ..Marks::default() } };
        insta::assert_snapshot!(example(&shown, Split::Train, Marking::Brackets), @r#"
        "q\n1" turn 0, row 7, train: 5 tokens, 2 supervised, clipped
         1 22
        [333 4444]
         5
        "#);
        assert!(example(&shown, Split::Train, Marking::Colour).contains("\u{1b}[1;32m333 4444\u{1b}[0m"));
    }

    #[test]
    fn long_runs_are_wrapped() {
        let text = run(&[1_000_000; 40], true, Marking::Brackets);
        assert!(text.lines().all(|line| line.len() <= WIDTH) && text.lines().count() == 4, "{text}");
    }
}
