//! Each dialect, row by row.

use super::*;
use proptest::prelude::*;
use serde_json::json;

fn read(row: Value) -> Result<Conversation, RejectReason> {
    read_with(row, &DatasetSpec::default())
}

fn read_with(row: Value, spec: &DatasetSpec) -> Result<Conversation, RejectReason> {
    let Value::Object(row) = row else { panic!("a row is an object") };
    let mut row = Row::from(row);
    let mut id = take_row_id(&mut row, spec.id_field.as_deref());
    read_row(row, &mut id, spec)
}

/// The messages as JSON, the way they are sent.
fn sent(row: Value) -> Value {
    serde_json::to_value(read(row).unwrap().messages).unwrap()
}

fn roles(row: Value, spec: &DatasetSpec) -> Vec<&'static str> {
    read_with(row, spec).unwrap().messages.iter().map(|message| message.role.as_str()).collect()
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

#[test]
fn sharegpt_roles_are_mapped_by_name_and_keep_their_order() {
    let row = json!({"sample_id": 41, "source": "harbour", "conversations": [
        {"from": "system", "value": "Answer like a lighthouse keeper."},
        {"from": "human", "value": "Is the tide in at both piers?"},
        {"from": "gpt", "value": "Let me see."},
        {"from": "function_call", "value": "[{\"name\": \"tide\", \"arguments\": {\"pier\": 1}}, {\"name\": \"tide\", \"arguments\": {\"pier\": 2}}]"},
        {"from": "observation", "value": "in"},
        {"from": "tool", "value": "out"},
        {"from": "chatgpt", "value": "Only at the first."},
        {"from": "user", "value": "And at night?"},
        {"from": "gpt", "value": "The set's own answer."},
    ]});
    let call = |n: u32| json!({"id": format!("call_{}", n - 1), "type": "function", "function": {"name": "tide", "arguments": format!("{{\"pier\":{n}}}")}});
    let read = read(row.clone()).unwrap();
    assert_eq!(read.id.unwrap().as_str(), "41");
    assert_eq!(read.source.as_deref(), Some("harbour"));
    assert_eq!(
        sent(row),
        json!([
            {"role": "system", "content": "Answer like a lighthouse keeper."},
            {"role": "user", "content": "Is the tide in at both piers?"},
            {"role": "assistant", "content": "Let me see."},
            {"role": "assistant", "tool_calls": [call(1), call(2)]},
            {"role": "tool", "content": "in", "tool_call_id": "call_0"},
            {"role": "tool", "content": "out", "tool_call_id": "call_1"},
            {"role": "assistant", "content": "Only at the first."},
            {"role": "user", "content": "And at night?"},
        ])
    );
}

#[test]
fn the_layouts_of_a_message_list_are_one() {
    let list = json!([{"role": "system", "content": "Short."}, {"role": "user", "content": "Why is slate grey?"}]);
    for row in [
        json!({"messages": list}),
        json!({"conversations": list.to_string()}),
        json!({"prompt": list}),
        json!({"turns": list}),
        json!({"body": {"messages": list}, "custom_id": "c"}),
        json!({"messages": {"role": ["system", "user"], "content": ["Short.", "Why is slate grey?"], "name": null}}),
        json!({"messages": [{"from": "system", "value": "Short."}, {"from": "human", "content": "Why is slate grey?", "tool_calls": null}, null]}),
        json!({"question": "Why is slate grey?", "messages": [], "conversations": null, "system_prompt": "Short."}),
    ] {
        assert_eq!(sent(row.clone()), list, "{row}");
    }
}

