# One command each; `make help` lists them. Every target sets up .venv by itself the first time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
BENCHMARKS := in_loop real_loop watching device agent kernel_log ingest dumps

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint format types imports size bench chaos fuzz docs dashboards constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The venv counts as usable when its Python is new enough and has pip: a half-made or outdated one is made again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "trainwarden needs Python 3.11 or newer, and '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 || true)" >&2; \
	  echo "Name another one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "== set up $(VENV): pip install -c constraints.txt -e '.[dev]'"
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP) ## make .venv and install what constraints.txt pins

demo: $(STAMP) ## the whole line on a real 4-rank training, with real faults: a table of verdicts
	$(BIN)/trainwarden demo $(ARGS)

test: $(STAMP) ## the whole suite in two processes, with branch coverage (its floor: fail_under in pyproject.toml)
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term:skip-covered $(ARGS)

check: lint format types imports size ## all of: lint, format, types, imports, size

lint: $(STAMP) ## ruff's rules
	@echo "== check: ruff rules"
	@$(BIN)/ruff check .

format: $(STAMP) ## ruff's formatting (only looks; `ruff format .` mends)
	@echo "== check: formatting"
	@$(BIN)/ruff format --check .

types: $(STAMP) ## mypy --strict
	@echo "== check: types"
	@$(BIN)/mypy
	@$(BIN)/mypy .ci/size.py .ci/metrics.py .ci/signals.py deploy/alertmanager/receiver.py

imports: $(STAMP) ## layout and import rules
	@echo "== check: layout and import rules"
	@$(BIN)/python -m pytest -q tests/test_layout.py

size: $(STAMP) ## lines of code a component, against the budget
	@echo "== check: size"
	@$(BIN)/python .ci/size.py

bench: $(STAMP) ## what it costs: in one rank, in a real loop, beside it (all are run; fails if one missed its goal)
	@failed=; for name in $(BENCHMARKS); do \
	  echo "== bench: $$name"; $(BIN)/python benchmarks/$$name.py $(ARGS) || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "missed:$$failed" >&2; exit 1; }

chaos: $(STAMP) ## the slow faults: frozen owners, ranks that wake up too late, breakers, people who do not approve
	$(BIN)/python -m pytest -m slow --timeout=180 tests $(ARGS)

FUZZ ?= tests
fuzz: $(STAMP) ## the property tests with 10,000 random examples each (hours; a part: FUZZ=tests/collectors)
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -m hypothesis --timeout=7200 --hypothesis-show-statistics $(FUZZ) $(ARGS)

docs: $(STAMP) ## write docs/metrics.md and docs/signals.md from their tables
	$(BIN)/python .ci/metrics.py
	$(BIN)/python .ci/signals.py

dashboards: $(STAMP) ## write the dashboards' JSON from their code
	$(BIN)/python -m trainwarden.dashboards.job

# To move to newer releases: .venv/bin/pip install -U NAME, make test, make constraints.
constraints: $(STAMP) ## write constraints.txt from what .venv holds
	@sed -n '/^#/p' constraints.txt > constraints.txt.new
	@$(BIN)/python -m pip list --format=freeze --exclude-editable --exclude pip --exclude setuptools \
	  | sed 's/+.*$$//' >> constraints.txt.new
	@mv constraints.txt.new constraints.txt
	@touch $(STAMP)

clean: ## remove .venv and everything that was generated
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
