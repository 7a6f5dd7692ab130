//! Arguments of `prepare`, `verify` and `show`.

use clap::{Args, ValueEnum};
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// `eaglet prepare`
#[derive(Args)]
#[command(after_help = "\
From a run's raw_responses.jsonl to training examples: input_ids are the server's own ids of prompt and answer, loss_mask is 1 exactly on what the target \
generated. No tokenizer is needed. Whatever is dropped is in dropped.jsonl with its reason; summary.json adds up.

Formats: shards (eaglet's own), specforge (data.prompts_path), specforge-conversations (data.train_data_path), speculators (train.py --data-path), \
speculators-jsonl (prepare-data --data), parquet.

The same input with the same settings gives the same bytes. A finished set is not made again; one that was interrupted is begun again.")]
pub(crate) struct PrepareArgs {
    /// Run directory
    #[arg(value_name = "RUN")]
    pub(crate) run: PathBuf,
    /// Where to write [default: RUN/prepared]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// What to write; all in one pass
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_value = "shards,specforge")]
    pub(crate) format: Vec<FormatArg>,
    /// Share of the prompts set apart for validation, by the hash of the prompt
    #[arg(long, value_name = "SHARE", default_value = "0.05")]
    pub(crate) validation_share: f64,
    /// Replace another prepared set that is there
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Threads [default: one for each core]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Print the summary as JSON on stdout
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) policies: PolicyArgs,
    #[command(flatten)]
    pub(crate) vocab: VocabArgs,
}

/// What becomes an example.
#[derive(Args)]
#[command(next_help_heading = "What is kept")]
pub(crate) struct PolicyArgs {
    /// Tokens of an answer, at least
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) min_completion_tokens: usize,
    /// Tokens of prompt and answer, at most [default: any]
    #[arg(long, value_name = "N")]
    pub(crate) max_seq_len: Option<NonZeroUsize>,
    /// What becomes of longer ones: their end is cut off, or they are dropped
    #[arg(long, value_name = "WHAT", default_value = "clip")]
    pub(crate) too_long: TooLongArg,
    /// Supervised tokens of an example, at least, after clipping
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) min_supervised_tokens: NonZeroUsize,
    /// Finish reasons that are kept [default: all that the run kept; length means cut at the token limit]
    #[arg(long, value_name = "REASON,...", value_delimiter = ',')]
    pub(crate) finish_reasons: Option<Vec<String>>,
    /// Examples with the same ids and mask as another
    #[arg(long, value_name = "WHAT", default_value = "drop")]
    pub(crate) duplicates: KeepArg,
    /// Answers that share about 95 % of their 8-grams or more with another one's, whatever the prompts: dropping looks for them
    #[arg(long, value_name = "WHAT", default_value = "keep")]
    pub(crate) near_duplicates: KeepArg,
    /// Answers that run in circles: four copies or more of a stretch, over 256 tokens or more
    #[arg(long, value_name = "WHAT", default_value = "keep")]
    pub(crate) repetition: KeepArg,
    /// Answers that ended within their reasoning: they teach thinking only
    #[arg(long, value_name = "WHAT", default_value = "keep")]
    pub(crate) cut_in_thought: KeepArg,
    /// Answers whose number of ids is not what the server counted
    #[arg(long, value_name = "WHAT", default_value = "drop")]
    pub(crate) ids_and_usage_differ: KeepArg,
    /// Token that opens the reasoning: its id, or TEXT=ID
    #[arg(long, value_name = "ID", requires = "think_close")]
    pub(crate) think_open: Option<String>,
    /// Token that closes the reasoning: its id, or TEXT=ID. Without it the record's texts say where the reasoning ends
    #[arg(long, value_name = "ID")]
    pub(crate) think_close: Option<String>,
}

/// The two vocabularies.
#[derive(Args)]
#[command(next_help_heading = "Vocabulary")]
pub(crate) struct VocabArgs {
    /// Tokens that the drafter can draft, or `full`: writes d2t-N.npy and t2d-N.npy
    #[arg(long, value_name = "N", default_value = "full")]
    pub(crate) draft_vocab_size: String,
    /// Rows of the target's embedding (vocab_size in its config.json)
    #[arg(long, value_name = "N")]
    pub(crate) vocab_size: Option<u32>,
    /// Directory of the target's config.json, to read vocab_size from
    #[arg(long, value_name = "DIR")]
    pub(crate) model_path: Option<PathBuf>,
    /// Ids that the drafter can draft whatever was counted, such as the end-of-turn tokens
    #[arg(long, value_name = "ID,...", value_delimiter = ',')]
    pub(crate) special_ids: Vec<u32>,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum FormatArg {
    Shards,
    Specforge,
    SpecforgeConversations,
    Speculators,
    SpeculatorsJsonl,
    Parquet,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum TooLongArg {
    Clip,
    Drop,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum KeepArg {
    Keep,
    Drop,
}

/// `eaglet verify`
#[derive(Args)]
pub(crate) struct VerifyArgs {
    /// Run directory, or a prepared directory
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Print what was checked as JSON on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

/// `eaglet show`
#[derive(Args)]
pub(crate) struct ShowArgs {
    /// Run directory, or a prepared directory with shards
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// The prompt's id
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// Turn of a conversation, from 0 [default: all]
    #[arg(long, value_name = "N")]
    pub(crate) turn: Option<u32>,
    /// Colour the supervised tokens
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub(crate) color: ColorArg,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorArg {
    Auto,
    Always,
    Never,
}
