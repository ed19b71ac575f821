"""What the core's own algorithms that hold others have alike: every part hears of every committed
token, whichever of them drafts. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from specplug.algorithm import AlgorithmInfo, Capabilities, SpecConfig
from specplug.errors import PluginError, UsageError, shown
from specplug.hookspecs import hookimpl
from specplug.registry import SelectedAlgorithm, build_plugin_manager

if TYPE_CHECKING:
    from torch import Tensor

    from specplug.speculative.draft import DraftInput
    from specplug.speculative.draft_state import StateTensor
    from specplug.speculative.hook_order import Batch
    from specplug.speculative.part import Part
    from specplug.speculative.runtime import Runtime
    from specplug.speculative.verify import CommittedOutput


@attrs.frozen(eq=False)
class PartsWorker:
    """The parts of a run.

    Attributes:
        parts: in the order of the algorithm's name.
    """

    parts: Sequence[Part]

    def state_spec(self) -> Mapping[str, StateTensor]:
        return {name: t for part in self.parts for name, t in part.state_spec().items()}


class HeldParts:
    """The hooks that hand a call to every part. Its worker is a ``PartsWorker``.

    Args:
        name: of the algorithm that holds them.
        parts: each another one.

    Raises:
        UsageError: one is named twice.
    """

    def __init__(self, name: str, parts: Sequence[SelectedAlgorithm]) -> None:
        self._name, self._parts = name, parts
        if len({part.name for part in parts}) < len(parts):
            raise UsageError(f"{name}: expected each algorithm once")

    @hookimpl
    def supports_target_verify_for_draft(self) -> bool:
        """Return True: each part's passes are recorded if the part says that they can be."""
        return True

    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> DraftInput:
        parts: Sequence[Part] = runtime.worker.parts
        return _joined(part.build_draft_input(batch, target_output) for part in parts)

    @hookimpl
    def build_disagg_draft_input(
        self, runtime: Runtime, batch: Batch, last_tokens: Tensor
    ) -> DraftInput:
        parts: Sequence[Part] = runtime.worker.parts
        return _joined(part.build_disagg_draft_input(batch, last_tokens) for part in parts)

    @hookimpl
    def fixup_idle(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> DraftInput:
        parts: Sequence[Part] = runtime.worker.parts
        return _joined(part.fixup_idle(batch, draft_input) for part in parts)


def joined_capabilities(
    infos: Iterable[AlgorithmInfo], *, branching: bool, draft_model: bool
) -> Capabilities:
    """Return what an algorithm that holds these can do, and needs.

    Args:
        branching, draft_model: of those whose drafts and weights the user's settings name.
    """
    every = [info.capabilities for info in infos]
    return Capabilities(
        branching=branching,
        draft_model=draft_model,
        overlap=all(each.overlap for each in every),
        prefix_cache=all(each.prefix_cache for each in every),
        target_drafts=any(each.target_drafts for each in every),
        parts=True,
        captures=frozenset().union(*(each.captures for each in every)),
    )


def joined_settings(infos: Iterable[AlgorithmInfo]) -> type[Any] | None:
    """Return a class of the settings that several algorithms have of their own; None: of none."""
    fields = {
        field.name: attrs.field(
            default=field.default,
            validator=field.validator,
            converter=field.converter,
            repr=field.repr,
            hash=field.hash,
            metadata=field.metadata,
            type=field.type,
        )
        for info in infos
        if info.settings is not None
        for field in attrs.fields(info.settings)
    }
    return attrs.make_class("JointSettings", fields, frozen=True, kw_only=True) if fields else None


def settings_of_part(part: SelectedAlgorithm, config: SpecConfig) -> dict[str, Any]:
    """Return a part's own settings, by name."""
    return {name: getattr(config.settings, name) for name in part.info.setting_names}


def validated_part(part: SelectedAlgorithm, config: SpecConfig) -> SpecConfig:
    """Return the settings of a part as it takes them."""
    found = build_plugin_manager(part).hook.validate_config(config=config)
    if found is None:
        return config
    if not isinstance(found, SpecConfig):
        raise PluginError(
            f"{part.entry.subject}: validate_config() returned {shown(found)}; expected a "
            "specplug.SpecConfig, or None; fix the plugin"
        )
    return found


def _joined(made: Iterable[DraftInput]) -> DraftInput:
    """Return the draft input of all parts."""
    first, *others = made
    if not any(other.state for other in others):
        return first
    state = dict(first.state)
    for other in others:
        state |= other.state
    return attrs.evolve(first, state=state)
