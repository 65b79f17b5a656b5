# make sweep and make test do all the set-up that a fresh machine needs. `make help` lists the rest.
SHELL := /bin/bash
PY := .venv/bin/python
CONFIG ?= configs/local.yaml
ONLY ?= smollm2*

.PHONY: help setup sweep plan test lint bench lock clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup:  ## create .venv from requirements.lock (nothing to do the second time)
	@scripts/setup.sh

sweep: setup  ## run the recipes ONLY of the matrix CONFIG (default: smollm2* of configs/local.yaml)
	@$(PY) -m runners.sweep --config $(CONFIG) --only '$(ONLY)'

plan: setup  ## print every process the sweep would start, with its exact command line
	@$(PY) -m runners.sweep --config $(CONFIG) --plan

test: setup  ## all tests, with a real vLLM, Mooncake, aiperf and Chromium
	@scripts/setup.sh test
	@$(PY) -m pytest tests -n 2 --dist loadgroup --durations 20

lint: setup  ## ruff and mypy
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy

bench: setup  ## performance ratios, each measured side by side in one run (JSON)
	@$(PY) -m runners.bench

lock: setup  ## write requirements.lock from what is installed in .venv
	@scripts/lock.sh

clean:  ## remove the environment and caches; results stay
	rm -rf .venv .cache build dist

.PHONY: slurm-up slurm-down
slurm-up: setup  ## a real four-node Slurm on this machine (root); prints the SLURM_CONF to export
	@$(PY) -m tests.slurm.cluster up

slurm-down: setup  ## stop it and remove every trace
	@$(PY) -m tests.slurm.cluster down

# These two run with the python of a machine that has a CUDA device: its torch, triton and transformers, not .venv.
.PHONY: bench-gpu test-gpu
GPU_PY ?= python3
GPU_TESTS ?= tests/gpu
bench-gpu:  ## GLM-5.2's decode and verify step and the engine's on one CUDA device, beside transformers (JSON)
	@$(GPU_PY) -m benchmarks.bench_gpu

test-gpu:  ## kernels, captured steps, the engine and the server on a CUDA device (GPU_TESTS=tests/gpu/check_engine.py)
	@$(GPU_PY) -m pytest -q -c tests/gpu/pytest.ini --rootdir . -p no:cacheprovider $(GPU_TESTS)
