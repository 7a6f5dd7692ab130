//! The same rows in every format give the same prompts; what is damaged or foreign is refused in clear words.
#![allow(clippy::unwrap_used)]

mod common;

use arrow_array::types::Int32Type;
use arrow_array::{
    Array, ArrayRef, DictionaryArray, Int32Array, LargeListArray, LargeStringArray, ListArray, RecordBatch,
    StringArray, StringViewArray, StructArray,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{DataType, Field, Fields};
use common::{plan_of, plan_text, prompts, texts};
use eaglet_core::Class;
use eaglet_core::prompt::Prompt;
use eaglet_data::{BadText, Plan};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

/// One list a row: (role, content, name), in the padded form that Parquet has.
type Turn = (&'static str, &'static str, Option<&'static str>);
const ROWS: [(&str, &[Turn]); 3] = [
    ("k1", &[("user", "How deep is the harbour?", None)]),
    ("k2", &[("system", "Be brief.", None), ("user", "Lines\u{2028}and\u{85}marks \u{1f980}", Some("ines"))]),
    ("k3", &[("user", "Knots?", None), ("assistant", "Twelve.", None), ("user", "Sure?\u{0}", None)]),
];

fn json_rows() -> Vec<serde_json::Value> {
    let message = |(role, content, name): &Turn| {
        let mut message = serde_json::json!({"role": role, "content": content});
        if let Some(name) = name {
            message["name"] = (*name).into();
        }
        message
    };
    let row = |(id, turns): &(&str, &[Turn])| serde_json::json!({"id": id, "messages": turns.iter().map(message).collect::<Vec<_>>(), "unused": [1, {"a": "\\ud800"}]});
    ROWS.iter().map(row).collect()
}

fn jsonl() -> String {
    json_rows().iter().map(|row| format!("{row}\n")).collect()
}

/// Prompts without their row numbers' origin: what must be equal in all formats.
fn content(plan: &Plan) -> (Vec<Prompt>, u128) {
    (prompts(plan), plan.fingerprint())
}

fn write_parquet(path: &Path, columns: Vec<(&str, ArrayRef)>) {
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let properties =
        parquet::file::properties::WriterProperties::builder().set_max_row_group_row_count(Some(2)).build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = parquet::arrow::ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

fn offsets() -> Vec<usize> {
    ROWS.iter().map(|(_, turns)| turns.len()).collect()
}

fn columns_of_turns() -> [ArrayRef; 3] {
    let turns: Vec<&Turn> = ROWS.iter().flat_map(|(_, turns)| turns.iter()).collect();
    [
        Arc::new(StringArray::from_iter_values(turns.iter().map(|turn| turn.0))),
        Arc::new(StringViewArray::from_iter_values(turns.iter().map(|turn| turn.1))),
        Arc::new(turns.iter().map(|turn| turn.2).collect::<StringArray>()),
    ]
}

fn turn_fields() -> Fields {
    Fields::from(vec![
        Field::new("role", DataType::Utf8, true),
        Field::new("content", DataType::Utf8View, true),
        Field::new("name", DataType::Utf8, true),
        Field::new("tool_calls", DataType::Null, true),
    ])
}

fn ids() -> ArrayRef {
    Arc::new(ROWS.iter().map(|(id, _)| *id).collect::<DictionaryArray<Int32Type>>())
}

#[test]
fn every_parquet_layout_gives_the_prompts_of_the_jsonl() {
    let dir = tempfile::tempdir().unwrap();
    let [roles, contents, names] = columns_of_turns();
    let length = roles.len();
    let nulls: ArrayRef = Arc::new(arrow_array::NullArray::new(length));
    let turns = StructArray::new(turn_fields(), vec![roles.clone(), contents.clone(), names, nulls], None);
    let item = Arc::new(Field::new("item", turns.data_type().clone(), true));
    let list = ListArray::new(item.clone(), OffsetBuffer::from_lengths(offsets()), Arc::new(turns.clone()), None);
    let large = LargeListArray::new(item, OffsetBuffer::from_lengths(offsets()), Arc::new(turns), None);
    let text: ArrayRef =
        Arc::new(LargeStringArray::from_iter_values(json_rows().iter().map(|row| row["messages"].to_string())));
    write_parquet(&dir.path().join("struct.parquet"), vec![("id", ids()), ("messages", Arc::new(list))]);
    write_parquet(&dir.path().join("large.parquet"), vec![("id", ids()), ("messages", Arc::new(large))]);
    write_parquet(&dir.path().join("text.parquet"), vec![("id", ids()), ("conversations", text)]);
    std::fs::write(dir.path().join("rows.jsonl"), jsonl()).unwrap();
    let reference = content(&plan_of(dir.path(), &["rows.jsonl"], |_| {}).unwrap());
    for name in ["struct.parquet", "large.parquet", "text.parquet"] {
        assert_eq!(content(&plan_of(dir.path(), &[name], |_| {}).unwrap()), reference, "{name}");
    }
}

#[test]
fn a_parquet_struct_of_lists_and_plain_columns_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let [roles, contents, _] = columns_of_turns();
    let list = |values: ArrayRef| -> ArrayRef {
        let item = Arc::new(Field::new("item", values.data_type().clone(), true));
        Arc::new(ListArray::new(item, OffsetBuffer::from_lengths(offsets()), values, None))
    };
    let lists = [list(roles), list(contents)];
    let fields: Fields = ["role", "content"]
        .iter()
        .zip(&lists)
        .map(|(name, list)| Field::new(*name, list.data_type().clone(), true))
        .collect();
    write_parquet(
        &dir.path().join("columns.parquet"),
        vec![("id", ids()), ("messages", Arc::new(StructArray::new(fields, lists.to_vec(), None)))],
    );
    let plan = plan_of(dir.path(), &["columns.parquet"], |_| {}).unwrap();
    assert_eq!(texts(&plan), ROWS.map(|(_, turns)| turns.last().unwrap().1));

    let prompt: ArrayRef = Arc::new(LargeStringArray::from(vec![Some("one"), None, Some("three")]));
    let number: ArrayRef = Arc::new(Int32Array::from(vec![Some(1), None, Some(3)]));
    write_parquet(
        &dir.path().join("plain.parquet"),
        vec![("question_id", number.clone()), ("prompt", prompt), ("huge", number)],
    );
    let plan = plan_of(dir.path(), &["plain.parquet"], |spec| spec.filters = vec!["huge!=3".parse().unwrap()]).unwrap();
    assert_eq!(texts(&plan), ["one"]);
    assert_eq!(prompts(&plan)[0].id.as_str(), "1");
    assert_eq!(plan.filtered(), 1);
    assert!(plan.rejected()[0].origin.ends_with("plain.parquet row 2"), "{:?}", plan.rejected());
}

#[test]
fn padded_tool_schemas_gain_nothing_in_parquet() {
    let dir = tempfile::tempdir().unwrap();
    let text: ArrayRef = Arc::new(StringArray::from(vec![None, Some("string")]));
    let inner = |name: &str, array: ArrayRef| -> ArrayRef {
        Arc::new(StructArray::new(vec![Field::new(name, array.data_type().clone(), true)].into(), vec![array], None))
    };
    let port = inner("port", text.clone());
    let names: ArrayRef = Arc::new(StringArray::from(vec!["knots", "tide"]));
    let fields: Fields =
        vec![Field::new("name", DataType::Utf8, true), Field::new("parameters", port.data_type().clone(), true)].into();
    let tools = StructArray::new(fields, vec![names, port], None);
    let item = Arc::new(Field::new("item", tools.data_type().clone(), true));
    let tools: ArrayRef = Arc::new(ListArray::new(item, OffsetBuffer::from_lengths([2]), Arc::new(tools), None));
    let prompt: ArrayRef = Arc::new(StringArray::from(vec!["x"]));
    write_parquet(&dir.path().join("tools.parquet"), vec![("prompt", prompt), ("tools", tools)]);
    let plan = plan_of(dir.path(), &["tools.parquet"], |_| {}).unwrap();
    assert_eq!(
        serde_json::to_value(prompts(&plan)[0].tools.clone()).unwrap(),
        serde_json::json!([
            {"type": "function", "function": {"name": "knots", "parameters": {}}},
            {"type": "function", "function": {"name": "tide", "parameters": {"port": "string"}}},
        ])
    );
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn text_formats_line_ends_and_compression_change_nothing() {
    let plain = jsonl();
    let array = format!(
        "\u{feff} [\n{}\n]\n",
        json_rows().iter().map(|row| serde_json::to_string_pretty(row).unwrap()).collect::<Vec<_>>().join(",\n")
    );
    let messy: String = plain.lines().map(|line| format!("{line}  \r\n\r\n   \n")).collect();
    let (first, second) = plain.as_bytes().split_at(plain.len() / 2);
    let members = [gzip(first), gzip(second)].concat();
    let frames = [zstd::encode_all(first, 1).unwrap(), zstd::encode_all(second, 1).unwrap()].concat();
    let mut csv = csv::Writer::from_writer(Vec::new());
    csv.write_record(["id", "messages", "other"]).unwrap();
    for row in json_rows() {
        csv.write_record([row["id"].as_str().unwrap(), &row["messages"].to_string(), ""]).unwrap();
    }
    let csv = csv.into_inner().unwrap();
    let reference = content(&plan_text("rows.jsonl", &plain, |_| {}).unwrap());
    assert_eq!(reference.0.len(), 3);
    let variants: Vec<(&str, Vec<u8>)> = vec![
        ("no-last-newline.jsonl", plain.trim_end().into()),
        ("bom.jsonl", format!("\u{feff}{plain}").into()),
        ("messy.jsonl", format!("\u{feff}\r\n{messy}").into()),
        ("named-wrongly.jsonl", array.clone().into()),
        ("array.json", array.clone().into()),
        ("no-extension", plain.clone().into()),
        ("rows.jsonl.gz", members),
        ("rows.jsonl.zst", frames),
        ("array.json.gz", gzip(array.as_bytes())),
        ("rows.csv", csv.clone()),
        ("bom.csv.gz", gzip(&[b"\xef\xbb\xbf".as_slice(), &csv].concat())),
    ];
    for (name, bytes) in variants {
        assert_eq!(content(&plan_text(name, bytes, |_| {}).unwrap()), reference, "{name}");
    }
}

#[test]
fn a_bad_row_is_set_aside_alone_with_its_line() {
    let text = concat!(
        "{\"id\": \"a\", \"prompt\": \"crab \\ud83e\\udd80\"}\n\n",
        "{\"id\": \"b\", \"prompt\": \"cut \\ud83e\"}\n",
        "{\"id\": \"c\", \"prompt\": \"unclosed}\n",
        "[\"d\"]\n",
        "{\"id\": \"e\", \"prompt\": \"\\udd80\\ud83e\"}\n",
        "{\"id\": \"f\", \"answer\": \"no prompt\"}\n",
    );
    let plan = plan_text("rows.jsonl", text, |_| {}).unwrap();
    assert_eq!(texts(&plan), ["crab \u{1f980}"]);
    let rejected: Vec<(u64, &str)> = plan.rejected().iter().map(|row| (row.row, row.reason.label())).collect();
    assert_eq!(
        rejected,
        [
            (1, "lone_surrogate"),
            (2, "invalid_json"),
            (3, "not_an_object"),
            (4, "lone_surrogate"),
            (5, "no_prompt_field")
        ]
    );
    assert!(plan.rejected()[0].origin.ends_with("rows.jsonl:3"));
    assert_eq!(plan.rejected()[4].id.as_deref(), Some("f"));
    assert!(plan.rejected()[4].reason.to_string().contains("answer"));
    assert_eq!(plan.rejected_counts()["lone_surrogate"], 2);
    assert_eq!(plan.rows_read(), 6);

    let plan = plan_text("rows.jsonl", text, |spec| spec.bad_text = BadText::Repair).unwrap();
    assert_eq!(texts(&plan), ["crab \u{1f980}", "cut \u{fffd}", "\u{fffd}\u{fffd}"]);
    assert_eq!(plan.repaired(), 2);
}

#[test]
fn bytes_that_are_not_utf8_follow_the_same_rule() {
    let text = b"{\"prompt\": \"fine\"}\n{\"prompt\": \"br\xf6ken\"}\n";
    let plan = plan_text("rows.jsonl", text, |_| {}).unwrap();
    assert_eq!(plan.rejected()[0].reason.label(), "invalid_utf8");
    let plan = plan_text("rows.jsonl", text, |spec| spec.bad_text = BadText::Repair).unwrap();
    assert_eq!(texts(&plan), ["fine", "br\u{fffd}ken"]);
    let plan = plan_text("rows.csv", b"prompt\nfine\nbr\xf6ken\n", |_| {}).unwrap();
    assert_eq!(plan.rejected()[0].reason.label(), "invalid_utf8");
}

#[test]
fn a_bad_element_of_an_array_is_set_aside_alone() {
    let text = "[{\"prompt\": \"a, ] } \\\" [\"}, {\"prompt\": NaN}, 7, {\"prompt\": \"b\"}]";
    let plan = plan_text("rows.json", text, |_| {}).unwrap();
    assert_eq!(texts(&plan), ["a, ] } \" [", "b"]);
    assert_eq!(
        plan.rejected().iter().map(|row| row.reason.label()).collect::<Vec<_>>(),
        ["invalid_json", "not_an_object"]
    );
    assert!(plan.rejected()[1].origin.ends_with("rows.json row 3"));
}

#[test]
fn csv_rows_with_other_fields_are_set_aside() {
    let plan = plan_text("rows.csv", "id,prompt\n1,\"two\nlines\"\n2\n3,x\n", |_| {}).unwrap();
    assert_eq!(texts(&plan), ["two\nlines", "x"]);
    assert!(plan.rejected()[0].origin.ends_with("rows.csv:4"), "{:?}", plan.rejected());
    assert_eq!(plan.rejected()[0].reason.label(), "field_count");
}

#[test]
fn what_is_not_a_data_set_is_refused_in_clear_words() {
    let utf16: Vec<u8> = jsonl().encode_utf16().flat_map(u16::to_le_bytes).collect();
    let mut marked = vec![0xff, 0xfe];
    marked.extend(&utf16);
    let compressed = gzip(jsonl().as_bytes());
    let torn_zstd = zstd::encode_all(jsonl().as_bytes(), 1).unwrap();
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("a.jsonl", marked, "UTF-16LE"),
        ("b.jsonl", utf16, "UTF-16LE"),
        ("c.jsonl", b"<!DOCTYPE html><html>".to_vec(), "HTML"),
        ("d.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n".to_vec(), "Git LFS"),
        ("e.jsonl", b"".to_vec(), "no rows"),
        ("f.jsonl.gz", compressed[..compressed.len() - 9].to_vec(), "cut short"),
        ("g.jsonl.zst", torn_zstd[..torn_zstd.len() - 3].to_vec(), "cut short"),
        ("h.json", b"[{\"prompt\": \"a\"}, {\"prom".to_vec(), "before its array is closed"),
        ("i.jsonl", "once upon\na time\n".into(), "none of its first 2 rows"),
        ("j.json", "{\n  \"prompt\": \"spread\"\n}\n".into(), "none of its first 3 rows"),
        ("k.csv", "a,b\n1,2\n".into(), "columns: a, b"),
        ("l.parquet", b"PAR1 and nothing more".to_vec(), "not a whole Parquet file"),
        ("m.txt", "hello".into(), "cannot tell its format"),
        ("n.jsonl", "{\"answer\": 1}\n".into(), "none of 1 rows can be used: no_prompt_field 1"),
    ];
    for (name, bytes, expected) in cases {
        let error = plan_text(name, bytes, |_| {}).err().unwrap_or_else(|| panic!("{name} was accepted"));
        assert!(error.to_string().contains(expected), "{name}: {error}");
        assert_eq!(error.class(), Class::Data, "{name}");
        assert!(error.hint_text().is_some(), "{name} has no hint");
    }
}

#[test]
fn a_parquet_file_cut_short_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.parquet");
    write_parquet(&path, vec![("prompt", Arc::new(StringArray::from(vec!["a", "b", "c"])))]);
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 20]).unwrap();
    let error = plan_of(dir.path(), &["x.parquet"], |_| {}).err().unwrap();
    assert!(error.to_string().contains("not a whole Parquet file"), "{error}");
    write_parquet(&path, vec![("reply", Arc::new(StringArray::from(vec!["a"])))]);
    let error = plan_of(dir.path(), &["x.parquet"], |_| {}).err().unwrap();
    assert!(error.to_string().contains("columns: reply"), "{error}");
}
