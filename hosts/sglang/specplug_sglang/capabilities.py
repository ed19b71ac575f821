"""What SGLang gives algorithms, and the versions that were tested. Imports neither it nor torch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from specplug import HostCapabilities, UsageError

TESTED = ("0.5.17", "0.5.23")
"""The tested versions of SGLang. ``versions`` has the code that differs between them."""

PREFIX = "SPECPLUG_"
"""The prefix of our algorithms' names in SGLang, which reserves the names of its own."""

PLAIN = "NONE"
"""The algorithm that drafts nothing: SGLang without an algorithm is the same, and faster."""

PLANNED = "torch_native"
"""The attention backend for the CPU, which is patched to read our plan."""

MASKED = "triton"
"""The attention backend for GPUs, which reads a mask of the drafts."""


class UntestedVersion(UsageError):
    """This SGLang was not tested: its version differs, or a name that this package uses."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"{found}; specplug-sglang was tested with sglang {', '.join(TESTED)}; install one of "
            "them"
        )


def check_version() -> str:
    """Return the installed version.

    Raises:
        UntestedVersion: it is not in ``TESTED``.
    """
    found = version_of("sglang")
    if found is None:
        raise UntestedVersion("sglang is not installed")
    if found not in TESTED:
        raise UntestedVersion(f"sglang {found}")
    return found


def capabilities(*, overlap: bool = True, seeded: bool = False) -> HostCapabilities:
    """Return what SGLang gives algorithms.

    Args:
        overlap: False with ``--disable-overlap-schedule``.
        seeded: True with ``--enable-deterministic-inference``: the noise is a function of a
            request's seed and the position. Otherwise it is drawn in the order of the steps.

    Raises:
        UntestedVersion: SGLang is not installed, or a version that was not tested.
    """
    return HostCapabilities(
        name=f"SGLang {check_version()}",
        draft_models=True,
        captures=("layer_inputs", "lm_head_input"),
        trees=True,
        verify=True,
        overlap=overlap,
        exact_sampling=seeded,
        foreseeable_noise=seeded,
        cache_salts=True,
    )


def version_of(name: str) -> str | None:
    """Return the version of a distribution; None: it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
