#!/usr/bin/env bash
# A generate run in small: 24 prompts, a scripted server in place of a model, one `kill -9` in the middle, a resume.
# usage: demo/run.sh [DIRECTORY_OF_THE_BINARIES]      `make demo` builds them first
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${1:-target/debug}
out=$(dirname "$bin")/demo-run
prompts=demo/prompts.jsonl
records=$out/raw_responses.jsonl

server='' client=''
clean_up() {
  for pid in $client $server; do
    { kill "$pid" && wait "$pid"; } 2>/dev/null || true
  done
  true
}
trap clean_up EXIT

say() { printf '\n== %s\n' "$*"; }
finished() { if [ -f "$records" ]; then wc -l < "$records" | tr -d ' '; else echo 0; fi; }
command_line=(generate --dataset "$prompts" --output-dir "$out" --concurrency 4 --sync-interval 200ms)

rm -rf "$out" && mkdir -p "$out"
say "a server that plays a model at 70 tokens/s a request, on a free port"
"$bin/eaglet-scripted-server" --mean-tokens 64 --token-ms 14 --first-token-ms 150 \
  --max-running 4 --reasoning reasoning > "$out/server.txt" &
server=$!
url=''
for _ in $(seq 100); do
  url=$(sed -n 's/^listening //p' "$out/server.txt")
  [ -n "$url" ] && break
  kill -0 "$server" || { echo "the scripted server did not start" >&2; exit 1; }
  sleep 0.1
done
echo "$url"

say "eaglet generate, killed with -9 once 9 of 24 answers are safe"
"$bin/eaglet" "${command_line[@]}" --url "$url" &
client=$!
for _ in $(seq 600); do
  [ "$(finished)" -ge 9 ] && break
  kill -0 "$client" 2>/dev/null || break
  sleep 0.05
done
{ kill -9 "$client" && wait "$client"; } 2>/dev/null || true
client=''
printf '\nkilled; %s whole records are in the file\n' "$(finished)"

say "the same command again"
"$bin/eaglet" "${command_line[@]}" --url "$url"

say "eaglet status"
"$bin/eaglet" status "$out"

say "the first record, cut to the width of a terminal"
head -n 1 "$records" | cut -c 1-79
say "of 24 prompts, answered exactly once"
grep -o '"sample_id":"[^"]*"' "$records" | sort | uniq -c | awk '$1 == 1' | wc -l | tr -d ' '
echo
echo "the run directory: $out"
