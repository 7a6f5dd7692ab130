//! What the tests of plans share.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, missing_docs)]

use eaglet_core::Result;
use eaglet_core::prompt::Prompt;
use eaglet_data::{DatasetSpec, HubSettings, Plan, plan};
use std::path::Path;

/// A plan of these inputs; paths are taken below `dir`.
pub fn plan_of(dir: &Path, inputs: &[&str], change: impl FnOnce(&mut DatasetSpec)) -> Result<Plan> {
    let mut spec = DatasetSpec {
        inputs: inputs.iter().map(|input| dir.join(input).display().to_string()).collect(),
        ..DatasetSpec::default()
    };
    change(&mut spec);
    plan(&spec, &HubSettings::default(), dir, None, &mut |_, _| false, &mut |_| {})
}

/// A plan of one file with this content.
pub fn plan_text(name: &str, content: impl AsRef<[u8]>, change: impl FnOnce(&mut DatasetSpec)) -> Result<Plan> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(name), content).unwrap();
    plan_of(dir.path(), &[name], change)
}

pub fn prompts(plan: &Plan) -> Vec<Prompt> {
    (0..plan.entries().len()).map(|index| plan.prompt(index).unwrap()).collect()
}

/// Id and text of the last message of every prompt.
pub fn texts(plan: &Plan) -> Vec<String> {
    prompts(plan)
        .iter()
        .map(|prompt| match &prompt.messages.last().unwrap().content {
            Some(eaglet_core::prompt::Content::Text(text)) => text.clone(),
            other => panic!("expected text, got {other:?}"),
        })
        .collect()
}
