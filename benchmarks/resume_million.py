"""Opening a finished run of a million records for resume, against `cat FILE > /dev/null` on the same file, interleaved.

Makes a data set of N prompts and a record file with one record for each (about 6 KB), then times `eaglet generate`, which reads the
data set, recognises every record and ends. Needs the package blake3 (to make the prompts' hashes) and about 7 GB of disk and page cache.

    pip install blake3
    python3 resume_million.py --eaglet ../target/release/eaglet --server ../target/release/eaglet-scripted-server
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time

import blake3


def generate(directory, count):
    ids = ",".join(str(1000 + n * 37 % 48000) for n in range(620))
    text = "A hash map resolves collisions by chaining or by probing. " * 38
    (directory / "run").mkdir()
    with open(directory / "data.jsonl", "w") as data, open(directory / "run/raw_responses.jsonl", "w") as records:
        for n in range(count):
            prompt = f"Question {n}: how does a hash map resolve collisions, and what does that cost when it is nearly full?"
            digest = blake3.blake3(json.dumps([{"content": prompt, "role": "user"}], separators=(",", ":")).encode()).hexdigest()[:32]
            data.write(f'{{"id":"q{n}","prompt":"{prompt}"}}\n')
            records.write(
                f'{{"v":1,"sample_id":"q{n}","prompt_hash":"{digest}","status":"ok","prompt_tokens":40,"completion_tokens":620,'
                f'"prompt_bytes":{len(prompt)},"row":{n},"source":null,"model":"fake/model","endpoint":"http://127.0.0.1:1",'
                f'"finished_at":"2026-11-29T00:00:00.000Z","attempts":1,"sampling":{{}},"max_completion_tokens":null,'
                f'"messages":[{{"role":"user","content":"{prompt}"}}],"finish_reason":"stop","content":"{text}",'
                f'"token_ids":[{ids}],"latency_s":1.5}}\n'
            )
    return directory / "run/raw_responses.jsonl"


def timed(command, **options):
    began = time.perf_counter()
    child = subprocess.Popen(command, **options)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return time.perf_counter() - began, usage.ru_maxrss / 1024, child.returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eaglet", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="eaglet-resume-"))
    server = subprocess.Popen([args.server], stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().split()[-1]
        records = generate(directory, args.count)
        command = [args.eaglet, "generate", "--dataset", directory / "data.jsonl", "--output-dir", directory / "run", "--url", url]
        cats, opens, memory = [], [], []
        for round_number in range(args.rounds + 1):
            seconds, _, _ = timed(["cat", records], stdout=subprocess.DEVNULL)
            with open(directory / "said", "w") as said:
                opening, mib, code = timed(command, stdout=subprocess.DEVNULL, stderr=said)
            assert code == 0, (directory / "said").read_text()
            assert f"{args.count:,} of {args.count:,} done" in (directory / "said").read_text()
            if round_number:  # the first warms the page cache
                cats.append(seconds)
                opens.append(opening)
                memory.append(mib)
        cat, opened = statistics.median(cats), statistics.median(opens)
        print(f"{args.count:,} records, {records.stat().st_size / 1e9:.2f} GB, medians of {args.rounds} interleaved rounds:")
        print(f"cat {cat:.2f} s, eaglet {opened:.2f} s ({opened / cat:.2f} times), peak {max(memory):.0f} MiB")
    finally:
        server.kill()
        shutil.rmtree(directory)


main()
