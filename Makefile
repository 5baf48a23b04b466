# Everything runs from .venv with relative paths, so a checkout's path may hold spaces.
# VENV= and TORCH= may be given on the command line.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV ?= .venv
PY := $(VENV)/bin/python
PIN := k3/constraints.txt
# Where no virtual environment can be made (no registry), `make gpu` runs on the current python.
HERE := $(if $(wildcard $(PY)),$(PY),python3)

.PHONY: help setup demo test peers slow gpu bench fmt check claims clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## make .venv: torch first (a CPU build where there is no NVIDIA device), then the rest
	@:

$(VENV)/.ready: pyproject.toml $(PIN)
	@bash .ci/setup "$(VENV)" "$(TORCH)"
	@touch "$@"

demo: setup ## minutes: train nano on this machine's Python source, resume, sample, report
	@$(PY) -m k3 demo

test: setup ## the default tests
	@$(PY) -m pytest -q -n 2

peers: setup $(VENV)/.peers ## compare with other people's implementations
	@$(PY) -m pytest -q -m peers

$(VENV)/.peers: tests/peers/requirements.txt $(VENV)/.ready
	@$(PY) -m pip install -qq --no-deps -r tests/peers/requirements.txt
	@touch "$@"

slow: setup ## soaks and learning runs at full size (hours)
	@$(PY) -m pytest -q -m slow

gpu: ## tests and a short training run on CUDA
	@$(HERE) -m pytest -q -m gpu
	@$(HERE) -m k3 train nano --steps 20 --out runs/gpu --fresh

bench: setup ## timings, both arms in one process
	@for file in bench/*.py; do \
	  [ "$$file" = bench/record.py ] && continue; \
	  echo "== $$file"; $(PY) "$$file" || exit 1; \
	done

fmt: setup ## format and fix what ruff can fix
	@$(PY) -m ruff format -q . && $(PY) -m ruff check -q --fix .

check: setup ## format, lint, types
	@$(PY) -m ruff format -q --check . && $(PY) -m ruff check -q . && $(PY) -m mypy

claims: setup ## write docs/claims.md from docs/records
	@$(PY) -m k3 claims

clean: ## remove .venv and caches; runs/ stays
	@rm -rf "$(VENV)" build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find k3 tests -name __pycache__ -type d -prune -exec rm -rf {} +
