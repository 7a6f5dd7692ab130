//! From what the person wrote (path, directory, glob, hub data set, `-`) to the list of files to read.
//!
//! Invariants: the list is complete before the first row is read, every file in it could be opened and told apart, and
//! the order is the person's (within a directory or glob: sorted by name).

use crate::format;
use crate::hub::{self, HubSettings};
use crate::spec::DatasetSpec;
use eaglet_core::{Error, Result};
use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};

/// Where standard input is kept in the working directory, so that a run can be resumed without piping it again.
pub const STDIN_FILE: &str = "stdin.dataset";

/// Piece in which standard input is copied and compared, in bytes.
const COPY_BYTES: usize = 256 << 10;

/// A file to read.
#[derive(Clone, Debug)]
pub(crate) struct InputFile {
    pub(crate) path: PathBuf,
    /// What messages call it.
    pub(crate) shown: String,
    /// Whether its rows are numbered by the line they stand on.
    pub(crate) numbered_by_line: bool,
}

/// Resolves all inputs of `spec`.
pub(crate) fn resolve(
    spec: &DatasetSpec,
    hub: &HubSettings,
    work_dir: &Path,
    mut stdin: Option<&mut dyn Read>,
) -> Result<Vec<InputFile>> {
    if spec.inputs.is_empty() {
        return Err(Error::usage("no data set given")
            .hint("name a file, a glob, owner/name on the hub, or - for standard input"));
    }
    if spec.inputs.iter().filter(|input| *input == "-").count() > 1 {
        return Err(Error::usage("standard input (-) is named twice; it can be read once"));
    }
    let mut files = Vec::new();
    for input in &spec.inputs {
        for (path, shown) in resolve_one(input, hub, work_dir, &mut stdin)? {
            let mut file = InputFile { path, shown, numbered_by_line: false };
            file.numbered_by_line = format::open(&file)?.layout.numbered_by_line();
            files.push(file);
        }
    }
    Ok(files)
}

type Named = Vec<(PathBuf, String)>;

fn resolve_one(input: &str, hub: &HubSettings, work_dir: &Path, stdin: &mut Option<&mut dyn Read>) -> Result<Named> {
    if input == "-" {
        return Ok(vec![(keep_stdin(work_dir, stdin.take())?, "standard input".to_owned())]);
    }
    let path = Path::new(input);
    if path.is_dir() {
        return directory(path);
    }
    if path.exists() {
        return Ok(vec![(path.to_owned(), input.to_owned())]);
    }
    if input.contains(['*', '?', '[']) {
        return glob_files(input);
    }
    match hub::DatasetName::parse(input) {
        Some(name) if format::extension(path).is_none() => hub::files(&name, hub),
        _ => Err(missing(path, input)),
    }
}

fn directory(path: &Path) -> Result<Named> {
    let entries = std::fs::read_dir(path).map_err(|error| Error::io("list", path, error))?;
    let mut files = Vec::new();
    for entry in entries {
        let file = entry.map_err(|error| Error::io("list", path, error))?.path();
        if format::extension(&file).is_some() && file.is_file() {
            files.push(file);
        }
    }
    if files.is_empty() {
        return Err(Error::usage(format!("{}: no data file in this directory", path.display()))
            .hint("read are .parquet, .jsonl, .ndjson, .json, .csv and .tsv, the last five also as .gz or .zst"));
    }
    Ok(sorted(files))
}

fn glob_files(pattern: &str) -> Result<Named> {
    let paths = glob::glob(pattern).map_err(|error| Error::usage(format!("{pattern}: not a glob: {}", error.msg)))?;
    let mut files = Vec::new();
    for path in paths {
        let path = path.map_err(|error| {
            let place = error.path().to_owned();
            Error::io("list", &place, error.into())
        })?;
        if path.is_file() {
            files.push(path);
        }
    }
    if files.is_empty() {
        return Err(Error::usage(format!("{pattern}: no file matches"))
            .hint("quote the glob so that the shell leaves it alone, and check the directory"));
    }
    Ok(sorted(files))
}

fn sorted(mut files: Vec<PathBuf>) -> Named {
    files.sort();
    files
        .into_iter()
        .map(|file| {
            let shown = file.display().to_string();
            (file, shown)
        })
        .collect()
}

fn missing(path: &Path, input: &str) -> Error {
    let error = Error::usage(format!("{input}: no such file"));
    match near_match(path) {
        Some(near) => error.hint(format!("did you mean {near}?")),
        None => error.hint("a data set on the hub is written owner/name"),
    }
}

