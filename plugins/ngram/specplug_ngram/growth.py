"""Adds to the drafts of another algorithm, of which NGRAM is a part: ``EAGLE3+NGRAM``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from specplug import Batch, Draft, RequestView, Runtime, runs_plugin_kernels
from specplug_ngram.compiled_drafter import load_library
from specplug_ngram.compiled_growth import CompiledGrowth
from specplug_ngram.device_texts import MOST_TOKENS, DeviceTexts
from specplug_ngram.growth_input import Form, packed
from specplug_ngram.path_continuation import LONGEST, grow_in_torch, write_in_torch
from specplug_ngram.worker import Forced, HostDraft, NgramWorker

PAYS = 1.0
"""Rows that a token which is expected to be accepted is worth."""

Grow = Callable[[Tensor, Draft, Tensor, Tensor, Tensor, Form], tuple[Tensor, Tensor, Tensor]]
"""A function like ``grow_in_torch``."""
Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""A function like ``write_in_torch``."""


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
        self._device = runtime.device
        self._nodes, self._steps = runtime.config.num_draft_tokens, runtime.config.num_steps
        # A GPU records passes, of few forms; the CPU computes less if widths fit.
        self._has_few_forms = runtime.device.type != "cpu"
        self._texts = DeviceTexts(runtime.req_table_size, runtime.context_len, runtime.device)
        self._grow, self._write = _passes_for(runtime.device)

    def write(self, batch: Batch, tokens: Tensor) -> None:
        """Take in the tokens [bs, C] int64 that a step has accepted, and any after them."""
        self._write(self._texts.tokens, tokens, batch.req_indices, batch.seq_lens)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._texts.forget(request_id)

    def forget_rows(self, requests: Iterable[RequestView]) -> None:
        """Forget where the texts of requests stood that have just got their rows."""
        for view in requests:
            self._texts.forget(view.request_id)

    def grow(self, batch: Batch, draft: Draft, forced: Forced = ()) -> Draft:
        """Return a draft with more nodes.

        How many a request gets is known on the host: as many as the wider of the two drafts has,
        and more, the surer ``Novelty`` is of long matches. Which ones, the scores say.

        Args:
            forced: what the requests' grammars force, as in ``NgramWorker.propose``.
        """
        self._texts.admit(batch)
        own = self._worker.draft_on_host(batch, forced)
        more, novelty = self._continuations(batch)
        widths = draft.widths or (draft.width,) * batch.size
        own_widths = (1,) * batch.size if own is None else own.widths
        kept = [
            min(max(width, of_own) + added, width + self._nodes - 1)
            for width, of_own, added in zip(widths, own_widths, more, strict=True)
        ]
        if self._has_few_forms:
            kept = [self._few_widths(draft.width, max(kept), max(batch.max_draft_nodes))]
            kept *= batch.size
        form = self._form(draft, own, max(kept), max(more))
        if form.width == draft.width and (self._has_few_forms or (own is None and not form.steps)):
            return draft
        given = packed(own, widths, novelty, self._nodes)
        given = given.to(self._device, non_blocking=True)
        rows, ends = batch.req_indices, batch.seq_lens
        tokens, parents, scores = self._grow(self._texts.tokens, draft, given, rows, ends, form)
        depth = min(form.depth, form.width - 1)
        return Draft.tree(tokens, parents, depth, kept, scores=scores)

    def _form(self, draft: Draft, own: HostDraft | None, width: int, more: int) -> Form:
        """Return the form of a step's pass."""
        deepest = draft.depth + self._steps
        if self._has_few_forms:
            return Form(width, self._steps, deepest)
        depth = max(draft.depth, 0 if own is None else own.depth)
        steps = min(more, deepest - depth)
        return Form(width, steps, depth + steps)

    def _few_widths(self, width: int, kept: int, room: int) -> int:
        """Return one of three widths, at least ``kept`` if there is room: of a draft that is
        ``width`` wide, with half of the nodes that may be added, and with all.

        The warm-up gives room for each of them in turn.
        """
        added = self._nodes - 1
        steps = (width, width + (added + 1) // 2, width + added)
        return next(each for each in steps if each >= min(kept, room, steps[-1]))

    def _continuations(self, batch: Batch) -> tuple[Sequence[int], Sequence[float]]:
        """Return how many nodes of continued paths pay for each request, and its novelty: infinite
        if none is continued.

        They are as many as are expected to be accepted at the end of a long match.
        """
        if batch.is_warm_up:
            return [self._nodes - 1] * batch.size, [1.0] * batch.size
        counts, novelties = [0] * batch.size, [math.inf] * batch.size
        for i, view in enumerate(batch.requests):
            request = self._worker.requests.get(view.request_id)
            too_long = len(view.token_ids) > MOST_TOKENS - 2 * self._steps
            if request is None or request.drafted is None or too_long:
                continue
            novelties[i] = math.exp(request.drafted.novelty.log)
            known = 1 / (1 + novelties[i] / LONGEST**1.5)
            expected = known * (1 - known**self._steps) / (1 - known)
            counts[i] = int(PAYS * expected)
        return counts, novelties


def _passes_for(device: torch.device) -> tuple[Grow, Write]:
    """Return what grows drafts on a device, and what writes accepted tokens to texts."""
    if runs_plugin_kernels(device):
        from specplug_ngram.growth_kernels import grow_by_kernels, write_by_kernel

        return grow_by_kernels, write_by_kernel
    compiled = load_library() if device.type == "cpu" else None
    if compiled is not None:
        growth = CompiledGrowth(compiled)
        return growth.grow, growth.write
    return grow_in_torch, write_in_torch
