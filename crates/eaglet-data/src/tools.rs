//! Tool definitions and tool calls of a row, brought into the chat API's form.
//!
//! Pure functions on JSON values. Invariants: null members are dropped at every depth (Parquet pads structs with them, and
//! tool `a` must not gain the parameters of tool `b`); `arguments` is always a JSON *text*, as the API has it.

use crate::reject::{RejectReason, shorten};
use serde_json::{Map, Value, json};

/// Removes null members of objects at every depth. Nulls inside lists stay: a list position can mean something.
pub(crate) fn drop_nulls(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        Value::Object(members) => {
            members.retain(|_, member| !member.is_null());
            members.values_mut().for_each(drop_nulls);
        }
        _ => {}
    }
}

/// The row's tools: `[{"type": "function", "function": {…}}, …]`. `None` when there are none.
pub(crate) fn definitions(value: Value) -> Result<Option<Vec<Value>>, RejectReason> {
    let Some(items) = list(value, "tools")? else {
        return Ok(None);
    };
    items.into_iter().filter(|item| !item.is_null()).map(definition).collect::<Result<Vec<_>, _>>().map(non_empty)
}

fn definition(value: Value) -> Result<Value, RejectReason> {
    let mut value = match value {
        // Some data sets keep each definition as a text of its own, because definitions have no common schema.
        Value::String(text) => parse(&text, "a tool definition")?,
        other => other,
    };
    drop_nulls(&mut value);
    match value {
        Value::Object(mut members) if members.get("function").is_some_and(Value::is_object) => {
            if !members.contains_key("type") {
                members.shift_insert(0, "type".to_owned(), json!("function"));
            }
            Ok(Value::Object(members))
        }
        Value::Object(members) if members.get("name").is_some_and(Value::is_string) => {
            Ok(json!({"type": "function", "function": members}))
        }
        other => Err(RejectReason::BadTools(format!(
            "expected a definition with a name, got {}",
            shorten(&other.to_string())
        ))),
    }
}

/// The calls of one assistant turn: a list, one object, or either as JSON text. Calls without an id stay without one
/// here; [`CallIds`] gives them theirs.
pub(crate) fn calls(value: Value) -> Result<Option<Vec<Call>>, RejectReason> {
    let Some(items) = list(value, "tool calls")? else {
        return Ok(None);
    };
    items.into_iter().filter(|item| !item.is_null()).map(call).collect::<Result<Vec<_>, _>>().map(non_empty)
}

/// One tool call before it has its final id.
pub(crate) struct Call {
    id: Option<String>,
    name: String,
    arguments: String,
}

fn call(value: Value) -> Result<Call, RejectReason> {
    let bad = |got: &str| RejectReason::BadTools(format!("expected a call with a name, got {}", shorten(got)));
    let value = match value {
        Value::String(text) => parse(&text, "a tool call")?,
        other => other,
    };
    let Value::Object(mut outer) = value else {
        return Err(bad(&value.to_string()));
    };
    let id = outer.remove("id").and_then(text_of);
    let mut function = match outer.remove("function") {
        Some(Value::Object(function)) => function,
        _ => outer,
    };
    let Some(name) = function.remove("name").and_then(text_of) else {
        return Err(bad(&Value::Object(function).to_string()));
    };
    let arguments = function.remove("arguments").or_else(|| function.remove("parameters"));
    let arguments = match arguments {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) => text,
        Some(mut value) => {
            drop_nulls(&mut value);
            value.to_string()
        }
    };
    Ok(Call { id, name, arguments })
}

/// Gives calls their ids and tool messages the id of the call they answer, in order of appearance.
#[derive(Default)]
pub(crate) struct CallIds {
    given: u32,
    unanswered: std::collections::VecDeque<String>,
    last: Option<String>,
}

