//! Going on from the beginning of an answer instead of starting again.
//!
//! What it is: what to ask next for a prompt of which something is there, and what a failed attempt leaves for the next. What it is not: the
//! joining of texts (`client::answer`), the checkpoint file (`checkpoints`). Whatever makes a continuation impossible leads to a request from
//! the beginning; that costs tokens and nothing else.

use super::Run;
use super::server::Server;
use crate::client::answer::{AnswerBuilder, WireEnd};
use crate::client::markers::Marker;
use crate::client::request::{Continuation, SpecialTokens};
use crate::client::{Api, Ask, Asked, AttemptFailure, LiveAnswer, Mode};
use crate::server_info::{self, SIDE_TIMEOUT};
use eaglet_core::inflight::{Seam, Unfinished};
use eaglet_core::outcome::Cause;
use eaglet_core::prompt::{Content, Prompt};
use eaglet_core::response::{Answer, Status};
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// A continuation that failed so often in a row without a further token is given up: the answer starts again.
const FRUITLESS_MAX: u32 = 3;
/// So many refusals in a row, without a continuation that worked, and no more are tried in this run.
const REFUSALS_MAX: u32 = 3;
/// Ids of the end of an answer that are looked at to find out whether they end inside a character, and dropped at most.
const SEAM_IDS: usize = 8;
/// An attempt that brought so many tokens has earned the prompt a new account of retries.
pub(super) const PROGRESS_TOKENS_MIN: u64 = 64;

/// Whether interrupted answers are continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupted {
    /// From their own ids, where the server can do it.
    Continue,
    /// They start again.
    StartAgain,
}

/// What a run knows about continuing on one server.
#[derive(Default)]
pub(super) struct Continuing {
    close: tokio::sync::OnceCell<Option<Marker>>,
    refusals: Cell<u32>,
    off: Cell<bool>,
}

/// What there is of the answer to one turn of one prompt.
#[derive(Default)]
pub(super) struct Draft {
    begun: Option<Unfinished>,
    /// A truncated answer, good in itself, that is being made longer.
    truncated: Option<Box<(Answer, Status)>>,
    /// How often the answer was made longer than its limit.
    rounds: u32,
    fruitless: u32,
    api: Option<Api>,
}

/// What to do next for a prompt.
pub(super) enum Step {
    Ask(Ask),
    /// There is nothing left to ask for.
    Answered(Box<Answer>, Status),
}

/// What a failed attempt means for the draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Broke {
    /// The retry table decides.
    Failed,
    /// The continuation was refused: ask from the beginning, at once.
    Refused,
}

impl Continuing {
    /// Whether the server is still asked to continue answers.
    pub(super) fn is_on(&self) -> bool {
        !self.off.get()
    }
}

impl Draft {
    /// Begins with what an earlier session left.
    pub(super) fn of_earlier_session(mut begun: Unfinished, truncated: &[String]) -> Self {
        begun.end_segment("session_ended");
        let rounds = begun.segments.iter().filter(|segment| truncated.contains(&segment.why)).count();
        Draft { rounds: u32::try_from(rounds).unwrap_or(u32::MAX), begun: Some(begun), ..Draft::default() }
    }

    /// Tokens that are there.
    pub(super) fn tokens(&self) -> u64 {
        self.begun.as_ref().map_or(0, |begun| begun.token_ids.len() as u64)
    }

    /// The draft as a live answer, for the checkpoints, while no request is out; and who answered it so far.
    pub(super) fn at_rest(&self) -> Option<(LiveAnswer, String)> {
        let begun = self.begun.clone()?;
        let endpoint = begun.endpoint.clone();
        Some((Rc::new(RefCell::new(AnswerBuilder::continuing(begun, None))), endpoint))
    }

    /// The truncated answer that was to be made longer, when that came to nothing.
    pub(super) fn take_truncated(&mut self) -> Option<(Box<Answer>, Status)> {
        self.truncated.take().map(|both| (Box::new(both.0), both.1))
    }
}

impl Run {
    /// Whether answers to this prompt can be continued at all: text alone, from ids, under a limit that is known.
    pub(super) fn may_continue(&self, prompt: &Prompt) -> bool {
        let is_text = |part: &Value| part.get("type").and_then(Value::as_str).is_none_or(|kind| kind == "text");
        // An image is in the prompt's ids as a placeholder only.
        let texts = prompt.messages.iter().all(|message| match &message.content {
            Some(Content::Parts(parts)) => parts.iter().all(is_text),
            _ => true,
        });
        self.settings.mode == Mode::Stream
            && self.servers.any_continues()
            && self.template.can_continue()
            && self.template.own_limit().is_ok()
            && prompt.tools.as_ref().is_none_or(Vec::is_empty)
            && texts
    }

