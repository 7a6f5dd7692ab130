//! Arguments of `generate` and `doctor`.

use super::seconds;
use clap::{Args, ValueEnum};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

/// `eaglet generate`
#[derive(Args)]
#[command(
    after_help = "Interrupt it as you like: the same command goes on where it stopped. Ctrl-C once finishes what is out, \
                        twice saves and leaves, three times leaves at once."
)]
pub(crate) struct GenerateArgs {
    /// Run directory; if it holds a run, that run goes on
    #[arg(long, value_name = "DIR")]
    pub(crate) output_dir: PathBuf,
    #[command(flatten)]
    pub(crate) input: Input,
    #[command(flatten)]
    pub(crate) connection: Connection,
    #[command(flatten)]
    pub(crate) limits: Limits,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) judging: Judging,
    #[command(flatten)]
    pub(crate) unfinished: UnfinishedArgs,
    /// Go on with the run in the directory; always so, the flag is accepted for old command lines
    #[arg(long, help_heading = "Run")]
    pub(crate) resume: bool,
    /// Also send prompts again that failed in earlier sessions
    #[arg(long, help_heading = "Run")]
    pub(crate) retry_failed: bool,
    /// Go on although dataset, model or sampling changed; the change is recorded in run.json
    #[arg(long, help_heading = "Run")]
    pub(crate) allow_config_change: bool,
    /// Share of prompts that may fail before the exit code is 1 (0.01 = 1 %)
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share, help_heading = "Run")]
    pub(crate) failure_tolerance: f64,
    /// Longest time between an answer's end and its sync to the disk
    #[arg(long, value_name = "TIME", default_value = "1", value_parser = seconds::parse, help_heading = "Run")]
    pub(crate) sync_interval: Duration,
    /// After SIGTERM, time to finish what is out
    #[arg(long, value_name = "TIME", default_value = "60", value_parser = seconds::parse, help_heading = "Run")]
    pub(crate) drain_deadline: Duration,
    /// Run in the background, in a session of its own; print the process id
    #[arg(long, help_heading = "Run")]
    pub(crate) detach: bool,
    /// Do not ask for a probe answer before a new run begins
    #[arg(long, help_heading = "Run")]
    pub(crate) no_probe: bool,
    /// Print the last state as JSON on stdout
    #[arg(long, help_heading = "Run")]
    pub(crate) json: bool,
}

/// `eaglet doctor`
#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// Run directory that will be used, for the disk check
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) output_dir: PathBuf,
    #[command(flatten)]
    pub(crate) input: DoctorInput,
    #[command(flatten)]
    pub(crate) connection: Connection,
    #[command(flatten)]
    pub(crate) limits: Limits,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    /// Print JSON on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

/// The data set is optional for `doctor`.
#[derive(Args)]
pub(crate) struct DoctorInput {
    /// Data set to read and count as well
    #[arg(long, value_name = "DATASET", num_args = 1..)]
    pub(crate) dataset: Vec<String>,
    /// Prompts at most
    #[arg(long, value_name = "N")]
    pub(crate) max_samples: Option<u64>,
}

/// Which prompts.
#[derive(Args)]
#[command(next_help_heading = "Prompts")]
pub(crate) struct Input {
    /// File, directory, glob, hub name (owner/name, owner/name:split) or - for stdin; may be repeated.
    /// Parquet, JSONL, JSON, CSV, each also .gz or .zst
    #[arg(long, value_name = "DATASET", required = true, num_args = 1..)]
    pub(crate) dataset: Vec<String>,
    /// Prompts at most, counting usable, distinct ones
    #[arg(long, value_name = "N")]
    pub(crate) max_samples: Option<u64>,
    /// Only rows whose field has (or with != has not) this value; may be repeated
    #[arg(long = "where", value_name = "FIELD=VALUE")]
    pub(crate) filters: Vec<String>,
    /// Shuffle the prompts, the same way for the same seed
    #[arg(long, value_name = "SEED")]
    pub(crate) shuffle: Option<u64>,
    /// System message of every prompt, in place of the data set's own
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Which turns of a conversation are answered
    #[arg(long, value_enum, default_value_t = Turns::Last)]
    pub(crate) turns: Turns,
    /// Rows with broken Unicode
    #[arg(long, value_enum, default_value_t = BadText::SetAside)]
    pub(crate) bad_text: BadText,
    /// Rows that share an id but not their text
    #[arg(long, value_enum, default_value_t = Duplicates::Refuse)]
    pub(crate) duplicates: Duplicates,
    /// Read this role name as system, user, assistant or tool; may be repeated
    #[arg(long, value_name = "NAME=ROLE")]
    pub(crate) map_role: Vec<String>,
    /// Field that holds the id
    #[arg(long, value_name = "FIELD")]
    pub(crate) id_field: Option<String>,
}

