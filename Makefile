# Every target is one line of intent; CI calls only these.  `make start` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ORACLE ?= $(VENV)/oracle

.PHONY: start test setup style types arch docs check slow oracle bench clean

start: setup
	$(BIN)/lucevisor start etc/demo.toml

test: setup
	$(BIN)/python -m pytest -m "not slow and not gpu" -n logical --dist loadfile --cov --cov-report=term:skip-covered

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

oracle: setup $(ORACLE)/.ready
	LUCEVISOR_ORACLE_PYTHON=$(abspath $(ORACLE))/bin/python $(BIN)/python -m pytest -m slow tests/oracles

# llama.cpp from source, 4 to 12 minutes on two cores. Its GELU in float32: the stock build takes it from a table of halves.
$(ORACLE)/.ready:
	$(PYTHON) -m venv $(ORACLE)
	$(ORACLE)/bin/python -m pip download --quiet --no-deps --no-binary :all: --dest $(ORACLE)/source \
		"$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["oracle"])')"
	tar -xzf $(ORACLE)/source/*.tar.gz -C $(ORACLE)/source --strip-components=1
	sed -i '/^#define GGML_GELU_FP16/d' $(ORACLE)/source/vendor/llama.cpp/ggml/src/ggml-cpu/vec.h
	CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_OPENMP=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF \
		-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_UI=OFF" \
		$(ORACLE)/bin/python -m pip install --quiet $(ORACLE)/source
	touch $@

gpu: setup
	$(BIN)/python -m pytest -m gpu

bench: setup
	$(BIN)/python bench/hop.py --save

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
