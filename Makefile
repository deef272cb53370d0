# Everything a developer does; `make` alone lists the targets.
VENV      := .venv
PYTHON    := $(VENV)/bin/python
PIN       := -c tests/constraints.txt
MODEL     := .cache/SmolLM2-135M-Instruct

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench completions clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp $(MODEL)/config.json ## inspect, plan and run a real small model on this machine
	@$(PYTHON) -m tests.demo $(MODEL)

test: lint ## lint, types and tests
	$(PYTHON) -m pytest

lint: $(VENV)/dev.stamp ## ruff and a strict type check
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

bench: $(VENV)/dev.stamp $(MODEL)/config.json ## measure against transformers and accelerate, side by side
	$(PYTHON) -m tests.benchmarks $(MODEL)
	$(PYTHON) -m tests.benchmarks.rehearsals
	$(PYTHON) -m tests.benchmarks.speeds
	$(PYTHON) -m tests.benchmarks.plans
	$(PYTHON) -m pytest -m slow

completions: $(VENV)/dev.stamp ## write completions/ and the help texts in README.md
	$(PYTHON) -m tests.surface

clean: ## remove all that the other targets made
	rm -rf $(VENV) .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	python3 -m venv $(VENV)

$(VENV)/demo.stamp: $(VENV)/bin/python pyproject.toml tests/constraints.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check $(PIN) -e '.[gguf]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp
	$(PYTHON) -m pip install --quiet --disable-pip-version-check $(PIN) -e '.[dev]'
	@touch $@

$(MODEL)/config.json: $(VENV)/demo.stamp
	@$(PYTHON) -m tests.real_model $(MODEL)
	@touch $@