/// How to reach the server.
#[derive(Args)]
#[command(next_help_heading = "Server")]
pub(crate) struct Connection {
    /// Server, with or without /v1; may be repeated: the same model on several servers [default: http://127.0.0.1:8000]
    #[arg(long, visible_alias = "vllm-url", value_name = "URL")]
    pub(crate) url: Vec<String>,
    /// File with one server a line (# begins a comment), read again while the run goes on: new ones join, those taken off it
    /// finish what is out
    #[arg(long, value_name = "FILE", conflicts_with = "url")]
    pub(crate) url_file: Option<PathBuf>,
    /// Model name to ask for; by default the one the server lists
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// The model's own directory or hub id: chooses the model on a server with several, and tells its width for the disk estimate
    #[arg(long, value_name = "DIR")]
    pub(crate) model_path: Option<String>,
    /// Requests out at once at each server: auto finds the server's knee and holds it, a number pins it
    #[arg(long, value_name = "auto|N", default_value = "auto", value_parser = concurrency)]
    pub(crate) concurrency: ConcurrencyArg,
    /// auto: at most so many at each server [default: 1024, or what open files allow]
    #[arg(long, value_name = "N")]
    pub(crate) concurrency_max: Option<NonZeroUsize>,
    /// Environment variable that holds the API key
    #[arg(long, value_name = "NAME")]
    pub(crate) api_key_env: Option<String>,
    /// Header of every request; may be repeated
    #[arg(long, value_name = "NAME: VALUE")]
    pub(crate) header: Vec<String>,
    /// JSON object merged into every request, e.g. '{"chat_template_kwargs":{"thinking":true}}'; recorded
    /// in run.json, so no place for secrets
    #[arg(long, value_name = "JSON")]
    pub(crate) extra_body: Option<String>,
    /// Ask for whole answers instead of streams: cheaper, but a lost connection loses the answer so far
    #[arg(long)]
    pub(crate) no_stream: bool,
    /// Do not ask for token ids: for gateways that refuse unknown fields
    #[arg(long)]
    pub(crate) no_token_ids: bool,
}

/// Lengths and times.
#[derive(Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct Limits {
    /// Tokens of an answer at most; by default as many as the server allows
    #[arg(long, value_name = "N")]
    pub(crate) max_completion_tokens: Option<u64>,
    /// Tokens of prompt and answer together at most
    #[arg(long, value_name = "N")]
    pub(crate) max_seq_len: Option<u64>,
    /// Answers with fewer tokens are kept and flagged
    #[arg(long, value_name = "N")]
    pub(crate) min_completion_tokens: Option<u64>,
    /// Longest silence between two tokens (the old script's name for its only time-out)
    #[arg(long, value_name = "TIME", value_parser = seconds::parse, conflicts_with = "silence_timeout")]
    pub(crate) timeout: Option<Duration>,
    /// Longest silence between two tokens; five times as long while the server's token counter moves
    #[arg(long, value_name = "TIME", value_parser = seconds::parse, default_value = "120")]
    pub(crate) silence_timeout: Duration,
    /// Longest wait for the first token; does not run while the server's gauges move
    #[arg(long, value_name = "TIME", value_parser = seconds::parse, default_value = "600")]
    pub(crate) first_byte_timeout: Duration,
    /// Longest time to connect
    #[arg(long, value_name = "TIME", value_parser = seconds::parse, default_value = "10")]
    pub(crate) connect_timeout: Duration,
    /// Longest time for a whole answer; by default there is none
    #[arg(long, value_name = "TIME", value_parser = seconds::parse)]
    pub(crate) total_timeout: Option<Duration>,
    /// Retries of a prompt
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(crate) max_retries: u32,
    /// No retry begins later than this after the first failure
    #[arg(long, value_name = "TIME", value_parser = seconds::parse, default_value = "1h")]
    pub(crate) retry_for: Duration,
    /// Longest wait before the first retry; doubles with each further one, up to a minute. For tests and for servers close by
    #[arg(long, value_name = "TIME", value_parser = seconds::parse, default_value = "1", hide = true)]
    pub(crate) retry_backoff: Duration,
}

