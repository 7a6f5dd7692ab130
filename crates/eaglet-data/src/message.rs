//! One message of a row, in any of the known spellings.
//!
//! Pure functions on JSON values. A null member counts as absent (Parquet pads structs with nulls).

use crate::reject::{RejectReason, shorten};
use crate::tools::{self, CallIds, drop_nulls, take_text};
use eaglet_core::prompt::{Content, Message, Role};
use serde_json::{Map, Value};

/// What a list element turned out to be.
pub(crate) enum Fields {
    /// A message with a role.
    Message(Map<String, Value>),
    /// A question and its answer in one object (`{"human": …, "assistant": …}`), the form of some older sets.
    Exchange {
        /// The person's text.
        user: Option<String>,
        /// The model's text.
        assistant: Option<String>,
    },
}

impl Fields {
    pub(crate) fn of(mut members: Map<String, Value>) -> Self {
        let has = |name: &str| members.get(name).is_some_and(|value| !value.is_null());
        let exchange = ["human", "user"].into_iter().find(|name| has(name));
        if has("role") || has("from") || exchange.is_none() {
            return Fields::Message(members);
        }
        let user = exchange.and_then(|name| take_text(&mut members, name));
        let assistant = ["assistant", "gpt", "bot"].into_iter().find_map(|name| take_text(&mut members, name));
        Fields::Exchange { user, assistant }
    }
}

/// Reads the messages of one conversation in order (ids of tool calls run over the whole of it).
pub(crate) struct Reader<'a> {
    role_map: &'a [(String, Role)],
    call_ids: CallIds,
}

/// What a role name stands for.
enum Speaker {
    Role(Role),
    /// An assistant turn whose text is the JSON of its calls.
    FunctionCall,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(role_map: &'a [(String, Role)]) -> Self {
        Reader { role_map, call_ids: CallIds::default() }
    }

    /// One message; `None` for a system message without text, which says nothing.
    pub(crate) fn read(&mut self, mut members: Map<String, Value>) -> Result<Option<Message>, RejectReason> {
        let name = take_text(&mut members, "role").or_else(|| take_text(&mut members, "from"));
        let name = name.ok_or_else(|| {
            let got = crate::conversation::names(members.keys().map(String::as_str));
            RejectReason::bad_field("message", "a role", format!("only {got}"))
        })?;
        let speaker = self.speaker(&name)?;
        let content = ["content", "value", "text"]
            .into_iter()
            .find_map(|field| members.remove(field).filter(|value| !value.is_null()))
            .unwrap_or(Value::Null);
        match speaker {
            Speaker::FunctionCall => {
                let calls = tools::calls(content)?
                    .ok_or_else(|| RejectReason::BadTools(format!("{} without a call", shorten(&name))))?;
                let mut message = Message::text(Role::Assistant, "");
                message.content = None;
                message.reasoning = reasoning(&mut members);
                message.tool_calls = Some(self.call_ids.finish(calls));
                Ok(Some(message))
            }
            Speaker::Role(role) => self.with_role(role, content, members),
        }
    }

    fn with_role(
        &mut self,
        role: Role,
        content: Value,
        mut members: Map<String, Value>,
    ) -> Result<Option<Message>, RejectReason> {
        let mut message = Message::text(role, "");
        message.content = content_of(content)?;
        message.name = take_text(&mut members, "name");
        match role {
            Role::Assistant => {
                message.reasoning = reasoning(&mut members);
                let calls = ["tool_calls", "function_call"]
                    .into_iter()
                    .find_map(|field| members.remove(field).filter(|value| !value.is_null()))
                    .unwrap_or(Value::Null);
                message.tool_calls = tools::calls(calls)?.map(|calls| self.call_ids.finish(calls));
            }
            Role::Tool => message.tool_call_id = self.call_ids.answered(take_text(&mut members, "tool_call_id")),
            Role::System | Role::Developer if message.content.is_none() => return Ok(None),
            Role::System | Role::Developer | Role::User => {}
        }
        if message.content.is_none() && message.tool_calls.is_none() {
            // The API requires a content here; an assistant turn that only calls tools is the one exception.
            message.content = Some(Content::Text(String::new()));
        }
        Ok(Some(message))
    }

    fn speaker(&self, name: &str) -> Result<Speaker, RejectReason> {
        if let Some((_, role)) = self.role_map.iter().find(|(known, _)| known == name) {
            return Ok(Speaker::Role(*role));
        }
        Ok(Speaker::Role(match name.trim().to_ascii_lowercase().as_str() {
            "system" => Role::System,
            "developer" => Role::Developer,
            "user" | "human" => Role::User,
            "assistant" | "gpt" | "chatgpt" | "bing" | "bard" | "model" => Role::Assistant,
            "tool" | "observation" | "function_response" | "ipython" | "function" => Role::Tool,
            "function_call" => return Ok(Speaker::FunctionCall),
            _ => return Err(RejectReason::UnknownRole(shorten(name))),
        }))
    }
}

fn reasoning(members: &mut Map<String, Value>) -> Option<String> {
    ["reasoning", "reasoning_content", "thinking"].into_iter().find_map(|field| take_text(members, field))
}

/// Text, or the API's parts; `None` for null and for an empty list.
fn content_of(value: Value) -> Result<Option<Content>, RejectReason> {
    match value {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(Content::Text(text))),
        Value::Array(parts) if parts.is_empty() => Ok(None),
        Value::Array(mut parts) if parts.iter().all(Value::is_object) => {
            parts.iter_mut().for_each(drop_nulls);
            Ok(Some(Content::Parts(parts)))
        }
        other => Err(RejectReason::bad_field("content", "text or a list of parts", kind(&other))),
    }
}

/// What a JSON value is, for messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
