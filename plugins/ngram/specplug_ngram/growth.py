"""Adds to the drafts of another algorithm, of which NGRAM is a part: ``EAGLE3+NGRAM``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from specplug import (
    Batch,
    Draft,
    Runtime,
    append_nodes,
    keep_likeliest,
    merge_drafts,
)
from specplug_ngram.path_continuation import LONGEST, MOST_TOKENS, DeviceTexts, continue_paths
from specplug_ngram.worker import HostDraft, NgramWorker

PAYS = 1.0
"""Rows that a token which is expected to be accepted is worth."""


class Form(NamedTuple):
    """The plain numbers of a growth pass. A GPU records the pass for each form, so there it varies
    with the length of the texts alone.

    Attributes:
        length: L, the tokens of each text that are looked at.
        own_depth: the greatest depth of the worker's own drafts; 0: there are none.
        steps: tokens that a path is continued by; 0: none is.
        depth: the greatest depth of a grown draft.
        most: the nodes of each request that are left.
    """

    length: int
    own_depth: int
    steps: int
    depth: int
    most: int


class DraftGrower:
    """Adds the worker's own draft at the root, and continues paths.

    The history on the host knows all tokens up to the root: what it drafts is merged in there. The
    other algorithm's paths are known on the device alone. They are continued as the request's own
    text goes on.

    Made in ``create_worker``, because passes are recorded from there on. Texts are kept from the
    first ``grow`` on.

    Args:
        runtime: of the part.
        worker: whose drafts are added.
    """

    def __init__(self, runtime: Runtime, worker: NgramWorker) -> None:
        self._runtime = runtime
        self._worker = worker
        self._nodes, self._steps = runtime.config.num_draft_tokens, runtime.config.num_steps
        # A GPU records passes, of few forms; the CPU computes less if widths fit.
        self._has_fixed_forms = runtime.device.type != "cpu"
        self._is_used = False
        self._grow_drafts = runtime.record_draft(self._grow)
        self._write_texts = runtime.record_draft(self._write)

    @cached_property
    def _texts(self) -> DeviceTexts:
        self._is_used = True
        runtime = self._runtime
        return DeviceTexts(runtime.max_running_requests, runtime.context_len, runtime.device)

    def write(self, batch: Batch, tokens: Tensor) -> None:
        """Take in the tokens [bs, C] int64 that a step has accepted, and any after them."""
        if self._is_used and self._texts.has_any:
            self._write_texts(batch, tokens, self._texts.rows_of(batch))

    def _write(self, batch: Batch, tokens: Tensor, rows: Tensor) -> tuple[()]:
        self._texts.write(rows, batch.seq_lens, tokens)
        return ()

    def forget(self, request_id: str) -> None:
        """Drop the text of a request that has ended."""
        if self._is_used:
            self._texts.forget(request_id)

    def grow(self, batch: Batch, draft: Draft) -> Draft:
        """Return a draft with more nodes.

        How many a request gets is known on the host: as many as the wider of the two drafts has,
        and more, the surer ``Novelty`` is of long matches. Which ones, the scores say.
        """
        own = self._worker.draft_on_host(batch)
        more, novelty = self._continuations(batch)
        if own is None and not any(more):
            return draft
        widths = draft.widths or (draft.width,) * batch.size
        most = draft.width + self._nodes - 1
        own_widths = (1,) * batch.size if own is None else own.widths
        kept = [
            min(max(width, of_own) + added, width + self._nodes - 1)
            for width, of_own, added in zip(widths, own_widths, more, strict=True)
        ]
        form = self._form(batch, draft, own, more, most)
        if self._has_fixed_forms:
            kept = [self._fixed_width(draft.width, max(kept))] * batch.size
        given = self._packed(batch, own, widths, novelty)
        nodes = attrs.evolve(draft, widths=None)
        tokens, parents, scores = self._grow_drafts(batch, nodes, given, form)
        width = max(kept)
        return Draft.tree(
            tokens[:, :width].contiguous(),
            parents[:, :width],
            min(form.depth, width - 1),
            kept,
            scores=scores[:, :width],
        )

    def _form(
        self, batch: Batch, draft: Draft, own: HostDraft | None, more: Sequence[int], most: int
    ) -> Form:
        """Return the form of a step's pass."""
        deepest = draft.depth + self._steps
        length = self._texts.admit(batch)
        if self._has_fixed_forms:
            length = self._texts.rounded(length)
            return Form(length, self._steps, self._steps, deepest, most)
        own_depth = 0 if own is None else own.depth
        depth = max(draft.depth, own_depth)
        steps = min(max(more), deepest - depth)
        return Form(length, own_depth, steps, depth + steps, most)

    def _fixed_width(self, width: int, kept: int) -> int:
        """Return one of three widths, at least ``kept``: of a draft that is ``width`` wide, with
        half of the nodes that may be added, and with all."""
        added = self._nodes - 1
        half = width + (added + 1) // 2
        return width if kept <= width else half if kept <= half else width + added

    def _packed(
        self,
        batch: Batch,
        own: HostDraft | None,
        widths: Sequence[int],
        novelty: Sequence[float],
    ) -> Tensor:
        """Return all that the pass needs of the host, in one tensor [bs, 3·nodes + 4] int64: one
        copy to the device. ``_grow`` takes it apart."""
        nodes = self._nodes
        own_widths = (1,) * batch.size if own is None else own.widths
        packed = torch.zeros(batch.size, 3 * nodes + 4, dtype=torch.int64)
        if own is not None:
            packed[:, :nodes] = own.tokens
            packed[:, nodes : 2 * nodes] = own.parents
            packed[:, 2 * nodes : 3 * nodes] = own.scores.view(torch.int32)
        packed[:, -4] = torch.tensor(novelty, dtype=torch.float32).view(torch.int32)
        of_each = zip(own_widths, widths, self._texts.row_list(batch), strict=True)
        packed[:, -3:] = torch.tensor(list(of_each))
        return packed.to(self._runtime.device, non_blocking=True)

    def _grow(
        self, batch: Batch, draft: Draft, given: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, parents and scores [bs, most] of the grown drafts, the likeliest nodes
        first.

        Args:
            draft: whose widths are among what is ``given``.
            given: what ``_packed`` returns.
        """
        nodes, bs = self._nodes, len(draft.tokens)
        own_widths, widths, rows = given[:, -3], given[:, -2], given[:, -1]
        floats = given[:, 2 * nodes : -3].to(torch.int32).view(torch.float32)
        grown = _only(draft, widths)
        if form.own_depth:
            own = Draft(
                tokens=given[:, :nodes],
                parents=given[:, nodes : 2 * nodes],
                widths=None,
                depth=form.own_depth,
                scores=floats[:, :nodes],
            )
            grown = merge_drafts(grown, _only(own, own_widths))
        # The text has its root even in a step that continues no path.
        self._texts.write_roots(rows, batch.seq_lens, draft.tokens[:, 0])
        if form.steps:
            texts = self._texts.read(rows, form.length)
            grown = continue_paths(
                grown, texts, batch.seq_lens, floats[:, nodes], form.steps, form.depth
            )
        lacks = max(form.most + 1 - grown.width, 0)  # what is wider is put in order
        if lacks:
            absent = rows.new_full((bs, lacks), -1)
            grown = append_nodes(grown, absent + 1, absent, grown.depth)
        grown = keep_likeliest(grown, (form.most,) * bs)
        assert grown.parents is not None
        assert grown.scores is not None
        return grown.tokens, grown.parents, grown.scores

    def _continuations(self, batch: Batch) -> tuple[list[int], list[float]]:
        """Return how many nodes of continued paths pay for each request, and its novelty.

        They are as many as are expected to be accepted at the end of a long match.
        """
        counts, novelties = [0] * batch.size, [1.0] * batch.size
        if batch.is_warm_up:
            return [self._nodes - 1] * batch.size, novelties
        for i, view in enumerate(batch.requests):
            request = self._worker.requests.get(view.request_id)
            too_long = len(view.token_ids) > MOST_TOKENS - 2 * self._steps
            if request is None or request.drafted is None or too_long:
                continue
            novelties[i] = math.exp(request.drafted.novelty.log)
            known = 1 / (1 + novelties[i] / LONGEST**1.5)
            expected = sum(known**step for step in range(1, self._steps + 1))
            counts[i] = int(PAYS * expected)
        return counts, novelties


def _only(draft: Draft, widths: Tensor) -> Draft:
    """Return a draft as a tree, in which the nodes after the first ``widths`` [bs] are absent."""
    tokens, parents, scores = draft.tokens, draft.parents, draft.scores
    order = torch.arange(draft.width, device=tokens.device)
    is_node = order < widths.unsqueeze(1)
    if scores is None:
        scores = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    scores = torch.where(is_node, scores, -torch.inf)
    parents = torch.where(is_node, order - 1 if parents is None else parents, -1)
    scores[:, :1], parents[:, :1] = 0.0, -1  # of padding requests too
    return Draft.tree(tokens, parents, draft.depth, scores=scores)
