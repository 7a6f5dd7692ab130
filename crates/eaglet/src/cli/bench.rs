//! Arguments of `bench`.

use super::{Input, SamplingArgs, seconds};
use clap::Args;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

/// `eaglet bench`
#[derive(Args)]
#[command(after_help = "\
Each level keeps so many requests out for --warm-up plus --time and counts the tokens that arrive in --time; what is out at its end is given \
up, nothing is recorded. The knee is the smallest level within 3 % of the best: more requests than that only wait longer.

Give --time several times what an answer takes, or a level shows only the beginning of its answers. The server should have nothing else to do.")]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) input: Input,
    /// Server, with or without /v1
    #[arg(
        long,
        visible_alias = "vllm-url",
        value_name = "URL",
        default_value = "http://127.0.0.1:8000",
        help_heading = "Server"
    )]
    pub(crate) url: String,
    /// Model name to ask for; by default the one the server lists
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    pub(crate) model: Option<String>,
    /// Environment variable that holds the API key
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    pub(crate) api_key_env: Option<String>,
    /// Header of every request; may be repeated
    #[arg(long, value_name = "NAME: VALUE", help_heading = "Server")]
    pub(crate) header: Vec<String>,
    /// JSON object merged into every request
    #[arg(long, value_name = "JSON", help_heading = "Server")]
    pub(crate) extra_body: Option<String>,
    /// Numbers of requests in flight to be measured, ascending [default: 1, 2, 4 ... 512, until two bring nothing more]
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', help_heading = "Sweep")]
    pub(crate) levels: Vec<NonZeroUsize>,
    /// Measured time of each level
    #[arg(long, value_name = "TIME", default_value = "60", value_parser = seconds::parse, help_heading = "Sweep")]
    pub(crate) time: Duration,
    /// Time of each level before measuring begins: the batch fills, first prompts are computed
    #[arg(long, value_name = "TIME", default_value = "15", value_parser = seconds::parse, help_heading = "Sweep")]
    pub(crate) warm_up: Duration,
    /// Tokens of an answer at most; by default as many as the server allows
    #[arg(long, value_name = "N", help_heading = "Sweep")]
    pub(crate) max_completion_tokens: Option<u64>,
    /// Print the levels as JSON on stdout, and no table
    #[arg(long)]
    pub(crate) json: bool,
    /// Write the curve to this file: .svg the picture, .html the picture with the table
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}
