# Everything from a fresh machine with Rust, a C++20 compiler, make and Python
# 3.10 or newer. Python's packages go to .venv/, all that is made to build/.

# Apple's make 3.81 looks the first word of a plain recipe up in the PATH that make
# was started with. Only a shell other than /bin/sh makes it use the PATH below.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
# Installs packages in a tenth of the time that pip takes.
UV := uv==0.13.9
# The backend that answers `make demo`: the faster one with the packages that are installed here.
DEMO := $(or $(BACKEND),$(if $(filter Darwin,$(shell uname)),mlx,cpu))
# What runs the model that `make model` exports: mlx or cpu.
BACKEND ?= mlx
MODEL := build/models/smollm2-135m$(if $(filter cpu,$(BACKEND)),-cpu)
# Cargo and CMake build against the packages of this Python.
export ETKV_PYTHON := $(CURDIR)/$(BIN)/python
export PATH := $(CURDIR)/$(BIN):$(HOME)/.cargo/bin:$(PATH)
# Nothing is looked for on a hub: models are folders, files or packages.
export HF_HUB_OFFLINE := 1
# Python's compiled modules are kept in .venv/, also where a system's settings say otherwise: without them each of
# hundreds of processes spends half of its imports of torch on compiling it.
unexport PYTHONDONTWRITEBYTECODE
# Some virtual machines announce AMX and cannot run it: PyTorch's bfloat16 products end the process there.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.DEFAULT_GOAL := help
.PHONY: help setup build demo question chat model programs made rust faces test test-rust test-buckets test-cpp test-package test-sanitize test-python test-macos test-macos-short test-long upstream-ops fuzz-programs lint format benches bench bench-pack bench-caches bench-speculation bench-restart bench-threads bench-llama bench-lengths test-threads clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- Setting up -------------------------------------------------------------

setup: .venv/.ready ## Install the pinned Python packages into .venv/

