//! What becomes an example, answer by answer.

use super::*;
use crate::prepare::record::RecordView;
use proptest::prelude::*;
use serde_json::{Value, json};

/// The verdict about the last answer of a record with these fields.
fn judged(fields: Value, policies: &Policies) -> Verdict {
    let mut record = json!({"sample_id": "q", "prompt_hash": "0".repeat(32), "status": "ok", "finish_reason": "stop",
                            "prompt_token_ids": [1, 2, 3], "token_ids": [10, 11]});
    record.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    record.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    let line = serde_json::to_vec(&record).unwrap();
    let record = RecordView::parse(&line).unwrap();
    judge(record.turns.last().unwrap(), record.status, policies)
}

fn reason(fields: Value, policies: &Policies) -> (&'static str, String) {
    let dropped = judged(fields, policies).unwrap_err();
    (dropped.reason.label(), dropped.detail)
}

fn with(change: impl FnOnce(&mut Policies)) -> Policies {
    let mut policies = Policies::default();
    change(&mut policies);
    policies
}

proptest! {
    #[test]
    fn what_was_sampled_is_what_is_trained(
        prompt in proptest::collection::vec(0u32..1000, 1..30), answer in proptest::collection::vec(0u32..1000, 1..30), max in 1usize..70,
    ) {
        let fields = json!({"prompt_token_ids": prompt, "token_ids": answer});
        let (tokens, marks) = judged(fields.clone(), &Policies::default()).unwrap();
        prop_assert_eq!(tokens.ids(), [prompt.as_slice(), answer.as_slice()].concat());
        prop_assert_eq!(tokens.mask(), [vec![0; prompt.len()], vec![1; answer.len()]].concat());
        prop_assert!(!marks.clipped);
        // Clipped it is a beginning of that, or dropped because nothing supervised is left.
        match judged(fields, &with(|p| p.max_seq_len = Some(max))) {
            Ok((clipped, marks)) => {
                let kept = max.min(tokens.len());
                prop_assert_eq!(clipped.ids(), &tokens.ids()[..kept]);
                prop_assert_eq!(clipped.mask(), &tokens.mask()[..kept]);
                prop_assert_eq!(marks.clipped, kept < tokens.len());
            }
            Err(dropped) => {
                prop_assert_eq!(dropped.reason, DropReason::TooFewSupervisedTokens);
                prop_assert!(max <= prompt.len());
            }
        }
    }
}

#[test]
fn an_answer_without_ids_is_dropped_with_the_reason() {
    let default = Policies::default();
    assert_eq!(reason(json!({"token_ids": null}), &default).0, "no_token_ids");
    assert_eq!(reason(json!({"prompt_token_ids": null}), &default).0, "no_prompt_token_ids");
    assert_eq!(reason(json!({"prompt_token_ids": []}), &default).0, "no_prompt_token_ids");
    assert_eq!(reason(json!({"token_ids": "10, 11"}), &default).0, "bad_token_ids");
    assert_eq!(reason(json!({"token_ids": [10, -1]}), &default).0, "bad_token_ids");
    assert_eq!(reason(json!({"token_ids": [3_000_000_000_u32]}), &default).0, "bad_token_ids");
    let small = with(|p| p.vocab_size = Some(11));
    assert_eq!(reason(json!({}), &small), ("id_out_of_range", "token id 11, the vocabulary has 11".into()));
    assert!(judged(json!({"token_ids": [10]}), &small).is_ok());
}

#[test]
fn an_answer_whose_count_differs_is_not_believed() {
    let counted = json!({"usage": {"completion_tokens": 3}});
    assert_eq!(reason(counted.clone(), &Policies::default()), ("ids_and_usage_differ", "2 ids, usage counts 3".into()));
    assert!(judged(counted, &with(|p| p.ids_and_usage_differ = Keep::Keep)).is_ok());
    assert_eq!(reason(json!({"flags": ["ids_and_usage_differ"]}), &Policies::default()).0, "ids_and_usage_differ");
    assert!(judged(json!({"usage": {"completion_tokens": 2}}), &Policies::default()).is_ok());
}

