//! What is sent: messages, and the prompt they belong to.
//!
//! A [`Message`] has the shape of the chat API. Absent fields are absent, not null: Parquet pads struct fields with
//! nulls, and a `"tool_calls": null` changes how some templates render.

use crate::ids::{ContentHash, PromptId, PromptKey, hash128};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions in front of the conversation (`developer` is kept apart where a data set uses it).
    System,
    /// Instructions, in the newer name some APIs use.
    Developer,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// A tool's result.
    Tool,
}

impl Role {
    /// The chat API's word.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::Developer => "developer",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// Text, or the API's list of parts; absent for an assistant turn that only calls tools.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<Content>,
    /// Reasoning of an assistant turn, under the name newer servers read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The calls of an assistant turn, as the API has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Value>,
    /// Which call a tool message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Name of the speaker or tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// Content of a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// Plain text.
    Text(String),
    /// Parts as the API has them (text parts, images, …), sent on as they are.
    Parts(Vec<Value>),
}

impl Content {
    /// Length of the text in bytes; of parts, of their text fields.
    pub fn text_bytes(&self) -> usize {
        match self {
            Content::Text(text) => text.len(),
            Content::Parts(parts) => parts.iter().filter_map(|part| part.get("text")?.as_str()).map(str::len).sum(),
        }
    }
}

impl Message {
    /// Length of its text in bytes.
    pub fn text_bytes(&self) -> usize {
        self.content.as_ref().map_or(0, Content::text_bytes)
    }

    /// A message that is only text.
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        Message {
            role,
            content: Some(Content::Text(text.into())),
            reasoning: None,
            tool_calls: None,
            tool_call_id: None,
            name: None,
        }
    }
}

/// One conversation to be answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    /// Its name in records.
    pub id: PromptId,
    /// Hash of `messages` and `tools`.
    pub hash: ContentHash,
    /// 0-based position in the data set, over all its files, before any selection.
    pub row: u64,
    /// Where it came from inside the data set (its `source` column), for counting losses by source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// The conversation, system message first if there is one.
    pub messages: Vec<Message>,
    /// Tool definitions as the API has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<Value>>,
}

impl Prompt {
    /// A prompt whose hash fits its messages; without a given id, the id follows the hash.
    pub fn new(
        given_id: Option<PromptId>,
        row: u64,
        source: Option<String>,
        messages: Vec<Message>,
        tools: Option<Vec<Value>>,
    ) -> Self {
        let hash = content_hash(&messages, tools.as_deref());
        let id = given_id.unwrap_or_else(|| PromptId::from_hash(hash));
        Prompt { id, hash, row, source, messages, tools }
    }

    /// What a run knows this prompt by.
    pub fn key(&self) -> PromptKey {
        PromptKey::new(self.id.as_str(), self.hash)
    }

    /// Length of all message texts in UTF-8 bytes.
    pub fn text_bytes(&self) -> usize {
        self.messages.iter().map(Message::text_bytes).sum()
    }
}

/// Hash of a conversation: of the JSON of its messages and tools, absent fields left out, keys in a fixed order.
///
/// The same conversation read from Parquet, JSONL or CSV has the same hash, so a run may be resumed on a converted file.
pub fn content_hash(messages: &[Message], tools: Option<&[Value]>) -> ContentHash {
    let mut json = Vec::with_capacity(64 + messages.iter().map(|m| m.text_bytes() + 32).sum::<usize>());
    json.push(b'[');
    for (index, message) in messages.iter().enumerate() {
        if index > 0 {
            json.push(b',');
        }
        write_canonical(message, &mut json);
    }
    json.push(b']');
    if let Some(tools) = tools.filter(|tools| !tools.is_empty()) {
        json.push(b'\n');
        write_json(&tools.iter().map(canonical).collect::<Vec<_>>(), &mut json);
    }
    ContentHash(hash128(&json))
}

/// As `serde_json` writes it; most texts hold nothing to escape, and one vectorised look tells.
fn write_text(text: &str, json: &mut Vec<u8>) {
    let has_escapes = text.bytes().fold(false, |found, byte| found | (byte < 0x20) | (byte == b'"') | (byte == b'\\'));
    if has_escapes {
        return write_json(&text, json);
    }
    json.push(b'"');
    json.extend_from_slice(text.as_bytes());
    json.push(b'"');
}

fn write_json(value: &impl Serialize, json: &mut Vec<u8>) {
    serde_json::to_writer(json, value).expect("plain JSON goes to memory without fail");
}

