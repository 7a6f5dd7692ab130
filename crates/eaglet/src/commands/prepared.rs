//! From arguments to validated settings. Parsing acts on nothing.

use crate::cli::{self, Connection, GenerateArgs, Input, Judging, Limits, SamplingArgs, UnfinishedArgs};
use crate::environment;
use eaglet_core::commit::CommitSettings;
use eaglet_core::prompt::Role;
use eaglet_core::redacted::Secret;
use eaglet_core::sampling::Sampling;
use eaglet_core::{Error, Result};
use eaglet_data::{BadText, DatasetSpec, Duplicates, Turns};
use eaglet_generate::client::answer::AnswerPolicy;
use eaglet_generate::client::endpoint::Endpoint;
use eaglet_generate::client::request::{RequestTemplate, TokenIds};
use eaglet_generate::client::{Client, Mode, Timeouts};
use eaglet_generate::retry::RetryPolicy;
use eaglet_generate::run::{Concurrency, ContinuationSettings, GenerateSettings, Interrupted};
use eaglet_generate::server_info::{self, ServerInfo};
use serde_json::{Map, Value};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::rc::Rc;

/// Where a server is looked for when none is named: vLLM's own port on this machine.
const DEFAULT_URL: &str = "http://127.0.0.1:8000";

/// The data set as asked for.
pub(super) fn dataset_spec(input: &Input) -> Result<DatasetSpec> {
    Ok(DatasetSpec {
        inputs: input.dataset.clone(),
        system: input.system.clone(),
        filters: input.filters.iter().map(|filter| filter.parse()).collect::<Result<_>>()?,
        shuffle_seed: input.shuffle,
        max_samples: input.max_samples,
        turns: turns(input.turns),
        bad_text: match input.bad_text {
            cli::BadText::SetAside => BadText::SetAside,
            cli::BadText::Repair => BadText::Repair,
        },
        duplicates: match input.duplicates {
            cli::Duplicates::Refuse => Duplicates::Refuse,
            cli::Duplicates::Keep => Duplicates::Keep,
        },
        role_map: input.map_role.iter().map(|pair| mapped_role(pair)).collect::<Result<_>>()?,
        id_field: input.id_field.clone(),
    })
}

fn turns(turns: cli::Turns) -> Turns {
    match turns {
        cli::Turns::All => Turns::All,
        cli::Turns::First => Turns::First,
        cli::Turns::Last => Turns::Last,
    }
}

fn mapped_role(pair: &str) -> Result<(String, Role)> {
    let bad = || {
        Error::usage(format!("--map-role {pair:?}: expected NAME=ROLE"))
            .hint("ROLE is system, user, assistant or tool, e.g. narrator=user")
    };
    let (name, role) = pair.split_once('=').ok_or_else(bad)?;
    let role = [Role::System, Role::Developer, Role::User, Role::Assistant, Role::Tool]
        .into_iter()
        .find(|r| r.as_str() == role.trim());
    Ok((name.trim().to_owned(), role.ok_or_else(bad)?))
}

/// Settings of `generate`.
pub(super) fn generate_settings(args: &GenerateArgs) -> Result<GenerateSettings> {
    let mut settings = settings(&args.connection, &args.limits, &args.sampling)?;
    settings.turns = turns(args.input.turns);
    settings.answers = answer_policy(&args.judging)?;
    settings.commit = CommitSettings { interval: args.sync_interval, ..CommitSettings::default() };
    settings.drain_deadline = args.drain_deadline;
    settings.continuation = continuation(&args.unfinished, &settings)?;
    Ok(settings)
}

fn continuation(args: &UnfinishedArgs, settings: &GenerateSettings) -> Result<ContinuationSettings> {
    if args.continue_truncated > 0 && (settings.mode == Mode::Whole || settings.token_ids == TokenIds::DoNotAsk) {
        return Err(Error::usage("--continue-truncated needs streamed answers with token ids")
            .hint("leave out --no-stream and --no-token-ids"));
    }
    Ok(ContinuationSettings {
        interrupted: if args.no_continue { Interrupted::StartAgain } else { Interrupted::Continue },
        truncated_rounds: args.continue_truncated,
        checkpoint_interval: args.checkpoint_interval,
    })
}

/// Replaces reasoning markers that were given as token ids by their texts, which the server knows.
pub(super) async fn resolve_markers(
    settings: &mut GenerateSettings,
    client: &Client,
    server: &ServerInfo,
) -> Result<()> {
    let Some((open, close)) = settings.answers.reasoning_markers.clone() else { return Ok(()) };
    let mut texts = Vec::new();
    for marker in [open, close] {
        texts.push(match marker.parse::<u32>() {
            Err(_) => marker,
            Ok(id) => server_info::text_of_token(client, &server.model, id).await.ok_or_else(|| {
                Error::server(format!("{} does not say which text token {id} is", client.endpoint().label()))
                    .hint("give the markers as text, e.g. --reasoning-markers '<think>,</think>'")
            })?,
        });
    }
    let [open, close] = <[String; 2]>::try_from(texts).map_err(|_| Error::bug("two markers became another number"))?;
    settings.answers.reasoning_markers = Some((open, close));
    Ok(())
}

