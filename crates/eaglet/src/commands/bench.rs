//! `eaglet bench`: tokens a second at each number of requests in flight, and the knee.

use super::prepared;
use crate::cli::BenchArgs;
use crate::{Exit, environment, render};
use bytes::Bytes;
use eaglet_core::{Error, Result};
use eaglet_data::Turns;
use eaglet_generate::bench::{self, Asks, Level, Window};
use eaglet_generate::client::endpoint::Endpoint;
use eaglet_generate::client::request::{RequestTemplate, TokenIds};
use eaglet_generate::client::{Client, Mode, Timeouts};
use eaglet_generate::server_info;
use std::cell::Cell;
use std::io::Write;
use std::path::Path;
use std::rc::Rc;

/// Runs the command.
pub(crate) fn bench(args: &BenchArgs) -> Result<Exit> {
    let picture = args.plot.as_deref().map(Picture::of).transpose()?;
    let levels: Vec<usize> = args.levels.iter().map(|level| level.get()).collect();
    if !levels.is_sorted() {
        return Err(Error::usage("--levels must ascend").hint("for example: --levels 16,32,64,128"));
    }
    environment::raise_descriptor_limit(levels.last().or(bench::LEVELS.last()).map_or(1, |most| *most as u64))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::environment(format!("cannot start the event loop: {e}")))?;
    let swept = tokio::task::LocalSet::new().block_on(&runtime, sweep(args, &levels))?;
    if swept.is_empty() {
        return Ok(Exit::Interrupted);
    }
    let curve: Vec<(usize, f64)> = swept.iter().map(|level| (level.concurrency, level.tokens_per_s)).collect();
    let Some(knee) = bench::knee(&curve, bench::KNEE_TOLERANCE) else {
        let why =
            swept.iter().find_map(|level| level.last_failure.clone()).unwrap_or_else(|| "no token came".to_owned());
        return Err(Error::server(format!("nothing could be measured: {why}"))
            .hint("eaglet doctor says what is wrong; a slow server needs a longer --time"));
    };
    let text = if args.json {
        render::bench::json(&swept, knee).to_string() + "\n"
    } else {
        render::bench::table(&swept, knee) + "\n" + &render::bench::bars(&swept, knee)
    };
    let _ = std::io::stdout().write_all(text.as_bytes());
    if let (Some(path), Some(picture)) = (&args.plot, picture) {
        let text = match picture {
            Picture::Svg => render::bench::svg(&swept, knee),
            Picture::Html => render::bench::html(&swept, knee),
        };
        std::fs::write(path, text).map_err(|e| Error::io("write", path, e))?;
    }
    Ok(Exit::Done)
}

enum Picture {
    Svg,
    Html,
}

impl Picture {
    fn of(path: &Path) -> Result<Self> {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("svg") => Ok(Picture::Svg),
            Some("html") => Ok(Picture::Html),
            _ => Err(Error::usage(format!("--plot {}: expected a file that ends in .svg or .html", path.display()))),
        }
    }
}

/// Measures one level after the other; of an interrupted sweep, the levels that were whole.
async fn sweep(args: &BenchArgs, wanted: &[usize]) -> Result<Vec<Level>> {
    let key = environment::api_key(args.api_key_env.as_deref())?;
    let endpoint = Endpoint::new(&args.url, key.as_ref(), &args.header)?;
    let client = Rc::new(Client::new(Rc::new(endpoint), Timeouts::default())?);
    let server = server_info::server_info(&client, args.model.as_deref(), None).await?;
    let extra_body = prepared::extra_body(args.extra_body.as_deref())?;
    let sampling = prepared::sampling(&args.sampling);
    // A busy server puts several tokens into one event; with their ids they are counted, without them events are.
    let template = RequestTemplate::new(&server.model, &sampling, &extra_body, true, TokenIds::Ask)?;
    let bodies = bodies(args, &template)?;
    say(&format!("{} serves {}; {} prompts in turn", client.endpoint().label(), server.model, bodies.len()));
    let asks = Rc::new(Asks { client, mode: Mode::Stream, next_body: in_turn(bodies) });
    let window = Window { warm_up: args.warm_up, time: args.time };
    let levels = if wanted.is_empty() { &bench::LEVELS[..] } else { wanted };
    let mut swept: Vec<Level> = Vec::new();
    for &concurrency in levels {
        let curve: Vec<(usize, f64)> = swept.iter().map(|level| (level.concurrency, level.tokens_per_s)).collect();
        if wanted.is_empty() && !bench::goes_on(&curve) {
            break;
        }
        let level = tokio::select! {
            level = bench::level(&asks, concurrency, window) => level,
            _ = tokio::signal::ctrl_c() => break,
        };
        say(&render::bench::line(&level));
        swept.push(level);
    }
    Ok(swept)
}

fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The requests: of a conversation with several turns, the last.
fn bodies(args: &BenchArgs, template: &RequestTemplate) -> Result<Vec<Bytes>> {
    /// More prompts than this tell no more about a server's speed.
    const BODIES_MAX: usize = 4096;
    let mut spec = prepared::dataset_spec(&args.input)?;
    if spec.turns == Turns::All {
        spec.turns = Turns::Last;
    }
    let (hub, scratch) = (environment::hub_settings(), std::env::temp_dir());
    let stdin = &mut std::io::stdin().lock();
    let plan = eaglet_data::plan(&spec, &hub, &scratch, Some(stdin), &mut |_, _| false, &mut |_| {})?;
    let render = |index| {
        let prompt = plan.prompt(index)?;
        Ok(template.render(&prompt.messages, prompt.tools.as_deref(), args.max_completion_tokens).into())
    };
    let bodies: Vec<Bytes> = (0..plan.entries().len().min(BODIES_MAX)).map(render).collect::<Result<_>>()?;
    if bodies.is_empty() {
        return Err(Error::usage("the data set has no usable prompt").hint("eaglet doctor --dataset says why"));
    }
    Ok(bodies)
}

/// One after the other, and from the beginning again.
fn in_turn(bodies: Vec<Bytes>) -> Box<dyn Fn() -> Bytes> {
    let next = Cell::new(0);
    Box::new(move || {
        let index = next.get();
        next.set((index + 1) % bodies.len());
        bodies[index].clone()
    })
}
