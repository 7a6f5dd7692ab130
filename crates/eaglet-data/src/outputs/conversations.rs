//! Conversations for SpecForge's `train_data_path`, which renders and masks them itself.
//!
//! SpecForge trains on every assistant message and ends each with the template's end of turn. So a conversation is left out where that would train on what the
//! target did not say, and the reason is counted:
//!
//! | word | the conversation |
//! |---|---|
//! | `cut_answer` | was cut at the token limit: the template would make up an end |
//! | `other_assistant` | holds an assistant's message that is the data set's, not the target's |
//! | `turn_dropped` | has a turn that was dropped |
//! | `no_text` | has a message whose content is no plain text, or an answer without text |
//!
//! Only the fields that SpecForge's parser takes are written; it refuses rows with others.

use super::Encoded;
use crate::prepare::record::{RecordView, Texts};
use eaglet_core::prompt::{Content, Message, Role};
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// Where the conversation of an example is found.
#[derive(Clone, Copy)]
pub(crate) struct ConversationSource<'a> {
    pub(crate) record: &'a RecordView<'a>,
    /// Index of the example's turn in the record.
    pub(crate) turn: usize,
    /// Whether every turn of the record became an example.
    pub(crate) all_turns_kept: bool,
}

#[derive(Serialize)]
struct Row<'a> {
    id: &'a str,
    conversations: Vec<Spoken<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<&'a RawValue>,
}

/// A message, with the fields that the parser takes.
#[derive(Serialize)]
struct Spoken<'a> {
    role: &'a str,
    content: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<&'a str>,
}

/// The line of a conversation, with its last turn.
pub(super) fn specforge(source: &ConversationSource<'_>) -> Encoded {
    let record = source.record;
    if source.turn + 1 != record.turns.len() {
        return Encoded::WithLastTurn;
    }
    if !source.all_turns_kept {
        return Encoded::LeftOut("turn_dropped");
    }
    line(record).map_or_else(Encoded::LeftOut, Encoded::Bytes)
}

fn line(record: &RecordView<'_>) -> Result<Vec<u8>, &'static str> {
    if record.turns.iter().any(|turn| turn.finish_reason == "length") {
        return Err("cut_answer");
    }
    let messages = record.messages.ok_or("no_text")?;
    let mut messages: Vec<Message> = serde_json::from_str(messages.get()).map_err(|_| "no_text")?;
    for (at, message) in messages.iter_mut().enumerate().filter(|(_, message)| message.role == Role::Assistant) {
        // The answer to the first `n` messages is message `n`.
        let answered = record.turns.iter().find(|turn| turn.messages_sent == Some(at)).ok_or("other_assistant")?;
        message.reasoning = text(answered.texts.reasoning);
    }
    let answer = record.turns.last().ok_or("no_text")?;
    messages.push(answer_message(&answer.texts)?);
    let conversations = messages.iter().map(spoken).collect::<Result<Vec<_>, _>>()?;
    let row = Row { id: &record.sample_id, conversations, tools: record.tools };
    let mut line = serde_json::to_vec(&row).expect("text and JSON are JSON");
    line.push(b'\n');
    Ok(line)
}

fn answer_message(texts: &Texts<'_>) -> Result<Message, &'static str> {
    let content = text(texts.content).unwrap_or_default();
    let tool_calls: Option<Value> =
        texts.tool_calls.map(|calls| serde_json::from_str(calls.get())).transpose().map_err(|_| "no_text")?;
    if content.is_empty() && tool_calls.is_none() {
        return Err("no_text");
    }
    let reasoning = text(texts.reasoning);
    Ok(Message { reasoning, tool_calls, ..Message::text(Role::Assistant, content) })
}

fn spoken(message: &Message) -> Result<Spoken<'_>, &'static str> {
    let content = match &message.content {
        Some(Content::Text(text)) => text.as_str(),
        Some(Content::Parts(_)) => return Err("no_text"),
        None => "",
    };
    Ok(Spoken {
        role: message.role.as_str(),
        content,
        reasoning_content: message.reasoning.clone(),
        tool_calls: message.tool_calls.as_ref(),
        name: message.name.as_deref(),
        tool_call_id: message.tool_call_id.as_deref(),
    })
}

fn text(json: Option<&RawValue>) -> Option<String> {
    serde_json::from_str(json?.get()).ok()
}
