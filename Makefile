# All commands need only Rust, a C++20 compiler, make and Python 3.10 or newer. Python packages are installed in .venv/,
# and outputs are written to build/. Longer commands are scripts in tools/.

# If SHELL is /bin/sh, Apple's make 3.81 runs simple recipes without a shell and ignores the PATH that is set below.
# With any other shell it uses this PATH.
SHELL := /bin/bash
PYTHON ?= python3
# BACKEND, mlx or cpu, is the backend of the model that `make model` exports. By default `make demo` uses the backend
# that is faster with the packages that `make setup` installs.
DEMO := $(or $(BACKEND),$(if $(filter Darwin,$(shell uname)),mlx,cpu))
BACKEND ?= mlx
MODEL := build/models/smollm2-135m$(if $(filter cpu,$(BACKEND)),-cpu)
# Cargo and CMake build against the packages of this Python.
export ETKV_PYTHON := $(CURDIR)/.venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(HOME)/.cargo/bin:$(PATH)
# Models are folders, files or packages; nothing is downloaded from a hub.
export HF_HUB_OFFLINE := 1
# Let Python cache compiled modules in .venv/: otherwise each of hundreds of processes compiles half of torch.
unexport PYTHONDONTWRITEBYTECODE
# Some virtual machines report AMX but cannot run it: there PyTorch's bfloat16 products end the process.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16
# Several tests run at once, and threads of OpenBLAS and OpenMP would spin while they wait for each other.
test% lint made rust faces pytest programs fuzz-programs: export OPENBLAS_NUM_THREADS ?= 1
programs: export OMP_NUM_THREADS ?= 1
# Ninja cannot use make's job server.
NINJA := env -u MAKEFLAGS cmake --build build/cmake
# Runs two targets in parallel: each of them uses only one core at times.
BESIDE := $(MAKE) --no-print-directory -j2
# Exports are checked with the library if there is one. A library older than the sources may not run a new program, so
# the library is built again first.
IF_BUILT := $(if $(wildcard build/lib/libetkv.*),$(MAKE) --no-print-directory,: without)

.DEFAULT_GOAL := help
.PHONY: help setup build model demo question chat test made rust faces python-part faces-part pytest \
  programs lint format test-unit test-conformance \
  test-rust test-buckets test-cpp test-package test-sanitize test-threads test-arm test-python test-macos \
  test-macos-short test-long upstream-ops fuzz-programs fuzz-files kill-saves benches bench bench-pack bench-llama \
  bench-lengths bench-caches bench-speculation bench-restart bench-threads clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.ready ## Install the pinned Python packages into .venv/
.venv/.ready: requirements.txt requirements-nodeps.txt pyproject.toml
	@tools/setup $(PYTHON)
build: build/cmake/build.ninja ## Build the libraries, the runners and the test tools
	@$(NINJA)
build/cmake/build.ninja: | .venv/.ready
	@cmake -S . -B build/cmake -G Ninja -DETKV_PYTHON=$(ETKV_PYTHON)

model: .venv/.ready ## Export SmolLM2-135M-Instruct: BACKEND=mlx or cpu
	@python -m etkv.export --if-changed --model "$$(python -m etkv.models smollm2-135m)" \
	  --backend $(BACKEND) --output $(MODEL)/model.pte --keep-hf $(MODEL)/hf
demo: build/cmake/build.ninja ## Ask the exported model a question: BACKEND=mlx or cpu
	+@$(IF_BUILT) chat
	@$(BESIDE) model chat BACKEND=$(DEMO)
	@$(MAKE) --no-print-directory question BACKEND=$(DEMO)
question:
	@echo "On the backend $(BACKEND); BACKEND=$(if $(filter cpu,$(BACKEND)),mlx,cpu) selects the other one."
	@build/bin/etkv_chat --model $(MODEL)/model.pte --prompt "What is the capital of France?"
chat: build/cmake/build.ninja
	@$(NINJA) --target etkv_chat

test: .venv/.ready ## Run all checks, and tests of each kind; `make test-long` runs all tests
	@$(BESIDE) python-part faces-part
# Python's tests do not wait for Rust's.
python-part: made
	@$(MAKE) --no-print-directory pytest
faces-part: rust made
	@$(MAKE) --no-print-directory faces
rust: lint
	@tools/test-rust
# Builds what pytest needs and Rust's tests do not.
made: .venv/.ready
	+@$(IF_BUILT) build
	@$(MAKE) --no-print-directory programs
	@$(MAKE) --no-print-directory build
programs: .venv/.ready
	python tests/python/programs.py
# Not in parallel: two Ninja processes cannot share a build folder.
faces: build
	@$(MAKE) --no-print-directory test-cpp
	@python tests/package/run.py build/cmake --short
	@$(MAKE) --no-print-directory test-macos-short
lint: .venv/.ready ## Check formats, lints and docs
	@tools/lint
