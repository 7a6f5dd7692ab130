"""An incident played again: a client with a number of requests somebody guessed, and eaglet, before the same pretended server.

`eaglet simulate --profile kimi-k2.5-8gpu` serves both, with time running faster (--speed). The old client is what people write:
AsyncOpenAI, 200 requests in flight, whole replies, the SDK's own time-out (600 s) and its own two repetitions; its time-out is divided by
the speed, as everything else is. It gives up what fails a third time, which is what lost 8 % of the run this comes from: the longest
answers. eaglet runs with its defaults. Both get the same prompts and, since answers follow from prompts, the same answers.

    python3 incident.py --eaglet ../target/release/eaglet --speed 20

"usable" are tokens of answers that were kept. The peak is what the same server gives to a steady number of requests, the best of a sweep
with `eaglet bench`. "steady" leaves out the first ten minutes of the server's time and the end, when fewer prompts are left than fit.
"""

import argparse
import asyncio
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
PROFILE = "kimi-k2.5-8gpu"
OLD_IN_FLIGHT = 200
SDK_TIMEOUT_S = 600
MAX_TOKENS = 8192
RAMP_S = 600
LEVELS = "128,176,200,208,216,240"


class Server:
    """A fresh pretended server; its token counter is read once a second."""

    def __init__(self, options):
        command = [options.eaglet, "simulate", "--profile", PROFILE, "--port", "0", "--speed", str(options.speed), "--seed", "1"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.about = json.loads(self.process.stdout.readline())
        self.url, self.speed = self.about["url"], options.speed
        self.samples = []
        self.ended = threading.Event()
        self.sampler = threading.Thread(target=self.sample, daemon=True)

    def begin(self):
        self.started = time.monotonic()
        self.sampler.start()

    def counter(self, name):
        text = urllib.request.urlopen(self.url + "/metrics", timeout=30).read().decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name) and not line.startswith("#"))

    def sample(self):
        while not self.ended.wait(1.0):
            try:
                tokens = self.counter("vllm:generation_tokens_total")
            except OSError:
                continue
            self.samples.append(((time.monotonic() - self.started) * self.speed, tokens))

    def stop(self):
        self.ended.set()
        self.seconds = (time.monotonic() - self.started) * self.speed
        self.generated = self.counter("vllm:generation_tokens_total")
        self.process.terminate()
        self.process.wait()

    def rate(self, begin_s, end_s):
        """Tokens a second between two times of the server, from its own counter."""
        inside = [(at, tokens) for at, tokens in self.samples if begin_s <= at <= end_s]
        if len(inside) < 2:
            return float("nan")
        (t0, n0), (t1, n1) = inside[0], inside[-1]
        return (n1 - n0) / (t1 - t0)


def old_client(options):
    """The child process: answers go to a file one by one, what fails is counted and forgotten."""
    import openai

    async def run():
        client = openai.AsyncOpenAI(base_url=options.url + "/v1", api_key="none", timeout=SDK_TIMEOUT_S / options.speed)
        prompts = [json.loads(line) for line in open(options.dataset)]
        slots, began = asyncio.Semaphore(OLD_IN_FLIGHT), time.monotonic()
        with open(options.output, "w") as output:

            async def one(prompt):
                async with slots:
                    row = {"id": prompt["id"], "began": (time.monotonic() - began) * options.speed}
                    try:
                        messages = [{"role": "user", "content": prompt["prompt"]}]
                        reply = await client.chat.completions.create(model=options.model, messages=messages, max_tokens=MAX_TOKENS)
                        row |= {"tokens": reply.usage.completion_tokens}
                    except openai.OpenAIError as error:
                        row |= {"error": type(error).__name__}
                    output.write(json.dumps(row) + "\n")
                    output.flush()

            await asyncio.gather(*[one(prompt) for prompt in prompts])

    asyncio.run(run())


def run_old(options, server, dataset, directory):
    output = directory / "old.jsonl"
    command = [options.python, __file__, "--old-client", "--url", server.url, "--model", server.about["model"], "--dataset", dataset]
    subprocess.run([*command, "--output", output, "--speed", str(options.speed)], check=True)
    rows = [json.loads(line) for line in open(output)]
    kept = {row["id"]: row["tokens"] for row in rows if "tokens" in row}
    return kept, max(row["began"] for row in rows)