/// Settings that `generate` and `doctor` share.
pub(super) fn settings(connection: &Connection, limits: &Limits, sampling: &SamplingArgs) -> Result<GenerateSettings> {
    let counts = [("--max-completion-tokens", limits.max_completion_tokens), ("--max-seq-len", limits.max_seq_len)];
    for (flag, value) in counts {
        if value == Some(0) {
            return Err(
                Error::usage(format!("{flag} must be at least 1")).hint("leave it out for no limit of eaglet's own")
            );
        }
    }
    Ok(GenerateSettings {
        mode: if connection.no_stream { Mode::Whole } else { Mode::Stream },
        sampling: self::sampling(sampling),
        extra_body: extra_body(connection.extra_body.as_deref())?,
        max_completion_tokens: limits.max_completion_tokens,
        max_seq_len: limits.max_seq_len,
        min_completion_tokens: limits.min_completion_tokens,
        token_ids: if connection.no_token_ids { TokenIds::DoNotAsk } else { TokenIds::Ask },
        timeouts: Timeouts {
            connect: limits.connect_timeout,
            first_byte: limits.first_byte_timeout,
            silence: limits.timeout.unwrap_or(limits.silence_timeout),
            total: limits.total_timeout,
            ..Timeouts::default()
        },
        retry: RetryPolicy {
            retries_max: limits.max_retries,
            retry_for: limits.retry_for,
            backoff_first: limits.retry_backoff,
            ..RetryPolicy::default()
        },
        ..GenerateSettings::new(concurrency(connection)?)
    })
}

/// The sampling asked for.
pub(super) fn sampling(sampling: &SamplingArgs) -> Sampling {
    Sampling {
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: sampling.top_k,
        min_p: sampling.min_p,
        repetition_penalty: sampling.repetition_penalty,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        seed: sampling.seed,
        stop: sampling.stop.clone(),
    }
}

/// `--extra-body` as JSON.
pub(super) fn extra_body(text: Option<&str>) -> Result<Map<String, Value>> {
    let Some(text) = text else { return Ok(Map::new()) };
    let hint = "give one JSON object, e.g. --extra-body '{\"chat_template_kwargs\": {\"thinking\": true}}'";
    match serde_json::from_str(text) {
        Ok(Value::Object(members)) => Ok(members),
        Ok(_) => Err(Error::usage("--extra-body is JSON, but not an object").hint(hint)),
        Err(error) => Err(Error::usage(format!("--extra-body is not JSON: {error}")).hint(hint)),
    }
}

fn answer_policy(judging: &Judging) -> Result<AnswerPolicy> {
    let mut policy = AnswerPolicy::default();
    policy.accepted.extend(judging.accept_finish_reason.iter().cloned());
    policy.reasoning_markers = match judging.reasoning_markers.as_str() {
        "none" => None,
        markers => match markers.split_once(',') {
            Some((open, close)) if !open.is_empty() && !close.is_empty() => Some((open.to_owned(), close.to_owned())),
            _ => {
                return Err(Error::usage(format!("--reasoning-markers {markers:?}: expected OPEN,CLOSE or none"))
                    .hint("e.g. --reasoning-markers '<think>,</think>'"));
            }
        },
    };
    Ok(policy)
}

/// The limit of requests out, as asked for; auto without a number is bounded by the limiter's own highest.
fn concurrency(connection: &Connection) -> Result<Concurrency> {
    match (connection.concurrency, connection.concurrency_max) {
        (cli::ConcurrencyArg::Auto, max) => Ok(Concurrency::Auto { max: max.unwrap_or(Concurrency::AUTO_MAX) }),
        (cli::ConcurrencyArg::Number(number), None) => Ok(Concurrency::Pinned(number)),
        (cli::ConcurrencyArg::Number(_), Some(_)) => Err(Error::usage("--concurrency-max is for --concurrency auto")
            .hint("leave one of the two out: a number pins the concurrency, so there is no highest one")),
    }
}

/// Opens as many files as the connections need: a pinned number must be had, auto takes what there is.
pub(super) fn descriptors(concurrency: Concurrency, servers: usize) -> Result<Concurrency> {
    let servers = servers.max(1) as u64;
    match concurrency {
        Concurrency::Pinned(number) => {
            environment::raise_descriptor_limit(number.get() as u64 * servers)?;
            Ok(concurrency)
        }
        Concurrency::Auto { max } => {
            let each = environment::descriptors_for(max.get() as u64 * servers) / servers;
            let each = usize::try_from(each).ok().and_then(NonZeroUsize::new).unwrap_or(NonZeroUsize::MIN);
            Ok(Concurrency::Auto { max: each.min(max) })
        }
    }
}

