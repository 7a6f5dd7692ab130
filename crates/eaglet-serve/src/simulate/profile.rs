//! What a simulated server pretends to be: sizes, what a step costs, how long answers are. Plain data, read from TOML.
//!
//! The built-in profiles are made to show stated figures (see [`Profile::named`]); `tests/curve.rs` holds them to it.
//!
//! Invariant: a [`Profile`] that passed [`Profile::check`] can serve any one sequence of `max_model_len` tokens by itself.

use eaglet_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::not_toml_of;
use eaglet_core::random::Random;

/// The names [`Profile::named`] knows.
pub const PROFILE_NAMES: [&str; 2] = ["kimi-k2.5-8gpu", "small"];

/// A server to be pretended. All times are in seconds of the pretended server, whatever the speed it is played at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// What the profile is called.
    pub name: String,
    /// The id under `/v1/models`.
    pub model: String,
    /// Prompt and answer together, in tokens.
    pub max_model_len: usize,
    /// Most sequences in one batch.
    pub max_num_seqs: usize,
    /// Most tokens in one step: one for each decoding sequence, the rest for pieces of prompts.
    pub max_batched_tokens: usize,
    /// Tokens in one block of the key-value cache.
    pub block_tokens: usize,
    /// Blocks of the key-value cache.
    pub kv_blocks: usize,
    /// Most sequences in the queue; one more is refused. Absent: no bound, as vLLM has none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_queued: Option<usize>,
    /// The first step after a start takes so much longer, in seconds.
    #[serde(default)]
    pub warm_up_s: f64,
    /// What a step costs.
    pub step: StepCost,
    /// How long answers are.
    pub answers: Answers,
}

/// The time of one step: `base_s + per_running_s * sequences + per_prefill_token_s * prompt tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepCost {
    /// Seconds of a step, whatever is in it.
    pub base_s: f64,
    /// Seconds for each sequence in the step.
    pub per_running_s: f64,
    /// Seconds for each prompt token in the step beyond the first of its sequence; recomputed tokens count as prompt tokens.
    pub per_prefill_token_s: f64,
}

/// How long answers are: log-normal, heavy-tailed, and a function of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answers {
    /// Mean length in tokens where requests allow `max_tokens`, end token included.
    pub mean_tokens: f64,
    /// Standard deviation of the logarithm of the length; 0 makes all alike.
    pub sigma: f64,
    /// The limit for which `mean_tokens` is stated. Longer answers exist, and are cut by a request that allows no more.
    pub max_tokens: usize,
    /// Share of an answer that is reasoning; 0 is a model that does not reason.
    #[serde(default)]
    pub reasoning_share: f64,
}

