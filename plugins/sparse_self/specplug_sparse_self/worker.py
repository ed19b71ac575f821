"""The drafter: it chooses the pages that drafts see, and drafts chains with the target."""

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
    couple,
    likeliest_tokens,
)
from specplug_sparse_self.view import View

PAGES = "pages"
"""The state between steps: the chosen pages, counted from 1; 0 is none."""


class SparseSelfWorker:
    """Drafts with the target over a part of its context.

    Args:
        runtime: the run's.
        view: the part.
        watched: the layers whose attention chooses the pages; None: two of the target's middle.

    Attributes:
        view: as given.
        width: nodes of a draft, its root included.
    """

    def __init__(
        self, runtime: Runtime, view: View, watched: tuple[int, ...] | None = None
    ) -> None:
        self._runtime = runtime
        self.view = view
        self.width = runtime.config.num_draft_tokens
        if watched is None:
            watched = tuple(sorted({runtime.num_layers // 2, runtime.num_layers * 3 // 4}))
        self._watched = [
            runtime.target_attention(layer, view.page_size)
            for layer in (watched if view.pages else ())
        ]
        self._inputs = runtime.capture_layer_inputs(watched) if self._watched else None
        self._layers = runtime.target_layers(0, runtime.num_layers)
        self._token_ids = torch.arange(runtime.vocab_size, device=runtime.device)
        self._draft = runtime.record_draft(self._chains)

    def state_spec(self) -> dict[str, StateTensor]:
        """Declare the chosen pages."""
        return {PAGES: StateTensor((self.view.pages,), torch.int64, kept="first")}

    # What drafts see

    def choose(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        """Choose the pages to which the last committed row attends most.

        Its queries in the watched layers are computed again. All keys of these layers are read for
        it, a part of what the verification has read that is as large as their share of the layers.
        """
        pages = None
        if self._inputs is not None and batch.drafts_follow and batch.size:
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
        """Draft a chain for each request; the roots alone where drafts would see whole contexts,
        and so cost what plain decoding costs."""
        roots = draft_input.bonus_tokens
        width = min(self.width, max(batch.max_draft_nodes))
        if width == 1 or not (batch.is_warm_up or self._is_long(batch)):
            return Draft.chain(roots.unsqueeze(1))
        tokens, scores = self._draft(batch, roots, draft_input[PAGES], width - 1)
        return Draft.chain(tokens, scores=scores)

    def _is_long(self, batch: Batch) -> bool:
        """Return whether some request has more tokens than drafts see, as far as the host knows."""
        return any(len(request.token_ids) > self.view.tokens for request in batch.requests)

    def _chains(
        self, batch: Batch, roots: Tensor, pages: Tensor, steps: int
    ) -> tuple[Tensor, Tensor]:
        """Draft chains of so many tokens.

        Args:
            roots: [bs] int64.
            pages: [bs, P] int64, counted from 1.

        Returns:
            Tokens [bs, steps + 1] int64, the roots first, and their scores, float32.
        """
        runtime, view = self._runtime, self.view
        plan = runtime.plan_target(
            batch,
            batch.seq_lens,
            1,
            sinks=view.sinks,
            window=view.window,
            pages=pages - 1,
            page_size=view.page_size,
        )
        tokens, scores = [roots], [torch.zeros_like(roots, dtype=torch.float32)]
        for step in range(1, steps + 1):
            hidden = self._layers(runtime.embed_tokens(tokens[-1]), plan)
            logits = runtime.lm_head(runtime.final_norm(hidden))
            if not batch.greedy:
                positions = (batch.seq_lens + step).unsqueeze(1)
                logits = couple(runtime, batch, logits, positions, self._token_ids)
            token, score = likeliest_tokens(logits)
            tokens.append(token)
            scores.append(score.float())
            if step < steps:
                plan = plan.next()
        return torch.stack(tokens, 1), torch.stack(scores, 1)
