"""NONE: plain decoding, an algorithm like any other, found by its entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specplug.algorithm import API_VERSION, AlgorithmInfo, Defaults
from specplug.hookspecs import hookimpl

if TYPE_CHECKING:
    from specplug.speculative.draft import Draft, DraftInput
    from specplug.speculative.hook_order import Batch
    from specplug.speculative.runtime import Runtime
    from specplug.speculative.verify import CommittedOutput


class Plain:
    """Proposes the root alone, so that the target verifies one node: one token per step."""

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="NONE",
            summary="Plain decoding, one token a step: the baseline",
            api_version=API_VERSION,
            defaults=Defaults(num_steps=1, topk=1, num_draft_tokens=1),
        )

    @hookimpl
    def create_worker(self, runtime: Runtime) -> object:
        return self

    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> DraftInput:
        from specplug.speculative.draft import DraftInput

        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        from specplug.speculative.draft import Draft

        return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))


algorithm = Plain()
