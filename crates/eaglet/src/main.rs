//! The `eaglet` binary: parses the command line, calls a command, renders its end. The only crate that prints, exits and reads the environment.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod cli;
mod commands;
mod environment;
mod log;
mod render;
mod signals;

use clap::Parser;
use cli::{Cli, Command};
use std::process::ExitCode;

/// How a command ended; see `docs/exit-codes.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// All done.
    Done,
    /// Ended, with failures above the stated tolerance.
    WithFailures,
    /// The command line cannot be acted on.
    Usage,
    /// The machine or the server does not allow it.
    Environment,
    /// A file is damaged.
    Data,
    /// eaglet's own fault.
    Bug,
    /// Interrupted; the same command goes on.
    Interrupted,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(match exit {
            Exit::Done => 0,
            Exit::WithFailures => 1,
            Exit::Usage => 2,
            Exit::Environment => 3,
            Exit::Data => 4,
            Exit::Bug => 70,
            Exit::Interrupted => 130,
        })
    }
}

impl From<eaglet_core::Class> for Exit {
    fn from(class: eaglet_core::Class) -> Self {
        match class {
            eaglet_core::Class::Usage => Exit::Usage,
            eaglet_core::Class::Environment | eaglet_core::Class::Server => Exit::Environment,
            eaglet_core::Class::Data => Exit::Data,
            eaglet_core::Class::Bug => Exit::Bug,
        }
    }
}

fn main() -> ExitCode {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(|l| format!("{}:{}", l.file(), l.line())).unwrap_or_default();
        let what = panic.payload_as_str().unwrap_or("no message");
        render::error::print(
            &eaglet_core::Error::bug(format!("this is a bug in eaglet ({place}): {what}"))
                .hint("please report it with this line"),
        );
    }));
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // clap's own exit code for a usage error is 2 as well; help and version are no errors.
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage.into() } else { Exit::Done.into() };
        }
    };
    let end = std::panic::catch_unwind(|| match cli.command {
        Command::Generate(args) => commands::generate::generate(*args),
        Command::Bench(args) => commands::bench::bench(&args),
        Command::Doctor(args) => commands::doctor::doctor(*args),
        Command::Status(args) => commands::status::status(&args),
        Command::Stop(args) => commands::stop::stop(&args),
        Command::Prepare(args) => commands::prepare::prepare(&args),
        Command::Verify(args) => commands::verify::verify(&args),
        Command::Show(args) => commands::show::show(&args),
        Command::Simulate(args) => commands::simulate::simulate(&args),
    });
    match end {
        Ok(Ok(exit)) => exit.into(),
        Ok(Err(error)) => {
            render::error::print(&error);
            Exit::from(error.class()).into()
        }
        Err(_) => Exit::Bug.into(),
    }
}
