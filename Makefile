# make parity   install into .venv and run the main job: the ε table over published model shapes, and parity-report.html
# make test     install into .venv and run the linters, the type checker and the test suite
# make smoke    only the tests that run in under two minutes;  make full  every case of the matrix

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/pytest -n $(or $(JOBS),auto) --dist worksteal

.PHONY: parity test smoke full lint install clean

parity: install
	$(BIN)/parity run --report parity-report.html

test: lint
	$(PYTEST)

smoke: install
	$(PYTEST) --parity-tier=smoke

full: install
	$(PYTEST) --parity-tier=full

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "kernel-parity needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)
# Without an NVIDIA device the CPU build, where an index offers it: the plain one brings gigabytes of CUDA libraries.
	test -e /dev/nvidia0 || $(PIP) torch==2.13.0+cpu || $(PIP) torch==2.13.0
	$(PIP) --editable ".[jax,triton,libtpu,dev]"
# The report's tests drive the Chromium of this machine, or else Playwright's, which needs no root; without one they skip.
	command -v chromium || command -v google-chrome || $(BIN)/playwright install --only-shell chromium || echo "no Chromium to be had"
	touch $@

clean:
	rm -rf $(VENV)
