//! `eaglet simulate`: a server that behaves as vLLM does, without a GPU and without a model.

use crate::cli::SimulateArgs;
use crate::{Exit, render};
use eaglet_core::{Error, Result};
use eaglet_serve::simulate::listener::Listener;
use eaglet_serve::simulate::profile::PROFILE_NAMES;
use eaglet_serve::simulate::{Fault, FaultScript, Profile, Settings, Simulator};
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Runs the command.
pub(crate) fn simulate(args: &SimulateArgs) -> Result<Exit> {
    let profile = profile(&args.profile)?;
    if args.print_profile {
        let _ = std::io::stdout().write_all(profile.to_toml().as_bytes());
        return Ok(Exit::Done);
    }
    let settings = Settings { profile, speed: args.speed, seed: args.seed, faults: faults(args)? };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::environment(format!("cannot start the event loop: {e}")))?;
    runtime.block_on(serve(settings, SocketAddr::new(args.host, args.port)))
}

async fn serve(settings: Settings, address: SocketAddr) -> Result<Exit> {
    let mut signals = Signals::take()?;
    let listener = Listener::bind(address)?;
    let url = format!("http://{}", listener.address());
    let line = serde_json::json!({"url": url, "model": settings.profile.model, "profile": settings.profile.name,
                                  "speed": settings.speed, "pid": std::process::id()});
    let _ = writeln!(std::io::stderr(), "{}", render::simulated::greeting(&url, &settings));
    let _ = writeln!(std::io::stdout(), "{line}");
    let simulator = Simulator::new(settings);
    let terminated = tokio::select! {
        () = simulator.run() => false,
        () = listener.serve(simulator.clone()) => false,
        terminated = signals.next() => terminated,
    };
    if terminated {
        // The port closed with `listener`; what is left is silence, until the clients or somebody's patience end.
        simulator.shut_down();
        tokio::select! {
            () = simulator.all_gone() => {}
            _ = signals.next() => {}
        }
    }
    Ok(Exit::Done)
}

struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn take() -> Result<Self> {
        let take = |kind| signal(kind).map_err(|e| Error::environment(format!("cannot handle signals: {e}")));
        Ok(Self { interrupt: take(SignalKind::interrupt())?, terminate: take(SignalKind::terminate())? })
    }

    /// Waits for the next one; whether it was SIGTERM.
    async fn next(&mut self) -> bool {
        tokio::select! {
            _ = self.interrupt.recv() => false,
            _ = self.terminate.recv() => true,
        }
    }
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))
}

fn profile(name: &str) -> Result<Profile> {
    if let Some(profile) = Profile::named(name) {
        return Ok(profile);
    }
    let path = Path::new(name);
    if !path.exists() {
        return Err(Error::usage(format!("{name:?} is neither a built-in profile nor a file"))
            .hint(format!("built-in profiles: {}", PROFILE_NAMES.join(", "))));
    }
    Profile::from_toml(&read(path)?).map_err(|e| e.context(name))
}

fn faults(args: &SimulateArgs) -> Result<FaultScript> {
    let mut script = match &args.faults {
        Some(path) => FaultScript::from_toml(&read(path)?).map_err(|e| e.context(path.display()))?,
        None => FaultScript::default(),
    };
    for line in &args.fault {
        script.faults.push(Fault::from_line(line).map_err(|e| e.context(format!("--fault {line:?}")))?);
    }
    Ok(script)
}
