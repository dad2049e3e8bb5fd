# make parity   install into .venv and run the main job: the ε table over published model shapes
# make test     install into .venv and run the linters, the type checker and the test suite
# make smoke    only the tests that run in under a minute;  make full  every case of the matrix

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where there is no NVIDIA device, torch's newest plain build would bring gigabytes of CUDA libraries.
TORCH ?= $(if $(wildcard /dev/nvidia0),torch,torch==2.13.0)
PYTEST := $(BIN)/pytest -n $(or $(JOBS),auto) --dist loadgroup

.PHONY: parity test smoke full lint install clean

parity: install
	$(BIN)/parity run

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
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[jax,triton,libtpu,dev]"
	touch $@

clean:
	rm -rf $(VENV)
