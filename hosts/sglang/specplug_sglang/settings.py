"""SGLang's command line as a ``SpecConfig``, and what of it cannot be given."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import specplug
from specplug import AlgorithmInfo, HostCapabilities, SpecConfig, UsageError
from specplug.speculative.algorithm_start import StartedAlgorithm, start_algorithm
from specplug_sglang.fault_tolerant_hooks import FaultTolerantHooks
from specplug_sglang.host import MASKED, PLANNED, PREFIX, capabilities

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


def start_in_sglang(
    algorithm: str, args: ServerArgs, target_config: Mapping[str, Any]
) -> StartedAlgorithm[FaultTolerantHooks]:
    """Start the algorithm of a run.

    Raises:
        UsageError: the settings do not fit, or SGLang cannot give what they need.
    """
    if found := "; ".join(_refused(args)):
        raise UsageError(f"{algorithm}: {found}")

    def resolve(info: AlgorithmInfo) -> SpecConfig:
        _check_capabilities(info, args)
        path = args.speculative_draft_model_path
        return SpecConfig.resolve(
            info,
            num_steps=args.speculative_num_steps,
            topk=args.speculative_eagle_topk,
            num_draft_tokens=args.speculative_num_draft_tokens,
            draft_model_path=None if path is None else Path(path),
            model_name=_shipped_name(args.model_path),
            target_config=target_config,
        )

    def tell(line: str) -> None:
        logger.warning("%s%s", PREFIX, line)  # the name that was typed

    return start_algorithm(
        algorithm, resolve, host=given_by(args), calls=FaultTolerantHooks, tell=tell
    )


def _check_capabilities(info: AlgorithmInfo, args: ServerArgs) -> None:
    """Refuse what an algorithm cannot run with."""
    if not info.capabilities.overlap and not args.disable_overlap_schedule:
        raise UsageError(
            f"{info.name} needs the result of a step before the next one; start SGLang with "
            "--disable-overlap-schedule"
        )
    if not info.capabilities.prefix_cache and not args.disable_radix_cache:
        raise UsageError(
            f"{info.name} cannot begin in the middle of a prompt; start SGLang with "
            "--disable-radix-cache"
        )


def given_by(args: ServerArgs) -> HostCapabilities:
    """Return what SGLang gives with these settings."""
    return capabilities(
        overlap=not args.disable_overlap_schedule,
        seeded=bool(args.enable_deterministic_inference),
    )


def _refused(args: ServerArgs) -> Iterator[str]:
    for name, expected in (("tp_size", 1), ("pp_size", 1)):
        found = getattr(args, name)
        if found != expected:
            yield f"{name}={found}: expected {expected}, drafts are made on one rank"
    if args.attention_backend not in (MASKED, PLANNED):
        yield (
            f"attention_backend={args.attention_backend!r}: drafts are verified with {MASKED!r}, "
            f"and with {PLANNED!r} on a CPU; start SGLang with --attention-backend {MASKED}"
        )
    if args.enable_return_hidden_states:
        yield "enable_return_hidden_states: the hidden states of a pass are the algorithm's"


def _shipped_name(model_path: str) -> str | None:
    """Return the name of a target that plugins ship weights for, by its folder."""
    shipped = Path(specplug.__file__).parent / "assets" / "tiny_code"
    return specplug.DEFAULT_MODEL if Path(model_path).resolve() == shipped.resolve() else None
