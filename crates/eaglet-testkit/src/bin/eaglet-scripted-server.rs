//! The scripted server as a program: prints where it listens, then serves until it is killed.

use std::{
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::Parser;
use eaglet_testkit::server::{Bench, Reasoning, Script, ScriptedServer};

/// How long a server told to hang stays after SIGTERM.
const HANG: Duration = Duration::from_secs(60);

/// An inference server that does what a script says, on 127.0.0.1 only.
#[derive(Debug, Parser)]
struct Options {
    /// Port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Script in JSON; the options below change it.
    #[arg(long)]
    script: Option<PathBuf>,
    /// What `{other}` stands for in scripted header values.
    #[arg(long)]
    other: Option<u16>,
    /// The model's name.
    #[arg(long)]
    model: Option<String>,
    /// Mean length of an answer, in tokens.
    #[arg(long)]
    mean_tokens: Option<usize>,
    /// Milliseconds between two tokens.
    #[arg(long)]
    token_ms: Option<f64>,
    /// Milliseconds before the first token.
    #[arg(long)]
    first_token_ms: Option<f64>,
    /// Requests that run at once; others queue.
    #[arg(long)]
    max_running: Option<usize>,
    /// Prompt and answer together, in tokens.
    #[arg(long)]
    max_model_len: Option<usize>,
    /// Where reasoning goes: none, reasoning or reasoning_content.
    #[arg(long, value_parser = reasoning)]
    reasoning: Option<Reasoning>,
    /// Appends one JSON line per request to this file.
    #[arg(long)]
    log: Option<PathBuf>,
    /// On SIGTERM refuse new connections, keep open ones silent, and leave after 60 seconds.
    #[arg(long)]
    hang_on_term: bool,
    /// Serve pre-rendered chat replies, for measuring clients; --mean-tokens sets their length.
    #[arg(long)]
    bench: bool,
    /// With --bench: milliseconds between two events of a stream; 0 is as fast as possible.
    #[arg(long, default_value_t = 0, requires = "bench")]
    bench_event_ms: u64,
    /// With --bench: milliseconds before a reply that is not streamed.
    #[arg(long, default_value_t = 0, requires = "bench")]
    bench_whole_ms: u64,
}

fn reasoning(name: &str) -> Result<Reasoning, String> {
    [Reasoning::None, Reasoning::Reasoning, Reasoning::ReasoningContent]
        .into_iter()
        .find(|reasoning| reasoning.field().unwrap_or("none") == name)
        .ok_or_else(|| "expected none, reasoning or reasoning_content".to_owned())
}

impl Options {
    fn script(&self) -> Result<Script, String> {
        let mut script = self.script.as_deref().map_or(Ok(Script::new()), read_script)?;
        // Nobody can ask this process for what it saw.
        script.keep_requests = 0;
        script.other = self.other.or(script.other);
        let answer = &mut script.answer;
        answer.model = self.model.clone().unwrap_or_else(|| answer.model.clone());
        answer.mean_tokens = self.mean_tokens.unwrap_or(answer.mean_tokens);
        answer.token_ms = self.token_ms.unwrap_or(answer.token_ms);
        answer.first_token_ms = self.first_token_ms.unwrap_or(answer.first_token_ms);
        answer.max_running = self.max_running.unwrap_or(answer.max_running);
        answer.max_model_len = self.max_model_len.unwrap_or(answer.max_model_len);
        answer.reasoning = self.reasoning.unwrap_or(answer.reasoning);
        if self.bench {
            let default = Bench::default();
            script.bench = Some(Bench {
                mean_tokens: self.mean_tokens.unwrap_or(default.mean_tokens),
                event_ms: self.bench_event_ms,
                whole_ms: self.bench_whole_ms,
            });
        }
        Ok(script)
    }
}

fn read_script(path: &Path) -> Result<Script, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("read {}: {error}", path.display()))?;
    Script::from_json(&text).map_err(|error| format!("read {}: {error}", path.display()))
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            let _ = writeln!(io::stderr(), "error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), String> {
    let open = |path: &PathBuf| {
        File::options()
            .append(true)
            .create(true)
            .open(path)
            .map_err(|error| format!("open {}: {error}", path.display()))
    };
    let log = options.log.as_ref().map(open).transpose()?;
    let term = options.hang_on_term.then(Term::catch).transpose().map_err(|error| format!("catch SIGTERM: {error}"))?;
    let server = ScriptedServer::try_start(options.port, options.script()?, log)
        .map_err(|error| format!("listen on 127.0.0.1:{}: {error}", options.port))?;
    let mut stdout = io::stdout();
    writeln!(stdout, "listening {}", server.url())
        .and_then(|()| stdout.flush())
        .map_err(|error| format!("write to stdout: {error}"))?;
    let Some(term) = term else {
        loop {
            std::thread::park();
        }
    };
    term.wait();
    server.stop_hanging();
    std::thread::sleep(HANG);
    Ok(())
}

/// SIGTERM, caught from the moment this exists.
struct Term {
    runtime: tokio::runtime::Runtime,
    signal: tokio::signal::unix::Signal,
}

impl Term {
    fn catch() -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let inside = runtime.enter();
        let signal = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        drop(inside);
        Ok(Self { runtime, signal })
    }

    fn wait(mut self) {
        self.runtime.block_on(self.signal.recv());
    }
}
