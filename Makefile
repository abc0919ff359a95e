# `make demo` and `make test` need only Python 3.11 and make: both build their own virtual environment first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 4
GRID ?= 2x2
# Tests wait for processes much of the time: one more of them than there are cores.
TEST_JOBS ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 8 ? cores + 1 : 8)))
PYTEST = $(BIN)/pytest -n $(TEST_JOBS) --dist loadgroup
# Tests start hundreds of processes. Each would compile the package anew where bytecode may not be kept.
export PYTHONDONTWRITEBYTECODE :=
HAS_SIMGRID := $(BIN)/python -c "import sys; from benchmarks.simulators.simgrid import find_simgrid; sys.exit(not find_simgrid())"

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-chaos study images browser simgrid docs test test-all check clean

help:
	@echo "make demo        train the demo recipe with four workers in a 2x2 grid on real images"
	@echo "make demo-chaos  the demo while workers are killed and replaced: the same weights, bit for bit"
	@echo "make study       large batches against a small one, three seeds each, a few minutes"
	@echo "make test        format, types and the fast tests"
	@echo "make test-all    the fast tests and the slower proofs"
	@echo "make check       format and types only"
	@echo "make images      fetch Fashion-MNIST, where that is possible"
	@echo "make browser     install chromium for the browser tests, where that is possible"
	@echo "make simgrid     install SimGrid for the planner's cross-check, where that is possible"
	@echo "make docs        build the documentation as a site"
	@echo "make clean       remove the virtual environment and caches"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: setup
	@if $(BIN)/megabatch data get fashion-mnist; then \
	  $(BIN)/megabatch train demo --workers $(WORKERS) --grid $(GRID); \
	else \
	  echo "Fashion-MNIST cannot be had here: training on generated images instead"; \
	  $(BIN)/megabatch train demo --workers $(WORKERS) --grid $(GRID) --set data.source=generated; \
	fi

demo-chaos: setup
	@if $(BIN)/megabatch data get fashion-mnist; then \
	  $(BIN)/python -m benchmarks.demo_chaos; \
	else \
	  echo "Fashion-MNIST cannot be had here: training on generated images instead"; \
	  $(BIN)/python -m benchmarks.demo_chaos --set data.source=generated; \
	fi

study: setup
	@if $(BIN)/megabatch data get fashion-mnist; then \
	  $(BIN)/megabatch study studies/short.toml --jobs 2 --output runs/study-short; \
	else \
	  echo "Fashion-MNIST cannot be had here: generated images instead, which show that it works and no more"; \
	  $(BIN)/megabatch study studies/short.toml --jobs 2 --output runs/study-short-generated \
	    --set data.source=generated --set data.generated.channels=1; \
	fi

# One test reads the real files; it skips with a reason where they are not.
images: setup
	@$(BIN)/megabatch data get fashion-mnist || echo "Fashion-MNIST cannot be had here: the test of its files will be skipped"

# The report is tested in a real browser. CI=true turns a missing one into a failure.
browser:
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing chromium for the browser tests"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null \
	    || echo "chromium could not be installed"; \
	else \
	  echo "no chromium here: the browser tests will be skipped; to run them: apt-get install chromium (as root)"; \
	fi

# The planner is tested against a simulator of others. CI=true turns a missing one into a failure.
simgrid: setup
	@if $(HAS_SIMGRID); then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing SimGrid for the tests of the planner"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-simgrid >/dev/null; \
	  $(HAS_SIMGRID) || echo "SimGrid could not be installed for this Python; Debian 12 has it for Python 3.11"; \
	else \
	  echo "no SimGrid here: its tests will be skipped; to run them: apt-get install python3-simgrid (as root, Debian 12)"; \
	fi

docs: setup
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --strict --quiet && echo "build/site/index.html"

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check browser simgrid
	$(PYTEST) -m "not slow" tests

test-all: check browser simgrid
	$(PYTEST) tests

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
