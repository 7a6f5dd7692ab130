//! Data sets of a model hub: which files belong to a name, and their download into the hub's usual cache.
//!
//! What is here: listing a repository, choosing the files of a split, downloading, reading the cache offline. What is not:
//! uploads, models, git. The `hf-hub` crate (1.0) would do this too, but brings some 330 crates, among them an asynchronous
//! HTTP stack, a database and a cryptography library built by cmake; the two requests needed here are made with `ureq`.
//!
//! Layout: `HOME/hub/datasets--OWNER--NAME/{refs/main, snapshots/COMMIT/PATH}`, as other tools read and write it. Files
//! are put into the snapshot directly, not as links into `blobs/` (the layout those tools use where links do not exist).
//! Invariant: a file under `snapshots/` is whole; it gets its name only after all its bytes are on disk.

use crate::format;
use eaglet_core::{Error, Result};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::fmt;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The hub asked when none is set.
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
/// Largest listing of a repository in bytes.
const LISTING_MAX_BYTES: u64 = 64 << 20;
/// Tries of one download; each goes on where the last one ended.
const DOWNLOAD_TRIES: u32 = 5;
/// Wait before the second try; doubles with each.
const RETRY_PAUSE: Duration = Duration::from_millis(250);
/// Limit for connecting, for the beginning of an answer, and for silence inside one.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// How the hub is reached; the binary fills it from its environment.
#[derive(Clone, Debug, Default)]
pub struct HubSettings {
    /// Base URL (`HF_ENDPOINT`).
    pub endpoint: Option<String>,
    /// Access token (`HF_TOKEN`); sent to the endpoint's own host only.
    pub token: Option<Token>,
    /// Directory that holds the `hub` cache (`HF_HOME`).
    pub home: Option<PathBuf>,
    /// Use the cache alone (`HF_HUB_OFFLINE`).
    pub offline: bool,
}

/// An access token. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Takes the token's text.
    pub fn new(text: impl Into<String>) -> Self {
        Token(text.into())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(***)")
    }
}

/// `owner/name` with what follows the colon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DatasetName {
    id: String,
    /// Split, `config/split`, or a file's path in the repository.
    selector: String,
}

impl DatasetName {
    /// `None` if the text cannot be a hub name.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (id, selector) = text.split_once(':').unwrap_or((text, "train"));
        let (owner, name) = id.split_once('/')?;
        let fits = |part: &str| {
            !part.is_empty()
                && !part.starts_with(['.', '-'])
                && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        };
        (fits(owner) && fits(name) && !selector.is_empty())
            .then(|| DatasetName { id: id.to_owned(), selector: selector.to_owned() })
    }
}

/// The files of a data set, on this machine.
pub(crate) fn files(name: &DatasetName, settings: &HubSettings) -> Result<Vec<(PathBuf, String)>> {
    let home = settings.home.as_ref().ok_or_else(|| {
        Error::usage(format!("{}: no such file, and no cache directory for hub data sets", name.id))
            .hint("set HF_HOME to a directory with room for the data set")
    })?;
    let repository = home.join("hub").join(format!("datasets--{}", name.id.replace('/', "--")));
    let (commit, listed) =
        if settings.offline { cached(name, &repository)? } else { Client::new(settings).list(name)? };
    let chosen = choose(name, &listed)?;
    let snapshot = repository.join("snapshots").join(&commit);
    let mut files = Vec::with_capacity(chosen.len());
    for path in chosen {
        let local = snapshot.join(&path);
        if !local.is_file() {
            if settings.offline {
                return Err(not_cached(name, &path));
            }
            Client::new(settings).download(name, &commit, &path, &local)?;
        }
        files.push((local, format!("{}/{path}", name.id)));
    }
    if !settings.offline {
        remember(&repository, &commit)?;
    }
    Ok(files)
}

/// Commit and files of the cached snapshot.
fn cached(name: &DatasetName, repository: &Path) -> Result<(String, Vec<String>)> {
    let commit = std::fs::read_to_string(repository.join("refs").join("main")).map_err(|_| not_cached(name, "it"))?;
    let commit = commit.trim().to_owned();
    let snapshot = repository.join("snapshots").join(&commit);
    let mut listed = Vec::new();
    let mut open = vec![snapshot.clone()];
    while let Some(directory) = open.pop() {
        let entries = std::fs::read_dir(&directory).map_err(|error| Error::io("list", &directory, error))?;
        for entry in entries {
            let path = entry.map_err(|error| Error::io("list", &directory, error))?.path();
            if path.is_dir() {
                open.push(path);
            } else if let Some(inside) = path.strip_prefix(&snapshot).ok().and_then(Path::to_str) {
                listed.push(inside.to_owned());
            }
        }
    }
    Ok((commit, listed))
}

