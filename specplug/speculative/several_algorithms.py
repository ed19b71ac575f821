"""``NGRAM,EAGLE3``: several algorithms in one run. Each request takes the drafts of one in a step.

It is an algorithm like any other, which holds parts. Each part hears of every committed token
before it drafts, so its keys, values and state are right whoever drafted the last step; where its
capabilities allow that, not sooner (``late_feed``). ``Batch.drafters`` says who drafts for which
request. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from specplug.algorithm import (
    API_VERSION,
    AlgorithmInfo,
    Conformance,
    Defaults,
    SpecConfig,
)
from specplug.algorithm_names import SETTINGS
from specplug.errors import UsageError
from specplug.hookspecs import hookimpl
from specplug.registry import SelectedAlgorithm
from specplug.speculative.held_parts import (
    HeldParts,
    joined_capabilities,
    joined_settings,
    settings_of_part,
    validated_part,
)
from specplug.speculative.several_worker import SeveralWorker

if TYPE_CHECKING:
    from specplug.speculative.draft import Draft, DraftInput
    from specplug.speculative.hook_order import Batch
    from specplug.speculative.part import Part
    from specplug.speculative.runtime import Runtime
    from specplug.speculative.verify import CommittedOutput

_ARGUMENTS = {
    "steps": "num_steps",
    "topk": "topk",
    "tokens": "num_draft_tokens",
    "draft": "draft_model_path",
}
"""The argument of ``SpecConfig.resolve`` for each setting in ``NAME:setting=value``."""


class SeveralAlgorithms(HeldParts):
    """The hooks of several algorithms, one of which drafts for a request in a step.

    Each runs with its own defaults, or with what the user gave by its name. A folder of draft
    weights that stands by no name is that of the one algorithm that has a draft model.

    Args:
        parts: each another one.
        settings: what the user gave by each one's name, as arguments of ``LLM``.

    Raises:
        UsageError: one is named twice.
    """

    def __init__(
        self, parts: Sequence[SelectedAlgorithm], settings: Sequence[Mapping[str, Any]]
    ) -> None:
        super().__init__(",".join(part.name for part in parts), parts)
        names = {SETTINGS[key]: name for key, name in _ARGUMENTS.items()}
        self._typed = [
            {names[argument]: value for argument, value in own.items()} for own in settings
        ]
        for own in self._typed:
            if "draft_model_path" in own:
                own["draft_model_path"] = Path(own["draft_model_path"]).expanduser()

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        infos = [part.info for part in self._parts]
        able = [info.capabilities for info in infos]
        steps = max(info.defaults.num_steps for info in infos)
        return AlgorithmInfo(
            name=self._name,
            summary=f"{' or '.join(part.name for part in self._parts)} drafts for a request",
            api_version=API_VERSION,
            capabilities=joined_capabilities(
                infos,
                branching=any(each.branching for each in able),
                draft_model=any(each.draft_model for each in able),
            ),
            defaults=Defaults(num_steps=steps),
            settings=joined_settings(infos),
            conformance=Conformance(
                settings={k: v for info in infos for k, v in info.conformance.settings.items()}
            ),
        )

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        """Make room for the greatest of the parts' drafts."""
        every = [
            validated_part(
                part,
                SpecConfig.resolve(
                    part.info,
                    model_name=config.model_name,
                    target_config=config.target_config,
                    **given,
                ),
            )
            for part, given in zip(self._parts, self._given(config), strict=True)
        ]
        return attrs.evolve(
            config,
            num_steps=max(each.num_steps for each in every),
            topk=max(each.topk for each in every),
            num_draft_tokens=max(each.num_draft_tokens for each in every),
            num_draft_slots=max(each.num_draft_slots for each in every),
            draft_lookahead=max(map(_lookahead, self._parts, every)),
            adjustments=tuple(
                dict.fromkeys(
                    f"{each.algorithm}: {told}" for each in every for told in each.adjustments
                )
            ),
        )

    def _given(self, config: SpecConfig) -> list[dict[str, Any]]:
        """Return what each part is given, as arguments of ``SpecConfig.resolve``.

        Raises:
            UsageError: it is not known whose the folder of draft weights is.
        """
        given = [
            {"settings": settings_of_part(part, config), **own}
            for part, own in zip(self._parts, self._typed, strict=True)
        ]
        folder = config.draft_model_path
        if folder is None:
            return given
        takers = [
            place
            for place, part in enumerate(self._parts)
            if part.info.capabilities.draft_model and "draft_model_path" not in given[place]
        ]
        if len(takers) != 1:
            raise UsageError(
                f"speculative_draft_model_path={str(folder)!r}: {len(takers)} algorithms of "
                f"{self._name} would take it; expected it by name, as in NAME:draft=FOLDER"
            )
        given[takers[0]]["draft_model_path"] = folder
        return given

    @hookimpl
    def create_worker(self, runtime: Runtime) -> SeveralWorker:
        given = self._given(runtime.config)
        parts = [runtime.part(part, **own) for part, own in zip(self._parts, given, strict=True)]
        return SeveralWorker(parts, [late for part in parts for late in part.feed_late(part.name)])

    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> DraftInput:
        made = super().build_draft_input(runtime, batch, target_output)
        parts: Sequence[Part] = runtime.worker.parts
        hosts = [part.hooks for n, part in enumerate(parts) if n in batch.drafters]
        waits = any(hooks.waits for hooks in hosts)  # mostly the next step does again
        if waits or any(hooks.takes_foreseen for hooks in hosts):
            for part in parts:
                part.feed_known(batch, waits=waits)
        return made

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        from specplug.speculative.planned_drafts import Proposer, propose_planned

        parts: Sequence[Part] = runtime.worker.parts
        proposers = [Proposer(part.propose, part.owns, part.hooks.waits) for part in parts]
        return propose_planned(batch, draft_input, proposers)


def _lookahead(part: SelectedAlgorithm, config: SpecConfig) -> int:
    """Return the tokens after a position on which a part's draft KV there depends."""
    if config.draft_lookahead is not None:
        return config.draft_lookahead
    return int(part.info.capabilities.draft_model)
