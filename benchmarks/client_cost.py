"""What a client costs: CPU seconds per 1,000 replies and resident memory, for eaglet and two Python clients.

The server is the bench mode of eaglet-scripted-server, which sends pre-rendered replies. Each measurement has a fresh server, a
fresh client process and a fresh directory. CPU time is user and system time of the whole client process from wait4, start-up
included; nothing is subtracted. The server's own time is shown beside it, without the rendering before it listens. Rounds are
interleaved, so that a busy spell of the machine does not fall on one client alone.
Every client must have written every prompt once, with as many token ids as the server says it sent.

    ./setup.sh
    python3 client_cost.py --eaglet ../target/release/eaglet --server ../target/release/eaglet-scripted-server
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
MODEL = "fake/model"
# The server has 64 replies and takes them in turn: after a multiple of 64 every client got the same tokens.
REPLIES = 64
CLIENTS = ("eaglet", "openai", "aiohttp")
SAMPLE_SECONDS = 0.05
PROMPT_CHARACTERS = 1200


@dataclasses.dataclass(frozen=True)
class Cell:
    """One row of the table."""

    name: str
    concurrency: int
    stream: bool
    replies: dict  # client -> number of replies, a multiple of REPLIES
    mean_tokens: int = 1263
    event_ms: int = 0
    whole_ms: int = 0


def same(count):
    return dict.fromkeys(CLIENTS, count)


# Cheaper clients get more replies, so that start-up is small beside the work for each of them.
CELLS = (
    Cell("stream, fast, 128 in flight", 128, True, {"eaglet": 1280, "openai": 192, "aiohttp": 640}),
    Cell("stream, 10 ms a token, 128 in flight", 128, True, same(256), event_ms=10),
    Cell("whole replies, 128 in flight", 128, False, {"eaglet": 12800, "openai": 1280, "aiohttp": 6400}, whole_ms=100),
    Cell("stream, 250 ms a token, 4,096 in flight", 4096, True, same(4096), mean_tokens=126, event_ms=250),
)
QUICK_CELLS = (
    Cell("stream, fast, 32 in flight", 32, True, same(64), mean_tokens=126),
    Cell("stream, 10 ms a token, 32 in flight", 32, True, same(64), mean_tokens=126, event_ms=10),
    Cell("whole replies, 32 in flight", 32, False, same(256), mean_tokens=126, whole_ms=20),
    Cell("stream, 50 ms a token, 256 in flight", 256, True, same(256), mean_tokens=63, event_ms=50),
)


@dataclasses.dataclass(frozen=True)
class Measurement:
    cell: str
    client: str
    round: int
    replies: int
    token_ids: int
    wall_s: float
    cpu_s: float
    cpu_s_per_1000: float
    rss_mib: float
    server_cpu_s: float
    load_1min: float


class Failed(Exception):
    """A client that did not do its work; the figures of such a run mean nothing."""


def write_prompts(path, count):
    """Prompts that differ in their first characters; about 1,200 characters each, as in instruction data sets."""
    sentence = "Explain step by step how a bridge carries a moving load, and say where the model stops being right. "
    text = (sentence * (PROMPT_CHARACTERS // len(sentence) + 1))[:PROMPT_CHARACTERS]
    with open(path, "w", encoding="utf-8") as file:
        for index in range(count):
            file.write(json.dumps({"id": f"prompt-{index:06}", "prompt": f"Task {index}. {text}"}) + "\n")


class Server:
    """A fresh bench server for one measurement."""

    def __init__(self, program, cell):
        command = [program, "--bench", "--model", MODEL, "--mean-tokens", str(cell.mean_tokens)]
        command += ["--bench-event-ms", str(cell.event_ms), "--bench-whole-ms", str(cell.whole_ms)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.rendering_s = 0.0
        line = self.process.stdout.readline()
        if not line.startswith("listening "):
            self.stop()
            raise Failed(f"{program} said {line!r} instead of where it listens")
        self.url = line.split()[1]
        self.rendering_s = cpu_so_far(self.process.pid)

    def stop(self):
        """Ends it; gives its CPU seconds without those spent before it listened, on rendering its replies."""
        self.process.terminate()
        self.process.stdout.close()
        return wait(self.process)[1] - self.rendering_s


def wait(process):
    """Exit status, CPU seconds, peak resident MiB by the kernel's account."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def cpu_so_far(pid):
    """CPU seconds of a running process, to a hundredth."""
    fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_peak_mib(pid):
    try:
        for line in open(f"/proc/{pid}/status"):
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def run_to_end(command, log):
    """Runs a client: wall seconds, CPU seconds, peak resident MiB."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    sampled = 0.0
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        sampled = max(sampled, resident_peak_mib(process.pid))
        time.sleep(SAMPLE_SECONDS)
    wall = time.monotonic() - start
    code, cpu, peak = wait(process)
    if code != 0:
        raise Failed(f"{' '.join(map(str, command))}: exit status {code}")
    # A child starts with its parent's peak on its account; below that only the sampled peak is its own.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return wall, cpu, peak if peak > own + 1 else sampled


def command_for(client, options, cell, url, dataset, directory):
    """The command line, and the file with its records."""
    common = ["--url", url, "--dataset", dataset, "--model", MODEL, "--concurrency", str(cell.concurrency)]
    common += [] if cell.stream else ["--no-stream"]
    if client == "eaglet":
        out = directory / "run"
        return [options.eaglet, "generate", *common, "--output-dir", out, "--no-probe"], out / "raw_responses.jsonl"
    out = directory / "responses.jsonl"
    return [options.python, HERE / "clients.py", client, *common, "--output", out], out


def completion_ids(value):
    """The completion's token ids, wherever a record keeps them."""
    if isinstance(value, dict):
        for name in ("completion_token_ids", "token_ids", "output_token_ids"):
            if isinstance(value.get(name), list):
                return len(value[name])
        return sum(completion_ids(inner) for inner in value.values())
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return sum(completion_ids(inner) for inner in value)
    return 0