fn not_cached(name: &DatasetName, what: &str) -> Error {
    Error::environment(format!("data set {}: offline, and {what} is not in the cache", name.id))
        .hint("fetch it once with a network connection and the same HF_HOME, or give a local file")
}

/// Writes `refs/main`, by which the cache is found offline.
fn remember(repository: &Path, commit: &str) -> Result<()> {
    let refs = repository.join("refs");
    let main = refs.join("main");
    let write = || -> std::io::Result<()> {
        std::fs::create_dir_all(&refs)?;
        let mut file = tempfile::NamedTempFile::new_in(&refs)?;
        file.write_all(commit.as_bytes())?;
        file.persist(&main)?;
        Ok(())
    };
    write().map_err(|error| Error::io("write", &main, error))
}

/// Files of a repository that belong to the selector, in order.
///
/// A file belongs to a split if one of the words of its path is the split's name (`data/train-00000-of-00002.parquet`,
/// `train/a.jsonl`). Files that name no split at all are the training split. Of several formats the first of
/// Parquet, JSONL, JSON, CSV is taken. Several configurations (directories), or several unrelated files, are refused.
fn choose(name: &DatasetName, listed: &[String]) -> Result<Vec<String>> {
    let data: BTreeSet<&str> = listed.iter().map(String::as_str).filter(|path| is_data(path)).collect();
    if data.contains(name.selector.as_str()) {
        return Ok(vec![name.selector.clone()]);
    }
    let (config, split) = match name.selector.rsplit_once('/') {
        Some((config, split)) => (Some(config), split),
        None => (None, name.selector.as_str()),
    };
    let in_config = |path: &&&str| config.is_none_or(|config| directory(path, split) == config);
    let mut chosen: Vec<&str> = data.iter().filter(in_config).filter(|path| has_word(path, split)).copied().collect();
    let named = !chosen.is_empty();
    if !named && split == "train" {
        let other = ["test", "validation", "valid", "val", "dev", "eval"];
        chosen = data
            .iter()
            .filter(in_config)
            .filter(|path| !other.iter().any(|word| has_word(path, word)))
            .copied()
            .collect();
    }
    for format in ["parquet", "jsonl", "json", "csv"] {
        let of_format = |path: &&str| format_of(path) == format;
        if chosen.iter().any(of_format) {
            chosen.retain(|path| of_format(path));
        }
    }
    let refuse = |what: String, hint: String| Err(Error::usage(format!("data set {}: {what}", name.id)).hint(hint));
    let some = crate::conversation::names(data.iter().copied());
    if chosen.is_empty() {
        return refuse(
            format!("no files of split {:?}", name.selector),
            format!("its data files: {some}; name one as {}:FILE", name.id),
        );
    }
    let directories: BTreeSet<&str> = chosen.iter().map(|path| directory(path, split)).collect();
    if directories.len() > 1 {
        let list = directories.into_iter().collect::<Vec<_>>().join(", ");
        return refuse(format!("several configurations ({list})"), format!("choose one: {}:CONFIG/{split}", name.id));
    }
    if !named && chosen.len() > 1 && format_of(chosen[0]) != "parquet" {
        return refuse(
            format!("several files, none named after split {split:?}"),
            format!("choose one as {}:FILE of {some}", name.id),
        );
    }
    Ok(chosen.into_iter().map(str::to_owned).collect())
}

fn is_data(path: &str) -> bool {
    let file = path.rsplit('/').next().unwrap_or(path);
    let description = ["dataset_infos.json", "dataset_info.json", "config.json", "state.json", "metadata.json"];
    // A repository is foreign: no path of it may lead out of the cache.
    let inside = path.split('/').all(|part| !part.is_empty() && !part.starts_with('.')) && !path.contains('\\');
    inside && format::extension(Path::new(path)).is_some() && !description.contains(&file)
}

fn format_of(path: &str) -> &'static str {
    match format::extension(Path::new(path)) {
        Some("parquet" | "pq") => "parquet",
        Some("jsonl" | "ndjson") => "jsonl",
        Some("json") => "json",
        _ => "csv",
    }
}

/// Directory of a file, without a last part that only names the split.
fn directory<'a>(path: &'a str, split: &str) -> &'a str {
    let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
    match parent.rsplit_once('/') {
        Some((before, last)) if last == split => before,
        None if parent == split => "",
        _ => parent,
    }
}

