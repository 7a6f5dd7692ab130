//! Regenerating a conversation turn by turn: which messages the next request carries. Pure.
//!
//! Everything that stands between two user turns (the data set's own answers, tool calls and tool results) is replaced by the target's one answer:
//! the target never made those calls.

use eaglet_core::prompt::{Content, Message, Role};
use eaglet_core::response::{Answer, EarlierTurn, Status};
use eaglet_data::Turns;

/// A conversation on its way.
#[derive(Clone, Debug)]
pub struct Conversation {
    /// Messages of the request that is next, or was last.
    messages: Vec<Message>,
    /// User turns still to come, the nearest last.
    to_come: Vec<Message>,
    earlier: Vec<EarlierTurn>,
}

impl Conversation {
    /// Begins a conversation. Only [`Turns::All`] has more than one request.
    pub fn new(messages: &[Message], turns: Turns) -> Self {
        if turns != Turns::All {
            return Conversation { messages: messages.to_vec(), to_come: vec![], earlier: vec![] };
        }
        let first_user = messages.iter().position(|m| m.role == Role::User).unwrap_or(messages.len());
        let to_come: Vec<Message> =
            messages.iter().skip(first_user + 1).filter(|m| m.role == Role::User).rev().cloned().collect();
        let messages = messages.iter().take(first_user + 1).cloned().collect();
        Conversation { messages, to_come, earlier: vec![] }
    }

    /// Messages of the request that is next.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Whether another request follows on this answer to the last one.
    pub fn goes_on_after(&self, answer: &Answer, status: Status) -> bool {
        status == Status::Ok && answer.content.is_some() && !self.to_come.is_empty()
    }

    /// Takes the answer to the last request. Returns it, when the conversation ends with it; else the next request is ready.
    ///
    /// A conversation ends early at an answer that was cut or is empty: what would follow would not follow from it.
    pub fn answered(&mut self, answer: Answer, status: Status) -> Option<Answer> {
        if !self.goes_on_after(&answer, status) {
            return Some(answer);
        }
        let Some(next) = self.to_come.pop() else { return Some(answer) };
        let reply = Message {
            content: answer.content.clone().map(Content::Text),
            tool_calls: answer.tool_calls.clone(),
            ..Message::text(Role::Assistant, "")
        };
        self.earlier.push(EarlierTurn { messages_sent: self.messages.len(), answer });
        self.messages.push(reply);
        self.messages.push(next);
        None
    }

    /// The messages last sent and the answers before the last one.
    pub fn finish(self) -> (Vec<Message>, Vec<EarlierTurn>) {
        (self.messages, self.earlier)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conversation() -> Vec<Message> {
        [
            (Role::System, "s"),
            (Role::User, "u1"),
            (Role::Assistant, "theirs"),
            (Role::Tool, "t"),
            (Role::Assistant, "theirs too"),
            (Role::User, "u2"),
        ]
        .map(|(role, text)| Message::text(role, text))
        .to_vec()
    }

    fn answer(text: &str) -> Answer {
        Answer { content: Some(text.into()), ..Answer::default() }
    }

    fn texts(messages: &[Message]) -> Vec<String> {
        messages
            .iter()
            .map(|m| match &m.content {
                Some(Content::Text(text)) => format!("{} {text}", m.role.as_str()),
                other => format!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn each_user_turn_is_answered_on_the_targets_own_answers() {
        let mut chat = Conversation::new(&conversation(), Turns::All);
        assert_eq!(texts(chat.messages()), ["system s", "user u1"]);
        assert!(chat.answered(answer("mine"), Status::Ok).is_none());
        assert_eq!(texts(chat.messages()), ["system s", "user u1", "assistant mine", "user u2"]);
        assert!(chat.answered(answer("last"), Status::Ok).is_some());
        let (messages, earlier) = chat.finish();
        assert_eq!((messages.len(), earlier.len(), earlier[0].messages_sent), (4, 1, 2));
    }

    #[test]
    fn a_cut_answer_ends_the_conversation() {
        let mut chat = Conversation::new(&conversation(), Turns::All);
        assert!(chat.answered(answer("cut"), Status::Truncated).is_some());
    }

    #[test]
    fn other_modes_send_the_conversation_as_it_is() {
        assert_eq!(Conversation::new(&conversation(), Turns::Last).messages(), conversation());
    }
}
