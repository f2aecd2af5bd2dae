# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Containers often set this. Without bytecode every process that a test starts compiles all of thinwire anew.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist worksteal
PYTEST_FULL := $(BIN)/python -m pytest --numprocesses 4 --dist worksteal # slow tests wait a lot

DECAYED := pico demo start lordo-pico coarse coarse-chosen coarse-tried mt-dao cnn owners-start owners-wide owners-default nano nano-start small owners-ddp owners-64 owners-in-turn nano-long # files of methods in benchmarks/matrix, shortest first

.DEFAULT_GOAL := help
.PHONY: help demo test quick-tests test-full full-tests test-all chaos lint types docs bench evidence evidence-all clean

help: ## Show this list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

demo: $(VENV)/.core ## Train a small GPT on 2 real workers with 3 methods: loss, bytes, speed on a thin link (about 3 minutes).
	$(BIN)/thinwire demo

test: $(VENV)/.dev ## Lint, types, docs and the quick tests (what CI runs; about 8 minutes on 2 cores).
	@$(MAKE) --no-print-directory --jobs=2 quick-tests lint types docs

quick-tests: $(VENV)/.dev
	$(PYTEST)

test-full: $(VENV)/.dev $(VENV)/.frameworks $(VENV)/.servers $(VENV)/.triton ## The same with the slow tests, real servers and frameworks (about 30 minutes on 2 cores).
	@$(MAKE) --no-print-directory --jobs=2 full-tests lint types docs

full-tests: $(VENV)/.dev $(VENV)/.frameworks $(VENV)/.servers $(VENV)/.triton
	$(PYTEST_FULL) -m "not rare"
	THINWIRE_KERNELS=auto $(PYTEST_FULL) tests/codecs tests/kernels tests/conformance tests/test_golden.py tests/test_share.py

test-all: $(VENV)/.dev $(VENV)/.frameworks $(VENV)/.servers $(VENV)/.triton ## Every case of every test, with and without C kernels (hours).
	$(PYTEST_FULL) -m ""
	THINWIRE_KERNELS=auto $(PYTEST_FULL) -m "" tests/codecs tests/kernels tests/conformance tests/test_golden.py tests/test_share.py

chaos: $(VENV)/.servers ## Kill workers of 5 methods again and again; each run must end as if nothing had happened.
	$(BIN)/python -m benchmarks.chaos
	$(BIN)/python -m benchmarks.elastic
	$(BIN)/python -m benchmarks.elastic cluster

lint: $(VENV)/.dev ## Ruff (rules and format) and the import layers.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev ## Pyright.
	$(BIN)/pyright --pythonpath $(BIN)/python --warnings

docs: $(VENV)/.dev ## Build the docs into site/; fails on a broken link or an undocumented public name.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.dev ## Speed, bytes and memory as ratios against peers in the same run; a million hostile messages (about 20 minutes).
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.optimizers
	$(BIN)/python -m benchmarks.wire
	$(BIN)/python -m benchmarks.fuzz
	$(BIN)/python -m benchmarks.fuzz_objects

evidence: $(VENV)/.dev ## Run one row of every table of the results anew and say how close it comes (about 17 minutes).
	$(BIN)/python -m benchmarks.reproduce

evidence-all: $(VENV)/.dev ## All runs behind the results; goes on where it stopped (hours).
	for name in $(DECAYED); do \
	  $(BIN)/thinwire compare @benchmarks/matrix/$$name.txt --records benchmarks/records/$$name.jsonl --out runs/$$name --jobs 2 || exit; \
	done
	for batch in 4 16 64; do \
	  $(BIN)/thinwire compare @benchmarks/matrix/sweep.txt --batch $$batch --records benchmarks/records/sweep-$$batch.jsonl \
	    --out runs/sweep-$$batch --jobs 2 || exit; \
	done
	$(BIN)/python -m benchmarks.evidence
	$(BIN)/python -m benchmarks.decayed
	$(BIN)/python -m benchmarks.frontier
	$(BIN)/python -m benchmarks.results
	$(BIN)/python -m benchmarks.scaling

clean: ## Remove the virtual environment and everything built.
	rm -rf $(VENV) site dist build

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"thinwire needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.core: $(VENV)/.python pyproject.toml constraints.txt
	$(PIP) -e '.[report]'
	@touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.core

$(VENV)/.frameworks: $(VENV)/.dev
	$(PIP) -e '.[frameworks]'
	@touch $@

$(VENV)/.servers: $(VENV)/.dev
	$(PIP) -e '.[servers]'
	@touch $@

$(VENV)/.triton: $(VENV)/.dev
	$(PIP) -e '.[triton]'
	@touch $@
