# Two commands from a fresh clone: `make demo` and `make test`. Each sets up .venv itself.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
VLLM := .venv-vllm
DEPLOY := .venv-deploy
LLAMACPP := .venv-llamacpp
# Processes of the tests compile modules once, whatever the shell's setting is.
unexport PYTHONDONTWRITEBYTECODE
# Many tests wait for processes: three workers keep two cores busy.
WORKERS ?= 3
# The tests of a file run in one worker, so that its servers and targets are built once. Matrices
# are tiny: more threads in a process would only add overhead.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
DATA ?= ../shared/data/bench
SEED ?= 0
MINUTES ?= 3

.PHONY: help demo test pytest bytecode lint types test-slow test-abuse test-arm fuzz test-vllm test-deploy bench-vllm bench-llamacpp comparison clean
.DEFAULT_GOAL := help

help: ## Show all targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	# Python compiles modules on import. --no-compile makes the installation a third faster.
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,page]'
	touch $@

demo: $(READY) ## Pull the default pair, decode three prompts with every method, compare
	$(BIN)/peagle demo

test: lint ## Lint, type-check and test
	$(MAKE) --no-print-directory --jobs 2 types bytecode
	$(MAKE) --no-print-directory pytest

pytest: $(READY)
	$(PYTEST)

# Importing the tests once compiles all modules; without it, every worker does so. Errors are
# reported by `pytest`.
bytecode: $(READY)
	$(BIN)/pytest --collect-only >/dev/null || true

lint: $(READY) ## Check style, formatting and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(READY) ## Check types
	$(BIN)/mypy

test-slow: $(READY) ## Run slow tests, such as lossless decoding of 20 prompts x 128 tokens with the real target
	$(PYTEST) -m slow

test-abuse: $(READY) ## Test hostile requests and programs against live servers (minutes)
	$(BIN)/pytest -m abuse -n 1

test-arm: $(READY) ## Test the C kernels on ARM, under qemu (Debian: gcc-aarch64-linux-gnu, qemu-user)
	@for program in aarch64-linux-gnu-gcc qemu-aarch64; do command -v $$program >/dev/null || \
	{ echo "$$program not found: install gcc-aarch64-linux-gnu and qemu-user (Debian packages)" >&2; exit 1; }; done
	$(BIN)/pytest -m arm tests/arm -n $(WORKERS)

fuzz: $(READY) ## Compare random requests to random engines with plain decoding; SEED=0 MINUTES=3
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.fuzzing --seed $(SEED) --minutes $(MINUTES)

$(VLLM)/.ready: tests/vllm/requirements.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --no-deps -r tests/vllm/requirements.txt
	touch $@

test-vllm: $(READY) $(VLLM)/.ready ## Compare all drafts with those of vLLM, in a separate environment (10 minutes)
	PEAGLE_REAL_TARGET=$$($(BIN)/peagle pull --json | $(BIN)/python -c 'import json, sys; print(json.load(sys.stdin)["folder"])') \
	PEAGLE_REAL_DRAFTER=peagle/drafters/smollm2-135m/p-eagle PEAGLE_DATA=$(DATA) PYTHONPATH=. $(VLLM)/bin/python -m pytest tests/vllm -m vllm

$(DEPLOY)/.ready: tests/deploy_validators/requirements.txt
	test -x $(DEPLOY)/bin/python || $(PYTHON) -m venv $(DEPLOY)
	$(DEPLOY)/bin/pip install --quiet -r tests/deploy_validators/requirements.txt
	$(DEPLOY)/bin/pip install --quiet --no-deps kserve==0.21.0
	touch $@

test-deploy: $(DEPLOY)/.ready ## Validate deployment files with the models of Ray, SkyPilot and KServe (2 minutes)
	PYTHONPATH=. $(DEPLOY)/bin/python -m pytest --confcutdir=tests/deploy_validators tests/deploy_validators -m deploy

bench-vllm: $(READY) $(VLLM)/.ready ## Compare tokens/s on this CPU with vLLM; DATA=folder with humaneval.jsonl (15 minutes)
	PYTHONPATH=. $(BIN)/python -m benchmarks.cpu.methods $(DATA) $(VLLM)/bin/python

$(LLAMACPP)/.ready: benchmarks/llamacpp/requirements.txt
	test -x $(LLAMACPP)/bin/python || $(PYTHON) -m venv $(LLAMACPP)
	$(LLAMACPP)/bin/pip install --quiet -r benchmarks/llamacpp/requirements.txt
	touch $@

bench-llamacpp: $(READY) $(LLAMACPP)/.ready ## Compare tokens/s on this CPU with llama.cpp, same GGUF file; DATA=folder (10 minutes)
	$(BIN)/peagle pull --json >/dev/null
	PYTHONPATH=. $(BIN)/python -m benchmarks.llamacpp $(DATA) $(LLAMACPP)/bin/python $(ARGS)

comparison: $(READY) ## Generate tables and figure of docs/science.md from the records in docs/results/comparison
	$(BIN)/python -m tools.comparison

clean: ## Remove all environments
	rm -rf .venv $(VLLM) $(DEPLOY) $(LLAMACPP)
