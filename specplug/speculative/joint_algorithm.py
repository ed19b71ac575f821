"""``EAGLE3+NGRAM``: an algorithm made of others. The first proposes, the rest grow its drafts.

It is an algorithm like any other, which holds parts. It hands every call to all of them, so each
hears of every committed token, whether or not a node of its own was taken. Importing this module
does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from specplug.algorithm import API_VERSION, AlgorithmInfo, Capabilities, Conformance, SpecConfig
from specplug.bounds import MAX_DRAFT_TOKENS
from specplug.contract import implemented_hooks
from specplug.errors import PluginError, UsageError, shown
from specplug.hookspecs import hookimpl
from specplug.registry import SelectedAlgorithm, build_plugin_manager

if TYPE_CHECKING:
    from torch import Tensor

    from specplug.speculative.draft import Draft, DraftInput
    from specplug.speculative.draft_state import StateTensor
    from specplug.speculative.hook_order import Batch
    from specplug.speculative.part import Part
    from specplug.speculative.runtime import Runtime
    from specplug.speculative.verify import CommittedOutput


@attrs.frozen(eq=False)
class JointWorker:
    """The parts of a run: the first proposes.

    Attributes:
        parts: of the run.
    """

    parts: Sequence[Part]

    @property
    def draft_widths(self) -> tuple[int, int]:
        """The widths of drafts that are narrower than the widest though there is room: what is
        proposed alone, and with half of what may be added, as ``grow_draft`` says."""
        proposer, *growers = (part.config.num_draft_tokens for part in self.parts)
        return proposer, proposer + (sum(growers) - len(growers) + 1) // 2

    def state_spec(self) -> Mapping[str, StateTensor]:
        return {name: t for part in self.parts for name, t in part.state_spec().items()}


class JointAlgorithm:
    """The hooks of several algorithms.

    What the user gives is the proposer's, but for the growers' own settings; else the growers run
    with their defaults. What the target verifies has room for both: the proposer's nodes and depth,
    and those of each grower.

    Args:
        parts: the proposer, and after it at least one grower; each another one.

    Raises:
        UsageError: they cannot be joined so.
    """

    def __init__(self, parts: Sequence[SelectedAlgorithm]) -> None:
        self._proposer, *self._growers = parts
        self._name = "+".join(part.name for part in parts)
        if len({part.name for part in parts}) < len(parts):
            raise UsageError(f"{self._name}: expected each algorithm once")
        for part in self._growers:
            if "grow_draft" not in implemented_hooks(part.plugin):
                why = "does not add to the drafts of others"
            elif part.info.capabilities.draft_model:
                why = "has a draft model, and the settings name the first one's alone"
            else:
                continue
            raise UsageError(
                f"{self._name}: {part.name} {why}; expected algorithms like NGRAM after the first"
            )

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        info, able = self._proposer.info, self._proposer.info.capabilities
        added = " and ".join(part.name for part in self._growers)
        every = [able, *(part.info.capabilities for part in self._growers)]
        return AlgorithmInfo(
            name=self._name,
            summary=f"{info.name} drafts, {added} adds to it",
            api_version=API_VERSION,
            capabilities=Capabilities(
                branching=able.branching,
                draft_model=able.draft_model,
                overlap=all(each.overlap for each in every),
                prefix_cache=all(each.prefix_cache for each in every),
                target_drafts=any(each.target_drafts for each in every),
                parts=True,
                captures=frozenset().union(*(each.captures for each in every)),
            ),
            defaults=info.defaults,
            paper=info.paper,
            weights=info.weights,
            settings=joined_settings([info, *(part.info for part in self._growers)]),
            draft_lookahead=info.draft_lookahead,
            conformance=Conformance(settings=info.conformance.settings),
        )

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        """Make room for the proposer's drafts and for what is added to them."""
        info, own = self._proposer.info, settings_of_part(self._proposer, config)
        settings = None if info.settings is None else info.settings(**own)
        alone = attrs.evolve(config, algorithm=self._proposer.name, settings=settings)
        proposer = validated_part(self._proposer, alone)
        growers = self._grower_configs(config)
        nodes = proposer.num_draft_tokens + sum(each.num_draft_tokens - 1 for each in growers)
        if nodes > MAX_DRAFT_TOKENS:
            raise UsageError(
                f"num_draft_tokens={proposer.num_draft_tokens}: {self._name} makes {nodes} of it; "
                f"expected at most {MAX_DRAFT_TOKENS}; lower it"
            )
        every = (proposer, *growers)
        return attrs.evolve(
            proposer,
            algorithm=config.algorithm,
            num_steps=sum(each.num_steps for each in every),
            num_draft_tokens=nodes,
            num_draft_slots=max(each.num_draft_slots for each in every),
            settings=config.settings,
            adjustments=tuple(dict.fromkeys(told for each in every for told in each.adjustments)),
        )

    def _grower_configs(self, config: SpecConfig) -> list[SpecConfig]:
        return [
            validated_part(
                part,
                SpecConfig.resolve(
                    part.info,
                    target_config=config.target_config,
                    settings=settings_of_part(part, config),
                ),
            )
            for part in self._growers
        ]

    @hookimpl
    def supports_target_verify_for_draft(self) -> bool:
        """Return True: each part's passes are recorded if the part says that they can be."""
        return True

    @hookimpl
    def create_worker(self, runtime: Runtime) -> JointWorker:
        config = runtime.config
        growers = self._grower_configs(config)
        proposer = runtime.part(
            self._proposer,
            num_steps=config.num_steps - sum(each.num_steps for each in growers),
            topk=config.topk,
            num_draft_tokens=config.num_draft_tokens - sum(g.num_draft_tokens - 1 for g in growers),
            draft_model_path=config.draft_model_path,
            settings=settings_of_part(self._proposer, config),
        )
        others = (
            runtime.part(part, settings=settings_of_part(part, config)) for part in self._growers
        )
        return JointWorker([proposer, *others])

    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> DraftInput:
        parts: Sequence[Part] = runtime.worker.parts
        return joined_inputs(part.build_draft_input(batch, target_output) for part in parts)

    @hookimpl
    def build_disagg_draft_input(
        self, runtime: Runtime, batch: Batch, last_tokens: Tensor
    ) -> DraftInput:
        parts: Sequence[Part] = runtime.worker.parts
        return joined_inputs(part.build_disagg_draft_input(batch, last_tokens) for part in parts)

    @hookimpl
    def fixup_idle(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> DraftInput:
        parts: Sequence[Part] = runtime.worker.parts
        return joined_inputs(part.fixup_idle(batch, draft_input) for part in parts)

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        proposer, *growers = runtime.worker.parts
        draft: Draft = proposer.propose(batch, draft_input)
        for part in growers:
            draft = part.grow_draft(batch, draft_input, draft)
        return draft


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


def joined_inputs(made: Iterable[DraftInput]) -> DraftInput:
    """Return the draft input of all parts."""
    first, *others = made
    state = dict(first.state)
    for other in others:
        state |= other.state
    return attrs.evolve(first, state=state)
