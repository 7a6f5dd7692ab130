//! The file format of scenarios: servers, prompts, accidents, and what is expected. Unknown keys are errors.

use eaglet_serve::simulate::Profile;
use eaglet_serve::simulate::profile::Answers;
use serde::Deserialize;

/// One scenario. Times are in seconds of the pretended servers.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Scenario {
    /// What it shows, for people.
    pub(crate) about: String,
    /// Prompts are started until then; what is out is finished after it.
    pub(crate) seconds: f64,
    /// From then on the rate is compared with the best fixed limit's.
    pub(crate) ramp_s: f64,
    /// The highest limit per server.
    pub(crate) limit_max: usize,
    /// False: whole replies (`--no-stream`).
    #[serde(default = "yes")]
    pub(crate) stream: bool,
    /// Shortest and longest prompt, in tokens.
    pub(crate) prompt_tokens: [usize; 2],
    /// Lengths of answers; each holds for prompts started from `from_s` on.
    pub(crate) answers: Vec<AnswersFrom>,
    /// The servers.
    pub(crate) servers: Vec<Server>,
    /// Changes every prompt.
    #[serde(default)]
    pub(crate) seed: u64,
    /// What must come out.
    pub(crate) expect: Expect,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AnswersFrom {
    #[serde(default)]
    pub(crate) from_s: f64,
    pub(crate) mean_tokens: f64,
    pub(crate) sigma: f64,
    pub(crate) max_tokens: usize,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Server {
    /// A built-in profile.
    profile: String,
    /// Every step takes so many times longer.
    #[serde(default = "one")]
    slower: f64,
    /// In place of the profile's.
    kv_blocks: Option<usize>,
    /// In place of the profile's.
    max_num_seqs: Option<usize>,
    /// Whether the server has gauges.
    #[serde(default = "yes")]
    pub(crate) gauges: bool,
    /// From when to when it is away; what is out breaks.
    #[serde(default)]
    pub(crate) down: Vec<[f64; 2]>,
    /// From when to when a request is refused with 429, and with what probability.
    #[serde(default)]
    pub(crate) refusals: Vec<[f64; 3]>,
    /// A gateway refuses what is more than this at once.
    pub(crate) gateway_in_flight: Option<usize>,
    /// A gateway refuses more requests per second than this (a bucket of ten seconds' worth).
    pub(crate) gateway_per_s: Option<f64>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Expect {
    /// The best fixed limit, as the whole search finds it (`every_best_fixed_limit_is_the_best`).
    pub(crate) best_fixed: usize,
    /// Share of the best fixed limit's rate, after the ramp.
    pub(crate) share_of_best: f64,
    /// Between these the first server's limit is, in the median after the ramp.
    pub(crate) limit: [usize; 2],
    /// Most refusals for each answer.
    #[serde(default)]
    pub(crate) refused_per_answer_max: f64,
}

fn yes() -> bool {
    true
}

fn one() -> f64 {
    1.0
}

impl Server {
    pub(crate) fn profile(&self) -> Profile {
        let mut profile = Profile::named(&self.profile).unwrap_or_else(|| panic!("no profile {:?}", self.profile));
        profile.kv_blocks = self.kv_blocks.unwrap_or(profile.kv_blocks);
        profile.max_num_seqs = self.max_num_seqs.unwrap_or(profile.max_num_seqs);
        profile.step.base_s *= self.slower;
        profile.step.per_running_s *= self.slower;
        profile.step.per_prefill_token_s *= self.slower;
        profile
    }
}

impl AnswersFrom {
    pub(crate) fn answers(&self) -> Answers {
        Answers { mean_tokens: self.mean_tokens, sigma: self.sigma, max_tokens: self.max_tokens, reasoning_share: 0.0 }
    }
}

/// All scenario files, by name.
pub(crate) fn all() -> Vec<(String, Scenario)> {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios");
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
        .iter()
        .map(|path| {
            let text = std::fs::read_to_string(path).unwrap();
            let scenario = toml::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            (path.file_stem().unwrap().to_string_lossy().into_owned(), scenario)
        })
        .collect()
}

pub(crate) fn named(name: &str) -> Scenario {
    all().into_iter().find(|(found, _)| found == name).unwrap_or_else(|| panic!("no scenario {name}")).1
}
