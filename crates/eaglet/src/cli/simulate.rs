//! Arguments of `simulate`.

use clap::Args;
use std::net::IpAddr;
use std::path::PathBuf;

/// `eaglet simulate`
#[derive(Args)]
#[command(after_help = "\
Profiles: kimi-k2.5-8gpu (a large model on 8 GPUs: 1,536 tok/s at 128 in flight, about 1,600 at 200, less beyond), small (a small model on a \
CPU: 10 tok/s alone, 100 at 32). --print-profile writes one as TOML, to be changed and given back as a file.

Faults: refuse, reset, cut, hang, abort, slow-first-token, stall, restart, shutdown, metrics-missing, metrics-renamed. In a file each is a \
[[fault]] table, on the command line key=value pairs; keys: kind, at, for, every, probability, times, status, retry-after, retry-after-as, \
after-tokens, delay. Times are the pretended server's, so --speed scales them too. docs/simulate.md has an example.

Ctrl-C ends it at once. SIGTERM ends it as it ends vLLM: new connections are refused, open ones stay open and silent until the clients \
leave.")]
pub(crate) struct SimulateArgs {
    /// What to pretend to be: a built-in profile, or a TOML file
    #[arg(long, value_name = "NAME|FILE", default_value = "small")]
    pub(crate) profile: String,
    /// Address to listen on; anything but the loopback is open to others
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    pub(crate) port: u16,
    /// How many of the server's seconds go by in one of ours
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = speed)]
    pub(crate) speed: f64,
    /// Changes every answer, and what goes wrong where a fault has a probability
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Script of what goes wrong, in TOML
    #[arg(long, value_name = "FILE")]
    pub(crate) faults: Option<PathBuf>,
    /// One more thing that goes wrong, as "at=60s kind=restart for=30s"; may be repeated
    #[arg(long, value_name = "FAULT")]
    pub(crate) fault: Vec<String>,
    /// Print the profile as TOML and end
    #[arg(long)]
    pub(crate) print_profile: bool,
}

fn speed(text: &str) -> Result<f64, String> {
    /// Beyond this a step would be shorter than the clock's tick by far.
    const SPEED_MAX: f64 = 10_000.0;
    let speed: f64 = text.parse().map_err(|_| "expected a number such as 10".to_owned())?;
    if (0.001..=SPEED_MAX).contains(&speed) {
        Ok(speed)
    } else {
        Err(format!("expected a number from 0.001 to {SPEED_MAX}"))
    }
}
