# make parity   install what it runs into .venv, and run the main job: the ε table, and parity-report.html
# make test     install into .venv and run the linters, the type checker and the test suite
# make audit    kernels that misbehave, kills at random moments, fuzzed files, odd machines: hours
# make smoke    only the smoke cases;  make full  everything, in hours, or with PART=1/24 a part; each says what it took

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/pytest -n $(or $(JOBS),auto) --dist loadfile
INSTALL := @PYTHON=$(PYTHON) VENV=$(VENV) .ci/install

# Without bytecode every process compiles JAX and torch anew: importing them takes 7 s of a processor, with it 3.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: parity picture test smoke full audit lint install clean

parity: $(VENV)/parity
	@$(BIN)/parity run --seeds 2 --report parity-report.html

# docs/report.png, of the report as it is now.
picture:
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1200,1420 --screenshot=docs/report.png parity-report.html

test: lint
	$(PYTEST)

# Only the files that take tests from the matrix: collecting all of them takes each worker 4 s more.
smoke: install
	$(PYTEST) --parity-tier=smoke $$(grep -lE 'agreement|parity\.cases|mark\.smoke' tests/*/test_*.py)

full: install
	$(PYTEST) --parity-tier=full $(PART:%=--parity-shard=%)

audit: install
	$(PYTEST) --parity-tier=full tests/meta/audit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/dev

$(VENV)/parity: pyproject.toml
	$(INSTALL) jax,triton
	@touch $@

$(VENV)/dev: pyproject.toml
	$(INSTALL) dev
# The report's tests drive the Chromium of this machine, or else Playwright's, which needs no root; without one they skip.
	@command -v chromium || command -v google-chrome || $(BIN)/playwright install --only-shell chromium \
		>$(VENV)/chromium.log 2>&1 || echo "no Chromium: tests of the report in a browser skip ($(VENV)/chromium.log)"
	@touch $@ $(VENV)/parity

clean:
	rm -rf $(VENV)