#[test]
fn lengths_and_finish_reasons_are_policies() {
    assert_eq!(reason(json!({"token_ids": []}), &Policies::default()).0, "empty_answer");
    assert_eq!(reason(json!({"status": "empty", "token_ids": [2]}), &Policies::default()).0, "empty_answer");
    let three = with(|p| p.min_completion_tokens = 3);
    assert_eq!(reason(json!({}), &three), ("below_min_completion_tokens", "2 tokens, at least 3 wanted".into()));
    let only_stop = with(|p| p.finish_reasons = Some(BTreeSet::from(["stop".to_owned()])));
    assert!(judged(json!({}), &only_stop).is_ok());
    assert_eq!(reason(json!({"finish_reason": "length"}), &only_stop), ("finish_reason", "length".into()));
    let (_, marks) = judged(json!({"finish_reason": "length"}), &Policies::default()).unwrap();
    assert!(marks.cut_at_limit);
    let long = with(|p| (p.max_seq_len, p.too_long) = (Some(4), TooLong::Drop));
    assert_eq!(reason(json!({}), &long), ("above_max_seq_len", "5 tokens, at most 4 wanted".into()));
    assert!(judged(json!({"token_ids": [10]}), &long).is_ok());
    let two_left = with(|p| (p.max_seq_len, p.min_supervised_tokens) = (Some(4), 2));
    assert_eq!(
        reason(json!({}), &two_left),
        ("too_few_supervised_tokens", "1 supervised tokens of 5, at least 2 wanted".into())
    );
}

/// 7 opens the reasoning, 8 closes it.
#[test]
fn the_markers_say_whether_the_answer_was_cut_in_thought() {
    let cut = |prompt: &[u32], answer: &[u32], open: Option<u32>| {
        let policies = with(|p| p.think_markers = Some(ThinkMarkers { open, close: 8 }));
        judged(json!({"prompt_token_ids": prompt, "token_ids": answer}), &policies).unwrap().1.cut_in_thought
    };
    assert!(cut(&[1], &[7, 20, 21], Some(7)), "opened by the answer");
    assert!(!cut(&[1], &[7, 20, 8, 21], Some(7)), "closed");
    assert!(cut(&[1, 7], &[20, 21], Some(7)), "opened by the template at the end of the prompt");
    assert!(!cut(&[1, 7], &[20, 8], Some(7)), "closed by the answer");
    assert!(!cut(&[1, 7, 8], &[20, 21], Some(7)), "an empty block in the prompt: the target does not think");
    assert!(!cut(&[1, 7, 5, 8, 2], &[20], Some(7)), "thoughts of an earlier turn");
    assert!(cut(&[1], &[7, 20, 8, 7, 21], Some(7)), "opened again");
    assert!(!cut(&[1], &[20], Some(7)), "no thought at all");
    assert!(cut(&[1], &[20], None) && !cut(&[1], &[20, 8], None), "a target that always thinks");
    let drop =
        with(|p| (p.think_markers, p.cut_in_thought) = (Some(ThinkMarkers { open: Some(7), close: 8 }), Keep::Drop));
    assert_eq!(reason(json!({"token_ids": [7, 20]}), &drop).0, "cut_in_thought");
}

#[test]
fn without_markers_the_texts_say_it() {
    let cut = |fields: Value| judged(fields, &Policies::default()).unwrap().1.cut_in_thought;
    assert!(cut(json!({"finish_reason": "length", "reasoning": "hm"})));
    assert!(cut(json!({"finish_reason": "length", "reasoning": "hm", "content": ""})));
    assert!(!cut(json!({"finish_reason": "length", "reasoning": "hm", "content": "So"})));
    assert!(!cut(json!({"finish_reason": "stop", "reasoning": "hm"})));
    assert!(!cut(json!({"finish_reason": "length", "content": "So"})));
    assert!(!cut(json!({"finish_reason": "length", "reasoning": "hm", "tool_calls": [{"id": "1"}]})));
}

#[test]
fn circles_are_marked_or_dropped() {
    let ids = [5, 6, 7].repeat(100);
    let (tokens, marks) = judged(json!({"token_ids": ids}), &Policies::default()).unwrap();
    assert!(marks.repetition && tokens.supervised() == 300);
    let drop = with(|p| p.repetition = Keep::Drop);
    let detail = "300 tokens with period 3 from token 0 of the answer";
    assert_eq!(reason(json!({"token_ids": ids}), &drop), ("repetition", detail.into()));
    assert!(judged(json!({"token_ids": (0..300).collect::<Vec<u32>>()}), &drop).is_ok());
}

#[test]
fn every_reason_has_a_word_of_its_own() {
    let words: BTreeSet<&str> = DropReason::ALL.into_iter().map(DropReason::label).collect();
    assert_eq!(words.len(), DropReason::ALL.len());
}