/// The file of the same directory whose name is closest, if it is close at all.
fn near_match(path: &Path) -> Option<String> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name()?.to_str()?;
    let near = std::fs::read_dir(directory)
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .map(|other| (distance(name, &other), other))
        .min()?;
    let limit = name.chars().count() / 3 + 1;
    (near.0 <= limit).then(|| path.with_file_name(near.1).display().to_string())
}

/// Edit distance (Levenshtein) in characters.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// Keeps standard input in the working directory, or checks it against what was kept before.
fn keep_stdin(work_dir: &Path, stdin: Option<&mut dyn Read>) -> Result<PathBuf> {
    let kept = work_dir.join(STDIN_FILE);
    match (stdin, kept.exists()) {
        (None, true) => {}
        (None, false) => {
            return Err(Error::usage("standard input is not available, and no earlier copy of it is kept")
                .hint("pipe the data set in, for example: zcat prompts.jsonl.gz | eaglet generate --dataset -"));
        }
        (Some(stdin), true) => compare(stdin, &kept)?,
        (Some(stdin), false) => copy(stdin, work_dir, &kept)?,
    }
    Ok(kept)
}

fn copy(stdin: &mut dyn Read, work_dir: &Path, kept: &Path) -> Result<()> {
    let write_error = |error| Error::io("write", kept, error);
    let mut file = tempfile::NamedTempFile::new_in(work_dir).map_err(write_error)?;
    let mut piece = vec![0; COPY_BYTES];
    let mut total = 0_u64;
    loop {
        let length = read_some(stdin, &mut piece)?;
        if length == 0 {
            break;
        }
        file.write_all(&piece[..length]).map_err(write_error)?;
        total += length as u64;
    }
    if total == 0 {
        return Err(Error::data("standard input: empty").hint("check the command in front of the pipe"));
    }
    // The name appears only once the bytes are on disk: a copy cut short by a crash is never taken for the data set.
    file.as_file().sync_all().map_err(write_error)?;
    file.persist(kept).map_err(|error| write_error(error.error))?;
    Ok(())
}

/// Empty input means "as before"; anything else must be the bytes that were kept.
fn compare(stdin: &mut dyn Read, kept: &Path) -> Result<()> {
    let file = File::open(kept).map_err(|error| Error::io("open", kept, error))?;
    let mut file = BufReader::with_capacity(COPY_BYTES, file);
    let (mut piece, mut before) = (vec![0; COPY_BYTES], vec![0; COPY_BYTES]);
    let mut total = 0_u64;
    loop {
        let length = read_some(stdin, &mut piece)?;
        let same = match length {
            0 if total == 0 => true,
            0 => file.read(&mut before[..1]).map_err(|error| Error::io("read", kept, error))? == 0,
            _ => match file.read_exact(&mut before[..length]) {
                Ok(()) => piece[..length] == before[..length],
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => false,
                Err(error) => return Err(Error::io("read", kept, error)),
            },
        };
        if !same {
            return Err(Error::usage(format!("standard input differs from the data set kept in {}", kept.display()))
                .hint("resume without piping anything in, or start a new run in another directory"));
        }
        if length == 0 {
            return Ok(());
        }
        total += length as u64;
    }
}

fn read_some(stdin: &mut dyn Read, piece: &mut [u8]) -> Result<usize> {
    loop {
        match stdin.read(piece) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::io("read", Path::new("standard input"), error)),
            Ok(length) => return Ok(length),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edit_distance_counts_single_changes() {
        assert_eq!(distance("prompts.jsonl", "prompts.jsonl"), 0);
        assert_eq!(distance("promts.jsonl", "prompts.jsonl"), 1);
        assert_eq!(distance("", "abc"), 3);
    }

    #[test]
    fn standard_input_is_kept_once_and_then_only_compared() {
        let dir = tempfile::tempdir().unwrap();
        let keep = |bytes: &[u8]| keep_stdin(dir.path(), Some(&mut &*bytes));
        assert_eq!(keep(b"").unwrap_err().to_string(), "standard input: empty");
        let kept = keep(b"{\"prompt\": \"a\"}\n").unwrap();
        assert_eq!(keep(b"").unwrap(), kept);
        assert_eq!(keep(b"{\"prompt\": \"a\"}\n").unwrap(), kept);
        assert_eq!(keep_stdin(dir.path(), None).unwrap(), kept);
        for other in ["{\"prompt\": \"b\"}\n", "{\"prompt\"", "{\"prompt\": \"a\"}\n\n"] {
            assert!(keep(other.as_bytes()).unwrap_err().to_string().contains("differs"), "{other}");
        }
        assert_eq!(std::fs::read(kept).unwrap(), b"{\"prompt\": \"a\"}\n");
    }
}
