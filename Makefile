# One prerequisite: a Rust toolchain (see RUST_MINIMUM). Everything else is installed here, as root or by sudo.

RUST_MINIMUM := 1.88
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

# rdma-sys generates its bindings with libclang, and only version 14 works: Debian 12 has it, elsewhere a wheel does.
LIBCLANG_VENV := .cache/libclang
export LIBCLANG_PATH ?= $(shell sh tests/libclang.sh $(LIBCLANG_VENV))
# Python leaves no compiled files in the source tree.
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: help setup toolchain libraries build lint unit sim hostile bench bench-gate bench-record demo-test vm-setup vm-test vm-test-all test test-all demo demo-vm clean

help:
	@echo "make demo      serve a file by the software provider and use it from here, and show what comes out"
	@echo "make demo-vm   serve a file to a real Linux host in a virtual machine, and show what comes out"
	@echo "make test      format, lints, unit tests, and stock kernels as hosts (the full list on 6.12, a short one on 6.1 and 7)"
	@echo "make test-all  the same, with every case on every kernel, those too that are not in the lists above"
	@echo "make bench     speed: raw figures, a table and plots under .cache/bench (tests/bench/README.md)"
	@echo "make build     the release binary, target/release/farside"
	@echo "make setup     install what the above need"
	@echo "make lint | unit | sim | hostile | bench-gate | vm-test | vm-test-all    parts of it"

setup: libraries vm-setup

toolchain:
	@sh tests/toolchain.sh $(RUST_MINIMUM)

# What the verbs provider is built with, and what unit tests and scripts run; packages that are there are left alone.
libraries:
	@sh tests/libclang.sh --install $(LIBCLANG_VENV) $(SUDO)

build: toolchain libraries
	cargo build --release --locked

lint: toolchain libraries
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo test --locked --test tables

unit: toolchain libraries
	cargo test --workspace --locked

# Whole targets and hosts over a simulated network, 10,000 seeds; `unit` runs a few.
SIM_RUNS ?= 10000
sim: toolchain libraries
	FARSIDE_SIM_RUNS=$(SIM_RUNS) cargo test --lib --locked -- --nocapture sim::tests::every_run_keeps_its_promises

# A minute of hostile packets, in whose last third memory has to stand still; `unit` has a few seconds of them.
hostile: toolchain libraries
	FARSIDE_HOSTILE_SECONDS=60 cargo test --test process --locked -- --nocapture hostile_packets_harm_nobody_else

# Instructions per command, by callgrind, against what is recorded: a rise of more than 3% fails. See tests/bench/README.md.
GATE = cargo bench --bench core --locked -- gate tests/bench/instructions.json
bench-gate: toolchain libraries
	@python3 tests/bench/setup gate
	$(GATE)

bench-record: toolchain libraries
	@python3 tests/bench/setup gate
	$(GATE) --write

# What this machine can measure: raw figures, a table and plots under .cache/bench. BENCH holds further arguments.
BENCH ?=
bench: build
	@python3 tests/bench/setup
	python3 tests/bench/run $(BENCH)

# Target and host of ours over real sockets, as a user meets them: within a minute, and without privileges too.
demo-test: build
	cargo build --example appliance --locked
	timeout 60 sh tests/demo.sh
	sh tests/unprivileged.sh
	sh tests/appliance.sh

vm-setup:
	python3 tests/vm/setup

vm-test: vm-setup build
	python3 tests/vm/run

vm-test-all: vm-setup build
	python3 tests/vm/run --list all

test: lint unit sim hostile demo-test vm-test

test-all: lint unit sim hostile demo-test vm-test-all

demo: build
	sh tests/demo.sh

demo-vm: vm-setup build
	python3 tests/vm/demo

clean:
	cargo clean
	rm -rf .cache
