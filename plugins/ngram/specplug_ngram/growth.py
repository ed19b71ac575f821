"""Adds to the drafts of another algorithm, of which NGRAM is a part: ``EAGLE3+NGRAM``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specplug import (
    Batch,
    Draft,
    DraftInput,
    Runtime,
    append_nodes,
    keep_likeliest,
    merge_drafts,
)
from specplug_ngram.path_continuation import LONGEST, MOST_TOKENS, DeviceTexts, continue_paths
from specplug_ngram.worker import NgramWorker

PAYS = 1.0
"""Rows that a token which is expected to be accepted is worth."""


class DraftGrower:
    """Adds the worker's own draft at the root, and continues paths.

    The history on the host knows all tokens up to the root: what it drafts is merged in there. The
    other algorithm's paths are known on the device alone. They are continued as the request's own
    text goes on.

    Args:
        runtime: of the part.
        worker: whose drafts are added.
    """

    def __init__(self, runtime: Runtime, worker: NgramWorker) -> None:
        self._worker = worker
        self._nodes, self._steps = runtime.config.num_draft_tokens, runtime.config.num_steps
        self._texts = DeviceTexts(runtime.max_running_requests, runtime.context_len, runtime.device)

    def write(self, batch: Batch, tokens: Tensor) -> None:
        """Take in the tokens [bs, C] int64 that a step has accepted, and any after them."""
        self._texts.write(batch, tokens)

    def forget(self, request_id: str) -> None:
        """Drop the text of a request that has ended."""
        self._texts.forget(request_id)

    def grow(self, batch: Batch, draft_input: DraftInput, draft: Draft) -> Draft:
        """Return a draft with more nodes.

        How many a request gets is known on the host: as many as the wider of the two drafts has,
        and more, the surer ``Novelty`` is of long matches. Which ones, the scores say.
        """
        own = self._worker.propose(batch, draft_input)
        widths = draft.widths or (draft.width,) * batch.size
        own_widths = own.widths or (own.width,) * batch.size
        grown = merge_drafts(draft, own)
        more, novelty = self._continuations(batch)
        steps = min(max(more), draft.depth + self._steps - grown.depth)
        if steps > 0:
            texts = self._texts.read(batch, draft_input.bonus_tokens)
            of_each = torch.tensor(novelty, dtype=torch.float32).to(texts.device, non_blocking=True)
            nothing = texts[:, :0]
            tree = append_nodes(grown, nothing, nothing, grown.depth)
            grown = continue_paths(tree, texts, batch.seq_lens, of_each, steps)
        if grown is draft:
            return draft
        kept = [
            min(max(width, of_own) + added, width + self._nodes - 1)
            for width, of_own, added in zip(widths, own_widths, more, strict=True)
        ]
        return keep_likeliest(grown, kept)

    def _continuations(self, batch: Batch) -> tuple[list[int], list[float]]:
        """Return how many nodes of continued paths pay for each request, and its novelty.

        They are as many as are expected to be accepted at the end of a long match.
        """
        counts, novelties = [0] * batch.size, [1.0] * batch.size
        for i, view in enumerate(batch.requests):
            request = self._worker.requests.get(view.request_id)
            too_long = len(view.token_ids) > MOST_TOKENS - 2 * self._steps
            if request is None or request.drafted is None or too_long or batch.is_warm_up:
                continue
            novelties[i] = math.exp(request.drafted.novelty.log)
            known = 1 / (1 + novelties[i] / LONGEST**1.5)
            expected = sum(known**step for step in range(1, self._steps + 1))
            counts[i] = int(PAYS * expected)
        return counts, novelties
