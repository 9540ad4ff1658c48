# Every target does all of its own set-up in .venv and is quick when that exists.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.installed
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all test-slow lint format docs pages bench paper paper-pages dist clean

# What the package itself needs; the tools for tests, documents and experiments come with the other targets.
$(RUNTIME): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(STAMP): $(RUNTIME) experiments/pyproject.toml
	$(PIP) -e '.[dev]' -e ./experiments
	touch $@

demo: $(RUNTIME)
	$(BIN)/dpformer demo

# One torch thread per worker: two workers on two cores are faster than two threads on small tensors. conftest.py has the tiers.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not nightly"

test-all: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A warning is an error (but not with --quiet): a dead link, a page outside of the navigation, a name that the API reference does not find.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What is made from commands and results: the pages of results and claims, the tables of README.md, the command-line reference.
pages: $(STAMP)
	$(BIN)/dpformer reproduce results -o docs
	$(BIN)/dpformer reproduce claims -o docs
	$(BIN)/python scripts/readme_tables.py README.md
	$(BIN)/python scripts/cli_reference.py docs/cli.md
	$(BIN)/python scripts/sizes.py docs/design.md

# All trainings behind docs/results.md and docs/paper.md, then their pages. It takes days from nothing, needs both data sets
# (docs/results.md), and can be stopped and started again; finished trainings are in runs.jsonl.
RUNS := experiments/results/runs.jsonl
paper: $(STAMP)
	$(BIN)/dpformer reproduce paper --runs $(RUNS) -o reproduced
	$(MAKE) paper-pages

paper-pages: $(STAMP)
	for result in rates table-1 table-2 reattention attention-limit optimisers ceiling time-split convergence embedding-sharing grid people; do \
	  $(BIN)/dpformer reproduce $$result --budget-minutes 0 --cells reproduced/cells --runs $(RUNS) -o docs/results || exit 1; \
	done
	$(MAKE) pages

bench: $(STAMP)
	$(BIN)/dpformer bench

# Builds and checks the package, and tries the wheel alone; REPOSITORY=https://... makes the links of its page absolute.
dist: $(STAMP)
	$(BIN)/python scripts/dist.py dist $(if $(REPOSITORY),--repository $(REPOSITORY))

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