impl Profile {
    /// A built-in profile.
    ///
    /// - `kimi-k2.5-8gpu`: a large model on 8 GPUs: 1,536 tokens/s at 128 requests in flight, about 1,600 at 200, less beyond,
    ///   since the cache is full and sequences are thrown out and computed again.
    /// - `small`: a small model on a CPU: some 10 tokens/s alone, about 100 at 32, no more beyond.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "kimi-k2.5-8gpu" => Some(Self {
                name: name.to_owned(),
                model: "moonshotai/Kimi-K2.5".to_owned(),
                max_model_len: 16_384,
                max_num_seqs: 256,
                max_batched_tokens: 8_192,
                block_tokens: 16,
                kv_blocks: 24_000,
                max_queued: None,
                warm_up_s: 2.0,
                step: StepCost { base_s: 0.0107, per_running_s: 0.000_545, per_prefill_token_s: 0.000_1 },
                answers: Answers { mean_tokens: 1263.0, sigma: 1.0, max_tokens: 8_192, reasoning_share: 0.6 },
            }),
            "small" => Some(Self {
                name: name.to_owned(),
                model: "small".to_owned(),
                max_model_len: 4_096,
                max_num_seqs: 32,
                max_batched_tokens: 2_048,
                block_tokens: 128,
                kv_blocks: 364,
                max_queued: None,
                warm_up_s: 3.0,
                step: StepCost { base_s: 0.09, per_running_s: 0.006_6, per_prefill_token_s: 0.000_4 },
                answers: Answers { mean_tokens: 160.0, sigma: 0.7, max_tokens: 1_024, reasoning_share: 0.0 },
            }),
            _ => None,
        }
    }

    /// Reads and checks a profile.
    ///
    /// # Errors
    /// `Usage` when the text is no TOML of a profile, or a value cannot be; the message names the place.
    pub fn from_toml(text: &str) -> Result<Self> {
        let profile: Self = toml::from_str(text).map_err(|error| not_toml_of("a profile", text, &error))?;
        profile.check()?;
        Ok(profile)
    }

    /// The profile as TOML that [`from_toml`](Self::from_toml) reads.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("plain numbers and texts can always be written as TOML")
    }

    /// Whether a server can be like this.
    ///
    /// # Errors
    /// `Usage`, naming the field, what it is and what it must be.
    pub fn check(&self) -> Result<()> {
        let must = |holds: bool, what: String| if holds { Ok(()) } else { Err(Error::usage(what)) };
        let counts = [
            ("max_model_len", self.max_model_len, 2),
            ("max_num_seqs", self.max_num_seqs, 1),
            ("block_tokens", self.block_tokens, 1),
            ("answers.max_tokens", self.answers.max_tokens, 1),
        ];
        for (name, value, least) in counts {
            must(value >= least, format!("{name} must be at least {least}, got {value}"))?;
        }
        must(
            self.max_batched_tokens >= self.max_num_seqs,
            format!(
                "max_batched_tokens must be at least max_num_seqs = {}, got {}",
                self.max_num_seqs, self.max_batched_tokens
            ),
        )?;
        must(
            self.kv_blocks.saturating_mul(self.block_tokens) >= self.max_model_len,
            format!(
                "kv_blocks * block_tokens must hold one sequence of max_model_len = {} tokens, got {} * {}",
                self.max_model_len, self.kv_blocks, self.block_tokens
            ),
        )?;
        let StepCost { base_s, per_running_s, per_prefill_token_s } = self.step;
        let Answers { mean_tokens, sigma, max_tokens, reasoning_share } = self.answers;
        let ranges = [
            ("warm_up_s", self.warm_up_s, 0.0, 1e6),
            ("step.base_s", base_s, 0.0, 1e3),
            ("step.per_running_s", per_running_s, 0.0, 1e3),
            ("step.per_prefill_token_s", per_prefill_token_s, 0.0, 1e3),
            ("answers.mean_tokens", mean_tokens, 1.0, max_tokens as f64),
            ("answers.sigma", sigma, 0.0, 3.0),
            ("answers.reasoning_share", reasoning_share, 0.0, 1.0),
        ];
        for (name, value, low, high) in ranges {
            must((low..=high).contains(&value), format!("{name} must be from {low} to {high}, got {value}"))?;
        }
        must(
            base_s + per_running_s > 0.0,
            "a step must take time: step.base_s and step.per_running_s are both 0".into(),
        )
    }

    /// Blocks that `tokens` take.
    pub(super) fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens)
    }
}

/// Lengths to be drawn, made once from [`Answers`].
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    /// Mean of the logarithm.
    mu: f64,
    sigma: f64,
}

impl Lengths {
    /// Finds the log-normal distribution whose mean is the stated one after lengths are cut at `max_tokens`.
    pub fn new(answers: &Answers) -> Self {
        const STEPS: usize = 60;
        let cap = answers.max_tokens as f64;
        let (mut low, mut high) = (-40.0, 40.0);
        for _ in 0..STEPS {
            let mu = (low + high) / 2.0;
            if mean_cut_at(cap, mu, answers.sigma) < answers.mean_tokens {
                low = mu;
            } else {
                high = mu;
            }
        }
        Self { mu: (low + high) / 2.0, sigma: answers.sigma }
    }

    /// One length in tokens, with the end token; at least 2.
    pub fn draw(&self, random: &mut Random) -> usize {
        let length = (self.mu + self.sigma * normal_quantile(random.unit())).exp().round();
        (length as usize).max(2)
    }
}

/// The mean of `min(length, cap)`, by the middle of each of 1,000 equal shares.
fn mean_cut_at(cap: f64, mu: f64, sigma: f64) -> f64 {
    const SHARES: usize = 1000;
    let middle = |share: usize| (share as f64 + 0.5) / SHARES as f64;
    let sum: f64 = (0..SHARES).map(|share| (mu + sigma * normal_quantile(middle(share))).exp().min(cap)).sum();
    sum / SHARES as f64
}

