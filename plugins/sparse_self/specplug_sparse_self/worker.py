"""The drafter: it chooses the pages that drafts see, and drafts with the target."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specplug import (
    Batch,
    CommittedOutput,
    Draft,
    DraftInput,
    Runtime,
    StateTensor,
    TargetDrafter,
    TargetPlan,
)
from specplug_sparse_self.view import View

PAGES = "pages"
"""The state between steps: the chosen pages, counted from 1; 0 is none."""


class SparseSelfWorker(TargetDrafter):
    """Drafts chains and trees with the target over a part of its context.

    Args:
        runtime: the run's.
        view: the part.
        watched: the layers whose attention chooses the pages; None: two of the target's middle.

    Attributes:
        view: as given.
    """

    def __init__(
        self, runtime: Runtime, view: View, watched: tuple[int, ...] | None = None
    ) -> None:
        super().__init__(runtime)
        self.view = view
        if watched is None:
            watched = tuple(sorted({runtime.num_layers // 2, runtime.num_layers * 3 // 4}))
        self._watched = [
            runtime.target_attention(layer, view.page_size)
            for layer in (watched if view.pages else ())
        ]
        self._inputs = runtime.capture_layer_inputs(watched) if self._watched else None

    def state_spec(self) -> dict[str, StateTensor]:
        """Declare the chosen pages."""
        return {PAGES: StateTensor((self.view.pages,), torch.int64, kept="first")}

    # What drafts see

    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        """Choose the pages to which the last committed row attends most; none while contexts are
        seen whole, and are at the next draft.

        Its queries in the watched layers are computed again. All keys of these layers are read for
        it, a part of what the verification has read that is as large as their share of the layers.
        """
        pages = None
        # By the next draft the host knows of more tokens: those of this step, and of one that is
        # still under way.
        follows = batch.drafts_follow and self._drafts(batch, soon=self.num_steps + 2)
        if self._inputs is not None and follows and batch.size:
            ends = batch.seq_lens + output.accept_lens  # what the next draft finds committed
            inputs = output.per_node[self._inputs][output.last_rows]
            shares = torch.stack(
                [
                    watch(batch, hidden.contiguous(), ends - 1)
                    for watch, hidden in zip(
                        self._watched, inputs.chunk(len(self._watched), 1), strict=True
                    )
                ]
            ).sum(0)
            pages = self._best(shares, ends)
        return DraftInput(bonus_tokens=output.bonus_tokens, state={PAGES: pages})

    def _best(self, shares: Tensor, ends: Tensor) -> Tensor:
        """Return the pages of the greatest shares, of those that are seen through them alone: [bs,
        P] int64, counted from 1, in ascending order; 0 is none.

        Args:
            shares: [bs, pages].
            ends: [bs] int64, the committed lengths.
        """
        view = self.view
        first = torch.arange(shares.shape[1], device=shares.device) * view.page_size
        edge = (ends - view.window).unsqueeze(1)
        adds = (first + view.page_size > view.sinks) & (first < edge)
        shares = torch.where(adds, shares, -1.0)
        found = shares.topk(min(view.pages, shares.shape[1]), dim=1)
        chosen = torch.where(found.values >= 0, found.indices + 1, 0).sort(dim=1).values
        return F.pad(chosen, (view.pages - chosen.shape[1], 0))

    # Drafting

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """Draft for each request; the roots alone where drafts would see whole contexts, and so
        cost what plain decoding costs."""
        if not self._drafts(batch):
            return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))
        return super().propose(batch, draft_input)

    def _drafts(self, batch: Batch, soon: int = 0) -> bool:
        """Return whether some request has more tokens than drafts see, as far as the host knows, or
        will have with so many more. A warm-up is of all passes."""
        seen = self.view.tokens - soon
        return batch.is_warm_up or any(len(each.token_ids) > seen for each in batch.requests)

    def plan(self, batch: Batch, *state: Tensor) -> TargetPlan:
        """Plan the roots over the part that is seen; the state: [bs, P] int64, the chosen pages."""
        (pages,) = state
        view = self.view
        return self.runtime.plan_target(
            batch,
            batch.seq_lens,
            1,
            sinks=view.sinks,
            window=view.window,
            pages=pages - 1,
            page_size=view.page_size,
        )
