//! Where reports go: the terminal, `inference.log`, `events.jsonl`, `progress.json`. All by-products: a failure here is told once and never ends a run.

use crate::render;
use eaglet_core::event::Event;
use eaglet_core::progress::{Phase, Snapshot};
use eaglet_core::provenance::now;
use eaglet_core::run_dir::RunDir;
use eaglet_generate::run::Report;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::collections::HashMap;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Between two plain lines where there is no terminal.
const PLAIN_LINE_INTERVAL: Duration = Duration::from_secs(15);
/// Between two writes of `progress.json`.
const PROGRESS_FILE_INTERVAL: Duration = Duration::from_secs(2);
/// Between two lines of the log about the limit of one server; `events.jsonl` has all changes.
const LIMIT_LINE_INTERVAL: Duration = Duration::from_secs(5);
/// Columns of a plain line.
const PLAIN_LINE_WIDTH: usize = 160;

/// Who watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watcher {
    /// Somebody on stderr, terminal or not.
    Stderr,
    /// Nobody: the log file only.
    Nobody,
}

/// Takes the reports of a run.
pub(crate) struct RunLog {
    run_dir: RunDir,
    log: Option<File>,
    events: Option<File>,
    bar: Option<ProgressBar>,
    watcher: Watcher,
    last_plain: Option<(Instant, Phase)>,
    /// When the log last told a change of a server's limit.
    last_limit: HashMap<String, Instant>,
    last_file: Option<(Instant, Phase)>,
    complained: bool,
}

impl RunLog {
    /// Opens the logs of a run directory.
    pub(crate) fn open(run_dir: &RunDir, watcher: Watcher) -> Self {
        let append = |path: PathBuf| File::options().create(true).append(true).open(path).ok();
        RunLog {
            log: append(run_dir.log()),
            events: append(run_dir.events()),
            run_dir: run_dir.clone(),
            bar: None,
            watcher,
            last_plain: None,
            last_limit: HashMap::new(),
            last_file: None,
            complained: false,
        }
    }

    /// Begins the live line, on a terminal.
    pub(crate) fn begin_line(&mut self) {
        if self.watcher == Watcher::Stderr && std::io::stderr().is_terminal() {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            bar.set_style(ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_bar()));
            self.bar = Some(bar);
        }
    }

    /// Takes one report.
    pub(crate) fn take(&mut self, report: Report) {
        match report {
            Report::Event(event) => self.event(&event),
            Report::Retried { sample_id, detail } => self.write_log("RETRY", &format!("{sample_id:?}: {detail}")),
            Report::Snapshot(snapshot) => self.snapshot(&snapshot),
        }
    }

    /// Takes an event: to people, to the log, to the event file.
    pub(crate) fn event(&mut self, event: &Event) {
        let sentence = event.sentence();
        match event {
            // The live line has the limit; each change goes to the event file, and some to the log.
            Event::LimitChanged { endpoint, .. } => self.limit_changed(endpoint, &sentence),
            _ => {
                self.say(&sentence);
                self.write_log("INFO", &sentence);
            }
        }
        let line = event.to_line(&now());
        if self.events.as_mut().is_some_and(|file| file.write_all(&line).is_err()) {
            self.complain("events.jsonl");
        }
    }

    fn limit_changed(&mut self, endpoint: &str, sentence: &str) {
        let last = self.last_limit.get(endpoint);
        if last.is_none_or(|at| at.elapsed() >= LIMIT_LINE_INTERVAL) {
            self.last_limit.insert(endpoint.to_owned(), Instant::now());
            self.write_log("LIMIT", sentence);
        }
    }

    /// Says something to whoever watches, above the live line.
    pub(crate) fn say(&self, text: &str) {
        if self.watcher == Watcher::Nobody {
            return;
        }
        match &self.bar {
            Some(bar) => bar.println(text),
            None => {
                let _ = writeln!(std::io::stderr(), "{text}");
            }
        }
    }

    fn snapshot(&mut self, snapshot: &Snapshot) {
        self.write_progress_file(snapshot);
        match &self.bar {
            Some(bar) if snapshot.phase == Phase::Ended => bar.finish_and_clear(),
            Some(bar) => {
                let width = bar_width();
                bar.set_message(render::progress::line(snapshot, width));
            }
            None => self.plain_line(snapshot),
        }
    }

    fn plain_line(&mut self, snapshot: &Snapshot) {
        let due =
            self.last_plain.is_none_or(|(at, phase)| at.elapsed() >= PLAIN_LINE_INTERVAL || phase != snapshot.phase);
        if due && snapshot.phase != Phase::Ended {
            self.last_plain = Some((Instant::now(), snapshot.phase));
            let line = render::progress::line(snapshot, PLAIN_LINE_WIDTH);
            self.say(&line);
            self.write_log("STATE", &line);
        }
    }

    /// Replaced by a rename, so that a reader sees the old state or the new one; not synced, it is worth nothing after a power cut.
    fn write_progress_file(&mut self, snapshot: &Snapshot) {
        let due =
            self.last_file.is_none_or(|(at, phase)| at.elapsed() >= PROGRESS_FILE_INTERVAL || phase != snapshot.phase);
        if !due {
            return;
        }
        self.last_file = Some((Instant::now(), snapshot.phase));
        let path = self.run_dir.progress();
        let scratch = path.with_extension("json.new");
        let written = serde_json::to_vec_pretty(snapshot)
            .map_err(std::io::Error::from)
            .and_then(|bytes| std::fs::write(&scratch, bytes))
            .and_then(|()| std::fs::rename(&scratch, &path));
        if written.is_err() {
            self.complain("progress.json");
        }
    }

    fn write_log(&mut self, kind: &str, text: &str) {
        let line = format!("{} {kind:<5} {text}\n", now());
        if self.log.as_mut().is_some_and(|file| file.write_all(line.as_bytes()).is_err()) {
            self.complain("inference.log");
        }
    }

    fn complain(&mut self, name: &str) {
        if !self.complained {
            self.complained = true;
            self.say(&format!("warning: cannot write {name}; the run goes on, the records are not concerned"));
        }
    }
}

/// Columns of the terminal, less one so that the cursor does not wrap.
fn bar_width() -> usize {
    rustix::termios::tcgetwinsize(std::io::stderr()).map_or(80, |size| usize::from(size.ws_col).max(20)) - 1
}
