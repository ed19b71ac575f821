# make test-vllm-v2: the tests of model runner V2 on the CPU, where Triton's kernels are interpreted,
# in an environment with the oldest version of vLLM that is tested. Included by Makefile.

VLLM_V2_VENV := .venv-vllm-v2
VLLM_V2_PINS := hosts/vllm/constraints-v2.txt
VLLM_V2_INSTALL := $(VLLM_V2_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
HOST_TESTS += test-vllm-v2 test-vllm-v2-newer

.PHONY: test-vllm-v2 test-vllm-v2-newer
test-vllm-v2: $(VLLM_V2_VENV)/.installed
	cd hosts/vllm && ../../$(VLLM_V2_VENV)/bin/python -m pytest tests_v2 $(HOST_PYTEST_ARGS)

# The same in the environment of `make test-vllm`, whose version has adaptive verification.
test-vllm-v2-newer: $(VLLM_VENV)/.installed
	cd hosts/vllm && ../../$(VLLM_VENV)/bin/python -m pytest tests_v2 $(HOST_PYTEST_ARGS)

# torch with what it asks for, all else that is pinned without; then the project itself.
$(VLLM_V2_VENV)/.installed: $(VLLM_V2_PINS) $(PROJECTS) hosts/vllm/pyproject.toml plugins
	$(PYTHON) -m venv $(VLLM_V2_VENV)
	$(VLLM_V2_INSTALL) -c $(VLLM_V2_PINS) torch
	$(VLLM_V2_INSTALL) --no-deps -r $(VLLM_V2_PINS)
	$(VLLM_V2_INSTALL) --no-deps --no-build-isolation $(patsubst %,-e ./%,. $(PLUGINS) hosts/vllm)
	@touch $@