/// Where servers are found when the list may change: the file and what every endpoint needs.
pub(super) struct UrlFile {
    path: PathBuf,
    key: Option<Secret>,
    headers: Vec<String>,
}

impl UrlFile {
    /// The servers the file lists now.
    pub(super) fn read(&self) -> Result<Vec<Rc<Endpoint>>> {
        let text = std::fs::read_to_string(&self.path).map_err(|e| {
            Error::io("read", &self.path, e).hint("--url-file takes a text file with the URL of one server a line")
        })?;
        let urls =
            text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()).filter(|url| !url.is_empty());
        endpoints(urls, self.key.as_ref(), &self.headers).map_err(|error| error.context(self.path.display()))
    }
}

/// The servers asked for, each once, and the file to read again if they came from one.
pub(super) fn servers(connection: &Connection) -> Result<(Vec<Rc<Endpoint>>, Option<UrlFile>)> {
    let key: Option<Secret> = environment::api_key(connection.api_key_env.as_deref())?;
    if let Some(path) = &connection.url_file {
        let file = UrlFile { path: path.clone(), key, headers: connection.header.clone() };
        let listed = file.read()?;
        if listed.is_empty() {
            return Err(Error::usage(format!("{} lists no server", path.display()))
                .hint("write one URL a line, e.g. http://host:8000"));
        }
        return Ok((listed, Some(file)));
    }
    let urls = connection.url.iter().map(String::as_str);
    let default = connection.url.is_empty().then_some(DEFAULT_URL);
    Ok((endpoints(urls.chain(default), key.as_ref(), &connection.header)?, None))
}

fn endpoints<'a>(
    urls: impl Iterator<Item = &'a str>,
    key: Option<&Secret>,
    headers: &[String],
) -> Result<Vec<Rc<Endpoint>>> {
    let mut found: Vec<Rc<Endpoint>> = Vec::new();
    for url in urls {
        let endpoint = Endpoint::new(url, key, headers)?;
        if !found.iter().any(|known| known.label() == endpoint.label()) {
            found.push(Rc::new(endpoint));
        }
    }
    Ok(found)
}

/// The template of all requests.
pub(super) fn template(settings: &GenerateSettings, server: &ServerInfo) -> Result<RequestTemplate> {
    let stream = settings.mode == Mode::Stream;
    RequestTemplate::new(&server.model, &settings.sampling, &settings.extra_body, stream, settings.token_ids)
}

/// Options whose values may be secret, or hold one.
const MASKED_OPTIONS: [&str; 3] = ["--header", "--url", "--vllm-url"];

/// The command line as it may be recorded. URLs keep their host, headers lose their values.
pub(super) fn masked_command() -> Vec<String> {
    mask(std::env::args())
}

fn mask(args: impl Iterator<Item = String>) -> Vec<String> {
    let mut masked = Vec::new();
    let mut option: Option<String> = None;
    for arg in args {
        let (name, value) = match arg.split_once('=') {
            Some((name, value)) if MASKED_OPTIONS.contains(&name) => (Some(name.to_owned()), value.to_owned()),
            _ => (option.take(), arg.clone()),
        };
        let inline = name.is_some() && arg.starts_with("--");
        let shown = match name.as_deref() {
            Some("--header") => value.split_once(':').map_or("***".to_owned(), |(header, _)| format!("{header}: ***")),
            Some("--url" | "--vllm-url") => Endpoint::new(&value, None, &[]).map_or("***".to_owned(), |e| e.label()),
            _ => value,
        };
        masked.push(match (&name, inline) {
            (Some(name), true) => format!("{name}={shown}"),
            _ => shown,
        });
        if MASKED_OPTIONS.contains(&arg.as_str()) {
            option = Some(arg);
        }
    }
    masked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recorded_command_line_holds_no_secret() {
        let args = [
            "eaglet",
            "generate",
            "--header",
            "X-Api-Key: s3cret",
            "--url=http://u:pw@h:1/v1",
            "--vllm-url",
            "http://u:pw@h:2",
            "--seed",
            "1",
        ];
        let masked = mask(args.iter().map(|s| (*s).to_owned()));
        assert_eq!(
            masked,
            [
                "eaglet",
                "generate",
                "--header",
                "X-Api-Key: ***",
                "--url=http://h:1",
                "--vllm-url",
                "http://h:2",
                "--seed",
                "1"
            ]
        );
    }

    #[test]
    fn bad_values_name_the_flag_and_the_form() {
        for text in ["[]", "{", "3"] {
            let error = extra_body(Some(text)).unwrap_err();
            assert!(error.to_string().starts_with("--extra-body") && error.hint_text().is_some());
        }
        assert!(mapped_role("narrator").is_err() && mapped_role("narrator=king").is_err());
        assert_eq!(mapped_role("narrator=user").unwrap(), ("narrator".to_owned(), Role::User));
    }
}
