//! What a server without a model answers: the token ids planned for a prompt.
//!
//! Pure: a plan is a function of the rule and the prompt's ids. No pace, no JSON, no sockets.
//!
//! Invariants: the same prompt gets the same ids; a prompt that ends in the first k ids of its own answer gets the rest of that
//! answer, so a continued generation equals the uninterrupted one; a plan that finishes by itself ends in [`EOS`] and holds
//! whole characters only.

use serde::Deserialize;

use crate::{
    random::Random,
    simulate::profile::Lengths,
    vocabulary::{ASSISTANT, EOS, THINK_CLOSE, draw, draw_one},
};

/// The rule by which answers follow from prompts.
#[derive(Clone, Copy, Debug)]
pub struct AnswerRule {
    /// How long answers are.
    pub length: Length,
    /// Share of an answer that is reasoning; 0 is none.
    pub reasoning_share: f64,
    /// Puts the `</think>` token between reasoning and content into the ids (and into the text of plain completions).
    pub think_token: bool,
    /// Changes every answer.
    pub seed: u64,
}

/// How long answers are that finish by themselves, in tokens with the end token.
#[derive(Clone, Copy, Debug)]
pub enum Length {
    /// Evenly between `mean * (1 - spread)` and `mean * (1 + spread)`.
    Even {
        /// The mean in tokens.
        mean: usize,
        /// From 0 to 1.
        spread: f64,
    },
    /// Log-normal: most are short, a few are very long.
    HeavyTailed(Lengths),
}

impl Length {
    /// One length; at least 2.
    fn draw(&self, random: &mut Random) -> usize {
        match self {
            Length::HeavyTailed(lengths) => lengths.draw(random),
            Length::Even { mean, spread } => {
                let (mean, spread) = (*mean as f64, spread.clamp(0.0, 1.0));
                let low = (mean * (1.0 - spread)).round() as usize;
                let high = (mean * (1.0 + spread)).round() as usize;
                let drawn = low + random.below((high - low + 1) as u32) as usize;
                drawn.max(2)
            }
        }
    }
}

/// The name under which reasoning is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(clippy::enum_variant_names, reason = "the variants are the names of the API's fields")]
pub enum Reasoning {
    /// All text is content.
    #[default]
    None,
    /// vLLM's name.
    Reasoning,
    /// The older name, still that of other servers.
    ReasoningContent,
}

impl Reasoning {
    /// The JSON field, or `None` where all text is content.
    pub fn field(self) -> Option<&'static str> {
        match self {
            Reasoning::None => None,
            Reasoning::Reasoning => Some("reasoning"),
            Reasoning::ReasoningContent => Some("reasoning_content"),
        }
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// By its end token.
    Stop,
    /// By the limit of the request.
    Length,
    /// By the server, in the middle; a client that takes this for an answer keeps a torn one.
    Abort,
}

impl Finish {
    /// The name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Abort => "abort",
        }
    }
}

/// What a request allows.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// At most so many tokens.
    pub max_tokens: usize,
    /// At least so many tokens before the end token.
    pub min_tokens: usize,
    /// Goes on to `max_tokens` without an end token.
    pub ignore_eos: bool,
    /// Which of several answers to the same prompt.
    pub choice: usize,
    /// The sampling seed of the request; 0 where it has none.
    pub seed: u64,
}

/// The ids of one answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What is generated, with the end token when it finishes by itself.
    pub ids: Vec<u32>,
    /// Index of the first id after the reasoning (of the `</think>` token where there is one).
    pub reasoning: usize,
    /// How it ends.
    pub finish: Finish,
}

/// Which field the text of a token belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The reasoning field.
    Reasoning,
    /// The content field.
    Content,
    /// No field of a chat answer: a control token.
    Hidden,
}

/// One generated token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// The part of the answer it belongs to.
    pub part: Part,
}

impl Plan {
    /// The tokens from index `from` up to `to`.
    pub fn tokens(&self, from: usize, to: usize) -> Vec<Token> {
        (from..to).map(|index| Token { id: self.ids[index], part: self.part(index) }).collect()
    }

