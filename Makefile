# make run: complete held-out code under every installed algorithm. make test: the whole suite.
# make docs: the pages as a site, build/site. Each installs the core and every plugin of plugins/ into
# .venv first, once. make test-hosts: the tests inside other engines, each in an environment that
# hosts/*/test*.mk make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PROJECTS := pyproject.toml $(PLUGINS:%=%/pyproject.toml)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST_ARGS ?= -n 3 --dist worksteal
HOST_PYTEST_ARGS ?=

.DELETE_ON_ERROR:
.PHONY: run test test-hosts lint bench docs clean

run: $(VENV)/.installed
	$(BIN)/python examples/complete.py

# Some hundred processes import the same modules, which are compiled once.
test: $(VENV)/.installed
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PYTEST_ARGS)

# All of them, though one fails.
test-hosts:
	@$(MAKE) --keep-going $(HOST_TESTS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/processes.py list
	$(BIN)/specplug bench --output build/bench
	$(BIN)/python benchmarks/hosts/compare.py prompts embedded --batch 1 --prompts 1 --rounds 40 --max-tokens 128

# Warnings are errors, a link to a page or a title that is not there too.
docs: $(VENV)/.installed
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/site-cache . build/site

clean:
	rm -rf $(VENV) $(VENV)-*

# The folder plugins/ is newer when a plugin was added to it or taken away.
$(VENV)/.installed: $(PROJECTS) constraints.txt plugins | $(BIN)/python
	$(INSTALL) -e ".[bench,disagg,docs,grammar,new,serve,test]" $(PLUGINS:%=-e ./%)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) -e ".[dev]"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	"specplug needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# Each adds its target to HOST_TESTS, after all that it uses of the above.
include $(wildcard hosts/*/test*.mk)
