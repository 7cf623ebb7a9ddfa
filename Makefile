# Two commands do everything on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test test-all test-slow lint format clean

demo: $(VENV)/demo.stamp  ## four methods on real digits, a table and a picture (about two minutes)
	$(BIN)/python examples/demo.py

test: $(VENV)/dev.stamp lint  ## ruff, mypy and the fast tests
	$(BIN)/python -m pytest

test-all: test test-slow  ## the slow stories as well

test-slow: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and alone: its CPU build then satisfies every later, wider request.
$(VENV)/torch.stamp: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) --editable '.[report]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
