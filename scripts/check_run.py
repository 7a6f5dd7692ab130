"""Checks a finished run directory against the server that answered, with nothing but Python's standard library.

usage: check_run.py DIR --prompts N --url URL [--end-token TEXT]

- raw_responses.jsonl has N lines, each one JSON object, and N prompts, each exactly once; failures.jsonl is empty
- token ids are there, as many as the usage says
- the ids, decoded by the server (POST /detokenize), are the answer's text: exact where the answer was cut at its limit,
  followed by the end token where the target ended it
Exits 0 when all of that holds, else 1 with the first differences.
"""

import argparse
import json
import pathlib
import sys
import urllib.request

SHOWN_MAX = 10


def lines_of(path, trouble):
    """The file's lines as bytes, split at 0x0A only; each must end with one."""
    *lines, rest = (path.read_bytes() if path.exists() else b"").split(b"\n")
    if rest:
        trouble.append(f"{path.name}: the last line has no newline: {rest[:40]!r}")
    return lines


def read_records(path, trouble):
    records = []
    for number, line in enumerate(lines_of(path, trouble), 1):
        try:
            record = json.loads(line.decode("utf-8"))
        except ValueError as error:
            trouble.append(f"{path.name}:{number}: not JSON: {error}")
            continue
        if not isinstance(record, dict):
            trouble.append(f"{path.name}:{number}: not an object")
            continue
        records.append(record)
    return records


def detokenize(url, model, ids):
    body = json.dumps({"model": model, "tokens": ids}).encode()
    request = urllib.request.Request(url + "/detokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["prompt"]


def check_text(record, url, end_token):
    """What differs between the ids and the text of a record, or None."""
    ids, reason = record.get("token_ids"), record["finish_reason"]
    if not ids:
        return "no token ids"
    counted = (record.get("usage") or {}).get("completion_tokens")
    if counted != len(ids):
        return f"{len(ids)} ids, but usage counts {counted}"
    text = (record.get("reasoning") or "") + (record.get("content") or "")
    if reason == "stop":
        whole = detokenize(url, record["model"], ids)
        if not whole.endswith(end_token):
            return f"ended by itself, but the last id is not {end_token!r}: {whole[-40:]!r}"
        ids = ids[:-1]
    decoded = detokenize(url, record["model"], ids) if ids else ""
    if reason == "length":
        # A character of several tokens may be cut in its middle: the decoder shows U+FFFD, the stream nothing.
        decoded, text = decoded.rstrip("\ufffd"), text.rstrip("\ufffd")
    return None if decoded == text else f"ids say {decoded!r}, text says {text!r}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--end-token", default="<|im_end|>")
    options = parser.parse_args()
    trouble = []
    records = read_records(options.dir / "raw_responses.jsonl", trouble)
    failures = read_records(options.dir / "failures.jsonl", trouble)
    prompts = {(record.get("sample_id"), record.get("prompt_hash")) for record in records}
    if len(records) != options.prompts or len(prompts) != options.prompts:
        trouble.append(f"{len(records)} records of {len(prompts)} prompts, expected {options.prompts} of each")
    for failure in failures:
        trouble.append(f"failed: {failure.get('sample_id')}: {failure.get('cause')}: {failure.get('detail')}")
    for record in records:
        try:
            different = check_text(record, options.url.rstrip("/"), options.end_token)
        except (OSError, KeyError, ValueError) as error:
            different = f"cannot be checked: {error!r}"
        if different:
            trouble.append(f"{record.get('sample_id')}: {different}")
    for line in trouble[:SHOWN_MAX]:
        print(line, file=sys.stderr)
    if trouble:
        print(f"{len(trouble)} differences", file=sys.stderr)
        return 1
    tokens = sum(len(record["token_ids"]) for record in records)
    ended = sum(record["finish_reason"] == "stop" for record in records)
    print(f"{len(records)} prompts, each answered once; {tokens} token ids decode to the text; {ended} answers ended by themselves, 0 failures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
