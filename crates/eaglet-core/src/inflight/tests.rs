use super::*;
use crate::ids::PromptKey;
use proptest::prelude::*;

fn field() -> impl Strategy<Value = Option<ReasoningField>> {
    prop_oneof![
        Just(None),
        Just(Some(ReasoningField::Reasoning)),
        Just(Some(ReasoningField::ReasoningContent)),
        Just(Some(ReasoningField::Both))
    ]
}

fn unfinished() -> impl Strategy<Value = Unfinished> {
    let ids = || proptest::collection::vec(any::<u32>(), 0..20);
    let segments = proptest::collection::vec(
        (any::<u64>(), ".{0,9}", "[a-z_]{0,9}").prop_map(|(tokens, endpoint, why)| Segment { tokens, endpoint, why }),
        0..3,
    );
    (ids(), ids(), any::<String>(), any::<String>(), field(), any::<bool>(), segments, any::<String>()).prop_map(
        |(prompt_token_ids, token_ids, reasoning, content, field, clean, segments, endpoint)| Unfinished {
            prompt_token_ids,
            token_ids,
            reasoning,
            content,
            field,
            seam: if clean { Seam::Clean } else { Seam::Unsure },
            segments,
            endpoint,
        },
    )
}

fn whole(generation: u64, key: u128, unfinished: Unfinished) -> Frame {
    Frame::Whole { generation, key: PromptKey(key), turn: 0, at: 1_796_000_000, unfinished: Box::new(unfinished) }
}

/// What comes after `from` to make it `to`.
fn more(generation: u64, from: &Unfinished, to: &Unfinished) -> Frame {
    Frame::More {
        generation,
        follows: [from.token_ids.len(), from.reasoning.len(), from.content.len()].map(|n| n as u64),
        token_ids: to.token_ids[from.token_ids.len()..].to_vec(),
        reasoning: to.reasoning[from.reasoning.len()..].to_owned(),
        content: to.content[from.content.len()..].to_owned(),
        field: to.field,
        seam: to.seam,
    }
}

fn file_of(frames: &[Frame]) -> Vec<u8> {
    let mut file = MAGIC.to_vec();
    frames.iter().for_each(|frame| append_framed(&mut file, &frame.to_payload()));
    file
}

/// An answer that grew in steps: what it was after each, the words of text one id each.
fn grown(words: &[String]) -> Vec<Unfinished> {
    let mut now = Unfinished {
        prompt_token_ids: vec![1, 2, 3],
        token_ids: vec![],
        reasoning: String::new(),
        content: String::new(),
        field: None,
        seam: Seam::Clean,
        segments: vec![],
        endpoint: "http://h:1".into(),
    };
    let mut stages = vec![now.clone()];
    for (index, word) in words.iter().enumerate() {
        now.token_ids.push(index as u32);
        if index < words.len() / 2 {
            now.reasoning.push_str(word);
            now.field = Some(ReasoningField::Reasoning);
        } else {
            now.content.push_str(word);
        }
        stages.push(now.clone());
    }
    stages
}

