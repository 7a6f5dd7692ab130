//! `eaglet show DIR ID`: what is trained of an answer.

use crate::cli::{ColorArg, ShowArgs};
use crate::render::examples::Marking;
use crate::{Exit, render};
use eaglet_core::run_dir::RunDir;
use eaglet_core::{Error, Result};
use eaglet_data::outputs::{Format, Split};
use eaglet_data::prepare::Summary;
use eaglet_data::shards::ShardReader;
use std::io::{IsTerminal, Write};

/// Runs the command.
pub(crate) fn show(args: &ShowArgs) -> Result<Exit> {
    let default = RunDir::new(&args.dir).prepared();
    let directory = if Summary::read(&args.dir)?.is_some() { args.dir.clone() } else { default };
    let Some(summary) = Summary::read(&directory)? else {
        return Err(Error::usage(format!("{} holds no prepared set", args.dir.display()))
            .hint("make one with eaglet prepare RUN"));
    };
    if !summary.outputs.contains_key(&Format::Shards) {
        return Err(Error::usage(format!("{} holds no shards", directory.display()))
            .hint("prepare with --format shards,... to look at examples"));
    }
    let marking = match args.color {
        ColorArg::Always => Marking::Colour,
        ColorArg::Auto if std::io::stdout().is_terminal() => Marking::Colour,
        ColorArg::Auto | ColorArg::Never => Marking::Brackets,
    };
    let mut shown = 0;
    for file in summary.files.iter().filter(|file| file.path.ends_with(".examples")) {
        let split = if file.path.contains("/validation-") { Split::Validation } else { Split::Train };
        let shard = ShardReader::open(&directory.join(&file.path))?;
        for (at, entry) in shard.entries().iter().enumerate() {
            if entry.id.sample_id != args.id || args.turn.is_some_and(|turn| turn != entry.id.turn) {
                continue;
            }
            shown += 1;
            let text = render::examples::example(&shard.example(at)?, split, marking);
            if std::io::stdout().write_all(text.as_bytes()).is_err() {
                return Ok(Exit::Done);
            }
        }
    }
    if shown == 0 {
        return Err(Error::usage(format!("{} has no example {:?}", directory.display(), args.id))
            .hint("dropped.jsonl says why, if it was dropped; ids are those of the data set"));
    }
    Ok(Exit::Done)
}