    /// What to ask next.
    pub(super) async fn next_step(
        &self,
        draft: &mut Draft,
        chat: &bytes::Bytes,
        limit: Option<u64>,
        server: &Server,
    ) -> Step {
        if let Some(begun) = draft.begun.take() {
            let tokens = begun.token_ids.len() as u64;
            // On the heap: few of the requests out ever need the room.
            if let Some((step, begun)) = Box::pin(self.continuation(begun, draft.rounds, limit, server)).await {
                draft.begun = Some(begun);
                draft.api = Some(Api::Completions);
                return step;
            }
            self.started_again(draft, tokens);
        }
        if let Some((answer, status)) = draft.take_truncated() {
            return Step::Answered(answer, status);
        }
        draft.rounds = 0;
        draft.api = Some(Api::Chat);
        let live = LiveAnswer::default();
        Step::Ask(Ask { api: Api::Chat, body: chat.clone(), mode: self.settings.mode, live })
    }

    async fn continuation(
        &self,
        mut begun: Unfinished,
        rounds: u32,
        limit: Option<u64>,
        server: &Server,
    ) -> Option<(Step, Unfinished)> {
        if !server.continuing.is_on() || !self.settle_seam(&mut begun, server).await {
            return None;
        }
        let max_tokens = self.tokens_left(&begun, rounds, limit)?;
        let close = self.close_marker(&begun, server).await?;
        let special_tokens = if close.is_some() { SpecialTokens::Show } else { SpecialTokens::Skip };
        let mut builder = AnswerBuilder::continuing(begun.clone(), close);
        if max_tokens == 0 {
            // It was cut between its last token and its end.
            builder.end_at_limit();
            let endpoint = begun.endpoint.clone();
            let (answer, status) = builder.finish(WireEnd::Orderly, &self.settings.answers, &endpoint).ok()?;
            return Some((Step::Answered(Box::new(answer), status), begun));
        }
        let rest = Continuation {
            prompt_token_ids: &begun.prompt_token_ids,
            token_ids: &begun.token_ids,
            max_tokens,
            special_tokens,
        };
        let body = self.template.render_continuation(&rest)?.into();
        let live = Rc::new(RefCell::new(builder));
        Some((Step::Ask(Ask { api: Api::Completions, body, mode: Mode::Stream, live }), begun))
    }

    /// Further tokens that the answer may have; `None` when nothing bounds it (a plain completion without a limit has 16 tokens).
    fn tokens_left(&self, begun: &Unfinished, rounds: u32, limit: Option<u64>) -> Option<u64> {
        let own = self.template.own_limit().ok()?;
        let limit = own.or(limit).map(|limit| limit.saturating_mul(u64::from(rounds) + 1));
        tokens_left(limit, self.servers.context(), begun.prompt_token_ids.len() as u64, begun.token_ids.len() as u64)
    }

    /// Cuts an answer whose last ids may end inside a character, with the server's help; false when that is not to be had.
    async fn settle_seam(&self, begun: &mut Unfinished, server: &Server) -> bool {
        if begun.seam == Seam::Clean {
            return true;
        }
        let from = begun.token_ids.len().saturating_sub(2 * SEAM_IDS);
        for dropped in 0..SEAM_IDS.min(begun.token_ids.len()) {
            let end = begun.token_ids.len() - dropped;
            let Some(text) = self.detokenize(&begun.token_ids[from..end], server).await else { return false };
            if !text.ends_with('\u{fffd}') {
                begun.token_ids.truncate(end);
                begun.seam = Seam::Clean;
                return true;
            }
        }
        false
    }

    /// The marker that the rest of the answer will hold: `Some(None)` when the reasoning is over, or never was; `None` when nobody
    /// knows how it ends.
    async fn close_marker(&self, begun: &Unfinished, server: &Server) -> Option<Option<Marker>> {
        if begun.field.is_none() || !begun.content.is_empty() {
            return Some(None);
        }
        let (_, text) = self.settings.answers.reasoning_markers.as_ref()?;
        let find = || async {
            let body = json!({"model": self.server.model, "prompt": text, "add_special_tokens": false});
            let reply = server.client.post("/tokenize", body.to_string().into(), SIDE_TIMEOUT).await.ok();
            let ids = reply.and_then(|reply| reply.json()?.get("tokens")?.as_array().cloned());
            let id = match ids.as_deref() {
                Some([only]) => only.as_u64().and_then(|id| u32::try_from(id).ok()),
                _ => None,
            };
            Some(Marker { text: text.clone(), id })
        };
        let marker = server.continuing.close.get_or_init(find).await.clone()?;
        let is_over = marker.id.is_some_and(|id| begun.token_ids.contains(&id));
        Some(if is_over { None } else { Some(marker) })
    }