#[test]
fn single_text_fields_become_a_user_message() {
    assert_eq!(
        sent(json!({"instruction": "Sort these.", "input": "b, a", "output": "a, b"})),
        user("Sort these.\n\nb, a")
    );
    assert_eq!(sent(json!({"instruction": "Sing.", "input": " "})), user("Sing."));
    for field in ["prompt", "question", "problem", "query", "text"] {
        assert_eq!(sent(json!({field: "What floats?", "answer": "cork"})), user("What floats?"));
    }
    assert_eq!(sent(json!({"text": "not me", "question": "me"})), user("me"));
    let exchange = json!({"conversation": [{"human": "Old form?", "assistant": "Yes."}, {"human": "Still read?"}]});
    assert_eq!(
        sent(exchange),
        json!([{"role": "user", "content": "Old form?"}, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Still read?"}])
    );
}

#[test]
fn turns_decide_how_much_is_sent() {
    let chat = json!({"messages": [
        {"role": "assistant", "content": "Welcome aboard."},
        {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"}, {"role": "assistant", "content": "4"},
    ]});
    let list = json!({"turns": ["first", "second"]});
    let with = |turns| DatasetSpec { turns, ..DatasetSpec::default() };
    assert_eq!(roles(chat.clone(), &with(Turns::First)), ["assistant", "user"]);
    for turns in [Turns::Last, Turns::All] {
        assert_eq!(roles(chat.clone(), &with(turns)), ["assistant", "user", "assistant", "user"]);
    }
    assert_eq!(roles(list.clone(), &with(Turns::All)), ["user", "user"]);
    assert_eq!(roles(list, &with(Turns::Last)), ["user"]);
}

#[test]
fn a_given_system_message_replaces_the_rows_own() {
    let spec = DatasetSpec { system: Some("Be kind.".to_owned()), ..DatasetSpec::default() };
    for row in [
        json!({"prompt": "x"}),
        json!({"messages": [{"role": "system", "content": "Be rude."}, {"role": "user", "content": "x"}]}),
        json!({"system": "Be rude.", "messages": [{"role": "user", "content": "x"}]}),
    ] {
        let messages = serde_json::to_value(read_with(row, &spec).unwrap().messages).unwrap();
        assert_eq!(messages, json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "x"}]));
    }
}

#[test]
fn parts_reasoning_and_names_are_kept_and_nulls_are_not() {
    let row = json!({"messages": [
        {"role": "user", "content": [{"type": "text", "text": "Look", "image_url": null}, {"type": "image_url", "image_url": {"url": "u", "detail": null}}]},
        {"role": "assistant", "content": "A quay.", "reasoning": null, "reasoning_content": "Water, stone."},
        {"role": "user", "name": "ines", "content": "Which?"},
    ]});
    assert_eq!(
        sent(row),
        json!([
            {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": "u"}}]},
            {"role": "assistant", "content": "A quay.", "reasoning": "Water, stone."},
            {"role": "user", "content": "Which?", "name": "ines"},
        ])
    );
}

#[test]
fn rows_that_cannot_be_used_say_why() {
    let reasons = [
        (json!({"messages": [{"role": "ghost", "content": "boo"}]}), "unknown_role"),
        (json!({"messages": [{"content": "no role"}]}), "bad_field"),
        (json!({"messages": ["text"]}), "bad_field"),
        (json!({"messages": "not JSON"}), "bad_field"),
        (json!({"messages": {"role": ["user"], "content": ["a", "b"]}}), "bad_field"),
        (json!({"messages": [{"role": "user", "content": 7}]}), "bad_field"),
        (json!({"question": ["a"]}), "bad_field"),
        (json!({"messages": [{"role": "assistant", "content": "hello"}]}), "no_user_message"),
        (json!({"messages": []}), "no_user_message"),
        (json!({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "  "}]}), "empty_user_text"),
        (json!({"prompt": ""}), "empty_user_text"),
        (json!({"answer": "42"}), "no_prompt_field"),
        (json!({"prompt": "x", "tools": "[{]"}), "bad_tools"),
        (json!({"messages": [{"from": "function_call", "value": "call me"}]}), "bad_tools"),
        (json!({"conversations": "[{\"from\": \"human\", \"value\": \"\\ud83d\"}]"}), "lone_surrogate"),
    ];
    for (row, label) in reasons {
        assert_eq!(read(row.clone()).unwrap_err().label(), label, "{row}");
    }
    assert!(read(json!({"messages": [{"role": "ghost"}]})).unwrap_err().to_string().contains("\"ghost\""));
}

