//! `eaglet prepare RUN`: from answers to training examples.

use crate::cli::{FormatArg, KeepArg, PolicyArgs, PrepareArgs, TooLongArg, VocabArgs};
use crate::{Exit, render};
use eaglet_core::run_dir::RunDir;
use eaglet_core::run_file::RunFile;
use eaglet_core::storage::RealStorage;
use eaglet_core::{Error, Result};
use eaglet_data::outputs::Format;
use eaglet_data::prepare::{
    Existing, Keep, Options, Policies, Prepared, Progress, Settings, ThinkMarkers, TooLong, prepare as make,
};
use eaglet_data::vocab::VocabPlan;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Between two looks at the progress.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// Between two lines where there is no terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Runs the command.
pub(crate) fn prepare(args: &PrepareArgs) -> Result<Exit> {
    let run_dir = RunDir::new(&args.run);
    let input = run_dir.responses();
    if !input.exists() {
        return Err(Error::usage(format!("{} holds no raw_responses.jsonl", args.run.display()))
            .hint("give the directory that was the --output-dir of eaglet generate"));
    }
    let out = args.out.clone().unwrap_or_else(|| run_dir.prepared());
    let settings = settings(args, &run_dir)?;
    let existing = if args.overwrite { Existing::Replace } else { Existing::Refuse };
    let threads = args.threads.or_else(|| std::thread::available_parallelism().ok()).map_or(1, usize::from);
    let began = Instant::now();
    let progress = Progress::default();
    let prepared = watched(&progress, || make(&input, &out, &settings, Options { threads, existing }, &progress))?;
    let (summary, took) = match &prepared {
        Prepared::Made(summary) => (summary, Some(began.elapsed())),
        Prepared::WasThere(summary) => (summary, None),
    };
    let text = render::prepared::text(summary, &out, took);
    let _ = std::io::stderr().write_all(text.as_bytes());
    if args.json {
        let _ = std::io::stdout().write_all(&serde_json::to_vec_pretty(summary).unwrap_or_default());
    }
    Ok(if summary.kept == 0 { Exit::WithFailures } else { Exit::Done })
}

