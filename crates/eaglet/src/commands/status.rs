//! `eaglet status DIR`: how a run goes, or how it ended, from the directory alone.

use super::generate::read_index;
use crate::Exit;
use crate::cli::StatusArgs;
use crate::render::units::{count, percent, time};
use eaglet_core::lock::{LockHolder, RunLock};
use eaglet_core::run_dir::RunDir;
use eaglet_core::run_file::{RunFile, StageState};
use eaglet_core::storage::RealStorage;
use eaglet_core::{Error, Result};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::Write;

/// Runs the command.
pub(crate) fn status(args: &StatusArgs) -> Result<Exit> {
    let run_dir = RunDir::new(&args.dir);
    if !run_dir.holds_a_run() {
        return Err(Error::usage(format!("{} holds no run", args.dir.display()))
            .hint("give the directory that was the --output-dir of eaglet generate"));
    }
    let run_file = RunFile::read(&RealStorage, &run_dir.run_file())?;
    let holder = RunLock::holder(run_dir.path())?;
    let progress: Option<Value> =
        std::fs::read(run_dir.progress()).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    // The records themselves are the truth; a progress file may be older than a crash.
    let index = read_index(&run_dir)?;
    let view = View {
        run_file: run_file.as_ref(),
        holder: holder.as_ref(),
        progress: progress.as_ref(),
        records: index.record_count(),
    };
    let text = if args.json { view.json() } else { view.text() };
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(Exit::Done)
}

struct View<'a> {
    run_file: Option<&'a RunFile>,
    holder: Option<&'a LockHolder>,
    progress: Option<&'a Value>,
    records: u64,
}

impl View<'_> {
    /// The progress file counts only while its process holds the run.
    fn live(&self) -> Option<&Value> {
        let holder = self.holder?;
        self.progress.filter(|p| p.get("pid").and_then(Value::as_u64) == Some(u64::from(holder.pid)))
    }

    fn state(&self) -> String {
        match (self.holder, self.run_file.map(|f| f.generate.state)) {
            (Some(holder), _) => {
                format!("running: process {} on {} since {}", holder.pid, holder.host, holder.started_at)
            }
            (None, Some(StageState::Complete)) => "complete".to_owned(),
            (None, _) => "not running, unfinished: the same command goes on".to_owned(),
        }
    }

    fn json(&self) -> String {
        let value = json!({
            "state": self.state(),
            "records": self.records,
            "holder": self.holder,
            "progress": self.live(),
            "run": self.run_file,
        });
        format!("{value:#}\n")
    }

    fn text(&self) -> String {
        let mut out = format!("state       {}\n", self.state());
        let planned = self.run_file.map(|f| f.generate.planned);
        let of = planned
            .map_or(String::new(), |planned| format!(" of {} ({})", count(planned), percent(self.records, planned)));
        let _ = writeln!(out, "records     {}{of}", count(self.records));
        if let Some(run) = self.run_file {
            let text = |name: &str| run.fingerprint.get(name).and_then(Value::as_str).unwrap_or("?");
            let _ = writeln!(out, "model       {}", text("model"));
            let _ = writeln!(out, "begun       {}, session {}", run.created_at, run.generate.sessions);
            if self.holder.is_none() {
                let _ = writeln!(out, "failed      {}", count(run.generate.failed));
            }
        }
        if let Some(progress) = self.live() {
            live_lines(progress, &mut out);
        }
        out
    }
}

fn live_lines(progress: &Value, out: &mut String) {
    let number = |name: &str| progress.get(name).and_then(Value::as_f64);
    let whole = |name: &str| number(name).map_or("not reported".to_owned(), |n| count(n.round() as u64));
    let phase = progress.get("phase").and_then(Value::as_str).unwrap_or("?");
    let _ = writeln!(
        out,
        "phase       {phase}, {} of {} out, {} retrying, {} failed",
        whole("in_flight"),
        whole("concurrency"),
        whole("waiting"),
        whole("failed")
    );
    let _ = writeln!(
        out,
        "rate        {} tok/s now, {} tok/s overall",
        whole("tokens_per_s"),
        whole("tokens_per_s_overall")
    );
    let continued =
        |name: &str| progress.get("continued").and_then(|c| c.get(name)).and_then(Value::as_u64).unwrap_or(0);
    if continued("tokens_kept") > 0 {
        let _ = writeln!(
            out,
            "continued   {} answers, {} tokens kept",
            count(continued("answers")),
            count(continued("tokens_kept"))
        );
    }
    let basis = progress.get("eta_basis").and_then(Value::as_str).unwrap_or_default();
    let _ = writeln!(out, "ETA         {} ({basis})", number("eta_s").map_or("-".to_owned(), time));
    let servers = progress.get("servers").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    for server in servers.iter().filter(|_| servers.len() > 1) {
        let text = |name: &str| server.get(name).and_then(Value::as_str).unwrap_or("?");
        let number = |name: &str| server.get(name).and_then(Value::as_u64).map_or("?".to_owned(), count);
        let (endpoint, state) = (text("endpoint"), text("state"));
        let _ = writeln!(out, "server      {endpoint} {state}, {} of {} out", number("in_flight"), number("limit"));
    }
    let server = progress.get("server");
    let gauge = |name: &str| server.and_then(|s| s.get(name)).and_then(Value::as_f64);
    match server.and_then(|s| s.get("not_available")).and_then(Value::as_str) {
        Some(reason) => {
            let _ = writeln!(out, "server      metrics not available ({reason})");
        }
        None => {
            let shown = |value: Option<f64>| value.map_or("not reported".to_owned(), |v| format!("{v:.0}"));
            let kv = gauge("kv_use").map(|v| v * 100.0);
            let _ = writeln!(
                out,
                "server      running {}, waiting {}, KV use % {}",
                shown(gauge("running")),
                shown(gauge("waiting")),
                shown(kv)
            );
        }
    }
}
