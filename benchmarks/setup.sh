#!/bin/sh
# Makes the Python environment of the baseline clients in $EAGLET_BENCH_VENV, or in .venv-bench here.
# Versions are pinned, so that figures taken on different days compare the same clients.
set -eu
cd "$(dirname "$0")"
venv="${EAGLET_BENCH_VENV:-.venv-bench}"
python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check openai==3.57.0 aiohttp==3.14.5
"$venv/bin/python" -c 'import aiohttp, openai; print("openai", openai.__version__, "aiohttp", aiohttp.__version__)'
