//! `eaglet doctor`: the checks of preflight, all shown, without a run.

use super::prepared;
use crate::cli::DoctorArgs;
use crate::{Exit, environment, render};
use eaglet_core::{Error, Result};
use eaglet_data::DatasetSpec;
use eaglet_generate::client::Client;
use eaglet_generate::preflight::{self, Finding, Level};
use eaglet_generate::run::{Concurrency, GenerateSettings};
use eaglet_generate::server_info::{self, ServerInfo};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Runs the command.
pub(crate) fn doctor(args: DoctorArgs) -> Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::environment(format!("cannot start the event loop: {e}")))?;
    let findings = tokio::task::LocalSet::new().block_on(&runtime, examine(&args))?;
    let text = if args.json {
        serde_json::to_string_pretty(&findings).map_err(|e| Error::bug(format!("findings are not JSON: {e}")))? + "\n"
    } else {
        render::findings::text(&findings, true)
    };
    let _ = std::io::stdout().write_all(text.as_bytes());
    let failed = findings.iter().any(|f| f.level == Level::Failure);
    Ok(if failed { Exit::Environment } else { Exit::Done })
}

async fn examine(args: &DoctorArgs) -> Result<Vec<Finding>> {
    let settings = prepared::settings(&args.connection, &args.limits, &args.sampling)?;
    let (endpoints, _) = prepared::servers(&args.connection)?;
    let mut findings = vec![descriptors(settings.concurrency, endpoints.len())];
    let (prompts, bytes) = dataset(args, &mut findings);
    findings.push(writable(&args.output_dir));
    let hidden = args.connection.model_path.as_deref().and_then(|path| preflight::hidden_size(Path::new(path)));
    if let Some(free) = existing_ancestor(&args.output_dir).and_then(|dir| environment::free_bytes(&dir)) {
        findings.push(preflight::check_disk(&preflight::disk_need(prompts, bytes, &settings, hidden), free));
    }
    let mut first: Option<ServerInfo> = None;
    for endpoint in endpoints {
        let client = Client::new(endpoint, settings.timeouts)?;
        first = examine_server(args, &settings, &client, first, &mut findings).await?;
    }
    Ok(findings)
}

/// One server; the model of the first one is that of the run.
async fn examine_server(
    args: &DoctorArgs,
    settings: &GenerateSettings,
    client: &Client,
    first: Option<ServerInfo>,
    findings: &mut Vec<Finding>,
) -> Result<Option<ServerInfo>> {
    const CHECK: &str = "server";
    let label = client.endpoint().label();
    let wanted = first.as_ref().map(|info| info.model.as_str()).or(args.connection.model.as_deref());
    let found = server_info::server_info(client, wanted, args.connection.model_path.as_deref()).await;
    let found = found.and_then(|info| match &first {
        Some(ours) => server_info::same_model(ours, &info, &label).map(|()| info),
        None => Ok(info),
    });
    match found {
        Err(error) => {
            findings.push(Finding::failure(CHECK, error.to_string(), error.hint_text().unwrap_or("see its log")));
            Ok(first)
        }
        Ok(server) => {
            let kind = server.owned_by.as_deref().unwrap_or("unknown kind");
            findings.push(Finding::ok(CHECK, format!("{label} ({kind}) serves {}", server.model)));
            findings.push(preflight::check_context(settings, &server));
            let template = prepared::template(settings, &server)?;
            findings.push(preflight::probe(client, &template, settings).await);
            Ok(first.or(Some(server)))
        }
    }
}

fn descriptors(concurrency: Concurrency, servers: usize) -> Finding {
    const CHECK: &str = "open files";
    match prepared::descriptors(concurrency, servers) {
        Ok(concurrency) => Finding::ok(CHECK, format!("enough for {} connections", concurrency.max() * servers)),
        Err(error) => Finding::failure(CHECK, error.to_string(), error.hint_text().unwrap_or_default()),
    }
}

/// Reads the data set if one is given: number of prompts and bytes of their text.
fn dataset(args: &DoctorArgs, findings: &mut Vec<Finding>) -> (u64, u64) {
    const CHECK: &str = "data set";
    /// Prompts of the disk estimate when no data set is given.
    const PROMPTS_GUESS: u64 = 25_000;
    /// Text bytes of a prompt then.
    const PROMPT_BYTES_GUESS: u64 = 2000;
    if args.input.dataset.is_empty() {
        let prompts = args.input.max_samples.unwrap_or(PROMPTS_GUESS);
        return (prompts, prompts * PROMPT_BYTES_GUESS);
    }
    let spec = DatasetSpec {
        inputs: args.input.dataset.clone(),
        max_samples: args.input.max_samples,
        ..DatasetSpec::default()
    };
    let scratch = std::env::temp_dir();
    match eaglet_data::plan(&spec, &environment::hub_settings(), &scratch, None, &mut |_, _| true, &mut |_| {}) {
        Err(error) => {
            findings.push(Finding::failure(CHECK, error.to_string(), error.hint_text().unwrap_or_default()));
            (0, 0)
        }
        Ok(plan) => {
            let bytes = plan.entries().iter().map(|entry| u64::from(entry.text_bytes())).sum();
            let prompts = plan.entries().len() as u64;
            let unusable: u64 = plan.rejected_counts().values().sum();
            findings.push(Finding::ok(
                CHECK,
                format!("{prompts} prompts, {unusable} unusable rows, {} repeats", plan.duplicates_total()),
            ));
            (prompts, bytes)
        }
    }
}

fn existing_ancestor(path: &Path) -> Option<PathBuf> {
    let absolute = std::path::absolute(path).ok()?;
    absolute.ancestors().find(|dir| dir.is_dir()).map(Path::to_path_buf)
}

/// Whether the run directory could be made and written; nothing is left behind.
fn writable(dir: &Path) -> Finding {
    const CHECK: &str = "run directory";
    let hint = "choose a directory you may write to with --output-dir";
    let Some(place) = existing_ancestor(dir) else {
        return Finding::failure(CHECK, format!("{} cannot be found", dir.display()), hint);
    };
    let probe = place.join(format!(".eaglet-doctor-{}", std::process::id()));
    let written = std::fs::write(&probe, b"");
    let _ = std::fs::remove_file(&probe);
    match written {
        Ok(()) => Finding::ok(CHECK, format!("{} can be written", dir.display())),
        Err(error) => Finding::failure(
            CHECK,
            format!("cannot write in {}: {}", place.display(), eaglet_core::error::io_reason(&error)),
            hint,
        ),
    }
}
