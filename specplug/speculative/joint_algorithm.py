"""``EAGLE3+NGRAM``: an algorithm made of others. The first proposes, the rest grow its drafts.

It is an algorithm like any other, which holds parts. It hands every call to all of them, so each
hears of every committed token, whether or not a node of its own was taken. Importing this module
does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from specplug.algorithm import API_VERSION, AlgorithmInfo, Conformance, SpecConfig
from specplug.bounds import MAX_DRAFT_TOKENS
from specplug.contract import implemented_hooks
from specplug.errors import UsageError
from specplug.hookspecs import hookimpl
from specplug.registry import SelectedAlgorithm
from specplug.speculative.held_parts import (
    HeldParts,
    PartsWorker,
    joined_capabilities,
    joined_settings,
    settings_of_part,
    validated_part,
)

if TYPE_CHECKING:
    from specplug.speculative.draft import Draft, DraftInput
    from specplug.speculative.hook_order import Batch
    from specplug.speculative.runtime import Runtime


@attrs.frozen(eq=False)
class JointWorker(PartsWorker):
    """The parts of a run: the first proposes."""

    @property
    def draft_widths(self) -> tuple[int, int]:
        """The widths of drafts that are narrower than the widest though there is room: what is
        proposed alone, and with half of what may be added, as ``grow_draft`` says."""
        proposer, *growers = (part.config.num_draft_tokens for part in self.parts)
        return proposer, proposer + (sum(growers) - len(growers) + 1) // 2


class JointAlgorithm(HeldParts):
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
        super().__init__("+".join(part.name for part in parts), parts)
        self._proposer, *self._growers = parts
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
        infos = [part.info for part in self._parts]
        return AlgorithmInfo(
            name=self._name,
            summary=f"{info.name} drafts, {added} adds to it",
            api_version=API_VERSION,
            capabilities=joined_capabilities(
                infos, branching=able.branching, draft_model=able.draft_model
            ),
            defaults=info.defaults,
            paper=info.paper,
            weights=info.weights,
            settings=joined_settings(infos),
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
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        proposer, *growers = runtime.worker.parts
        draft: Draft = proposer.propose(batch, draft_input)
        for part in growers:
            draft = part.grow_draft(batch, draft_input, draft)
        return draft