.venv/.ready: requirements.txt requirements-nodeps.txt pyproject.toml
	@command -v cargo >/dev/null || { echo "etkv needs Rust: no cargo in PATH" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "etkv needs Python 3.10 or newer: set PYTHON=..., $$($(PYTHON) --version 2>&1) is too old" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
	  { echo "$(PYTHON) cannot make a virtual environment; set PYTHON=... to one that can" >&2; rm -rf .venv; exit 1; }
	@echo "Installing Python packages into .venv/ ($$(test "$$(uname)" = Darwin && echo 1.4 || echo 5.8) GB, a minute or two)"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet $(UV)
	@$(BIN)/uv pip install --python $(BIN)/python -r requirements.txt
	@$(BIN)/uv pip install --python $(BIN)/python --no-deps -r requirements-nodeps.txt
	@$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation --quiet -e .
	@touch $@

# Ninja cannot read make's own list of jobs.
build: build/cmake/build.ninja ## Build the libraries, the runners and the test tools
	@env -u MAKEFLAGS cmake --build build/cmake

build/cmake/build.ninja: | .venv/.ready
	@cmake -S . -B build/cmake -G Ninja -DETKV_PYTHON=$(ETKV_PYTHON)

# ---- Trying it --------------------------------------------------------------

model: .venv/.ready ## Export SmolLM2-135M-Instruct
	@python -m etkv.export --if-changed --model "$$(python -m etkv.models smollm2-135m)" \
	  --backend $(BACKEND) --output $(MODEL)/model.pte --keep-hf $(MODEL)/hf

# The export takes one core for a minute or two, and the build takes both.
demo: build/cmake/build.ninja ## Ask the exported model a question
	@$(MAKE) --no-print-directory -j2 model chat BACKEND=$(DEMO)
	@$(MAKE) --no-print-directory question BACKEND=$(DEMO)

question:
	@echo "On the backend $(BACKEND); BACKEND=$(if $(filter cpu,$(BACKEND)),mlx,cpu) selects the other one."
	@build/bin/etkv_chat --model $(MODEL)/model.pte --prompt "What is the capital of France?"

chat: build/cmake/build.ninja
	@env -u MAKEFLAGS cmake --build build/cmake --target etkv_chat

# ---- Checking it ------------------------------------------------------------

# One profile for all but the core: MLX's bindings are compiled once.
CARGO_FLAGS := --release --locked
# Every test has a limit of time: pytest's and ctest's have one each, Cargo's a run of them, what is compiled included.
# Like Ninja, Cargo cannot read make's own list of jobs, and would say so for each crate with examples in its docs.
BOUNDED := env -u MAKEFLAGS -u MFLAGS python tests/package/bounded.py

# Tests share the cores, and OpenBLAS's threads spin while they wait for each other.
test made rust faces programs test-rust test-cpp test-package test-python test-macos test-macos-short test-sanitize test-long fuzz-programs: export OPENBLAS_NUM_THREADS ?= 1
# OpenMP's threads spin too. Exports run two at a time; pytest sets it for itself.
programs: export OMP_NUM_THREADS ?= 1

# Each of two halves has stretches that use one core only.
test: .venv/.ready ## Run every check and test
	@$(MAKE) --no-print-directory -j2 rust made
	@$(MAKE) --no-print-directory -j2 test-python faces

# Programs, the C++ libraries and the benchmarks: pytest needs them, Rust's tests do not.
made: programs
	@$(MAKE) --no-print-directory build
	@$(MAKE) --no-print-directory benches

rust:
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory test-rust

# What `test` runs beside pytest, one after the other. Two of Ninja in one folder disturb each other, so that the
# benchmarks for pytest come first.
faces: benches
	@$(MAKE) --no-print-directory test-cpp
	@$(MAKE) --no-print-directory test-package
	@$(MAKE) --no-print-directory test-macos-short

programs: model
	python tests/python/programs.py
	python -m tests.upstream_ops --export-only --part

# The second command chooses as many packages as the first, so that dependencies have the same
# features: with others Cargo would build them again.
lint: .venv/.ready ## Check formats, lints and docs
	cargo fmt --all --check
	cargo clippy $(CARGO_FLAGS) --workspace --all-targets -- -D warnings
	cargo clippy $(CARGO_FLAGS) --workspace --exclude etkv-benches --all-targets --no-default-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc $(CARGO_FLAGS) --workspace --exclude mlx-sys --exclude etkv-tests --exclude etkv-benches --no-deps --quiet
	git ls-files -- '*.h' '*.hpp' '*.cpp' | xargs clang-format --dry-run -Werror
	ruff check --quiet .
	ruff format --check --quiet .
	mypy
	python tests/lint/words.py
	python tests/lint/features.py

# What Rust's tests are built of: all but the benchmarks, which `make lint` checks.
TESTED := --workspace --exclude etkv-benches
# A library is compiled once more for the tests within it. These two take twice as long to optimize as to compile, and no
# other such tests depend on them.
WITHIN := --exclude etkv-tests --exclude etkv-capi --lib \
  --config profile.release.package.etkv-mlx-program.opt-level=1 --config profile.release.package.etkv-tokenizer.opt-level=1
# All others but `buckets`, which has a command of its own.
OUTSIDE := --test '[!b]*' --test 'b[!u]*' --test 'bu[!c]*'

# The core's own tests run for half a second however they are compiled.
CHECKED := --config profile.release.package.etkv-core.opt-level=0 \
  --config profile.release.package.etkv-core.debug-assertions=true \
  --config profile.release.package.etkv-core.overflow-checks=true

test-rust: .venv/.ready ## Run Rust's tests; the core also by itself, with debug assertions
	$(BOUNDED) 3600 cargo test $(CARGO_FLAGS) -p etkv-core --lib $(CHECKED)
	$(BOUNDED) 3600 cargo test $(CARGO_FLAGS) $(TESTED) $(WITHIN)
	cargo build $(CARGO_FLAGS) $(TESTED) --example embedded
	$(BOUNDED) 3600 cargo test $(CARGO_FLAGS) $(TESTED) $(OUTSIDE)
	$(BOUNDED) 3600 cargo test $(CARGO_FLAGS) $(TESTED) --doc

# Its crates take minutes to build, and a server of the S3 protocol comes from PyPI, so `make test` leaves it out.
# Python and etkv_chat take a build of their own, so that `make build` keeps what it has compiled without buckets.
BUCKETS := $(CURDIR)/build/buckets
test-buckets: .venv/.ready ## Run the tests of stores in buckets, with a server of S3's protocol
	python tests/package/buckets.py $(BOUNDED) 3600 cargo test $(CARGO_FLAGS) -p etkv-file -p etkv-tests \
	  --no-default-features --features etkv-tests/buckets --lib --test buckets
	@test -f $(BUCKETS)/cmake/build.ninja || cmake -S . -B $(BUCKETS)/cmake -G Ninja -DETKV_PYTHON=$(ETKV_PYTHON) \
	  -DETKV_BUCKETS=ON -DETKV_CARGO_TARGET_DIR=$(BUCKETS)/cargo
	@env -u MAKEFLAGS cmake --build $(BUCKETS)/cmake --target etkv_chat
	ETKV_LIBRARY_DIR=$(BUCKETS)/lib ETKV_TEST_BIN=$(BUCKETS)/bin \
	  python tests/package/buckets.py python -m pytest tests/python/test_prefix_store.py

test-cpp: build ## Run the tests of the C and C++ faces
	ctest --test-dir build/cmake --output-on-failure --parallel 2

test-package: build model ## Build and run what others build on etkv: installed, within, from a wheel, by the docs
	python tests/package/run.py build/cmake

test-sanitize: .venv/.ready ## Run the tests of the C and C++ faces with address and undefined-behaviour checks
	@test -f build/sanitize/build.ninja || \
	  cmake -S . -B build/sanitize -G Ninja -DETKV_PYTHON=$(ETKV_PYTHON) -DETKV_SANITIZE=ON
	@cmake --build build/sanitize
	ctest --test-dir build/sanitize --output-on-failure

# ThreadSanitizer sees only what it has compiled: Rust's standard library is compiled with it, from its sources,
# and nothing here links MLX, ExecuTorch or C++.
TSAN_HOST := x86_64-unknown-linux-gnu
TSAN_RUST = RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=thread TSAN_OPTIONS=halt_on_error=1:history_size=7 ETKV_RUNS=20 \
  $(BOUNDED) 3600 cargo test --release --locked -Zbuild-std --target $(TSAN_HOST) --target-dir build/threads
# The attention's other tests compare every format and shape, over nine minutes under the sanitizer.
TSAN_CPU := threads_attend steps_of_one_shape

test-threads: .venv/.ready ## Run the caches' tests on many threads under ThreadSanitizer; needs rust-src
	@command -v rustc >/dev/null && test -d "$$(rustc --print sysroot)/lib/rustlib/src/rust/library" || \
	  { echo "ThreadSanitizer needs the sources of Rust's standard library: rustup component add rust-src" >&2; exit 1; }
	$(TSAN_RUST) -p etkv-core --lib
	$(TSAN_RUST) -p etkv-cpu --lib -- $(TSAN_CPU)

test-python: benches model ## Run the exporter's tests, and models against transformers
	python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Options for it: make upstream-ops UPSTREAM='--op Softmax'.
upstream-ops: build ## Run ExecuTorch's own tests of MLX operations: a report in build/upstream_ops
	python -m tests.upstream_ops $(UPSTREAM)

format: .venv/.ready ## Format every file
	cargo fmt --all
	git ls-files -- '*.h' '*.hpp' '*.cpp' | xargs clang-format -i
	ruff check --fix --quiet .
	ruff format --quiet .

# The binaries of `make bench` that `make build` leaves out.
benches: build
	@env -u MAKEFLAGS cmake --build build/cmake --target etkv_benches

bench: benches model ## Compare speed and memory, side by side: a report in build/bench, an hour
	python -m benches.run $(BENCH)
	python benches/cpu_peers.py $(if $(wildcard build/llama/bin/python),--llama-python build/llama/bin/python)

bench-pack: benches ## Make a folder that runs the benchmark elsewhere, as on an NVIDIA GPU
	python benches/pack.py

# SIGILL from it on a virtual machine: benches/cpu_peers.py says how to build it then.
bench-llama: .venv/.ready ## Build llama.cpp for `make bench`, in build/llama
	@test -x build/llama/bin/python || python -m venv build/llama
	build/llama/bin/python -m pip install --quiet --no-binary llama-cpp-python llama-cpp-python==0.3.36

bench-lengths: benches model ## Measure steps at lengths that were not run before
	@build/cmake/benches/etkv_lengths $(MODEL)/model.pte

bench-caches: .venv/.ready ## Measure plans, forks and decode steps of every kind and format
	cargo bench --locked -p etkv-benches

bench-speculation: build model ## Measure what speculative decoding takes and brings
	python benches/speculation.py

bench-restart: build model ## Measure a prompt after a restart, read and from a store: BACKEND=cpu
	python benches/restart.py $(MODEL)/model.pte

bench-threads: benches model ## Measure how far the steps of two programs overlap
	@build/cmake/benches/etkv_two_programs $(MODEL)/model.pte

# Needs no Mac: clang with macOS's headers, and the wheels for it, from PyPI, in build/macos.
test-macos: build ## Compile everything for macOS, and compare its wheels with what the build expects
	python tests/macos/check.py

test-macos-short: build
	python tests/macos/check.py --short

# The files whose tests have more cases with ETKV_TEST_LONG=1.
WITH_LONG_FORM := bench cpu_programs draft_runners export families family_sweep metal_kernels model_greedy model_precision numbers passes upstream_exporters upstream_ops upstream_turboquant upstream_voxtral windows

LONG := --timeout 14400 -o faulthandler_timeout=14600

test-long: build model ## Millions of generated operations against the oracles; every program; damaged programs; runners on long answers
	ETKV_RUNS=40000 $(BOUNDED) 14400 cargo test --release --locked -p etkv-tests --no-default-features
	ETKV_RUNS=4000 $(BOUNDED) 14400 cargo test --release --locked -p etkv-tests --test on_mlx
	ETKV_STEP_SEEDS=20 python -m pytest $(LONG) tests/python/test_native_steps.py
	ETKV_INTERRUPTED=1 python -m pytest $(LONG) tests/python/test_interruptions.py
	python -m tests.upstream_ops.damage --programs 1000000
	ETKV_DAMAGED_COPIES=10000 python -m pytest $(LONG) tests/python/test_damaged_programs.py
	ETKV_RUNS=1000 $(BOUNDED) 3600 cargo test --release --locked -p etkv-tests --test memory
	ETKV_TEST_LONG=1 python tests/python/programs.py
	ETKV_TEST_LONG=1 python -m pytest $(LONG) -n 2 --dist loadfile --no-loadscope-reorder $(WITH_LONG_FORM:%=tests/python/test_%.py)
	ETKV_TEST_LONG=1 ctest --test-dir build/cmake --output-on-failure -R '^cpp.headers$$'
	ETKV_TEST_LONG=1 python -m pytest $(LONG) tests/python/test_runners.py tests/python/test_runner_page.py tests/python/test_runner_windows.py

fuzz-programs: .venv/.ready ## Run damaged programs of every operation: FUZZ="--programs 100000 --first 1"
	python -m tests.upstream_ops.damage $(FUZZ)

clean: ## Remove what was built; .venv/ and exported models stay
	rm -rf build/cargo build/cmake build/sanitize build/bin build/lib
