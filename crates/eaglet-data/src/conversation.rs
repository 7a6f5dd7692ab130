//! Dialects: one row of a data set, as a JSON object, becomes a conversation in the chat API's form.
//!
//! What is here: pure functions from a row to id, source, messages and tools, or to the reason why not. What is not: files,
//! formats, filters, hashing. Invariants: roles are mapped by name, never by position; the order of messages is the
//! row's; nothing the row says is dropped without a rule stated here.
//!
//! Where the prompt is looked for, first one that is not empty: `messages`, `conversations`, `conversation` (lists, JSON
//! text of a list, or a struct of lists), `body.messages` (batch files), `prompt` (text or list), `question`, `problem`, `query`,
//! `instruction` (joined with a non-empty `input` by one blank line), `turns` (list of user texts), `text`. A `system` or
//! `system_prompt` text goes in front unless the conversation brings its own system message.

use crate::json_text;
use crate::message::{self, Fields};
use crate::reject::{RejectReason, shorten};
use crate::row::Row;
use crate::spec::{BadText, DatasetSpec, Turns};
use crate::tools;
use eaglet_core::ids::PromptId;
use eaglet_core::prompt::{Content, Message, Role};
use serde_json::{Map, Value};
use std::borrow::Cow;

/// Fields that hold an id, in order of preference.
const ID_FIELDS: [&str; 7] = ["id", "sample_id", "prompt_id", "conversation_id", "uuid", "question_id", "custom_id"];
/// Fields that say where a row comes from.
const SOURCE_FIELDS: [&str; 3] = ["source", "category", "dataset"];
/// Fields that hold a list of messages.
const LIST_FIELDS: [&str; 3] = ["messages", "conversations", "conversation"];
/// Fields that hold the user's text.
const TEXT_FIELDS: [&str; 4] = ["question", "problem", "query", "instruction"];
/// Further fields that may hold a prompt, in forms of their own.
const OTHER_PROMPT_FIELDS: [&str; 4] = ["prompt", "turns", "text", "body"];
/// Fields that accompany a prompt.
const SIDE_FIELDS: [&str; 5] = ["input", "system", "system_prompt", "tools", "functions"];

/// The name of a column that may hold (part of) a prompt or its context.
pub(crate) fn known_field(name: &str) -> Option<&'static str> {
    [&LIST_FIELDS[..], &TEXT_FIELDS, &OTHER_PROMPT_FIELDS, &ID_FIELDS, &SOURCE_FIELDS, &SIDE_FIELDS]
        .into_iter()
        .flatten()
        .find(|known| **known == name)
        .copied()
}

/// Whether a column of this name may hold a prompt by itself.
pub(crate) fn is_prompt_field(name: &str) -> bool {
    [&LIST_FIELDS[..], &TEXT_FIELDS, &OTHER_PROMPT_FIELDS].iter().any(|group| group.contains(&name))
}

/// What a row says.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// The data set's own id.
    pub id: Option<PromptId>,
    /// Where the row comes from inside the data set.
    pub source: Option<String>,
    /// The conversation as it is to be sent: ends with a user or tool message.
    pub messages: Vec<Message>,
    /// Tool definitions in the API's form.
    pub tools: Option<Vec<Value>>,
    /// Whether text inside the row had to be repaired.
    pub repaired: bool,
}

/// A row's own id as text, taken out of the row: from `id_field` (which stays, it may be part of the prompt too), else from the first known
/// field that holds text or a whole number.
pub fn take_row_id(row: &mut Row, id_field: Option<&str>) -> Option<String> {
    match id_field {
        Some(field) => row.lookup(field).cloned().and_then(id_text),
        None => ID_FIELDS.iter().find_map(|field| row.remove(field).and_then(id_text)),
    }
}

fn id_text(value: Value) -> Option<String> {
    match value {
        Value::String(text) if !text.is_empty() => Some(text),
        Value::Number(number) if !number.is_f64() => Some(number.to_string()),
        // pandas turns a column of integers with gaps into floats; below 2^53 they are still whole.
        Value::Number(number) => {
            number.as_f64().filter(|id| id.fract() == 0.0 && id.abs() < 9e15).map(|id| format!("{id:.0}"))
        }
        _ => None,
    }
}

/// Reads one row, whose id is that of [`take_row_id`]; the id stays with the caller unless the row can be used. `spec` says how (turns, system message, role
/// names, bad text).
pub fn read_row(mut row: Row, id: &mut Option<String>, spec: &DatasetSpec) -> Result<Conversation, RejectReason> {
    if let (None, Some(field)) = (&id, &spec.id_field) {
        return Err(RejectReason::MissingId(field.clone()));
    }
    let mut repaired = false;
    let found = find_messages(&mut row, spec, &mut repaired)?;
    let mut tools_value = ["tools", "functions"].iter().find_map(|name| row.remove(name).filter(|v| !v.is_null()));
    if tools_value.is_none() {
        tools_value = found.tools;
    }
    let tools = tools::definitions(tools_value.unwrap_or(Value::Null))?;
    let mut messages = found.messages;
    if let Some(own) = row.take_text("system").or_else(|| row.take_text("system_prompt")) {
        put_system(&mut messages, own, false);
    }
    if let Some(system) = &spec.system {
        put_system(&mut messages, system.clone(), true);
    }
    cut(&mut messages, spec.turns, found.answers_missing)?;
    let source = SOURCE_FIELDS.iter().find_map(|name| row.take_text(name));
    Ok(Conversation { id: id.take().map(PromptId::given), source, messages, tools, repaired })
}

