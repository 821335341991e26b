# make demo   environment, installation, and the main job on this machine
# make test   environment, installation, and every check
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types unit proto clean

demo: $(VENV)/.installed
	$(BIN)/titan demo

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/pyright

unit: $(VENV)/.installed-dev
	$(BIN)/pytest

proto: $(VENV)/.installed-dev
	$(BIN)/python proto/generate.py

$(VENV)/bin/python:
	@echo "making the environment in $(VENV)"
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Titan needs Python 3.11 or newer, {sys.executable} is {v.major}.{v.minor}. Run: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing Titan (about a minute the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing Titan and what its checks need (about a minute the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info
