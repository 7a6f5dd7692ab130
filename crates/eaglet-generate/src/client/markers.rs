//! The border between reasoning and content in the text of a plain completion.
//!
//! What it is: the part of a server's reasoning parser that a continued answer needs, because `/v1/completions` has no parser and the chat
//! API's parser starts anew in the middle of an answer. What it is not: a reader of whole answers with markers inside their content (that is
//! done in `answer` when nobody else has). Pure.
//!
//! Invariant: with the marker taken out, what comes out is what went in, whatever the pieces.

/// The marker that ends reasoning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marker {
    /// Its text, never empty.
    pub text: String,
    /// Its token, where the server's tokenizer has one for it. The same text spelled by other tokens is then no marker.
    pub id: Option<u32>,
}

/// The marker's token came together with others, and the text does not show where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoBorder;

/// Text of one piece, by side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sides {
    /// Before the marker.
    pub reasoning: String,
    /// After it.
    pub content: String,
}

/// Sends each piece of text to its side of the marker.
#[derive(Clone, Debug)]
pub struct Splitter {
    /// `None` behind the marker.
    close: Option<Marker>,
    /// What may be the beginning of the marker's text.
    held: String,
}

impl Splitter {
    /// Begins inside the reasoning that `close` ends, or without one in the content.
    pub fn new(close: Option<Marker>) -> Self {
        Splitter { close, held: String::new() }
    }

    /// Takes one piece and the ids it came with.
    ///
    /// # Errors
    /// The border is in this piece and cannot be seen.
    pub fn push(&mut self, text: &str, ids: &[u32]) -> Result<Sides, NoBorder> {
        let Some(close) = &self.close else { return Ok(Sides { content: text.to_owned(), ..Sides::default() }) };
        match close.id.filter(|_| !ids.is_empty()) {
            Some(id) => match ids.iter().position(|found| *found == id) {
                None => Ok(Sides { reasoning: text.to_owned(), ..Sides::default() }),
                Some(position) => {
                    let sides = match text.split_once(close.text.as_str()) {
                        Some((before, after)) => Sides { reasoning: before.to_owned(), content: after.to_owned() },
                        // A server that shows no special tokens.
                        None if position == 0 => Sides { content: text.to_owned(), ..Sides::default() },
                        None if position + 1 == ids.len() => Sides { reasoning: text.to_owned(), ..Sides::default() },
                        None => return Err(NoBorder),
                    };
                    self.close = None;
                    Ok(sides)
                }
            },
            None => Ok(self.push_text(text)),
        }
    }

    fn push_text(&mut self, text: &str) -> Sides {
        let Some(close) = &self.close else { return Sides::default() };
        let mut all = std::mem::take(&mut self.held);
        all.push_str(text);
        if let Some((before, after)) = all.split_once(close.text.as_str()) {
            let sides = Sides { reasoning: before.to_owned(), content: after.to_owned() };
            self.close = None;
            return sides;
        }
        let keep = (1..close.text.len())
            .rev()
            .find(|length| close.text.is_char_boundary(*length) && all.ends_with(&close.text[..*length]))
            .unwrap_or(0);
        self.held = all.split_off(all.len() - keep);
        Sides { reasoning: all, ..Sides::default() }
    }

    /// Whether all text that came has gone to its side.
    pub fn is_clean(&self) -> bool {
        self.held.is_empty()
    }

    /// The text that was held back and turned out to be no marker.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(id: Option<u32>) -> Option<Marker> {
        Some(Marker { text: "</think>".into(), id })
    }

    fn split(pieces: &[&str]) -> (String, String) {
        let mut splitter = Splitter::new(close(None));
        let (mut reasoning, mut content) = (String::new(), String::new());
        for piece in pieces {
            let sides = splitter.push(piece, &[]).unwrap();
            reasoning.push_str(&sides.reasoning);
            content.push_str(&sides.content);
        }
        reasoning.push_str(&splitter.finish());
        (reasoning, content)
    }

    proptest! {
        #[test]
        fn the_border_does_not_depend_on_the_pieces(
            before in "[a</thinké>]{0,12}", after in "[a</think>é]{0,12}", size in 1usize..5, closed: bool,
        ) {
            let text = if closed { format!("{before}</think>{after}") } else { before };
            let chars: Vec<char> = text.chars().collect();
            let pieces: Vec<String> = chars.chunks(size).map(|piece| piece.iter().collect()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let (reasoning, content) = text.split_once("</think>").unwrap_or((&text, ""));
            prop_assert_eq!(split(&pieces), (reasoning.to_owned(), content.to_owned()));
        }
    }

    #[test]
    fn with_its_token_known_the_same_text_from_other_tokens_is_text() {
        let mut splitter = Splitter::new(close(Some(4)));
        let sides = splitter.push("say </think> aloud", &[9, 10]).unwrap();
        assert_eq!(sides.reasoning, "say </think> aloud");
        let sides = splitter.push("x</think>y", &[9, 4, 10]).unwrap();
        assert_eq!((sides.reasoning.as_str(), sides.content.as_str()), ("x", "y"));
        assert_eq!(splitter.push("</think>", &[4]).unwrap().content, "</think>", "only the first one is the border");
    }

    #[test]
    fn a_hidden_marker_is_a_border_where_it_can_be_seen() {
        let hidden = |ids: &[u32], text: &str| Splitter::new(close(Some(4))).push(text, ids);
        assert_eq!(hidden(&[4], "").unwrap(), Sides::default());
        assert_eq!(hidden(&[4, 9], "a").unwrap().content, "a");
        assert_eq!(hidden(&[9, 4], "a").unwrap().reasoning, "a");
        assert_eq!(hidden(&[9, 4, 9], "ab"), Err(NoBorder));
    }
}
