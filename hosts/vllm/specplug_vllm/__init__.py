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
    from specplug_vllm.v1.proposer import Proposer

_ALGORITHM = re.compile(r"[A-Z][A-Z0-9_]*")


def register() -> None:
    """vLLM's ``vllm.general_plugins`` entry point, called in each of its processes.

    It does nothing to a version of vLLM that was not tested: who then chooses an algorithm is told.
    """
    from specplug_vllm.host import untested

    if untested() is None:
        from specplug_vllm.patches import patch_config

        patch_config()


def __getattr__(name: str) -> Callable[[Any], Proposer]:
    """Return what makes the proposer of an installed algorithm from a ``VllmConfig``.

    Raises:
        UnknownAlgorithm: there is none of that name.
    """
    if not _ALGORITHM.fullmatch(name):
        raise AttributeError(f"module 'specplug_vllm' has no attribute {name!r}")
    from specplug.registry import Registry

    registry = Registry()
    if name not in registry.names():
        registry.check(name)  # says what is installed

    def build(vllm_config: Any) -> Proposer:
        from specplug_vllm.v1.proposer import Proposer

        return Proposer(vllm_config, name)

    build.__name__ = name
    return build
