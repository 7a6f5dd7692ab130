# The two commands of a fresh machine: `make demo` and `make test`. Needed: a Rust toolchain, a C compiler, pip (pip for `make real-vllm` only).

CARGO ?= cargo
# Where cargo puts what it builds; follows CARGO_TARGET_DIR as cargo does.
TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)

.PHONY: help demo test lint format release real-vllm

help:
	@echo "make demo       build, then run eaglet against a scripted server on 24 prompts (about 8 s)"
	@echo "make test       all tests (cargo-nextest; installed if it is missing)"
	@echo "make lint       clippy and rustfmt as CI runs them"
	@echo "make release    the binary to copy: $(TARGET)/release/eaglet"
	@echo "make real-vllm  install a real CPU vLLM and a small model (7 GB), and test against them"

demo:
	$(CARGO) build --locked -p eaglet -p eaglet-testkit --bins
	@demo/run.sh $(TARGET)/debug

# The tests run the real binaries, so these are built first; what the runner says last is the result.
test:
	@scripts/test.sh

lint:
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	$(CARGO) fmt --all -- --check

format:
	$(CARGO) fmt --all

release:
	$(CARGO) build --locked --release -p eaglet

real-vllm: release
	scripts/real-vllm.sh ci
