"""SGLang for specplug's command line: tested versions, capabilities, the server's command.

This module imports neither torch nor SGLang.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from specplug import (
    EngineOptions,
    HostCapabilities,
    MeasuredEngine,
    RunOptions,
    ServerOptions,
    UsageError,
)
from specplug_sglang.capabilities import (
    MASKED,
    PLAIN,
    PLANNED,
    PREFIX,
    capabilities,
    check_version,
    version_of,
)

_ON_CPU = "SGLANG_USE_CPU_ENGINE"

_DISTRIBUTIONS = ("sglang", "sglang-kernel")


class SglangHost:
    """specplug's ``HostPlugin`` for SGLang."""

    def versions(self) -> Mapping[str, str | None]:
        return {name: version_of(name) for name in _DISTRIBUTIONS}

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
        UsageError: this SGLang was not tested, its CPU engine is not turned on, or the algorithm
            is given settings of its own, which SGLang's arguments have no place for.
    """
    check_version()
    if options.settings:
        raise UsageError(
            f"{', '.join(options.settings)}: SGLang passes no algorithm settings of its own; leave "
            "them out, or use the embedded engine or vLLM"
        )
    if _on_cpu(options) and os.environ.get(_ON_CPU) != "1":
        raise UsageError(f"--device cpu: SGLang reads {_ON_CPU} from the environment; set it to 1")


def _on_cpu(options: RunOptions) -> bool:
    typed = {*zip(options.more, options.more[1:], strict=False)}
    return ("--device", "cpu") in typed or "--device=cpu" in options.more


def _attention(options: RunOptions) -> str:
    """Return the attention backend for the device."""
    return PLANNED if _on_cpu(options) else MASKED