/// The message with its keys sorted, without a detour over [`Value`] for the usual case of plain text: a plan hashes every row.
fn write_canonical(message: &Message, json: &mut Vec<u8>) {
    let mut separator = b'{';
    let mut member = |name: &str, write: &mut dyn FnMut(&mut Vec<u8>)| {
        json.push(separator);
        separator = b',';
        write_text(name, json);
        json.push(b':');
        write(json);
    };
    match &message.content {
        Some(Content::Text(text)) => member("content", &mut |json| write_text(text, json)),
        Some(Content::Parts(parts)) => {
            member("content", &mut |json| write_json(&parts.iter().map(canonical).collect::<Vec<_>>(), json));
        }
        None => {}
    }
    for (name, text) in [("name", &message.name), ("reasoning", &message.reasoning)] {
        if let Some(text) = text {
            member(name, &mut |json| write_text(text, json));
        }
    }
    member("role", &mut |json| write_text(message.role.as_str(), json));
    if let Some(id) = &message.tool_call_id {
        member("tool_call_id", &mut |json| write_text(id, json));
    }
    if let Some(calls) = message.tool_calls.as_ref().filter(|calls| !calls.is_null()) {
        member("tool_calls", &mut |json| write_json(&canonical(calls), json));
    }
    json.push(b'}');
}

/// The value with object keys sorted and null members dropped, at every depth.
fn canonical(value: &Value) -> Value {
    match value {
        Value::Array(items) => Value::Array(items.iter().map(canonical).collect()),
        Value::Object(members) => {
            let mut sorted: Vec<_> = members.iter().filter(|(_, v)| !v.is_null()).collect();
            sorted.sort_by(|a, b| a.0.cmp(b.0));
            Value::Object(sorted.into_iter().map(|(k, v)| (k.clone(), canonical(v))).collect())
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn user(text: &str) -> Vec<Message> {
        vec![Message::text(Role::User, text)]
    }

    #[test]
    fn the_hash_ignores_nulls_and_key_order_but_nothing_else() {
        let with = |calls: Value| {
            let mut message = Message::text(Role::Assistant, "");
            message.tool_calls = Some(calls);
            vec![message]
        };
        let a = with(json!([{"type": "function", "function": {"name": "f", "arguments": "{}"}}]));
        let b = with(json!([{"function": {"arguments": "{}", "name": "f", "id": null}, "type": "function"}]));
        assert_eq!(content_hash(&a, None), content_hash(&b, None));
        assert_ne!(content_hash(&user("a"), None), content_hash(&user("b"), None));
        assert_ne!(content_hash(&user("a"), None), content_hash(&user("a"), Some(&[json!({"name": "t"})])));
    }

    /// The hash is part of the record format: it must never change.
    #[test]
    fn the_hash_is_that_of_the_sorted_json_without_nulls() {
        let mut call = Message::text(Role::Assistant, "x\u{0}\"é\u{2028}");
        call.name = Some("n".into());
        call.reasoning = Some("r".into());
        call.tool_calls = Some(json!([{"type": "function", "id": null, "function": {"name": "f", "arguments": "{}"}}]));
        let mut result = Message::text(Role::Tool, "");
        result.content = Some(Content::Parts(vec![json!({"type": "text", "text": "p", "a": null})]));
        result.tool_call_id = Some("c".into());
        let messages = [call, result, Message { content: None, ..Message::text(Role::User, "") }];
        let tools = [json!({"type": "function", "function": {"name": "f", "b": null}})];
        let sorted = messages.iter().map(|m| canonical(&serde_json::to_value(m).unwrap())).collect::<Vec<_>>();
        let tools_sorted = tools.iter().map(canonical).collect::<Vec<_>>();
        let text =
            format!("{}\n{}", serde_json::to_string(&sorted).unwrap(), serde_json::to_string(&tools_sorted).unwrap());
        assert_eq!(content_hash(&messages, Some(&tools)), ContentHash(hash128(text.as_bytes())));
        assert_eq!(content_hash(&user("hello"), None).to_string(), "913943507625143fb0fa58ffc8ac9ab1");
    }

    #[test]
    fn a_row_without_an_id_is_named_after_its_content() {
        let prompt = Prompt::new(None, 7, None, user("hello"), None);
        assert_eq!(prompt.id.as_str(), format!("hash-{}", &prompt.hash.to_string()[..16]));
        assert_eq!(prompt.key(), Prompt::new(None, 9, None, user("hello"), None).key());
    }

    #[test]
    fn absent_fields_stay_absent_in_json() {
        let text = serde_json::to_string(&Message::text(Role::User, "x\u{0}y")).unwrap();
        assert_eq!(text, "{\"role\":\"user\",\"content\":\"x\\u0000y\"}");
    }
}