def run_eaglet(options, server, dataset, directory):
    run = directory / "run"
    command = [options.eaglet, "generate", "--url", server.url, "--dataset", dataset, "--output-dir", run, "--no-probe"]
    command += ["--max-completion-tokens", str(MAX_TOKENS)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    last_start = 0.0
    while process.poll() is None:
        try:
            state = json.load(open(run / "progress.json"))
            if state["not_started"] > 0:
                last_start = (time.monotonic() - server.started) * options.speed
        except (OSError, ValueError):
            pass
        time.sleep(0.2)
    if process.returncode != 0:
        sys.exit(f"eaglet ended with {process.returncode}")
    records = [json.loads(line) for line in open(run / "raw_responses.jsonl")]
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        for name in ("events.jsonl", "inference.log", "progress.json"):
            (options.keep / name).write_bytes((run / name).read_bytes())
    return {record["sample_id"]: record["completion_tokens"] for record in records}, last_start


def peak(options, dataset):
    """The best level of a sweep, in tokens a second of the server's time."""
    server = Server(options)
    command = [options.eaglet, "bench", "--url", server.url, "--dataset", dataset, "--levels", options.levels, "--json"]
    command += ["--warm-up", str(600 / options.speed), "--time", str(900 / options.speed), "--max-completion-tokens", str(MAX_TOKENS)]
    swept = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
    server.process.terminate()
    server.process.wait()
    return {level["concurrency"]: level["tokens_per_s"] / options.speed for level in swept["levels"]}


def describe(name, server, kept, last_start, lengths):
    lost = {prompt: lengths[prompt] for prompt in lengths if prompt not in kept}
    usable = sum(kept.values())
    return {
        "client": name,
        "prompts": len(lengths),
        "lost": len(lost),
        "mean_tokens_of_lost": round(statistics.mean(lost.values())) if lost else None,
        "shortest_lost": min(lost.values()) if lost else None,
        "share_of_tokens_lost": round(sum(lost.values()) / sum(lengths.values()), 4),
        "generated_twice": round(server.generated - usable),
        "server_minutes": round(server.seconds / 60, 1),
        "usable_tokens_per_s": round(usable / server.seconds, 1),
        "steady_tokens_per_s": round(server.rate(RAMP_S, last_start), 1),
        "tail_minutes": round((server.seconds - last_start) / 60, 1),
    }


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eaglet", type=pathlib.Path)
    parser.add_argument("--python", type=pathlib.Path, default=pathlib.Path(sys.executable), help="Python with openai")
    parser.add_argument("--speed", type=float, default=20)
    parser.add_argument("--prompts", type=int, default=3000)
    parser.add_argument("--levels", default=LEVELS, help="requests in flight of the sweep that finds the peak")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--keep", type=pathlib.Path, help="where eaglet's log and events go")
    parser.add_argument("--old-client", action="store_true", help=argparse.SUPPRESS)
    for name in ("--url", "--model", "--dataset", "--output"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = parse()
    if options.old_client:
        return old_client(options)
    with tempfile.TemporaryDirectory(prefix="incident-") as name:
        directory = pathlib.Path(name)
        dataset = directory / "prompts.jsonl"
        with open(dataset, "w") as file:
            for index in range(options.prompts):
                prompt = f"Task {index}. Explain how a bridge carries a moving load, and where the model stops being right."
                file.write(json.dumps({"id": f"prompt-{index:05}", "prompt": prompt}) + "\n")
        curve = peak(options, dataset)
        print("sweep:", ", ".join(f"{level}: {rate:.0f}" for level, rate in curve.items()), "tok/s", flush=True)
        found = []
        for client, run in (("eaglet", run_eaglet), ("old", run_old)):
            server = Server(options)
            server.begin()
            try:
                kept, last_start = run(options, server, dataset, directory)
            finally:
                server.stop()
            found.append((client, server, kept, last_start))
        lengths = found[0][2]
        rows = [describe(*one, lengths) for one in found]
        best = max(curve.values())
        for row in rows:
            row["steady_share_of_peak"] = round(row["steady_tokens_per_s"] / best, 4)
        print("| | " + " | ".join(row["client"] for row in rows) + " |\n|---|" + "---:|" * len(rows))
        for key in list(rows[0])[1:]:
            print(f"| {key.replace('_', ' ')} | " + " | ".join(str(row[key]) for row in rows) + " |")
        if options.json:
            options.json.write_text(json.dumps({"speed": options.speed, "sweep": curve, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