/// Does the work, and shows how far it is.
fn watched<T: Send>(progress: &Progress, work: impl FnOnce() -> T + Send) -> T {
    let terminal = std::io::stderr().is_terminal();
    let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(None, target);
    if let Ok(style) =
        ProgressStyle::with_template("prepare  {bar:30} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left")
    {
        bar.set_style(style);
    }
    std::thread::scope(|scope| {
        let worker = scope.spawn(work);
        let mut said = Instant::now();
        while !worker.is_finished() {
            std::thread::park_timeout(LOOK_INTERVAL);
            let (done, total) =
                (progress.bytes_done.load(Ordering::Relaxed), progress.bytes_total.load(Ordering::Relaxed));
            bar.set_length(total);
            bar.set_position(done);
            if !terminal && said.elapsed() >= LINE_INTERVAL {
                said = Instant::now();
                let _ = writeln!(std::io::stderr(), "prepare  {} of {} MB", done / 1_000_000, total / 1_000_000);
            }
        }
        bar.finish_and_clear();
        match worker.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn settings(args: &PrepareArgs, run_dir: &RunDir) -> Result<Settings> {
    if !(0.0..=1.0).contains(&args.validation_share) {
        return Err(Error::usage(format!("--validation-share {} is not between 0 and 1", args.validation_share)));
    }
    let vocab_size = target_vocab_size(&args.vocab, run_dir)?;
    Ok(Settings {
        policies: policies(&args.policies, vocab_size)?,
        formats: args.format.iter().map(|format| format_of(*format)).collect(),
        validation_share: args.validation_share,
        draft_vocab: draft_vocab(&args.vocab, vocab_size)?,
    })
}

fn policies(args: &PolicyArgs, vocab_size: Option<u32>) -> Result<Policies> {
    let keep = |arg| match arg {
        KeepArg::Keep => Keep::Keep,
        KeepArg::Drop => Keep::Drop,
    };
    let open = args.think_open.as_deref().map(|text| marker_id("--think-open", text)).transpose()?;
    let close = args.think_close.as_deref().map(|text| marker_id("--think-close", text)).transpose()?;
    Ok(Policies {
        min_completion_tokens: args.min_completion_tokens,
        max_seq_len: args.max_seq_len.map(usize::from),
        too_long: match args.too_long {
            TooLongArg::Clip => TooLong::Clip,
            TooLongArg::Drop => TooLong::Drop,
        },
        min_supervised_tokens: args.min_supervised_tokens.into(),
        finish_reasons: args.finish_reasons.as_ref().map(|reasons| reasons.iter().cloned().collect()),
        think_markers: close.map(|close| ThinkMarkers { open, close }),
        cut_in_thought: keep(args.cut_in_thought),
        repetition: keep(args.repetition),
        duplicates: keep(args.duplicates),
        near_duplicates: keep(args.near_duplicates),
        ids_and_usage_differ: keep(args.ids_and_usage_differ),
        vocab_size,
    })
}

/// The id in `163606` or `<think>=163606`.
fn marker_id(flag: &str, text: &str) -> Result<u32> {
    let id = text.rsplit_once('=').map_or(text, |(_, id)| id);
    id.trim().parse().map_err(|_| {
        Error::usage(format!("{flag} {text:?} names no token id")).hint(
            "give the id, such as 163606, or text and id, such as '<think>=163606'; the text alone needs a tokenizer",
        )
    })
}

fn format_of(arg: FormatArg) -> Format {
    match arg {
        FormatArg::Shards => Format::Shards,
        FormatArg::Specforge => Format::Specforge,
        FormatArg::SpecforgeConversations => Format::SpecforgeConversations,
        FormatArg::Speculators => Format::Speculators,
        FormatArg::SpeculatorsJsonl => Format::SpeculatorsJsonl,
        FormatArg::Parquet => Format::Parquet,
    }
}

fn draft_vocab(args: &VocabArgs, target: Option<u32>) -> Result<Option<VocabPlan>> {
    if args.draft_vocab_size == "full" {
        return Ok(None);
    }
    let draft: u32 = args.draft_vocab_size.parse().map_err(|_| {
        Error::usage(format!("--draft-vocab-size {:?} is neither a number nor full", args.draft_vocab_size))
    })?;
    let target = target.ok_or_else(|| {
        Error::usage("--draft-vocab-size needs the size of the target's vocabulary")
            .hint("--vocab-size N (vocab_size in the target's config.json), or --model-path DIR to read it from there")
    })?;
    let plan = VocabPlan::new(draft, target, args.special_ids.clone())?;
    // As many as the target has: no map, as with `full`.
    Ok((draft < target).then_some(plan))
}

/// As given, else from the config.json of the model that was given, else of the one the server had loaded, if that directory is on this machine.
fn target_vocab_size(args: &VocabArgs, run_dir: &RunDir) -> Result<Option<u32>> {
    if args.vocab_size.is_some() {
        return Ok(args.vocab_size);
    }
    if let Some(directory) = &args.model_path {
        let path = directory.join("config.json");
        let bytes = std::fs::read(&path).map_err(|error| Error::io("read", &path, error))?;
        return vocab_size_in(&bytes).map(Some).ok_or_else(|| {
            Error::data(format!("{} holds no vocab_size", path.display())).hint("give it with --vocab-size")
        });
    }
    Ok(servers_model(run_dir)?
        .and_then(|path| std::fs::read(path.join("config.json")).ok())
        .and_then(|bytes| vocab_size_in(&bytes)))
}

fn servers_model(run_dir: &RunDir) -> Result<Option<PathBuf>> {
    let run = RunFile::read(&RealStorage, &run_dir.run_file())?;
    let model = run.as_ref().and_then(|run| run.fingerprint.get("server_model")).and_then(Value::as_str);
    Ok(model.map(Path::new).filter(|path| path.is_absolute()).map(Path::to_owned))
}

/// `vocab_size`, of a model with several parts that of its text part.
fn vocab_size_in(config: &[u8]) -> Option<u32> {
    let config: Value = serde_json::from_slice(config).ok()?;
    let size = |of: &Value| of.get("vocab_size").and_then(Value::as_u64).and_then(|size| u32::try_from(size).ok());
    config.get("text_config").and_then(size).or_else(|| size(&config))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_is_an_id_or_a_text_with_its_id() {
        assert_eq!(marker_id("--think-open", "163606").unwrap(), 163_606);
        assert_eq!(marker_id("--think-close", "</think>=7").unwrap(), 7);
        assert_eq!(marker_id("--think-close", "a=b=7").unwrap(), 7);
        for text in ["<think>", "", "=", "-1"] {
            assert_eq!(marker_id("--think-open", text).unwrap_err().class(), eaglet_core::Class::Usage);
        }
    }

    #[test]
    fn the_vocabulary_is_that_of_the_text_model() {
        assert_eq!(vocab_size_in(br#"{"vocab_size": 128256}"#), Some(128_256));
        assert_eq!(vocab_size_in(br#"{"vocab_size": 1, "text_config": {"vocab_size": 163840}}"#), Some(163_840));
        assert_eq!(vocab_size_in(b"{}"), None);
    }
}
