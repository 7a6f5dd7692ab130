//! Tool calls joined from the pieces of a stream: by index, argument text appended.

use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// No model calls more tools than this in one turn; an index beyond it is a broken reply.
const CALLS_MAX: u64 = 1024;

/// The calls gathered so far.
#[derive(Debug, Default)]
pub struct ToolCalls(Vec<Map<String, Value>>);

impl ToolCalls {
    /// Takes the `tool_calls` of a delta (with `index`) or of a message (without).
    ///
    /// # Errors
    /// Says what is wrong when it is no list of objects.
    pub fn push(&mut self, calls: &RawValue) -> Result<(), String> {
        let calls: Vec<Map<String, Value>> =
            serde_json::from_str(calls.get()).map_err(|e| format!("tool_calls is not a list of objects: {e}"))?;
        for (position, mut call) in calls.into_iter().enumerate() {
            let index = call.remove("index").and_then(|i| i.as_u64()).unwrap_or(position as u64);
            if index >= CALLS_MAX {
                return Err(format!("tool_calls has index {index}, more than {CALLS_MAX} calls"));
            }
            let index = usize::try_from(index).unwrap_or(usize::MAX);
            if self.0.len() <= index {
                self.0.resize_with(index + 1, Map::new);
            }
            merge(&mut self.0[index], call);
        }
        Ok(())
    }

    /// Whether none has come.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The calls as the API has them.
    pub fn finish(self) -> Option<Value> {
        (!self.0.is_empty()).then(|| Value::Array(self.0.into_iter().map(Value::Object).collect()))
    }
}

/// `id`, `type` and `name` come once; `arguments` comes in pieces.
fn merge(into: &mut Map<String, Value>, piece: Map<String, Value>) {
    for (key, value) in piece {
        if value.is_null() {
            continue;
        }
        match (into.get_mut(&key), value) {
            (Some(Value::Object(old)), Value::Object(new)) => merge(old, new),
            (Some(Value::String(old)), Value::String(new)) if key == "arguments" => old.push_str(&new),
            (_, value) => {
                into.insert(key, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(pieces: &[&str]) -> Value {
        let mut calls = ToolCalls::default();
        for piece in pieces {
            calls.push(serde_json::from_str(piece).unwrap()).unwrap();
        }
        calls.finish().unwrap()
    }

    #[test]
    fn streamed_pieces_give_what_a_whole_message_gives() {
        let streamed = joined(&[
            r#"[{"index":0,"id":"c0","type":"function","function":{"name":"clock","arguments":""}}]"#,
            r#"[{"index":0,"function":{"arguments":"{\"zone\":"}}]"#,
            r#"[{"index":1,"id":"c1","type":"function","function":{"name":"date","arguments":"{}"}}]"#,
            r#"[{"index":0,"function":{"name":null,"arguments":"1}"}}]"#,
        ]);
        let whole =
            joined(&[r#"[{"id":"c0","type":"function","function":{"name":"clock","arguments":"{\"zone\":1}"}},
                {"id":"c1","type":"function","function":{"name":"date","arguments":"{}"}}]"#]);
        assert_eq!(streamed, whole);
    }

    #[test]
    fn a_wild_index_does_not_take_the_memory() {
        let mut calls = ToolCalls::default();
        assert!(calls.push(serde_json::from_str(r#"[{"index":4000000000}]"#).unwrap()).is_err());
    }
}
