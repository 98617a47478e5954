# Every target is one line of intent; CI calls only these.  `make start` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: start test setup style types arch docs check slow bench clean

start: setup
	$(BIN)/lucevisor start etc/demo.toml

test: setup
	$(BIN)/python -m pytest -m "not slow and not gpu" --cov --cov-report=term:skip-covered

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[daemon,dev]'
	touch $@

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy lucevisor daemons

arch: setup
	$(BIN)/lint-imports

docs: setup
	$(BIN)/python -m lucevisor.config.docs --check
	$(BIN)/python -m lucevisor.supervision.states --diagram | diff - docs/states.md
	$(BIN)/python -m lucevisor.wire.docs --check

check: style types arch docs test

slow: setup
	$(BIN)/python -m pytest -m slow

gpu: setup
	$(BIN)/python -m pytest -m gpu

bench: setup
	$(BIN)/python bench/hop.py --save

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