impl CallIds {
    /// The calls in the API's form; a call without an id becomes `call_0`, `call_1`, … over the conversation.
    pub(crate) fn finish(&mut self, calls: Vec<Call>) -> Value {
        let finished = calls.into_iter().map(|call| {
            let id = call.id.unwrap_or_else(|| format!("call_{}", self.given));
            self.given += 1;
            self.unanswered.push_back(id.clone());
            json!({"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
        });
        Value::Array(finished.collect())
    }

    /// The id of the call that a tool message answers: its own, else the oldest unanswered call.
    pub(crate) fn answered(&mut self, own: Option<String>) -> Option<String> {
        match own {
            Some(own) => {
                self.unanswered.retain(|id| *id != own);
                Some(own)
            }
            // More results than calls: the extra ones belong to the call answered last.
            None => {
                self.last = self.unanswered.pop_front().or_else(|| self.last.take());
                self.last.clone()
            }
        }
    }
}

/// A list, or one object as a list of one, or either as JSON text; `None` for absent and empty.
fn list(value: Value, what: &str) -> Result<Option<Vec<Value>>, RejectReason> {
    match value {
        Value::Null => Ok(None),
        Value::Array(items) => Ok(non_empty(items)),
        Value::Object(members) if members.is_empty() => Ok(None),
        Value::Object(_) => Ok(Some(vec![value])),
        Value::String(text) if text.trim().is_empty() => Ok(None),
        Value::String(text) => match parse(&text, what)? {
            Value::String(_) => Err(RejectReason::BadTools(format!("{what}: text inside text"))),
            parsed => list(parsed, what),
        },
        other => Err(RejectReason::BadTools(format!("{what}: expected a list, got {}", shorten(&other.to_string())))),
    }
}

fn parse(text: &str, what: &str) -> Result<Value, RejectReason> {
    serde_json::from_str(text).map_err(|error| {
        if crate::json_text::repair_lone_surrogates(text.as_bytes()).is_some() {
            RejectReason::LoneSurrogate
        } else {
            RejectReason::BadTools(format!("{what}: not JSON: {error}"))
        }
    })
}

fn non_empty<T>(items: Vec<T>) -> Option<Vec<T>> {
    (!items.is_empty()).then_some(items)
}

/// A text that is not empty.
pub(crate) fn text_of(value: Value) -> Option<String> {
    match value {
        Value::String(text) if !text.is_empty() => Some(text),
        _ => None,
    }
}

/// A text member that is not empty, taken out of `members`.
pub(crate) fn take_text(members: &mut Map<String, Value>, name: &str) -> Option<String> {
    members.remove(name).and_then(text_of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_and_wrapped_definitions_become_the_same() {
        let wrapped =
            json!([{"type": "function", "function": {"name": "tide", "parameters": {"port": {"type": "string"}}}}]);
        let padded = json!([{"name": "tide", "strict": null, "parameters": {"port": {"type": "string", "enum": null}, "n": null}}]);
        let text = Value::String(padded.to_string());
        let each = json!([padded[0].to_string()]);
        for form in [wrapped.clone(), padded, text, each] {
            assert_eq!(Value::Array(definitions(form).unwrap().unwrap()), wrapped);
        }
        for none in [json!(null), json!([]), json!(""), json!("[]")] {
            assert_eq!(definitions(none).unwrap(), None);
        }
        for bad in [json!(["tide"]), json!(3), json!([{"parameters": {}}]), json!("[1")] {
            assert_eq!(definitions(bad).unwrap_err().label(), "bad_tools");
        }
    }

    #[test]
    fn calls_get_ids_and_their_answers_find_them() {
        let two = json!(
            "[{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"id\": \"k\", \"function\": {\"name\": \"g\", \"arguments\": \"{ }\"}}]"
        );
        let mut ids = CallIds::default();
        let made = ids.finish(calls(two).unwrap().unwrap());
        assert_eq!(
            made,
            json!([
                {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}},
                {"id": "k", "type": "function", "function": {"name": "g", "arguments": "{ }"}},
            ])
        );
        assert_eq!(ids.answered(Some("k".to_owned())).as_deref(), Some("k"));
        assert_eq!(ids.answered(None).as_deref(), Some("call_0"));
        assert_eq!(ids.answered(None).as_deref(), Some("call_0"), "a second result of the same call");
        assert_eq!(CallIds::default().answered(None), None);
    }
}