    async fn detokenize(&self, ids: &[u32], server: &Server) -> Option<String> {
        server_info::detokenize(&server.client, &self.server.model, ids).await
    }

    /// An attempt failed; its cause is settled. Says how many of its tokens are kept.
    pub(super) fn broke(
        &self,
        draft: &mut Draft,
        failure: &mut AttemptFailure,
        prompt: &Prompt,
        server: &Server,
    ) -> (Broke, u64) {
        let before = draft.tokens();
        let was_continued = draft.api == Some(Api::Completions);
        if was_continued && failure.tokens == 0 && means_refused(failure.cause) {
            self.refused(failure, server);
            draft.begun = None;
            self.started_again(draft, before);
            return (Broke::Refused, 0);
        }
        let goes_on = self.settings.continuation.interrupted == Interrupted::Continue || draft.truncated.is_some();
        let grown = failure.unfinished.take().filter(|_| goes_on && self.may_continue(prompt));
        match grown.filter(|unfinished| unfinished.token_ids.len() as u64 > before) {
            Some(mut unfinished) => {
                unfinished.end_segment(failure.cause.label());
                draft.begun = Some(*unfinished);
                draft.fruitless = 0;
            }
            None if was_continued && !is_the_servers_absence(failure.cause) => {
                draft.fruitless += 1;
                if draft.fruitless >= FRUITLESS_MAX {
                    draft.begun = None;
                    draft.fruitless = 0;
                    self.started_again(draft, before);
                }
            }
            None => {}
        }
        (Broke::Failed, draft.tokens().saturating_sub(before))
    }

    /// The beginning of an answer is given up; a truncated answer that was to be made longer is not lost by that.
    fn started_again(&self, draft: &Draft, tokens: u64) {
        if draft.truncated.is_none() {
            self.books.borrow_mut().started_again(tokens);
        }
    }

    fn refused(&self, failure: &AttemptFailure, server: &Server) {
        let refusals = server.continuing.refusals.get() + 1;
        server.continuing.refusals.set(refusals);
        if (failure.cause == Cause::NotFound || refusals >= REFUSALS_MAX) && !server.continuing.off.replace(true) {
            let text = format!(
                "interrupted answers start again at {}: it does not continue them ({}: {})",
                server.label(),
                failure.cause.label(),
                failure.detail
            );
            self.report(eaglet_core::event::Event::Notice { text });
        }
    }

    /// An answer came. If it is to be made longer, the draft goes on from it; else it is given back.
    pub(super) fn goes_on(
        &self,
        draft: &mut Draft,
        asked: Asked,
        limit: Option<u64>,
        prompt: &Prompt,
        server: &Server,
    ) -> Option<(Box<Answer>, Status)> {
        if draft.api == Some(Api::Completions) {
            server.continuing.refusals.set(0);
        }
        let Asked { answer, status, unfinished, .. } = asked;
        let may = status == Status::Truncated
            && draft.rounds < self.settings.continuation.truncated_rounds
            && self.may_continue(prompt);
        let room = |unfinished: &Unfinished| self.tokens_left(unfinished, draft.rounds + 1, limit).unwrap_or(0);
        let Some(mut unfinished) = unfinished.filter(|unfinished| may && room(unfinished) > 0) else {
            return Some((Box::new(answer), status));
        };
        unfinished.end_segment(&answer.finish_reason);
        draft.begun = Some(*unfinished);
        draft.truncated = Some(Box::new((answer, status)));
        draft.rounds += 1;
        draft.fruitless = 0;
        None
    }

