# make demo · make test · make bench: each sets up a virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.holdfast-ready
NATIVE := $(wildcard csrc/*.cpp csrc/*.h)

.PHONY: setup demo test lint unit campaign bench test-gpu bench-gpu clean

setup: $(READY)

$(READY): pyproject.toml setup.py constraints.txt $(NATIVE)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "holdfast needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch numpy setuptools wheel ninja
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/holdfast demo

test: lint unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest

# Long statistical runs, half an hour on two cores: random storms, kills, clean rows.
campaign: setup
	$(BIN)/python -m bench.clean_rows
	$(BIN)/python -m bench.kills
	$(BIN)/python -m bench.storms

bench: setup
	$(BIN)/python -m bench.training_step

# On a machine with a CUDA device and its own torch; nothing is downloaded. Besides torch it needs
# rich, safetensors, xxhash, psutil, pytest, pytest-timeout and hypothesis.
test-gpu:
	$(PYTHON) -m pytest -m gpu

bench-gpu:
	$(PYTHON) -m bench.training_step --device cuda
	$(PYTHON) -m bench.gemm_cuda
	$(PYTHON) -m bench.attention_cuda

clean:
	rm -rf build $(VENV) holdfast/_C*.so *.egg-info