fn has_word(path: &str, word: &str) -> bool {
    path.contains(word) && path.split(['/', '-', '_', '.', ' ']).any(|part| part == word) || {
        // A split's own name may hold a separator (`train_sft`).
        word.contains(['-', '_', '.'])
            && path
                .split('/')
                .any(|part| part.strip_prefix(word).is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '.'])))
    }
}

/// Answer to a listing.
#[derive(Deserialize)]
struct Listing {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

/// One file of a listing.
#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

type Response = ureq::http::Response<ureq::Body>;

struct Client<'a> {
    settings: &'a HubSettings,
    endpoint: &'a str,
    agent: ureq::Agent,
}

impl<'a> Client<'a> {
    fn new(settings: &'a HubSettings) -> Self {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .redirect_auth_headers(ureq::config::RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(SILENCE_MAX))
            .timeout_recv_response(Some(SILENCE_MAX))
            .timeout_per_read(Some(SILENCE_MAX))
            .build();
        let endpoint = settings.endpoint.as_deref().unwrap_or(DEFAULT_ENDPOINT).trim_end_matches('/');
        Client { settings, endpoint, agent: config.into() }
    }

    fn get(&self, url: &str, from: u64) -> Result<Response, ureq::Error> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.settings.token {
            request = request.header("authorization", format!("Bearer {}", token.0));
        }
        if from > 0 {
            request = request.header("range", format!("bytes={from}-"));
        }
        request.call()
    }

    fn list(&self, name: &DatasetName) -> Result<(String, Vec<String>)> {
        let url = format!("{}/api/datasets/{}/revision/main", self.endpoint, name.id);
        let mut response = self.get(&url, 0).map_err(|error| self.unreachable(name, &error))?;
        self.check(name, &response)?;
        let body = response.body_mut().with_config().limit(LISTING_MAX_BYTES).read_to_vec();
        let body = body.map_err(|error| self.unreachable(name, &error))?;
        let listing: Listing = serde_json::from_slice(&body).map_err(|error| {
            Error::environment(format!("hub {}: its answer about {} is not a listing: {error}", self.endpoint, name.id))
                .hint("check HF_ENDPOINT; a proxy may answer in its place")
        })?;
        if listing.sha.is_empty() || !listing.sha.chars().all(|c| c.is_ascii_alphanumeric()) {
            return Err(Error::environment(format!("hub {}: its listing of {} has no commit", self.endpoint, name.id)));
        }
        Ok((listing.sha, listing.siblings.into_iter().map(|sibling| sibling.rfilename).collect()))
    }

    fn download(&self, name: &DatasetName, commit: &str, path: &str, local: &Path) -> Result<()> {
        let url = format!("{}/datasets/{}/resolve/{commit}/{}", self.endpoint, name.id, percent_encoded(path));
        let directory = local.parent().expect("a snapshot's file lies in the snapshot");
        let write_error = |error| Error::io("write", local, error);
        std::fs::create_dir_all(directory).map_err(write_error)?;
        let mut file = tempfile::NamedTempFile::new_in(directory).map_err(write_error)?;
        let mut pause = RETRY_PAUSE;
        let mut tries = 1;
        while let Some(fault) = self.go_on(name, &url, file.as_file_mut(), local)? {
            if tries == DOWNLOAD_TRIES {
                return Err(Error::environment(format!("data set {}: cannot download {path}: {fault}", name.id))
                    .hint("start again later: files that are complete are not fetched again"));
            }
            tries += 1;
            std::thread::sleep(pause);
            pause *= 2;
        }
        file.as_file().sync_all().map_err(write_error)?;
        file.persist(local).map_err(|error| write_error(error.error))?;
        Ok(())
    }

    /// One try: appends to `file` what is missing. `Some` says what interrupted it; worth another try.
    fn go_on(&self, name: &DatasetName, url: &str, file: &mut std::fs::File, local: &Path) -> Result<Option<String>> {
        let write_error = |error| Error::io("write", local, error);
        let mut have = file.stream_position().map_err(write_error)?;
        let mut response = match self.get(url, have) {
            Ok(response) => response,
            Err(error) => return Ok(Some(error.to_string())),
        };
        if response.status().is_server_error() || response.status().as_u16() == 429 {
            return Ok(Some(format!("HTTP status {}", response.status().as_u16())));
        }
        self.check(name, &response)?;
        if have > 0 && response.status().as_u16() != 206 {
            // The server sends the whole file again.
            file.set_len(0).and_then(|()| file.rewind()).map_err(write_error)?;
            have = 0;
        }
        let length = response.headers().get("content-length").and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
        let expected = length.map(|length| have + length);
        let mut body = response.body_mut().with_config().limit(u64::MAX).reader();
        let mut piece = vec![0; 256 << 10];
        loop {
            match body.read(&mut piece) {
                Ok(0) => break,
                Ok(read) => file.write_all(&piece[..read]).map_err(write_error)?,
                Err(error) => return Ok(Some(error.to_string())),
            }
            have = file.stream_position().map_err(write_error)?;
        }
        Ok(expected.filter(|expected| have < *expected).map(|expected| format!("got {have} of {expected} bytes")))
    }

    fn check(&self, name: &DatasetName, response: &Response) -> Result<()> {
        let refuse = |what: &str| format!("data set {}: {what} (hub {})", name.id, self.endpoint);
        match response.status().as_u16() {
            200 | 206 => Ok(()),
            401 | 403 => Err(Error::environment(refuse("the hub refuses access"))
                .hint("check the spelling; for a private or gated data set accept its terms and set HF_TOKEN")),
            404 => Err(Error::usage(refuse("no such local file, and not found on the hub"))
                .hint("check the spelling of owner/name, or the path of a local file")),
            status => Err(Error::environment(refuse(&format!("HTTP status {status}"))).hint("try again later")),
        }
    }

    fn unreachable(&self, name: &DatasetName, error: &ureq::Error) -> Error {
        Error::environment(format!("data set {}: cannot reach the hub {}: {error}", name.id, self.endpoint))
            .hint("no such local file exists either; with a cached copy set HF_HUB_OFFLINE=1")
    }
}