#[test]
fn a_role_map_adds_names() {
    let spec = DatasetSpec { role_map: vec![("narrator".to_owned(), Role::User)], ..DatasetSpec::default() };
    let row = json!({"conversations": [{"from": "narrator", "value": "A door opens."}]});
    assert_eq!(roles(row, &spec), ["user"]);
}

#[test]
fn broken_text_inside_json_text_is_repaired_on_request() {
    let spec = DatasetSpec { bad_text: BadText::Repair, ..DatasetSpec::default() };
    let read = read_with(json!({"messages": "[{\"role\": \"user\", \"content\": \"a\\ude00b\"}]"}), &spec).unwrap();
    assert!(read.repaired);
    assert_eq!(read.messages, [Message::text(Role::User, "a\u{fffd}b")]);
}

#[test]
fn ids_are_text_or_whole_numbers() {
    let id = |row: Value| take_row_id(&mut row.as_object().unwrap().clone().into(), None);
    assert_eq!(id(json!({"id": null, "uuid": "u-1"})).as_deref(), Some("u-1"));
    assert_eq!(id(json!({"id": 12.0})).as_deref(), Some("12"));
    assert_eq!(id(json!({"id": 1.5, "custom_id": -3})).as_deref(), Some("-3"));
    assert_eq!(id(json!({"id": ""})), None);
    let spec = DatasetSpec { id_field: Some("meta.key".to_owned()), ..DatasetSpec::default() };
    let row = json!({"id": "no", "meta": {"key": "yes"}, "prompt": "x"});
    assert_eq!(read_with(row, &spec).unwrap().id.unwrap().as_str(), "yes");
    assert_eq!(read_with(json!({"id": "no", "prompt": "x"}), &spec).unwrap_err().label(), "missing_id");
}

/// JSON values that look like rows more often than chance would have it.
fn any_value() -> impl Strategy<Value = Value> {
    let word = prop::sample::select(vec![
        "user",
        "assistant",
        "tool",
        "function_call",
        "system",
        "",
        "[]",
        "[{\"role\":\"user\",\"content\":\"x\"}]",
        "{\"name\":\"f\"}",
        "\\ud800",
    ]);
    let key = prop::sample::select(vec![
        "messages",
        "conversations",
        "conversation",
        "prompt",
        "turns",
        "instruction",
        "input",
        "tools",
        "role",
        "from",
        "content",
        "value",
        "human",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "id",
        "source",
        "text",
        "body",
        "question",
        "system",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        word.prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 48, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::Array),
            prop::collection::vec((key.clone(), inner), 0..6)
                .prop_map(|members| Value::Object(members.into_iter().map(|(k, v)| (k.to_owned(), v)).collect())),
        ]
    })
}

proptest! {
    #[test]
    fn no_row_panics_and_every_accepted_one_asks_something(
        members in prop::collection::vec((prop::sample::select(vec!["messages", "conversations", "conversation", "prompt", "turns", "tools", "body", "question", "id"]), any_value()), 0..4),
        turns in prop::sample::select(vec![Turns::First, Turns::Last, Turns::All]),
    ) {
        let row: Map<String, Value> = members.into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        let spec = DatasetSpec { turns, ..DatasetSpec::default() };
        let mut row = Row::from(row);
        let mut id = take_row_id(&mut row, None);
        if let Ok(read) = read_row(row, &mut id, &spec) {
            let last = read.messages.last().unwrap();
            prop_assert!(matches!(last.role, Role::User | Role::Tool));
            prop_assert!(read.messages.iter().any(|message| message.role == Role::User));
        }
    }
}