/// Sampling; what is not given is left to the server.
#[derive(Args)]
#[command(next_help_heading = "Sampling (what is not given is left to the server)")]
pub(crate) struct SamplingArgs {
    /// 0 is greedy
    #[arg(long, value_name = "T", value_parser = at_least_zero)]
    pub(crate) temperature: Option<f64>,
    /// Nucleus mass
    #[arg(long, value_name = "P", value_parser = share)]
    pub(crate) top_p: Option<f64>,
    /// Candidates; -1 for all
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub(crate) top_k: Option<i64>,
    /// Smallest probability relative to the best
    #[arg(long, value_name = "P", value_parser = share)]
    pub(crate) min_p: Option<f64>,
    /// Factor on repeated tokens; 1 is none
    #[arg(long, value_name = "F", value_parser = at_least_zero)]
    pub(crate) repetition_penalty: Option<f64>,
    /// -2 to 2
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f64>,
    /// -2 to 2
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f64>,
    /// Sent with every request
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) seed: Option<i64>,
    /// Text at which an answer stops; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
}

/// What counts as an answer.
#[derive(Args)]
#[command(next_help_heading = "Answers")]
pub(crate) struct Judging {
    /// Finish reason that counts as a good end besides the usual ones; may be repeated
    #[arg(long, value_name = "REASON")]
    pub(crate) accept_finish_reason: Vec<String>,
    /// Markers around reasoning, as texts or token ids, or none: to find it inside content and in continued answers
    #[arg(long, value_name = "OPEN,CLOSE", default_value = "<think>,</think>")]
    pub(crate) reasoning_markers: String,
}

/// What becomes of answers that are interrupted or cut.
#[derive(Args)]
#[command(next_help_heading = "Unfinished answers")]
pub(crate) struct UnfinishedArgs {
    /// Start interrupted answers again instead of continuing them from their token ids
    #[arg(long)]
    pub(crate) no_continue: bool,
    /// Time between two checkpoints of an answer that is out: so much of it a killed run loses
    #[arg(long, value_name = "TIME", default_value = "2", value_parser = seconds::parse)]
    pub(crate) checkpoint_interval: Duration,
    /// Continue an answer that was cut at its token limit up to N times, each time with the same limit
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) continue_truncated: u32,
}

/// Which turns are answered.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Turns {
    /// Each user turn, on the target's own earlier answers
    All,
    /// The first user turn
    First,
    /// The last user turn, with everything before it as context
    Last,
}

/// Rows with broken Unicode.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum BadText {
    /// List them in failures.jsonl
    SetAside,
    /// Put U+FFFD in place of what is broken
    Repair,
}

/// Rows that share an id but not their text.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Duplicates {
    /// Refuse the data set, naming both rows
    Refuse,
    /// Answer both; records tell them apart by prompt_hash
    Keep,
}

/// `--concurrency`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConcurrencyArg {
    /// Found by the limiter.
    Auto,
    /// Pinned.
    Number(NonZeroUsize),
}

fn concurrency(text: &str) -> Result<ConcurrencyArg, String> {
    match text {
        "auto" => Ok(ConcurrencyArg::Auto),
        number => {
            number.parse().map(ConcurrencyArg::Number).map_err(|_| "expected auto or a number of 1 or more".to_owned())
        }
    }
}

fn share(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if (0.0..=1.0).contains(&value) { Ok(value) } else { Err(format!("expected a value from 0 to 1, got {value}")) }
}

fn at_least_zero(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if value.is_finite() && value >= 0.0 {
        Ok(value)
    } else {
        Err(format!("expected a value of 0 or more, got {value}"))
    }
}