/// The standard normal value below which the share `p` lies, by Acklam's rational approximation (relative error below 1.2e-9).
fn normal_quantile(p: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969_683_028_665_376e1,
        2.209_460_984_245_205e2,
        -2.759_285_104_469_687e2,
        1.383_577_518_672_69e2,
        -3.066_479_806_614_716e1,
        2.506_628_277_459_239,
    ];
    const B: [f64; 6] = [
        -5.447_609_879_822_406e1,
        1.615_858_368_580_409e2,
        -1.556_989_798_598_866e2,
        6.680_131_188_771_972e1,
        -1.328_068_155_288_572e1,
        1.0,
    ];
    const C: [f64; 6] = [
        -7.784_894_002_430_293e-3,
        -3.223_964_580_411_365e-1,
        -2.400_758_277_161_838,
        -2.549_732_539_343_734,
        4.374_664_141_464_968,
        2.938_163_982_698_783,
    ];
    const D: [f64; 5] =
        [7.784_695_709_041_462e-3, 3.224_671_290_700_398e-1, 2.445_134_137_142_996, 3.754_408_661_907_416, 1.0];
    const TAIL: f64 = 0.024_25;
    let horner = |coefficients: &[f64], x: f64| coefficients.iter().fold(0.0, |sum, c| sum * x + c);
    let tail = |share: f64| {
        let q = (-2.0 * share.ln()).sqrt();
        horner(&C, q) / horner(&D, q)
    };
    if p < TAIL {
        tail(p)
    } else if p > 1.0 - TAIL {
        -tail(1.0 - p)
    } else {
        let q = p - 0.5;
        horner(&A, q * q) * q / horner(&B, q * q)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_profiles_are_sound_and_survive_their_own_toml() {
        for name in PROFILE_NAMES {
            let profile = Profile::named(name).unwrap();
            assert_eq!(profile.name, name);
            profile.check().map_err(|e| e.to_string()).unwrap();
            assert_eq!(Profile::from_toml(&profile.to_toml()).map_err(|e| e.to_string()).unwrap(), profile);
        }
        assert_eq!(Profile::named("large"), None);
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        let good = Profile::named("small").unwrap().to_toml();
        let cases = [
            ("kv_blocks = 364", "kv_blocks = 3", "kv_blocks"),
            ("max_num_seqs = 32", "max_num_seqs = 0", "max_num_seqs"),
            ("sigma = 0.7", "sigma = -1.0", "sigma"),
            ("model = \"small\"", "modle = \"small\"", "modle"),
            ("mean_tokens = 160.0", "mean_tokens = 9000.0", "mean_tokens"),
        ];
        for (old, new, named) in cases {
            assert!(good.contains(old), "{old} is not in\n{good}");
            let error = Profile::from_toml(&good.replace(old, new)).unwrap_err();
            assert!(error.to_string().contains(named), "{error}");
        }
    }

    #[test]
    fn drawn_lengths_have_the_stated_mean_and_a_heavy_tail() {
        let answers = Profile::named("kimi-k2.5-8gpu").unwrap().answers;
        let lengths = Lengths::new(&answers);
        let mut random = Random::new(1);
        let mut drawn: Vec<usize> = (0..100_000).map(|_| lengths.draw(&mut random)).collect();
        let mean = drawn.iter().map(|&length| length.min(answers.max_tokens) as f64).sum::<f64>() / drawn.len() as f64;
        assert!((mean / answers.mean_tokens - 1.0).abs() < 0.02, "{mean}");
        drawn.sort_unstable();
        let cut = drawn.iter().filter(|&&length| length > answers.max_tokens).count();
        assert!((300..2000).contains(&cut), "{cut} of 100,000 beyond the limit");
        assert!(drawn[drawn.len() / 2] < 900, "the median lies well below the mean");
    }

    #[test]
    fn the_normal_quantile_is_known_at_known_places() {
        for (p, value) in [(0.5, 0.0), (0.975, 1.959_964), (0.001, -3.090_232), (0.841_344_7, 1.0)] {
            assert!((normal_quantile(p) - value).abs() < 1e-5, "{p}");
        }
    }
}
