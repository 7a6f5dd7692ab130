//! The catalogue of damaged ends: what opening keeps, what it cuts, and where the cut bytes are afterwards.

#![allow(clippy::unwrap_used)]

use eaglet_core::journal::{Journal, Repair};
use eaglet_core::scan::{Damage, scan};
use eaglet_core::storage::RealStorage;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

const GOOD: &str = "{\"n\":1}\n{\"n\":2,\"text\":\"süß\"}\n";

struct Case {
    dir: tempfile::TempDir,
    path: PathBuf,
}

impl Case {
    fn new(content: &[u8]) -> Case {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("answers.jsonl");
        fs::write(&path, content).unwrap();
        Case { dir, path }
    }

    /// Opens, appends one record and commits: the way every damaged file goes.
    fn open_and_append(&self) -> Repair {
        let (mut journal, repair) = Journal::open(Arc::new(RealStorage), &self.path).unwrap();
        journal.append(b"{\"n\":3}").unwrap();
        journal.commit().unwrap();
        repair
    }

    fn content(&self) -> Vec<u8> {
        fs::read(&self.path).unwrap()
    }

    fn torn(&self, number: u32) -> Vec<u8> {
        fs::read(self.dir.path().join(format!("answers.jsonl.torn-{number}"))).unwrap()
    }

    fn files(&self) -> usize {
        fs::read_dir(self.dir.path()).unwrap().count()
    }
}

/// The good part followed by `tail` becomes the good part followed by the new record, and the tail is set aside.
fn assert_tail_is_cut(tail: &[u8]) {
    let case = Case::new(&[GOOD.as_bytes(), tail].concat());
    let repair = case.open_and_append();
    assert_eq!(case.content(), [GOOD.as_bytes(), b"{\"n\":3}\n"].concat());
    assert_eq!(case.torn(1), tail);
    assert_eq!((repair.cut_at, repair.cut_bytes), (GOOD.len() as u64, tail.len() as u64));
    assert!(repair.kept_in.unwrap().ends_with("answers.jsonl.torn-1"));
}

#[test]
fn half_a_line() {
    assert_tail_is_cut(b"{\"n\":3,\"text\":\"so f");
}

#[test]
fn half_a_utf8_character() {
    assert_tail_is_cut("{\"text\":\"grün".as_bytes().strip_suffix(b"\xbcn").unwrap());
}

#[test]
fn half_an_escape() {
    assert_tail_is_cut(b"{\"text\":\"\\u00");
}

#[test]
fn a_tail_of_zero_bytes() {
    assert_tail_is_cut(&[0; 5000]);
}

#[test]
fn half_a_line_and_zero_bytes() {
    assert_tail_is_cut(b"{\"n\":3\0\0\0\0");
}

#[test]
fn zero_bytes_in_the_middle_of_the_last_line() {
    assert_tail_is_cut(b"{\"n\":3,\0\0\0\0\0 \"x\":4}\n");
}

#[test]
fn zero_bytes_across_the_last_lines() {
    assert_tail_is_cut(b"{\"n\":3,\0\0\n\0\0\"x\":4}\n{\"n\":5");
}

#[test]
fn white_space_and_a_lone_carriage_return() {
    assert_tail_is_cut(b" \t\r");
}

#[test]
fn something_that_is_json_but_no_object() {
    assert_tail_is_cut(b"17");
}

#[test]
fn a_whole_record_without_its_newline_is_kept() {
    let case = Case::new(b"{\"n\":1}\n{\"n\":2}");
    let repair = case.open_and_append();
    assert_eq!(case.content(), b"{\"n\":1}\n{\"n\":2}\n{\"n\":3}\n");
    assert_eq!(repair, Repair { newline_added: true, ..Repair::default() });
    assert_eq!(case.files(), 1);
}

#[test]
fn a_whole_record_without_newline_before_zero_bytes_is_kept() {
    let case = Case::new(b"{\"n\":2}\0\0\0");
    let repair = case.open_and_append();
    assert_eq!(case.content(), b"{\"n\":2}\n{\"n\":3}\n");
    assert_eq!((repair.cut_bytes, repair.newline_added), (3, true));
    assert_eq!(case.torn(1), [0; 3]);
}

#[test]
fn crlf_at_the_end_is_no_damage() {
    let case = Case::new(b"{\"n\":1}\r\n{\"n\":2}\r\n");
    assert!(!case.open_and_append().was_needed());
    assert_eq!(case.content(), b"{\"n\":1}\r\n{\"n\":2}\r\n{\"n\":3}\n");
}

#[test]
fn a_carriage_return_whose_line_feed_is_missing_gets_it() {
    let case = Case::new(b"{\"n\":1}\r\n{\"n\":2}\r");
    assert!(case.open_and_append().newline_added);
    assert_eq!(case.content(), b"{\"n\":1}\r\n{\"n\":2}\r\n{\"n\":3}\n");
}

#[test]
fn nothing_but_zero_bytes() {
    let case = Case::new(&[0; 70_000]);
    assert_eq!(case.open_and_append().cut_bytes, 70_000);
    assert_eq!(case.content(), b"{\"n\":3}\n");
    assert_eq!(case.torn(1), [0; 70_000]);
}

#[test]
fn nothing_but_half_a_line() {
    let case = Case::new(b"{\"n\"");
    case.open_and_append();
    assert_eq!(case.content(), b"{\"n\":3}\n");
    assert_eq!(case.torn(1), b"{\"n\"");
}

#[test]
fn an_empty_file() {
    let case = Case::new(b"");
    assert!(!case.open_and_append().was_needed());
    assert_eq!(case.files(), 1);
}

#[test]
fn no_file() {
    let case = Case::new(b"");
    fs::remove_file(&case.path).unwrap();
    assert!(!case.open_and_append().was_needed());
    assert_eq!(case.content(), b"{\"n\":3}\n");
}

#[test]
fn an_earlier_torn_end_is_not_overwritten() {
    let case = Case::new(b"{\"n\":1}\n{\"later");
    fs::write(case.dir.path().join("answers.jsonl.torn-1"), "{\"earlier").unwrap();
    let repair = case.open_and_append();
    assert_eq!(case.torn(1), b"{\"earlier");
    assert_eq!(case.torn(2), b"{\"later");
    assert!(repair.kept_in.unwrap().ends_with("answers.jsonl.torn-2"));
}

#[test]
fn a_bad_line_in_the_middle_stays_and_scan_reports_it() {
    let content = b"{\"n\":1}\n{\"n\":\0\0}\nhello\n{\"n\":2}\n";
    let case = Case::new(content);
    assert!(!case.open_and_append().was_needed());
    assert_eq!(case.content(), [&content[..], b"{\"n\":3}\n"].concat());
    let damaged = scan(&case.path, |found: &mut Vec<_>, line| found.extend(line.damage().map(|d| (line.offset, d))), 1);
    assert_eq!(damaged.unwrap().concat(), [(8, Damage::ZeroBytes), (17, Damage::NotAnObject)]);
}

#[test]
fn a_journal_that_cannot_be_opened_names_itself() {
    let dir = tempfile::tempdir().unwrap();
    let error = Journal::open(Arc::new(RealStorage), &dir.path().join("gone/answers.jsonl")).err().unwrap();
    assert!(error.to_string().contains("gone/answers.jsonl"), "{error}");
}
