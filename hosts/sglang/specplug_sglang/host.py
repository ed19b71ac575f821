"""SGLang for specplug's command line: tested versions, capabilities, the server's command.

This module imports neither torch nor SGLang.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from specplug import (
    EngineOptions,
    HostCapabilities,
    MeasuredEngine,
    RunOptions,
    ServerOptions,
    UsageError,
)

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

_ON_CPU = "SGLANG_USE_CPU_ENGINE"

_DISTRIBUTIONS = ("sglang", "sglang-kernel")


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
    found = _version("sglang")
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
    )


class SglangHost:
    """specplug's ``HostPlugin`` for SGLang."""

    def versions(self) -> Mapping[str, str | None]:
        return {name: _version(name) for name in _DISTRIBUTIONS}

    def describe(self) -> HostCapabilities:
        return capabilities()

    def server_command(self, options: ServerOptions) -> Sequence[str]:
        _check(options)
        address, port = options.address
        command = [sys.executable, "-m", "sglang.launch_server", *arguments(options)]
        command += ["--host", address, "--port", str(port)]
        if options.served_model_name is not None:
            command += ["--served-model-name", options.served_model_name]
        return [*command, *options.more]

    def open_engine(self, options: EngineOptions) -> MeasuredEngine:
        _check(options)
        from specplug_sglang.measured_engine import SglangEngine

        # For plain decoding too: compared engines then differ in the algorithm alone.
        own = ["--log-level", "error", "--random-seed", str(options.seed)]
        own += ["--attention-backend", _attention(options)]
        own += ["--max-running-requests", str(options.max_running_requests)]
        return SglangEngine([*arguments(options), *own, *options.more])


host = SglangHost()


def arguments(options: RunOptions) -> list[str]:
    """Return a run's settings as arguments of SGLang's command line."""
    found = ["--model-path", options.model, "--dtype", options.dtype]
    if options.algorithm == PLAIN:
        return found
    found += ["--speculative-algorithm", PREFIX + options.algorithm]
    found += ["--attention-backend", _attention(options)]
    path = options.draft_model_path
    typed = {
        "--speculative-num-steps": options.num_steps,
        "--speculative-eagle-topk": options.topk,
        "--speculative-num-draft-tokens": options.num_draft_tokens,
        "--speculative-draft-model-path": None if path is None else str(path),
    }
    for name, value in typed.items():
        if value is not None:
            found += [name, str(value)]
    return found


def _check(options: RunOptions) -> None:
    """Refuse a run for which SGLang itself gives no clear error.

    Raises:
        UsageError: this SGLang was not tested, or its CPU engine is not turned on.
    """
    check_version()
    if _on_cpu(options) and os.environ.get(_ON_CPU) != "1":
        raise UsageError(f"--device cpu: SGLang reads {_ON_CPU} from the environment; set it to 1")


def _on_cpu(options: RunOptions) -> bool:
    typed = {*zip(options.more, options.more[1:], strict=False)}
    return ("--device", "cpu") in typed or "--device=cpu" in options.more


def _attention(options: RunOptions) -> str:
    """Return the attention backend for the device."""
    return PLANNED if _on_cpu(options) else MASKED


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