/// A repository path as part of a URL.
fn percent_encoded(path: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    path.bytes().fold(String::with_capacity(path.len()), |mut text, byte| {
        if plain(byte) {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(name: &str, listed: &[&str]) -> Result<Vec<String>> {
        let listed: Vec<String> = listed.iter().map(|path| (*path).to_owned()).collect();
        choose(&DatasetName::parse(name).unwrap(), &listed)
    }

    #[test]
    fn names_of_the_hub_are_told_from_paths() {
        assert_eq!(DatasetName::parse("quiet/harbour").unwrap().selector, "train");
        assert_eq!(DatasetName::parse("quiet/harbour:test").unwrap().selector, "test");
        for text in ["harbour", "/quiet/harbour", "./harbour", "../harbour", "a/b/c", "a/b c", "a/b:"] {
            assert_eq!(DatasetName::parse(text), None, "{text}");
        }
    }

    #[test]
    fn the_files_of_a_split_are_chosen() {
        let shards = [
            "README.md",
            "data/train-00001-of-00002.parquet",
            "data/train-00000-of-00002.parquet",
            "data/test-00000-of-00001.parquet",
        ];
        assert_eq!(
            chosen("o/n", &shards).unwrap(),
            ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
        );
        assert_eq!(chosen("o/n:test", &shards).unwrap(), ["data/test-00000-of-00001.parquet"]);
        assert_eq!(chosen("o/n", &["sharegpt.json", "dataset_infos.json"]).unwrap(), ["sharegpt.json"]);
        assert_eq!(chosen("o/n", &["train/a.jsonl.gz", "val/a.jsonl.gz"]).unwrap(), ["train/a.jsonl.gz"]);
        assert_eq!(
            chosen("o/n:train_sft", &["data/train_sft-00000.parquet", "data/train_gen-00000.parquet"]).unwrap(),
            ["data/train_sft-00000.parquet"]
        );
        assert_eq!(chosen("o/n", &["train.csv", "train.parquet"]).unwrap(), ["train.parquet"]);
        assert_eq!(chosen("o/n:b.json", &["a.json", "b.json"]).unwrap(), ["b.json"]);
    }

    #[test]
    fn what_is_ambiguous_is_refused_with_a_way_out() {
        let configs = ["easy/train-0.parquet", "hard/train-0.parquet"];
        assert!(chosen("o/n", &configs).unwrap_err().to_string().contains("easy, hard"));
        assert_eq!(chosen("o/n:hard/train", &configs).unwrap(), ["hard/train-0.parquet"]);
        assert!(chosen("o/n", &["a.json", "b.json"]).unwrap_err().hint_text().unwrap().contains("a.json"));
        assert!(chosen("o/n:dev", &["train.json"]).is_err());
        assert!(chosen("o/n", &["../../train.json", "/etc/train.json"]).is_err(), "no path leads out of the cache");
    }

    #[test]
    fn a_token_is_never_printed() {
        let settings = HubSettings { token: Some(Token::new("tok-123")), ..HubSettings::default() };
        assert!(!format!("{settings:?}").contains("123"));
    }
}