proptest! {
    #[test]
    fn a_frame_reads_back_as_it_was(unfinished in unfinished(), generation: u64, key: u128) {
        let frame = whole(generation, key, unfinished);
        prop_assert_eq!(Frame::parse(&frame.to_payload()), Some(frame));
    }

    #[test]
    fn no_bytes_make_the_reader_fall(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Frame::parse(&bytes);
        let _ = replay(&bytes);
        let _ = replay(&[MAGIC.as_slice(), &bytes].concat());
    }

    /// Cut anywhere, or with any byte changed, what is read is a beginning of the answer, and no more than the file holds.
    #[test]
    fn a_damaged_file_gives_a_beginning_of_each_answer(
        words in proptest::collection::vec("[a-zäöü🦀 ]{1,6}", 1..12), cut: proptest::sample::Index, flip in any::<Option<(proptest::sample::Index, u8)>>(),
    ) {
        let stages = grown(&words);
        let mut frames = vec![whole(7, 1, stages[0].clone())];
        frames.extend(stages.windows(2).map(|pair| more(7, &pair[0], &pair[1])));
        let mut file = file_of(&frames);
        file.truncate(cut.index(file.len() + 1));
        if let (Some((at, bits)), false) = (flip, file.is_empty()) {
            let at = at.index(file.len());
            file[at] ^= bits;
        }
        let replayed = replay(&file);
        prop_assert!(replayed.good_bytes <= file.len() as u64);
        if let Some(saved) = replayed.into_saved().remove(&PromptKey(1)) {
            prop_assert!(stages.contains(&saved.unfinished.unwrap()));
        }
    }

    /// Compaction changes nothing that counts, and is its own fixed point.
    #[test]
    fn a_compacted_file_says_the_same(
        steps in proptest::collection::vec((0u64..5, 0u8..4, "[a-z]{1,5}"), 0..60),
    ) {
        let mut frames = Vec::new();
        let mut now: std::collections::BTreeMap<u64, Unfinished> = std::collections::BTreeMap::new();
        for (generation, kind, word) in steps {
            match (kind, now.get_mut(&generation)) {
                (0, _) => { frames.push(Frame::End { generation }); now.remove(&generation); }
                (_, None) => {
                    let fresh = grown(&[word]).pop().unwrap();
                    frames.push(whole(generation, u128::from(generation), fresh.clone()));
                    now.insert(generation, fresh);
                }
                (_, Some(answer)) => {
                    let before = answer.clone();
                    answer.token_ids.push(9);
                    answer.content.push_str(&word);
                    frames.push(more(generation, &before, answer));
                }
            }
        }
        let file = file_of(&frames);
        let (compacted, sizes) = compact(&file);
        prop_assert_eq!(replay(&compacted).into_saved(), replay(&file).into_saved());
        prop_assert_eq!(compacted.len() as u64, MAGIC.len() as u64 + sizes.values().sum::<u64>());
        prop_assert_eq!(&compact(&compacted).0, &compacted);
        let live: std::collections::HashMap<_, _> =
            replay(&file).into_saved().into_iter().map(|(key, saved)| (key, saved.unfinished.unwrap())).collect();
        prop_assert_eq!(live, now.into_iter().map(|(n, answer)| (PromptKey(u128::from(n)), answer)).collect());
    }
}

#[test]
fn a_frame_that_does_not_follow_changes_nothing() {
    let stages = grown(&["a".into(), "b".into(), "c".into(), "d".into()]);
    let frames = [whole(1, 5, stages[1].clone()), more(1, &stages[2], &stages[3]), more(2, &stages[1], &stages[2])];
    let saved = replay(&file_of(&frames)).into_saved();
    assert_eq!(saved[&PromptKey(5)].unfinished.as_ref(), Some(&stages[1]));
    assert_eq!(saved.len(), 1);
}

#[test]
fn an_answered_turn_replaces_its_checkpoints() {
    let answer = |text: &str| Box::new(Answer { content: Some(text.into()), ..Answer::default() });
    let stages = grown(&["a".into(), "b".into()]);
    let turn = |turn, text: &str| Frame::Turn {
        generation: 3,
        key: PromptKey(5),
        turn,
        answer: answer(text),
        status: Status::Ok,
    };
    let second = |unfinished: &Unfinished| Frame::Whole {
        generation: 3,
        key: PromptKey(5),
        turn: 1,
        at: 0,
        unfinished: Box::new(unfinished.clone()),
    };
    let saved = replay(&file_of(&[whole(3, 5, stages[1].clone()), turn(0, "one")])).into_saved();
    let saved = &saved[&PromptKey(5)];
    assert_eq!((saved.turns.len(), saved.unfinished.as_ref()), (1, None));
    let file = file_of(&[whole(3, 5, stages[2].clone()), turn(0, "one"), second(&stages[1])]);
    for file in [compact(&file).0, file] {
        let saved = replay(&file).into_saved();
        let saved = &saved[&PromptKey(5)];
        assert_eq!(saved.turns[0].0.content.as_deref(), Some("one"));
        assert_eq!(saved.unfinished.as_ref(), Some(&stages[1]));
    }
    // A turn whose predecessor is missing follows from nothing.
    assert!(replay(&file_of(&[turn(1, "two")])).into_saved().is_empty());
}

#[test]
fn a_file_is_compacted_when_most_of_it_is_dead_and_it_is_worth_it() {
    assert!(!should_compact(0, 8, 16));
    assert!(!should_compact(12, 20, 16));
    assert!(should_compact(8, 20, 16));
}

#[test]
fn segments_tell_only_what_has_tokens() {
    let mut answer = grown(&["a".into(), "b".into()]).pop().unwrap();
    answer.end_segment("reset");
    answer.end_segment("silence");
    answer.token_ids.push(4);
    answer.endpoint = "http://h:2".into();
    answer.end_segment("silence");
    let told: Vec<_> = answer.segments.iter().map(|s| (s.tokens, s.endpoint.as_str(), s.why.as_str())).collect();
    assert_eq!(told, [(2, "http://h:1", "reset"), (1, "http://h:2", "silence")]);
}
