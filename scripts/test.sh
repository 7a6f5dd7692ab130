#!/usr/bin/env bash
# All tests of the workspace. Uses cargo-nextest; installs it where it is missing, and falls back to `cargo test` where it cannot be.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! cargo nextest --version >/dev/null 2>&1; then
  echo "cargo-nextest is missing; installing it (once, some minutes)"
  cargo install cargo-nextest --locked ||
    echo "cargo-nextest cannot be installed here; going on with cargo test" >&2
fi
cargo build --locked --workspace --bins
if cargo nextest --version >/dev/null 2>&1; then
  exec cargo nextest run --locked --workspace "$@"
fi
exec cargo test --locked --workspace --no-fail-fast "$@"