    /// The part the id at `index` belongs to.
    pub fn part(&self, index: usize) -> Part {
        match self.ids[index] {
            EOS | THINK_CLOSE => Part::Hidden,
            _ if index < self.reasoning => Part::Reasoning,
            _ => Part::Content,
        }
    }
}

/// A prompt cut into what the answer follows from and the part of the answer that is already there.
///
/// The cut is after the last token that opens an assistant turn, unless that turn is closed.
pub fn split_prompt(ids: &[u32]) -> (&[u32], &[u32]) {
    let cut = ids.iter().rposition(|&id| id == ASSISTANT).map_or(ids.len(), |index| index + 1);
    let (root, begun) = ids.split_at(cut);
    if begun.contains(&EOS) { (ids, &[]) } else { (root, begun) }
}

impl AnswerRule {
    /// The answer to a prompt of these ids.
    pub fn plan(&self, prompt: &[u32], limits: Limits) -> Plan {
        let (root, begun) = split_prompt(prompt);
        let wanted = begun.len() + limits.max_tokens;
        let mut whole = self.whole(self.seed_of(limits, root), limits, wanted);
        let mut skipped = begun.len();
        if !whole.ids.starts_with(begun) {
            // The turn was begun by someone else: answer the prompt as it stands.
            whole = self.whole(self.seed_of(limits, prompt), limits, limits.max_tokens);
            skipped = 0;
        }
        let mut ids = whole.ids.split_off(skipped);
        let mut finish = whole.finish;
        if ids.len() > limits.max_tokens {
            ids.truncate(limits.max_tokens);
            finish = Finish::Length;
        }
        Plan { ids, reasoning: whole.reasoning.saturating_sub(skipped), finish }
    }

    /// The full answer for a seed. With `ignore_eos` it has at least `wanted` ids and no end token.
    fn whole(&self, seed: u64, limits: Limits, wanted: usize) -> Plan {
        let mut random = Random::new(seed);
        let length = self.length.draw(&mut random).max(limits.min_tokens + 1);
        let before_end = length - 1;
        let mut ids = Vec::with_capacity(length);
        let mut reasoning = 0;
        if self.reasoning_share > 0.0 && before_end > 2 {
            reasoning = (before_end as f64 * self.reasoning_share) as usize;
            fill(&mut ids, reasoning, &mut random);
            if self.think_token {
                ids.push(THINK_CLOSE);
            }
        }
        fill(&mut ids, before_end, &mut random);
        if limits.ignore_eos {
            fill(&mut ids, wanted, &mut random);
            return Plan { ids, reasoning, finish: Finish::Length };
        }
        ids.push(EOS);
        Plan { ids, reasoning, finish: Finish::Stop }
    }

    fn seed_of(&self, limits: Limits, ids: &[u32]) -> u64 {
        seed_of(self.seed ^ limits.seed.rotate_left(32), limits.choice, ids)
    }
}

/// Draws until there are `length` ids; a character that would not fit whole is replaced by a shorter one.
fn fill(ids: &mut Vec<u32>, length: usize, random: &mut Random) {
    while ids.len() < length {
        let drawn = draw(random);
        if ids.len() + drawn.len() <= length {
            ids.extend(drawn);
        } else {
            ids.push(draw_one(random));
        }
    }
}

