# make test-sglang: the tests of specplug-sglang, in an environment of their own. Included by Makefile.

SGLANG_VENV := .venv-sglang
SGLANG_PINS := hosts/sglang/constraints.txt
SGLANG_INSTALL := $(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps
SGLANG_STANDINS := $(shell find hosts/sglang/standins -name "*.py" -o -name pyproject.toml)
HOST_TESTS += test-sglang

.PHONY: test-sglang
test-sglang: $(SGLANG_VENV)/.installed
	cd hosts/sglang && ../../$(SGLANG_VENV)/bin/python -m pytest $(HOST_PYTEST_ARGS)

# All that is pinned, without what it asks for; then the project itself.
$(SGLANG_VENV)/.installed: $(SGLANG_PINS) $(PROJECTS) hosts/sglang/pyproject.toml $(SGLANG_STANDINS) plugins
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_INSTALL) -r $(SGLANG_PINS)
	$(SGLANG_INSTALL) --no-build-isolation $(patsubst %,-e ./%,. $(PLUGINS) hosts/sglang)
	$(SGLANG_INSTALL) --no-build-isolation ./hosts/sglang/standins
	@touch $@
