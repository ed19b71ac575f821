# make run: complete held-out code under every installed algorithm. make test: the whole suite.
# Both install the core and every plugin of plugins/ into .venv first, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PROJECTS := pyproject.toml $(PLUGINS:%=%/pyproject.toml)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST_ARGS ?= -n 2 --dist worksteal

.DELETE_ON_ERROR:
.PHONY: run test lint bench clean

run: $(VENV)/.installed
	$(BIN)/python examples/complete.py

# Some hundred processes import the same modules, which are compiled once.
test: $(VENV)/.installed
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/list_startup.py
	$(BIN)/specplug bench --output build/bench
	$(BIN)/python benchmarks/speed.py

clean:
	rm -rf $(VENV)

# The folder plugins/ is newer when a plugin was added to it or taken away.
$(VENV)/.installed: $(PROJECTS) constraints.txt plugins | $(BIN)/python
	$(INSTALL) -e ".[bench,disagg,grammar,serve,test]" $(PLUGINS:%=-e ./%)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) -e ".[dev]"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	"specplug needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