/// FNV-1a over the ids.
fn seed_of(seed: u64, choice: usize, ids: &[u32]) -> u64 {
    let start = 0xCBF2_9CE4_8422_2325 ^ seed.wrapping_mul(31) ^ ((choice as u64) << 48);
    ids.iter()
        .flat_map(|id| id.to_le_bytes())
        .fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::{BOS, Control, TextStream, USER, decode, encode};

    fn prompt(text: &str) -> Vec<u32> {
        [vec![BOS, USER], encode(text, Control::Plain), vec![EOS, ASSISTANT]].concat()
    }

    fn up_to(max_tokens: usize) -> Limits {
        Limits { max_tokens, min_tokens: 0, ignore_eos: false, choice: 0, seed: 0 }
    }

    fn settings() -> AnswerRule {
        let length = Length::Even { mean: 40, spread: 0.5 };
        AnswerRule { length, reasoning_share: 0.6, think_token: false, seed: 0 }
    }

    /// Reasoning and content, as a chat stream would give them.
    fn parts(plan: &Plan) -> (String, String) {
        let mut stream = TextStream::default();
        let (mut reasoning, mut content) = (String::new(), String::new());
        for (index, &id) in plan.ids.iter().enumerate() {
            match plan.part(index) {
                Part::Reasoning => reasoning.push_str(&stream.push(id)),
                Part::Content => content.push_str(&stream.push(id)),
                Part::Hidden => {}
            }
        }
        content.push_str(&stream.finish());
        (reasoning, content)
    }

    #[test]
    fn repeats_agree_and_prompts_differ() {
        let answer = settings();
        let plans: Vec<Plan> =
            (0..50).map(|number| answer.plan(&prompt(&format!("count {number}")), up_to(999))).collect();
        for (number, plan) in plans.iter().enumerate() {
            assert_eq!(*plan, answer.plan(&prompt(&format!("count {number}")), up_to(999)));
            assert!((20..=60).contains(&plan.ids.len()), "{}", plan.ids.len());
            assert_eq!((plan.ids.last(), plan.finish), (Some(&EOS), Finish::Stop));
            assert_eq!(plans.iter().filter(|other| *other == plan).count(), 1);
        }
    }

    #[test]
    fn ids_without_the_end_decode_to_reasoning_and_content() {
        let answer = AnswerRule { length: Length::Even { mean: 300, spread: 0.5 }, ..settings() };
        for number in 0..40 {
            let plan = answer.plan(&prompt(&number.to_string()), up_to(4000));
            let (reasoning, content) = parts(&plan);
            assert!(!reasoning.is_empty() && !content.is_empty());
            assert!(!reasoning.contains('\u{FFFD}') && !content.contains('\u{FFFD}'), "only whole characters");
            assert_eq!(decode(&plan.ids[..plan.ids.len() - 1]), reasoning + &content);
        }
    }

    #[test]
    fn a_continued_answer_is_the_rest_of_the_answer() {
        for think_token in [false, true] {
            let answer = AnswerRule { think_token, ..settings() };
            let start = prompt("carry on");
            let whole = answer.plan(&start, up_to(999));
            for cut in 0..whole.ids.len() {
                let again = [&start[..], &whole.ids[..cut]].concat();
                let rest = answer.plan(&again, up_to(999));
                assert_eq!(rest.ids, whole.ids[cut..], "cut after {cut}");
                assert_eq!(rest.reasoning, whole.reasoning.saturating_sub(cut));
            }
        }
    }

    #[test]
    fn limits_are_kept() {
        let answer = settings();
        let start = prompt("limits");
        let cut = answer.plan(&start, up_to(5));
        assert_eq!((cut.ids.len(), cut.finish), (5, Finish::Length));
        let long = answer.plan(&start, Limits { ignore_eos: true, ..up_to(500) });
        assert_eq!((long.ids.len(), long.finish, long.ids.contains(&EOS)), (500, Finish::Length, false));
        let least = answer.plan(&start, Limits { min_tokens: 100, ..up_to(500) });
        assert_eq!((least.ids.len(), least.finish), (101, Finish::Stop));
        assert_ne!(cut.ids, answer.plan(&start, Limits { choice: 1, ..up_to(5) }).ids);
        assert_ne!(cut.ids, answer.plan(&start, Limits { seed: 1, ..up_to(5) }).ids);
    }

    #[test]
    fn a_closed_assistant_turn_is_history() {
        let ids = [prompt("first"), vec![300, EOS]].concat();
        assert_eq!(split_prompt(&ids), (&ids[..], &[][..]));
    }
}
