# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint types unit clean

demo: .venv/installed
	$(BIN)/m3d demo

test: .venv/dev lint types unit

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev
	$(BIN)/mypy

unit: .venv/dev
	$(BIN)/pytest --numprocesses auto

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints/cpu.txt | .venv/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints/cpu.txt --editable .
	touch $@

.venv/dev: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints/cpu.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv
