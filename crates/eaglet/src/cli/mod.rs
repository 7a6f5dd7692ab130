//! The command line: definitions only, no behaviour.

mod bench;
mod generate;
mod prepare;
mod seconds;
mod simulate;

pub(crate) use bench::BenchArgs;
pub(crate) use generate::{
    BadText, ConcurrencyArg, Connection, DoctorArgs, Duplicates, GenerateArgs, Input, Judging, Limits, SamplingArgs,
    Turns, UnfinishedArgs,
};

pub(crate) use prepare::{
    ColorArg, FormatArg, KeepArg, PolicyArgs, PrepareArgs, ShowArgs, TooLongArg, VerifyArgs, VocabArgs,
};
pub(crate) use simulate::SimulateArgs;

use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// From a running inference server to a trained, measured EAGLE-3 drafter, with not one sampled token lost.
#[derive(Parser)]
#[command(name = "eaglet", version, max_term_width = 100, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Send a data set's prompts to an OpenAI-compatible server and keep every answer
    Generate(Box<GenerateArgs>),
    /// Check server, data set, limits and disk before GPU time is spent
    Doctor(Box<DoctorArgs>),
    /// Measure tokens a second at each number of requests in flight, and find the knee
    Bench(Box<BenchArgs>),
    /// Show how a run goes, or how it ended
    Status(StatusArgs),
    /// Stop a run: what is out is finished, nothing is lost
    Stop(StopArgs),
    /// Make training examples of a run's answers, from the server's own token ids
    Prepare(Box<PrepareArgs>),
    /// Check a run or a prepared set: everything once, hashes, ids, masks, counts
    Verify(VerifyArgs),
    /// Show a training example, what is trained marked
    Show(ShowArgs),
    /// Pretend to be an inference server, to rehearse a run without a GPU
    Simulate(SimulateArgs),
}

#[derive(Args)]
pub(crate) struct StatusArgs {
    /// Run directory
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Print JSON on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct StopArgs {
    /// Run directory
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Give up the requests that are out instead of finishing them
    #[arg(long)]
    pub(crate) now: bool,
    /// Longest wait for the run to end, in seconds or as 90s, 10m, 2h
    #[arg(long, value_name = "TIME", default_value = "120", value_parser = seconds::parse)]
    pub(crate) wait: std::time::Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definitions_are_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    /// The Python script's command line must go on working when only the program's name changes.
    #[test]
    fn the_old_command_line_is_accepted() {
        let line = "eaglet generate --model-path /models/m --output-dir /tmp/x --dataset mlabonne/open-perfectblend --max-samples 25000 \
                    --max-completion-tokens 8192 --max-seq-len 16384 --concurrency 128 --vllm-url http://localhost:8000/v1 \
                    --min-completion-tokens 32 --timeout 600 --resume";
        let cli = Cli::try_parse_from(line.split_whitespace()).map_err(|e| e.to_string()).unwrap();
        let Command::Generate(args) = cli.command else { panic!("another command") };
        assert_eq!(args.connection.url, ["http://localhost:8000/v1"]);
        assert_eq!(args.input.dataset, ["mlabonne/open-perfectblend"]);
        assert_eq!(args.limits.timeout, Some(std::time::Duration::from_secs(600)));
        assert_eq!(args.connection.concurrency, ConcurrencyArg::Number(std::num::NonZeroUsize::new(128).unwrap()));
    }
}
