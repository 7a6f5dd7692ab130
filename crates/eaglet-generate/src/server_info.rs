//! What a server says about itself: which model it serves, and how long its context is.

use crate::client::{AttemptFailure, Client};
use eaglet_core::outcome::Cause;
use eaglet_core::{Error, Result};
use serde::Serialize;
use serde_json::Value;
use std::time::Duration;

/// Longest wait for an answer to a side request.
pub const SIDE_TIMEOUT: Duration = Duration::from_secs(10);

/// The served model. Part of the fingerprint: a run is not resumed on another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ServerInfo {
    /// Name to send in requests.
    pub model: String,
    /// Path or hub id that the server loaded, where it says so.
    pub root: Option<String>,
    /// Context length in tokens, where the server says so.
    #[serde(skip)]
    pub max_model_len: Option<u64>,
    /// `vllm`, `sglang`, `llamacpp`, …, as the model list has it.
    #[serde(skip)]
    pub owned_by: Option<String>,
}

/// Asks `/v1/models` and chooses the model.
///
/// # Errors
/// Server: it cannot be reached, refuses the key, or does not serve the model; each with what to do.
pub async fn server_info(client: &Client, wanted: Option<&str>, model_path: Option<&str>) -> Result<ServerInfo> {
    let label = client.endpoint().label();
    let reply = client.get("/v1/models", SIDE_TIMEOUT).await.map_err(|failure| unreachable_error(&label, &failure))?;
    match reply.status.as_u16() {
        200 => {}
        401 | 403 => {
            return Err(Error::server(format!("{label} refuses the API key (HTTP {})", reply.status.as_u16()))
                .hint("name the environment variable that holds the key with --api-key-env NAME"));
        }
        status => {
            return match wanted {
                // A server without a model list can still answer.
                Some(model) if status == 404 => {
                    Ok(ServerInfo { model: model.to_owned(), root: None, max_model_len: None, owned_by: None })
                }
                _ => Err(Error::server(format!("{label}/v1/models answers HTTP {status}, expected 200"))
                    .hint("check the URL; if the server has no model list, name the model with --model")),
            };
        }
    }
    let listed = reply.json().and_then(|json| json.get("data").cloned()).and_then(|data| data.as_array().cloned());
    let Some(listed) = listed else {
        return Err(Error::server(format!("{label}/v1/models does not answer as an OpenAI-compatible server does"))
            .hint("check the URL: is this port the inference server's?"));
    };
    choose(&listed, wanted, model_path)
        .map_err(|(message, hint)| Error::server(format!("{label} {message}")).hint(hint))
}

/// The text of one token, where the server has `/detokenize`.
pub async fn text_of_token(client: &Client, model: &str, id: u32) -> Option<String> {
    detokenize(client, model, &[id]).await.filter(|text| !text.is_empty())
}

/// The text of these tokens, special ones shown, where the server has `/detokenize`.
pub async fn detokenize(client: &Client, model: &str, ids: &[u32]) -> Option<String> {
    let body = serde_json::json!({"model": model, "tokens": ids}).to_string();
    let reply = client.post("/detokenize", body.into(), SIDE_TIMEOUT).await.ok()?;
    reply.status.is_success().then(|| Some(reply.json()?.get("prompt")?.as_str()?.to_owned()))?
}

/// Whether an error of [`server_info`] says that nothing answered, which may be otherwise in a minute.
pub fn is_unreachable(error: &Error) -> bool {
    error.to_string().starts_with(CANNOT_REACH)
}

/// How a message about a server that does not answer begins.
const CANNOT_REACH: &str = "cannot reach";

/// Whether another server serves the model of the run. Hosts keep the same model in different places, so of the path only its last part is compared.
///
/// # Errors
/// Server: it serves another one; in one line.
pub fn same_model(run: &ServerInfo, other: &ServerInfo, label: &str) -> Result<()> {
    let last = |root: &Option<String>| {
        root.as_deref().and_then(|root| root.trim_end_matches('/').rsplit('/').next()).map(str::to_owned)
    };
    let (ours, theirs) = (last(&run.root), last(&other.root));
    let same_root = ours.is_none() || theirs.is_none() || ours == theirs;
    if run.model == other.model && same_root {
        return Ok(());
    }
    let named = |info: &ServerInfo| match &info.root {
        Some(root) if *root != info.model => format!("{} ({root})", info.model),
        _ => info.model.clone(),
    };
    Err(Error::server(format!("{label} serves {}, the run's model is {}", named(other), named(run))).hint(
        "the answers of two models do not belong in one run: leave this server out, or start it with the same model",
    ))
}