    /// Holds a joined answer against what its ids say, where the server can tell, and flags it if they differ.
    pub(super) async fn check_joined(&self, answer: &mut Answer) {
        let Some(ids) = answer.token_ids.as_deref().filter(|_| !answer.segments.is_empty()) else { return };
        let was_cut = self.settings.answers.truncated.contains(&answer.finish_reason);
        // The end token is no text.
        let (text_ids, end) = match ids.split_last() {
            Some((last, rest)) if !was_cut => (rest, Some(*last)),
            _ => (ids, None),
        };
        let Some(server) = self.servers.one_up() else { return };
        let Some(said) = self.detokenize(text_ids, &server).await else { return };
        let markers = self.settings.answers.reasoning_markers.as_ref();
        if texts_agree(&said, answer, markers) {
            return;
        }
        // A server that was asked to show special tokens may show the last one, too.
        if let Some(end) = end
            && let Some(end) = self.detokenize(&[end], &server).await
            && let Some(without) = without_end(answer, &end).filter(|without| texts_agree(&said, without, markers))
        {
            *answer = without;
            return;
        }
        answer.flags.push("joined_text_differs".to_owned());
    }
}

/// The answer without the text of its end token.
fn without_end(answer: &Answer, end: &str) -> Option<Answer> {
    let cut = |text: &Option<String>| text.as_deref().and_then(|text| text.strip_suffix(end)).map(str::to_owned);
    if end.is_empty() {
        return None;
    }
    match &answer.content {
        Some(_) => {
            Some(Answer { content: Some(cut(&answer.content)?).filter(|text| !text.is_empty()), ..answer.clone() })
        }
        None => Some(Answer { reasoning: Some(cut(&answer.reasoning)?), ..answer.clone() }),
    }
}

/// Whether reasoning and content are what the ids say, markers aside. White space at the beginning (some tokenizers drop it when they
/// decode) and a character that the end of the answer cuts are no difference.
fn texts_agree(said: &str, answer: &Answer, markers: Option<&(String, String)>) -> bool {
    let shown = [answer.reasoning.as_deref(), answer.content.as_deref()].into_iter().flatten().collect::<String>();
    let mut said = said.to_owned();
    if let (Some((open, close)), true) = (markers, answer.reasoning.is_some()) {
        said = said.replacen(open, "", 1).replacen(close, "", 1);
    }
    let body = |text: &str| text.trim_start().trim_end_matches('\u{fffd}').to_owned();
    body(&said) == body(&shown)
}

/// Pure: what both bounds leave.
fn tokens_left(limit: Option<u64>, context: Option<u64>, prompt: u64, answer: u64) -> Option<u64> {
    let by_limit = limit.map(|limit| limit.saturating_sub(answer));
    let by_context = context.map(|context| context.saturating_sub(prompt + answer));
    match (by_limit, by_context) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Whether this answer to a continuation says that it will not be done.
fn means_refused(cause: Cause) -> bool {
    matches!(
        cause,
        Cause::BadRequest
            | Cause::NotFound
            | Cause::Unauthorized
            | Cause::ContextTooLong
            | Cause::Redirect
            | Cause::BadReply
            | Cause::UnknownFinish
            | Cause::MissingText
    )
}

/// Whether a failure says nothing about continuing.
fn is_the_servers_absence(cause: Cause) -> bool {
    matches!(cause, Cause::ServerDown | Cause::Connect | Cause::Overloaded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_may_have_what_limit_and_context_leave() {
        assert_eq!(tokens_left(Some(100), Some(1000), 50, 30), Some(70));
        assert_eq!(tokens_left(Some(2000), Some(1000), 50, 30), Some(920));
        assert_eq!(tokens_left(None, Some(1000), 990, 30), Some(0));
        assert_eq!(tokens_left(None, None, 50, 30), None, "a plain completion without a limit has 16 tokens");
    }

    #[test]
    fn texts_agree_up_to_markers_and_a_cut_character() {
        let answer = |reasoning: Option<&str>, content: &str| Answer {
            reasoning: reasoning.map(str::to_owned),
            content: Some(content.to_owned()),
            ..Answer::default()
        };
        let markers = ("<think>".to_owned(), "</think>".to_owned());
        let agree = |said: &str, answer: &Answer| texts_agree(said, answer, Some(&markers));
        assert!(agree("why</think>because", &answer(Some("why"), "because")));
        assert!(agree("<think>why</think>because\u{fffd}", &answer(Some("why"), "because")));
        assert!(!agree("why</think>because", &answer(Some("why"), "becausebecause")));
        let shown_end = answer(None, "because<end>");
        assert_eq!(without_end(&shown_end, "<end>"), Some(answer(None, "because")));
        assert_eq!((without_end(&shown_end, ""), without_end(&shown_end, "<other>")), (None, None));
        assert!(agree("</think>", &answer(None, "</think>")), "without reasoning a marker is text");
    }
}
