"""specplug's algorithms inside vLLM.

``speculative_config={"model": "specplug_vllm.EAGLE3", "num_speculative_tokens": 5}``: the name
after the dot is that of any installed algorithm. Further settings stand in
``additional_config={"specplug": {…}}``; see ``specplug_vllm.settings.Settings``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specplug_vllm.v1.proposer import VllmProposer

_ALGORITHM = re.compile(r"[A-Z][A-Z0-9_]*")


def register() -> None:
    """Patch a process of vLLM: its ``vllm.general_plugins`` entry point, called in each of them.

    It does nothing to a version of vLLM that was not tested: a run that chooses an algorithm is
    refused there.
    """
    from specplug_vllm.versions import is_tested

    if is_tested():
        from specplug_vllm.patches import patch_process

        patch_process()


def __getattr__(name: str) -> Callable[[Any], VllmProposer]:
    """Return what makes the proposer of an installed algorithm from a ``VllmConfig``.

    Raises:
        UnknownAlgorithm: there is none of that name.
    """
    if not _ALGORITHM.fullmatch(name):
        raise AttributeError(f"module 'specplug_vllm' has no attribute {name!r}")
    from specplug import Registry

    registry = Registry()
    if name not in registry.names():
        registry.check(name)  # says what is installed

    def build(vllm_config: Any) -> VllmProposer:
        from specplug_vllm.patches import patch_runner_v1

        patch_runner_v1(on_cpu=vllm_config.device_config.device_type == "cpu")
        from specplug_vllm.v1.proposer import VllmProposer

        return VllmProposer(vllm_config, name)

    build.__name__ = name
    return build