def check_records(path, cell, count):
    """The number of token ids, after checking that there are `count` whole records and the right number of ids."""
    lines = path.read_bytes().split(b"\n")
    if lines.pop() != b"":
        raise Failed(f"{path}: the last line is torn")
    per_record = [completion_ids(json.loads(line)) for line in lines]
    if len(per_record) != count or 0 in per_record:
        raise Failed(f"{path}: {len(per_record)} records, {per_record.count(0)} of them without ids; expected {count}")
    expected = sum(max(4, cell.mean_tokens * (63 + 2 * step) // 126) for step in range(REPLIES)) * (count // REPLIES)
    if sum(per_record) != expected:
        raise Failed(f"{path}: {sum(per_record)} token ids, the server sent {expected}")
    return expected


def measure(options, cell, client, number):
    count = cell.replies[client]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="client-cost-", dir=options.work_dir) as name:
        directory = pathlib.Path(name)
        dataset = directory / "prompts.jsonl"
        write_prompts(dataset, count)
        server = Server(options.server, cell)
        log_path = directory / "client.log"
        try:
            command, records = command_for(client, options, cell, server.url, dataset, directory)
            with open(log_path, "wb") as log:
                wall, cpu, rss = run_to_end(command, log)
            token_ids = check_records(records, cell, count)
        except (Failed, OSError, ValueError) as failure:
            said = log_path.read_text(errors="replace")[-2000:] if log_path.exists() else ""
            raise Failed(f"{client}, {cell.name}: {failure}\n{said}") from failure
        finally:
            server_cpu = server.stop()
    return Measurement(
        cell.name, client, number, count, token_ids, round(wall, 2), round(cpu, 3), round(cpu / count * 1000, 4),
        round(rss, 1), round(server_cpu, 2), round(load, 2),
    )  # fmt: skip


def medians(measurements, cell, client):
    """Median CPU seconds per 1,000 replies, median peak MiB, median server CPU seconds per 1,000 replies."""
    mine = [one for one in measurements if (one.cell, one.client) == (cell.name, client)]
    if not mine:
        return None
    server = statistics.median(one.server_cpu_s / one.replies * 1000 for one in mine)
    return statistics.median(one.cpu_s_per_1000 for one in mine), statistics.median(one.rss_mib for one in mine), server


def table(cells, measurements):
    lines = [
        "| cell | tokens a reply | client | replies | CPU s per 1,000 | ratio to eaglet | peak MiB | ratio to eaglet | server CPU s per 1,000 |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for cell in cells:
        base = medians(measurements, cell, "eaglet")
        for client in CLIENTS:
            found = medians(measurements, cell, client)
            if found is None:
                continue
            cpu, rss, server = found
            ratios = [f"{mine / its:.1f}" if its else "" for mine, its in zip((cpu, rss), base[:2])] if base else ["", ""]
            lines.append(
                f"| {cell.name} | {cell.mean_tokens:,} | {client} | {cell.replies[client]:,} | {cpu:.3f} | {ratios[0]} "
                f"| {rss:.0f} | {ratios[1]} | {server:.2f} |"
            )
    return "\n".join(lines)


def first_line(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"unknown ({error.strerror})"
    return (done.stdout.strip().splitlines() or ["unknown"])[0]


def surroundings(options):
    cpu = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "unknown")
    versions = "import aiohttp, openai, platform; print(platform.python_version(), openai.__version__, aiohttp.__version__)"
    python, openai, aiohttp = (first_line([options.python, "-c", versions]).split() + ["unknown"] * 3)[:3]
    found = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": python,
        "openai": openai,
        "aiohttp": aiohttp,
        "rounds": options.rounds,
    }
    if "eaglet" in options.clients:
        found["eaglet"] = first_line([options.eaglet, "--version"])
    return found


def raise_open_files(needed):
    """Children inherit the limit; 4,096 connections need more than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise Failed(f"at most {hard} open files are allowed here, {needed} are needed")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def default_python():
    venv = pathlib.Path(os.environ.get("EAGLET_BENCH_VENV") or HERE / ".venv-bench")
    return venv / "bin" / "python"


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eaglet", type=pathlib.Path, help="the release build of eaglet")
    parser.add_argument("--server", type=pathlib.Path, required=True, help="the release build of eaglet-scripted-server")
    parser.add_argument("--python", type=pathlib.Path, default=default_python(), help="Python with openai and aiohttp (setup.sh)")
    parser.add_argument("--rounds", type=int, help="default 3; 1 with --quick")
    parser.add_argument("--clients", default=",".join(CLIENTS), help="comma-separated; default all")
    parser.add_argument("--cells", default="", help="only cells whose name holds this text")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works; no figures to quote")
    parser.add_argument("--json", type=pathlib.Path, help="every measurement, and where it was taken")
    parser.add_argument("--work-dir", type=pathlib.Path, help="where the clients write; default the system's temporary directory")
    options = parser.parse_args()
    options.clients = [client for client in CLIENTS if client in options.clients.split(",")]
    options.rounds = options.rounds or (1 if options.quick else 3)
    if "eaglet" in options.clients and options.eaglet is None:
        parser.error("--eaglet is needed, or --clients openai,aiohttp")
    for name in ("eaglet", "server"):
        program = getattr(options, name)
        if program is not None:
            setattr(options, name, program.resolve())
    return options


def main():
    options = parse()
    cells = [cell for cell in (QUICK_CELLS if options.quick else CELLS) if options.cells in cell.name]
    try:
        raise_open_files(max(cell.concurrency for cell in cells) + 512 if cells else 0)
        measurements = []
        for number in range(options.rounds):
            for cell in cells:
                for turn in range(len(options.clients)):
                    client = options.clients[(turn + number) % len(options.clients)]
                    one = measure(options, cell, client, number + 1)
                    measurements.append(one)
                    print(f"round {one.round}: {client}, {cell.name}: {one.cpu_s_per_1000} s CPU per 1,000, {one.rss_mib} MiB, "
                          f"{one.wall_s} s, server {one.server_cpu_s} s CPU", file=sys.stderr, flush=True)  # fmt: skip
    except Failed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    where = surroundings(options)
    print(table(cells, measurements))
    print("\n" + ", ".join(f"{name} {value}" for name, value in where.items()))
    if options.json:
        report = {**where, "measurements": [dataclasses.asdict(one) for one in measurements]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
