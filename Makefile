# make help says what there is. Each target installs what it needs first, once, in an environment of its own:
# the core and every plugin of plugins/ in .venv; what hosts/*/test*.mk make, for the tests inside other
# engines; what builds distributions, in .venv-dist.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PROJECTS := pyproject.toml $(PLUGINS:%=%/pyproject.toml)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST_ARGS ?= -n 3 --dist worksteal
HOST_PYTEST_ARGS ?=

.DELETE_ON_ERROR:
.PHONY: help run test test-hosts lint kit bench docs generated dist check-dist release-notes clean

help: ## this list
	@grep -hE "^[a-z0-9-]+:.*##" $(MAKEFILE_LIST) | sed "s/:[^#]*## /: /" | while IFS=: read -r name what; \
		do printf "make %-15s%s\n" "$$name" "$$what"; done

run: $(VENV)/.installed ## complete held-out code under every installed algorithm
	$(BIN)/python examples/complete.py

# Some hundred processes import the same modules, which are compiled once.
test: $(VENV)/.installed ## the whole suite
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PYTEST_ARGS)

# All of them, though one fails.
test-hosts: ## the tests inside vLLM and SGLang
	@$(MAKE) --keep-going $(HOST_TESTS)

lint: $(VENV)/.installed-dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What ships; make kit KIT=NGRAM for one of them.
KIT ?= $(shell sed -n '/specplug\.algorithms"/{n;s/ =.*//p;}' $(PLUGINS:%=%/pyproject.toml))

# All of them, though one fails.
kit: $(VENV)/.installed ## the conformance kit's table for every algorithm, each a minute or two
	@failed=; for name in $(KIT); do echo "== $$name"; \
		$(BIN)/specplug check $$name || failed="$$failed $$name"; done; \
		test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

bench: $(VENV)/.installed ## every algorithm beside plain decoding, with pictures
	$(BIN)/python benchmarks/processes.py list
	$(BIN)/specplug bench --output build/bench
	$(BIN)/python benchmarks/hosts/compare.py prompts embedded --batch 1 --prompts 1 --rounds 40 --max-tokens 128

# Warnings are errors, a link to a page or a title that is not there too.
docs: $(VENV)/.installed ## the pages as a site, build/site/index.html
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/site-cache . build/site

generated: $(VENV)/.installed ## the pages that are made from code: hooks, settings, the plugins' READMEs
	$(BIN)/python docs/make_hooks.py
	$(BIN)/python docs/make_settings.py
	$(BIN)/python plugins/make_readmes.py

# All distributions, each as an sdist and a wheel, as a package index takes them.
dist: $(VENV)-dist/.installed ## sdists and wheels of all distributions, checked by twine
	rm -rf dist build/dist
	@mkdir -p build/dist
	for project in . $(PLUGINS) $(wildcard hosts/*); do \
		$(VENV)-dist/bin/python -m build --no-isolation --outdir dist $$project \
		> build/dist/log 2>&1 || { cat build/dist/log; exit 1; }; done
	$(VENV)-dist/bin/python -m twine check --strict dist/*

check-dist: dist ## the wheels in an empty environment, away from the repository
	rm -rf $(VENV)-wheels
	$(PYTHON) -m venv $(VENV)-wheels
	$(VENV)-wheels/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		$$(ls dist/*.whl | grep -v "specplug_vllm\|specplug_sglang" | sed "s,dist/specplug-.*,&[bench\,new],")
	cd $(VENV)-wheels && env PATH="$$PWD/bin:$$PATH" PYTHONPATH= bash $(CURDIR)/tests/check_wheels.sh

release-notes: $(VENV)/.installed ## of the newest version, from the changelog
	$(BIN)/python docs/release_notes.py

clean: ## take all environments away
	rm -rf $(VENV) $(VENV)-*

# The folder plugins/ is newer when a plugin was added to it or taken away.
$(VENV)/.installed: $(PROJECTS) constraints.txt plugins | $(BIN)/python
	$(INSTALL) -e ".[bench,disagg,docs,grammar,new,serve,test]" $(PLUGINS:%=-e ./%)
	@touch $@

$(VENV)-dist/.installed: constraints.txt
	$(PYTHON) -m venv $(VENV)-dist
	$(VENV)-dist/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		"setuptools>=77" "build>=1.3" "twine>=6"
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