/// Messages found in a row, before anything is cut.
struct Found {
    messages: Vec<Message>,
    /// The user messages follow one another because the answers between them do not exist yet.
    answers_missing: bool,
    /// Tools that stand beside the messages in a nested body.
    tools: Option<Value>,
}

impl Found {
    fn messages(messages: Vec<Message>) -> Self {
        Found { messages, answers_missing: false, tools: None }
    }

    fn user(text: String) -> Self {
        Self::messages(vec![Message::text(Role::User, text)])
    }
}

fn find_messages(row: &mut Row, spec: &DatasetSpec, repaired: &mut bool) -> Result<Found, RejectReason> {
    let mut empty_text = false;
    let mut empty_list = false;
    for field in LIST_FIELDS {
        if let Some(value) = row.remove(field) {
            match message_list(value, field, spec, repaired)? {
                Some(messages) => return Ok(Found::messages(messages)),
                None => empty_list = true,
            }
        }
    }
    if let Some(Value::Object(mut body)) = row.remove("body") {
        let messages = body.remove("messages").unwrap_or(Value::Null);
        if let Some(messages) = message_list(messages, "body.messages", spec, repaired)? {
            return Ok(Found { messages, answers_missing: false, tools: body.remove("tools") });
        }
    }
    match row.remove("prompt") {
        Some(Value::String(text)) if text.trim().is_empty() => empty_text = true,
        Some(Value::String(text)) => return Ok(Found::user(text)),
        Some(Value::Null) | None => {}
        Some(Value::Array(items)) if items.iter().any(Value::is_string) => {
            return turns(items, "prompt");
        }
        Some(value) => match message_list(value, "prompt", spec, repaired)? {
            Some(messages) => return Ok(Found::messages(messages)),
            None => empty_list = true,
        },
    }
    for field in TEXT_FIELDS {
        match row.remove(field) {
            Some(Value::String(text)) if text.trim().is_empty() => empty_text = true,
            Some(Value::String(text)) if field == "instruction" => {
                let input = row.take_text("input").filter(|input| !input.trim().is_empty());
                return Ok(Found::user(input.map_or(text.clone(), |input| format!("{text}\n\n{input}"))));
            }
            Some(Value::String(text)) => return Ok(Found::user(text)),
            Some(Value::Null) | None => {}
            Some(other) => {
                return Err(RejectReason::bad_field(field, "text", message::kind(&other)));
            }
        }
    }
    match row.remove("turns").map(|value| decoded(value, "turns", spec, repaired)).transpose()? {
        Some(Value::Array(items)) if items.iter().any(Value::is_string) => {
            return turns(items, "turns");
        }
        Some(Value::Null) | None => {}
        Some(value) => match message_list(value, "turns", spec, repaired)? {
            Some(messages) => return Ok(Found::messages(messages)),
            None => empty_list = true,
        },
    }
    match row.remove("text") {
        Some(Value::String(text)) if !text.trim().is_empty() => Ok(Found::user(text)),
        Some(Value::String(_)) => Err(RejectReason::EmptyUserText),
        _ if empty_text => Err(RejectReason::EmptyUserText),
        _ if empty_list => Err(RejectReason::NoUserMessage),
        _ => Err(RejectReason::NoPromptField(String::new())),
    }
}

/// A list of user texts.
fn turns(items: Vec<Value>, field: &str) -> Result<Found, RejectReason> {
    let messages = items
        .into_iter()
        .filter(|item| !item.is_null())
        .map(|item| match item {
            Value::String(text) => Ok(Message::text(Role::User, text)),
            other => Err(RejectReason::bad_field(field, "a list of texts", message::kind(&other))),
        })
        .collect::<Result<_, _>>()?;
    Ok(Found { messages, answers_missing: true, tools: None })
}