format: .venv/.ready ## Format every file
	cargo fmt --all
	git ls-files -- '*.h' '*.hpp' '*.cpp' | xargs clang-format -i
	ruff check --fix --quiet .
	ruff format --quiet .

test-unit: .venv/.ready ## Run the unit tests of crates that need no MLX
	cargo test --release --locked -p etkv-core -p etkv-cpu -p etkv-delegate -p etkv-file
test-conformance: .venv/.ready ## Compare generated operations on every store with an independent model
	cargo test --release --locked -p etkv-tests --test caches --test on_mlx
test-rust: .venv/.ready ## Run Rust's tests; those of four crates with debug assertions
	@tools/test-rust
test-cpp: build ## Run the tests of the C and C++ interfaces
	ctest --test-dir build/cmake --output-on-failure --parallel 2
test-package: build model ## Test etkv in other projects: installed, as a subdirectory, from a wheel, and by the docs
	python tests/package/run.py build/cmake
test-python: benches model ## Run the exporter's tests, and models against transformers
	@$(MAKE) --no-print-directory pytest
pytest:
	python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
test-buckets: .venv/.ready ## Run the tests of prefix stores in buckets, with an S3 server
	@tools/test-buckets
test-threads: .venv/.ready ## Run the caches' tests on many threads under ThreadSanitizer; needs rust-src
	@tools/test-threads
test-arm: .venv/.ready ## Run Rust's tests that need no MLX on an emulated 64-bit ARM; needs QEMU
	@tools/test-arm
test-sanitize: .venv/.ready ## Run the tests of the C and C++ interfaces with address and undefined-behaviour checks
	@test -f build/sanitize/build.ninja || cmake -S . -B build/sanitize -G Ninja -DETKV_PYTHON=$(ETKV_PYTHON) -DETKV_SANITIZE=ON
	@env -u MAKEFLAGS cmake --build build/sanitize
	ctest --test-dir build/sanitize --output-on-failure
# Needs no Mac: clang, macOS's headers and the wheels for macOS come from PyPI, to build/macos.
test-macos: build ## Compile everything for macOS, and compare its wheels with what the build expects
	python tests/macos/check.py
test-macos-short: build
	python tests/macos/check.py --short
test-long: benches model ## Run tests that take hours: millions of operations, every program, damaged programs, long answers
	@tools/test-long
upstream-ops: build ## Run ExecuTorch's tests of MLX operations: UPSTREAM='--op Softmax'
	python -m tests.upstream_ops $(UPSTREAM)
fuzz-programs: .venv/.ready ## Run damaged programs of every operation: FUZZ="--programs 100000 --first 1"
	python -m tests.upstream_ops.damage $(FUZZ)
# Each seed damages 20 files.
fuzz-files: .venv/.ready ## Load damaged files of caches with recurrent layers: FILES=100000 FIRST=5000 (the first seed)
	ETKV_FIRST=$(or $(FIRST),0) ETKV_RUNS=$$(($(or $(FILES),20000) / 20)) nice cargo test --release --locked -p etkv-tests --no-default-features \
	  --config tools/checked.toml --test damaged_files -- --nocapture
kill-saves: .venv/.ready ## Kill processes that save caches with recurrent layers: KILLS=1000
	ETKV_RUNS=$(or $(KILLS),1000) nice cargo test --release --locked -p etkv-tests --no-default-features \
	  --test killed_saves -- --nocapture

benches: build
	@$(NINJA) --target etkv_benches
bench: benches model ## Compare speed and memory with other programs: writes build/bench, takes an hour
	python -m benches.run $(BENCH)
	python benches/cpu_peers.py $(if $(wildcard build/llama/bin/python),--llama-python build/llama/bin/python)
bench-pack: benches ## Pack the benchmark for another machine, such as one with an NVIDIA GPU
	python benches/pack.py
# If llama.cpp ends with SIGILL on a virtual machine, see benches/cpu_peers.py for a build that works.
bench-llama: .venv/.ready ## Build llama.cpp for `make bench`, in build/llama
	@test -x build/llama/bin/python || python -m venv build/llama
	build/llama/bin/python -m pip install --quiet --no-binary llama-cpp-python llama-cpp-python==0.3.36
bench-lengths: benches model ## Measure steps of lengths that were not run before
	@build/cmake/benches/etkv_lengths $(MODEL)/model.pte
bench-caches: .venv/.ready ## Measure plans, forks and decode steps of every cache kind and format
	cargo bench --locked -p etkv-benches
bench-speculation: build model ## Measure the cost and gain of speculative decoding
	python benches/speculation.py
bench-restart: build model ## Measure a prompt after a restart, without and with a prefix store
	python benches/restart.py $(MODEL)/model.pte
bench-threads: benches model ## Measure how far the steps of two programs overlap
	@build/cmake/benches/etkv_two_programs $(MODEL)/model.pte
clean: ## Remove build outputs; .venv/ and exported models stay
	rm -rf build/cargo build/cmake build/sanitize build/bin build/lib
