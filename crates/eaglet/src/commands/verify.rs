//! `eaglet verify DIR`: whether what is on the disk is whole.

use crate::cli::VerifyArgs;
use crate::{Exit, render};
use eaglet_core::run_dir::RunDir;
use eaglet_core::{Error, Result};
use eaglet_data::prepare::Summary;
use eaglet_data::verify::{Report, verify_prepared, verify_run};
use std::io::Write;

/// Runs the command.
pub(crate) fn verify(args: &VerifyArgs) -> Result<Exit> {
    let run_dir = RunDir::new(&args.dir);
    let mut reports: Vec<(&str, Report)> = Vec::new();
    if run_dir.responses().exists() {
        reports.push(("run", verify_run(&run_dir)?));
        if Summary::read(&run_dir.prepared())?.is_some() {
            reports.push(("prepared", verify_prepared(&run_dir.prepared(), Some(&run_dir.responses()))?));
        }
    } else if Summary::read(&args.dir)?.is_some() {
        // Where it was made by default, its run is around it.
        let responses = args.dir.parent().map(|parent| RunDir::new(parent).responses()).filter(|path| path.exists());
        reports.push(("prepared", verify_prepared(&args.dir, responses.as_deref())?));
    } else {
        return Err(Error::usage(format!("{} holds neither a run nor a prepared set", args.dir.display()))
            .hint("give the --output-dir of eaglet generate or the --out of eaglet prepare"));
    }
    let sound = reports.iter().all(|(_, report)| report.findings_total == 0);
    let text = if args.json {
        let object: serde_json::Map<_, _> =
            reports.iter().map(|(name, report)| ((*name).to_owned(), serde_json::json!(report))).collect();
        format!("{:#}\n", serde_json::Value::Object(object))
    } else {
        reports.iter().map(|(name, report)| render::examples::report(name, report)).collect()
    };
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(if sound { Exit::Done } else { Exit::Data })
}
