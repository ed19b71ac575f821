# make test-vllm: the tests of specplug-vllm, in an environment of their own. Included by Makefile.

VLLM_VENV := .venv-vllm
VLLM_PINS := hosts/vllm/constraints.txt
VLLM_INSTALL := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps
HOST_TESTS += test-vllm

.PHONY: test-vllm
test-vllm: $(VLLM_VENV)/.installed
	cd hosts/vllm && ../../$(VLLM_VENV)/bin/python -m pytest $(HOST_PYTEST_ARGS)

# All that is pinned, without what it asks for; then the project itself.
$(VLLM_VENV)/.installed: $(VLLM_PINS) $(PROJECTS) hosts/vllm/pyproject.toml plugins
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_INSTALL) -r $(VLLM_PINS)
	$(VLLM_INSTALL) --no-build-isolation $(patsubst %,-e ./%,. $(PLUGINS) hosts/vllm)
	@touch $@
