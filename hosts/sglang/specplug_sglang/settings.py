"""SGLang's command line as a ``SpecConfig``, and what of it cannot be given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

import specplug
from specplug import HostCapabilities, SpecConfig, UsageError
from specplug.registry import Registry, SelectedAlgorithm, build_plugin_manager
from specplug.speculative.defaults import CoreDefaults
from specplug_sglang.contained_hooks import ContainedHooks
from specplug_sglang.host import MASKED, PLANNED, capabilities

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


@attrs.frozen
class Chosen:
    """The plugins of a run and its settings."""

    selected: SelectedAlgorithm
    hooks: ContainedHooks
    config: SpecConfig


def choose(algorithm: str, args: ServerArgs, target_config: Mapping[str, Any]) -> Chosen:
    """Select the algorithm and resolve its settings.

    Raises:
        UsageError: they do not fit, or SGLang cannot give what they need.
    """
    if found := "; ".join(_refused(args)):
        raise UsageError(f"{algorithm}: {found}")
    registry = Registry()
    selected = registry.select(algorithm)
    extensions = registry.extensions()
    manager = build_plugin_manager(selected, extensions, CoreDefaults())
    hooks = ContainedHooks(manager, selected, extensions)
    path = args.speculative_draft_model_path
    typed = SpecConfig.resolve(
        selected.info,
        num_steps=args.speculative_num_steps,
        topk=args.speculative_eagle_topk,
        num_draft_tokens=args.speculative_num_draft_tokens,
        draft_model_path=None if path is None else Path(path),
        model_name=_shipped_name(args.model_path),
        target_config=target_config,
    )
    if not selected.info.capabilities.overlap and not args.disable_overlap_schedule:
        raise UsageError(
            f"{algorithm} needs the result of a step before the next one; start SGLang with "
            "--disable-overlap-schedule"
        )
    if not selected.info.capabilities.prefix_cache and not args.disable_radix_cache:
        raise UsageError(
            f"{algorithm} cannot begin in the middle of a prompt; start SGLang with "
            "--disable-radix-cache"
        )
    config = hooks.validate_config(typed)
    given_by(args).check(selected.info, config, own_verify=not hooks.core_verifies)
    return Chosen(selected, hooks, config)


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