/// A connection that cannot be made is the most common first experience; say exactly what was tried.
pub fn unreachable_error(label: &str, failure: &AttemptFailure) -> Error {
    let hint = match failure.cause {
        Cause::Connect => {
            "is the server started, and is this its host and port? vLLM's default is http://127.0.0.1:8000"
        }
        Cause::Tls => "a certificate that this machine does not trust; use http:// if the server speaks plain HTTP",
        _ => "is this port an inference server's? `curl URL/v1/models` should list its models",
    };
    Error::server(format!("{CANNOT_REACH} {label}: {}", failure.detail)).hint(hint)
}

fn choose(
    listed: &[Value],
    wanted: Option<&str>,
    model_path: Option<&str>,
) -> std::result::Result<ServerInfo, (String, String)> {
    let text = |model: &Value, name: &str| model.get(name).and_then(Value::as_str).map(str::to_owned);
    let names: Vec<String> = listed.iter().filter_map(|model| text(model, "id")).collect();
    let by_root = |path: &str| listed.iter().find(|model| text(model, "root").as_deref() == Some(path));
    let chosen = match (wanted, model_path) {
        (Some(name), _) => listed.iter().find(|model| text(model, "id").as_deref() == Some(name)),
        (None, Some(path)) if by_root(path).is_some() => by_root(path),
        (None, _) if listed.len() <= 1 => listed.first(),
        (None, _) => {
            return Err((
                format!("serves {} models: {}", names.len(), names.join(", ")),
                "choose one with --model NAME".to_owned(),
            ));
        }
    };
    let Some(chosen) = chosen else {
        let serves =
            if names.is_empty() { "serves no model".to_owned() } else { format!("serves {}", names.join(", ")) };
        let missing = wanted.map_or(String::new(), |name| format!("does not serve {name:?}; it "));
        return Err((
            format!("{missing}{serves}"),
            "leave --model out to take the served one, or start the server with that model".to_owned(),
        ));
    };
    let number = |value: Option<&Value>| value.and_then(Value::as_u64);
    Ok(ServerInfo {
        model: text(chosen, "id").unwrap_or_default(),
        root: text(chosen, "root"),
        // llama.cpp gives the context of one slot under `meta`.
        max_model_len: number(chosen.get("max_model_len"))
            .or_else(|| number(chosen.get("meta").and_then(|m| m.get("n_ctx")))),
        owned_by: text(chosen, "owned_by"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn models() -> Vec<Value> {
        vec![
            json!({"id": "small", "root": "/models/small", "max_model_len": 4096, "owned_by": "vllm"}),
            json!({"id": "adapter", "root": "/models/adapter"}),
        ]
    }

    #[test]
    fn the_only_model_is_taken_and_several_are_a_question() {
        assert_eq!(choose(&models()[..1], None, None).unwrap().max_model_len, Some(4096));
        assert_eq!(choose(&models(), None, Some("/models/adapter")).unwrap().model, "adapter");
        assert!(choose(&models(), None, None).unwrap_err().0.contains("small, adapter"));
        assert_eq!(
            choose(&models(), Some("nope"), None).unwrap_err().0,
            "does not serve \"nope\"; it serves small, adapter"
        );
    }

    #[test]
    fn the_same_model_may_lie_in_another_place() {
        let info = |model: &str, root: Option<&str>| ServerInfo {
            model: model.to_owned(),
            root: root.map(str::to_owned),
            max_model_len: None,
            owned_by: None,
        };
        let ours = info("kimi", Some("/data/kimi-k2.5"));
        for same in [info("kimi", Some("/mnt/models/kimi-k2.5/")), info("kimi", None)] {
            assert!(same_model(&ours, &same, "http://h:1").is_ok());
        }
        for other in [info("kimi", Some("/data/kimi-k2")), info("qwen", Some("/data/kimi-k2.5"))] {
            let error = same_model(&ours, &other, "http://h:1").unwrap_err().to_string();
            assert!(error.starts_with("http://h:1 serves ") && error.contains("the run's model is kimi"), "{error}");
        }
    }

    #[test]
    fn llamacpp_says_its_context_elsewhere() {
        let listed = [json!({"id": "m", "meta": {"n_ctx": 2048}})];
        assert_eq!(choose(&listed, None, None).unwrap().max_model_len, Some(2048));
    }
}
