# make demo: set up, train on the embedded data set, show the result.
# make test: set up, then lint, types and all tests but `slow` and `gpu`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Twice quiet: warnings stay out as well, errors are shown.
INSTALL := python -m pip install --quiet --quiet --disable-pip-version-check
# Two tests at a time, each with one thread; tests that need another number set it themselves.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo demo-photos test test-all lint types bench kernel-report setup clean

setup: $(READY)

# The stamp is the last thing written, so an interrupted set-up is simply done again.
$(READY): setup.py pyproject.toml
	@echo "== set-up: $(VENV) with simpro_fast and its development tools (some minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "simpro_fast needs Python 3.10 or newer")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/$(INSTALL) --upgrade pip setuptools wheel
	@$(BIN)/$(INSTALL) --editable '.[dev]'
	@touch $(READY)

demo: $(READY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh launch/demo.sh

# Some minutes, with 180 MB from Debian and PyPI the first time.
demo-photos: $(READY)
	@PYTHONPATH=. PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python launch/demo_photos.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

test: lint types
	$(PYTEST) -m "not slow and not gpu"

test-all: lint types
	$(PYTEST) -m "not gpu"

# What a CPU can measure, under a quarter of an hour on two idle cores; results in bench/results.
bench: $(READY)
	$(BIN)/python bench/bench_step.py --output bench/results/step.csv
	$(BIN)/python bench/end_to_end.py
	$(BIN)/python bench/bench_kernels.py --seconds 0.3

kernel-report: $(READY)
	$(BIN)/python bench/kernel_report.py

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