/// A list of messages in any of its layouts; `None` when it is absent or empty.
fn message_list(
    value: Value,
    field: &str,
    spec: &DatasetSpec,
    repaired: &mut bool,
) -> Result<Option<Vec<Message>>, RejectReason> {
    let items = match decoded(value, field, spec, repaired)? {
        Value::Null => return Ok(None),
        Value::String(text) if text.trim().is_empty() => return Ok(None),
        Value::Array(items) => items,
        Value::Object(columns) => transposed(columns, field)?,
        other => {
            return Err(RejectReason::bad_field(field, "a list of messages", message::kind(&other)));
        }
    };
    let mut messages = Vec::with_capacity(items.len());
    let mut reader = message::Reader::new(&spec.role_map);
    for item in items {
        match item {
            Value::Null => {}
            Value::Object(members) => match Fields::of(members) {
                Fields::Message(members) => messages.extend(reader.read(members)?),
                Fields::Exchange { user, assistant } => {
                    messages.extend(user.map(|text| Message::text(Role::User, text)));
                    messages.extend(assistant.map(|text| Message::text(Role::Assistant, text)));
                }
            },
            other => {
                return Err(RejectReason::bad_field(field, "a list of messages", message::kind(&other)));
            }
        }
    }
    Ok((!messages.is_empty()).then_some(messages))
}

/// JSON text is parsed (some data sets store the list that way); everything else is left as it is.
fn decoded(value: Value, field: &str, spec: &DatasetSpec, repaired: &mut bool) -> Result<Value, RejectReason> {
    let Value::String(text) = &value else {
        return Ok(value);
    };
    if text.trim().is_empty() {
        return Ok(Value::Null);
    }
    let error = match serde_json::from_str(text) {
        Ok(parsed) => return Ok(parsed),
        Err(error) => error,
    };
    let Some(fixed) = json_text::repair_lone_surrogates(text.as_bytes()) else {
        return Err(RejectReason::bad_field(field, "a list of messages", format!("text that is not JSON ({error})")));
    };
    match (spec.bad_text, serde_json::from_slice(&fixed)) {
        (BadText::Repair, Ok(parsed)) => {
            *repaired = true;
            Ok(parsed)
        }
        _ => Err(RejectReason::LoneSurrogate),
    }
}

/// A struct of lists, `{"role": […], "content": […]}`, as a list of structs.
fn transposed(columns: Map<String, Value>, field: &str) -> Result<Vec<Value>, RejectReason> {
    let mut rows: Vec<Map<String, Value>> = Vec::new();
    let mut lengths: Option<usize> = None;
    for (name, column) in columns {
        let cells = match column {
            Value::Null => continue,
            Value::Array(cells) => cells,
            other => {
                return Err(RejectReason::bad_field(
                    field,
                    "a list of messages",
                    format!("an object whose {} is {}", shorten(&name), message::kind(&other)),
                ));
            }
        };
        if *lengths.get_or_insert(cells.len()) != cells.len() {
            return Err(RejectReason::bad_field(field, "lists of one length", "lists of different lengths"));
        }
        rows.resize_with(cells.len(), Map::new);
        for (row, cell) in rows.iter_mut().zip(cells).filter(|(_, cell)| !cell.is_null()) {
            row.insert(name.clone(), cell);
        }
    }
    Ok(rows.into_iter().map(Value::Object).collect())
}

/// Puts a system message in front; with `replace`, in place of the conversation's own.
fn put_system(messages: &mut Vec<Message>, text: String, replace: bool) {
    let is_system = |message: &Message| matches!(message.role, Role::System | Role::Developer);
    if replace {
        messages.retain(|message| !is_system(message));
    } else if messages.first().is_some_and(is_system) {
        return;
    }
    messages.insert(0, Message::text(Role::System, text));
}

/// Drops what is not sent, and checks that something is asked.
fn cut(messages: &mut Vec<Message>, turns: Turns, answers_missing: bool) -> Result<(), RejectReason> {
    let first_user = messages.iter().position(|message| message.role == Role::User);
    let first_user = first_user.ok_or(RejectReason::NoUserMessage)?;
    let only_first = turns == Turns::First || (turns == Turns::Last && answers_missing);
    let last = if only_first {
        first_user
    } else {
        messages.iter().rposition(|m| matches!(m.role, Role::User | Role::Tool)).unwrap_or(first_user)
    };
    messages.truncate(last + 1);
    let asked = messages.iter().rfind(|message| message.role == Role::User);
    match asked.and_then(|message| message.content.as_ref()) {
        Some(content) if !is_blank(content) => Ok(()),
        _ => Err(RejectReason::EmptyUserText),
    }
}

/// Whether a content says nothing: blank text, or parts that are all blank text.
fn is_blank(content: &Content) -> bool {
    match content {
        Content::Text(text) => text.trim().is_empty(),
        Content::Parts(parts) => parts.iter().all(|part| {
            part.get("type").is_none_or(|kind| kind == "text")
                && part.get("text").and_then(Value::as_str).is_none_or(|text| text.trim().is_empty())
        }),
    }
}

/// Names for an error message: `a, b, c`.
pub(crate) fn names<'a>(names: impl IntoIterator<Item = &'a str>) -> Cow<'static, str> {
    let list = names.into_iter().collect::<Vec<_>>().join(", ");
    if list.is_empty() { Cow::Borrowed("none") } else { Cow::Owned(shorten(&list)) }
}

#[cfg(test)]
#[path = "conversation_tests.rs"]
mod tests;
