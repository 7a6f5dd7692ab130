//! The server's gauges, under the names they have had across servers and versions. Pure.
//!
//! A gauge that is not reported is `None`, never 0, and nothing here ever stops a run. Sources of the names: vLLM 0.6 to 0.32, SGLang, llama.cpp and
//! TensorRT-LLM expositions (`docs/servers.md`).

use eaglet_core::progress::ServerGauges;
use serde_json::Value;

/// Where expositions are found: TensorRT-LLM has JSON at the first and text at the second.
pub const METRICS_PATHS: [&str; 2] = ["/metrics", "/prometheus/metrics"];

const RUNNING: [&str; 4] = [
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
    "trtllm_num_requests_running",
];
const WAITING: [&str; 4] =
    ["vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred", "trtllm_num_requests_waiting"];
const KV_USE: [&str; 5] = [
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
    "trtllm_kv_cache_utilization",
];
const PREEMPTIONS: [&str; 2] = ["vllm:num_preemptions_total", "vllm:num_preemptions"];
const GENERATION_TOKENS: [&str; 4] = [
    "vllm:generation_tokens_total",
    "vllm:generation_tokens",
    "sglang:generation_tokens_total",
    "llamacpp:tokens_predicted_total",
];

/// Reads a reply to GET of one of [`METRICS_PATHS`].
///
/// # Errors
/// Why there are no gauges in it, for people.
pub fn read(status: u16, body: &[u8]) -> Result<ServerGauges, String> {
    let text = String::from_utf8_lossy(body);
    let text = text.trim_start_matches('\u{feff}').trim();
    match status {
        200 => {}
        501 => return Err("501: start the server with --metrics".to_owned()),
        300..=399 => return Err(format!("{status}: redirect not followed")),
        other => return Err(other.to_string()),
    }
    if text.starts_with('<') {
        return Err("an HTML page".to_owned());
    }
    match serde_json::from_str::<Value>(text) {
        // An exposition put into a JSON string by a gateway.
        Ok(Value::String(quoted)) => exposition(&quoted),
        Ok(json) => iteration_stats(&json),
        Err(_) => exposition(text),
    }
}

/// TensorRT-LLM's list of iteration statistics: the last one counts.
fn iteration_stats(json: &Value) -> Result<ServerGauges, String> {
    let last = match json {
        Value::Array(list) => list.last().ok_or("empty JSON")?,
        other => other,
    };
    let number = |name: &str| last.get(name).and_then(Value::as_f64);
    let kv = last.get("kvCacheStats").and_then(|kv| {
        let (used, max) = (kv.get("usedNumBlocks")?.as_f64()?, kv.get("maxNumBlocks")?.as_f64()?);
        (max > 0.0).then(|| used / max)
    });
    let gauges = ServerGauges {
        running: number("numActiveRequests"),
        waiting: number("numQueuedRequests"),
        kv_use: kv,
        ..ServerGauges::default()
    };
    if gauges == ServerGauges::default() { Err("JSON of an unknown form".to_owned()) } else { Ok(gauges) }
}

fn exposition(text: &str) -> Result<ServerGauges, String> {
    let samples: Vec<(&str, f64)> = text.lines().filter_map(sample).collect();
    // Several engines behind one port: requests and counters add up, the fullest cache decides.
    let find = |names: &[&str], join: fn(f64, f64) -> f64| {
        names.iter().find_map(|wanted| samples.iter().filter(|(name, _)| name == wanted).map(|(_, v)| *v).reduce(join))
    };
    let add = |a, b| a + b;
    let gauges = ServerGauges {
        running: find(&RUNNING, add),
        waiting: find(&WAITING, add),
        kv_use: find(&KV_USE, f64::max),
        preemptions: find(&PREEMPTIONS, add),
        generation_tokens: find(&GENERATION_TOKENS, add),
        not_available: None,
    };
    if gauges == ServerGauges::default() { Err("no known gauge in it".to_owned()) } else { Ok(gauges) }
}

/// Name and value of one line; `None` for comments, NaN and what is no sample.
fn sample(line: &str) -> Option<(&str, f64)> {
    let line = line.trim();
    if line.starts_with('#') {
        return None;
    }
    let name_end = line.find(['{', ' ', '\t'])?;
    let after = &line[name_end..];
    let after = if after.starts_with('{') { &after[labels_end(after)?..] } else { after };
    let value: f64 = after.split_whitespace().next()?.parse().ok()?;
    value.is_finite().then_some((&line[..name_end], value))
}

/// Index behind the closing brace; braces inside quoted label values do not count.
fn labels_end(text: &str) -> Option<usize> {
    let mut quoted = false;
    let mut escaped = false;
    for (index, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return Some(index + 1),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gauges(text: &str) -> (Option<f64>, Option<f64>, Option<f64>) {
        let gauges = read(200, text.as_bytes()).unwrap();
        (gauges.running, gauges.waiting, gauges.kv_use)
    }

    /// A metric renamed by an upgrade must not turn into 0.
    #[test]
    fn names_across_versions_give_the_same_gauges() {
        let old = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"a b}\"} 7\nvllm:num_requests_waiting{model_name=\"x\"} 2\nvllm:gpu_cache_usage_perc{model_name=\"x\"} 0.25\n";
        let new = "vllm:num_requests_running{engine=\"0\"} 4.0\nvllm:num_requests_running{engine=\"1\"} 3.0\nvllm:num_requests_waiting{engine=\"0\"} 2.0 1700000000\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nvllm:num_requests_waiting_by_reason{reason=\"capacity\"} 99\nvllm:num_preemptions_created{engine=\"0\"} 1.7e9\n";
        let sglang =
            "sglang:num_running_reqs{m=\"x\"} 7\nsglang:num_queue_reqs{m=\"x\"} 2\nsglang:token_usage{m=\"x\"} 0.25\n";
        for text in [old, new, sglang] {
            assert_eq!(gauges(text), (Some(7.0), Some(2.0), Some(0.25)), "{text}");
        }
        assert_eq!(
            gauges("llamacpp:requests_processing 7\nllamacpp:requests_deferred 2\n"),
            (Some(7.0), Some(2.0), None)
        );
        assert_eq!(
            gauges("vllm:num_requests_running 1\nvllm:kv_cache_usage_perc NaN\n# EOF\n"),
            (Some(1.0), None, None)
        );
    }

    #[test]
    fn whatever_else_comes_is_a_reason_not_a_failure() {
        let stats = r#"[{"numActiveRequests": 1}, {"numActiveRequests": 5, "numQueuedRequests": 4, "kvCacheStats": {"usedNumBlocks": 30, "maxNumBlocks": 120}}]"#;
        assert_eq!(gauges(stats), (Some(5.0), Some(4.0), Some(0.25)));
        assert_eq!(gauges("\"llamacpp:requests_processing 5\\n\"").0, Some(5.0));
        let reasons = [
            (200, "[]", "empty JSON"),
            (200, "<!doctype html>", "an HTML page"),
            (200, "go_threads 5\n", "no known gauge in it"),
            (200, "", "no known gauge in it"),
            (404, "nope", "404"),
            (401, "{}", "401"),
            (501, "{}", "501: start the server with --metrics"),
            (307, "", "307: redirect not followed"),
        ];
        for (status, body, reason) in reasons {
            assert_eq!(read(status, body.as_bytes()), Err(reason.to_owned()), "{body}");
        }
    }
}
