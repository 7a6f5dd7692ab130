//! Which rows become prompts, in which order, and what is said about the others.
#![allow(clippy::unwrap_used)]

mod common;

use common::{plan_of, plan_text, prompts, texts};
use eaglet_core::Class;
use eaglet_data::{DatasetSpec, Duplicates, HubSettings, STDIN_FILE, plan};
use std::collections::BTreeSet;

fn numbered(count: u32) -> String {
    (0..count).map(|n| format!("{{\"id\": {n}, \"prompt\": \"count to {n}\", \"source\": \"s{}\"}}\n", n % 3)).collect()
}

const REPEATED: &str = concat!(
    "{\"id\": \"p\", \"prompt\": \"first\"}\n",
    "{\"id\": \"q\", \"prompt\": \"second\"}\n",
    "{\"id\": \"q\", \"prompt\": \"second\"}\n",
    "{\"id\": \"p\", \"prompt\": \"not first\"}\n",
    "{\"prompt\": \"nameless\"}\n",
    "{\"prompt\": \"nameless\"}\n",
    "{\"id\": \"p\", \"prompt\": \"not first\"}\n",
    "{\"id\": \"q\", \"prompt\": \"other second\"}\n",
);

#[test]
fn one_id_on_two_contents_is_refused_with_both_places() {
    let error = plan_text("rows.jsonl", REPEATED, |_| {}).err().unwrap();
    assert_eq!(error.class(), Class::Usage);
    let text = error.to_string();
    assert!(text.contains("\"p\"") && text.contains("rows.jsonl:1") && text.contains("rows.jsonl:4"), "{text}");
    assert!(text.contains("1 more"), "{text}");
    assert!(error.hint_text().unwrap().contains("--duplicates keep"));
}

#[test]
fn kept_duplicates_are_prompts_and_equal_rows_are_listed() {
    let plan = plan_text("rows.jsonl", REPEATED, |spec| spec.duplicates = Duplicates::Keep).unwrap();
    assert_eq!(texts(&plan), ["first", "second", "not first", "nameless", "other second"]);
    assert_eq!(plan.entries().iter().map(|entry| entry.key()).collect::<BTreeSet<_>>().len(), 5);
    let pairs: Vec<(u64, bool)> = plan
        .duplicates()
        .iter()
        .map(|row| {
            (
                row.row,
                row.first_origin
                    .ends_with([":2", ":5", ":4"][usize::from(row.row == 5) + 2 * usize::from(row.row == 6)]),
            )
        })
        .collect();
    assert_eq!(pairs, [(2, true), (5, true), (6, true)]);
    assert!(plan.duplicates()[0].origin.ends_with(":3"));
}

#[test]
fn rows_are_conserved() {
    let text = format!("{}{{\"id\": 2, \"prompt\": \"count to 2\"}}\nnonsense\n", numbered(30));
    for (seed, max) in [(None, None), (Some(3), None), (Some(3), Some(7))] {
        let plan = plan_text("rows.jsonl", &text, |spec| {
            (spec.shuffle_seed, spec.max_samples) = (seed, max);
            spec.filters = vec!["source!=s0".parse().unwrap()];
        })
        .unwrap();
        let parts = plan.entries().len() as u64
            + plan.filtered()
            + plan.not_chosen()
            + plan.duplicates_total()
            + plan.rejected_counts().values().sum::<u64>();
        assert_eq!((plan.rows_read(), parts), (32, 32));
        assert_eq!((plan.filtered(), plan.duplicates_total(), plan.rejected().len()), (10, 1, 1));
    }
}

#[test]
fn the_spool_gives_back_what_was_planned() {
    let plan = plan_text("rows.jsonl", numbered(50), |_| {}).unwrap();
    for (index, prompt) in prompts(&plan).into_iter().enumerate() {
        let entry = &plan.entries()[index];
        assert_eq!((prompt.key(), prompt.row), (entry.key(), entry.row()));
        assert_eq!(prompt.text_bytes(), entry.text_bytes() as usize);
        assert_eq!(prompt.source.as_deref(), Some(plan.sources()[entry.source()].as_str()));
        assert!(plan.origin(index).unwrap().ends_with(&format!("rows.jsonl:{}", index + 1)));
        assert_eq!(
            prompt,
            eaglet_core::prompt::Prompt::new(
                Some(prompt.id.clone()),
                prompt.row,
                prompt.source.clone(),
                prompt.messages.clone(),
                None
            )
        );
    }
    assert_eq!(plan.sources(), ["", "s0", "s1", "s2"]);
}

