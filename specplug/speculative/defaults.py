"""The core's own answers to the hooks that a plugin may leave out. Registered first, asked last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from specplug.hookspecs import hookimpl
from specplug.speculative.draft_plan import ForeseenDrafts

if TYPE_CHECKING:
    from torch import Tensor

    from specplug.algorithm import SpecConfig
    from specplug.speculative.draft import Draft, DraftInput
    from specplug.speculative.draft_plan import DraftChoices, DraftPlan
    from specplug.speculative.future_map import FutureMap
    from specplug.speculative.hook_order import Batch, RequestView
    from specplug.speculative.runtime import Runtime
    from specplug.speculative.verify import TargetOutput, VerifyOutput


class CoreDefaults:
    """Default implementations.

    Attributes:
        verifying: the draft and the target's token at each of its nodes, while ``verify`` is
            called: they are not what the plugins were lent, and may have written to.
    """

    def __init__(self) -> None:
        self.verifying: tuple[Draft, Tensor] | None = None

    @hookimpl(trylast=True)
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        return config

    @hookimpl(trylast=True)
    def create_future_map(self, runtime: Runtime) -> FutureMap:
        from specplug.speculative.future_map import FutureMap

        return FutureMap(runtime.req_table_size, runtime.device)

    @hookimpl(trylast=True)
    def build_disagg_draft_input(
        self, runtime: Runtime, batch: Batch, last_tokens: Tensor
    ) -> DraftInput:
        from specplug.speculative.draft import DraftInput
        from specplug.speculative.draft_state import received_state, state_spec

        received = received_state(batch, state_spec(runtime.worker))
        return DraftInput(bonus_tokens=last_tokens, state=received.tensors)

    @hookimpl(trylast=True)
    def foresee_drafts(self, requests: Sequence[RequestView]) -> ForeseenDrafts:
        return ForeseenDrafts.untold(len(requests))

    @hookimpl(trylast=True)
    def plan_drafts(self, choices: DraftChoices) -> DraftPlan:
        return choices.default()

    @hookimpl(trylast=True)
    def grow_draft(self, draft: Draft) -> Draft:
        return draft

    @hookimpl(trylast=True)
    def verify(self, draft: Draft, target_output: TargetOutput) -> VerifyOutput:
        from specplug.speculative.verify import verify_tree

        return verify_tree(*(self.verifying or (draft, target_output.predict)))

    @hookimpl(trylast=True)
    def fixup_idle(self, runtime: Runtime, draft_input: DraftInput) -> DraftInput:
        from specplug.speculative.draft_state import idle_draft_input

        return idle_draft_input(runtime, draft_input)

    @hookimpl(trylast=True)
    def supports_target_verify_for_draft(self) -> bool:
        return False

    @hookimpl(trylast=True)
    def export_draft_state(
        self, batch: Batch, future_map: FutureMap
    ) -> Mapping[str, Tensor | None]:
        return future_map.resolve(batch.req_indices)[1].state