#[test]
fn shuffling_depends_on_the_seed_alone() {
    let run = |seed, max| {
        let plan =
            plan_text("rows.jsonl", numbered(40), |spec| (spec.shuffle_seed, spec.max_samples) = (seed, max)).unwrap();
        (texts(&plan), plan.fingerprint())
    };
    let all = run(Some(11), None);
    assert_eq!(run(Some(11), None), all);
    assert_ne!(run(Some(12), None).1, all.1);
    let plain = run(None, None);
    assert_ne!(plain.0, all.0);
    assert_eq!(plain.0.iter().collect::<BTreeSet<_>>(), all.0.iter().collect::<BTreeSet<_>>());
    assert_eq!(run(Some(11), Some(9)).0, all.0[..9], "fewer samples of the same seed are a prefix");
    assert_eq!(run(None, Some(9)).0, plain.0[..9]);
}

#[test]
fn the_number_of_samples_counts_usable_distinct_prompts() {
    let text = "nonsense\n{\"prompt\": \"a\"}\n{\"prompt\": \"a\"}\n{\"prompt\": \"\"}\n{\"prompt\": \"b\"}\n{\"prompt\": \"c\"}\n";
    let plan = plan_text("rows.jsonl", text, |spec| spec.max_samples = Some(2)).unwrap();
    assert_eq!(texts(&plan), ["a", "b"]);
    assert_eq!(plan.rows_read(), 5);
}

#[test]
fn done_prompts_are_asked_once_and_not_spooled() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("rows.jsonl"), numbered(20)).unwrap();
    for (seed, max) in [(None, None), (Some(1), Some(10))] {
        let spec = DatasetSpec {
            inputs: vec![dir.path().join("rows.jsonl").display().to_string()],
            shuffle_seed: seed,
            max_samples: max,
            ..DatasetSpec::default()
        };
        let (mut asked, mut heard) = (0, 0);
        let mut is_done = |prompt: &eaglet_core::prompt::Prompt, _| {
            asked += 1;
            prompt.row.is_multiple_of(2)
        };
        let plan =
            plan(&spec, &HubSettings::default(), dir.path(), None, &mut is_done, &mut |rows| heard = rows).unwrap();
        assert_eq!((asked, heard), (plan.entries().len(), 20));
        for (index, entry) in plan.entries().iter().enumerate() {
            assert_eq!(entry.done(), entry.row() % 2 == 0);
            assert_eq!(plan.prompt(index).is_err(), entry.done());
        }
    }
}

#[test]
fn several_files_directories_and_globs_are_read_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let set = dir.path().join("set");
    std::fs::create_dir(&set).unwrap();
    std::fs::write(set.join("b.jsonl"), "{\"prompt\": \"b\"}\n").unwrap();
    std::fs::write(set.join("a.csv"), "prompt\na\n").unwrap();
    std::fs::write(set.join("notes.txt"), "not data").unwrap();
    std::fs::write(dir.path().join("c.jsonl"), "{\"prompt\": \"c\"}\n").unwrap();
    assert_eq!(texts(&plan_of(dir.path(), &["c.jsonl", "set"], |_| {}).unwrap()), ["c", "a", "b"]);
    assert_eq!(texts(&plan_of(dir.path(), &["set/*.jsonl", "c.jsonl"], |_| {}).unwrap()), ["b", "c"]);
    let plan = plan_of(dir.path(), &["set", "c.jsonl"], |_| {}).unwrap();
    assert_eq!(plan.entries().iter().map(|entry| entry.row()).collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn inputs_that_do_not_exist_are_usage_errors_with_a_hint() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("prompts.jsonl"), "{\"prompt\": \"x\"}\n").unwrap();
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    for (input, hint) in [("promts.jsonl", "prompts.jsonl"), ("*.parquet", "quote"), ("empty", "parquet")] {
        let error = plan_of(dir.path(), &[input], |_| {}).err().unwrap();
        assert_eq!(error.class(), Class::Usage, "{error}");
        assert!(error.hint_text().unwrap().contains(hint), "{error}: {:?}", error.hint_text());
    }
    let error =
        plan_of(dir.path(), &["prompts.jsonl"], |spec| spec.filters = vec!["lang=en".parse().unwrap()]).err().unwrap();
    assert!(error.hint_text().unwrap().contains("\"lang\""), "{error}");
}

#[test]
fn standard_input_is_kept_for_the_next_time() {
    let dir = tempfile::tempdir().unwrap();
    let spec = DatasetSpec { inputs: vec!["-".to_owned()], ..DatasetSpec::default() };
    let run = |input: &[u8]| {
        plan(&spec, &HubSettings::default(), dir.path(), Some(&mut &*input), &mut |_, _| false, &mut |_| {})
    };
    let text = numbered(4);
    let first = run(text.as_bytes()).unwrap();
    assert_eq!(first.origin(1).unwrap(), "standard input:2");
    assert_eq!(run(b"").unwrap().fingerprint(), first.fingerprint());
    assert_eq!(std::fs::read(dir.path().join(STDIN_FILE)).unwrap(), text.as_bytes());
    assert_eq!(run(b"{}").err().unwrap().class(), Class::Usage);
}
