"""Some of a step's requests: narrow a hook's arguments to them, widen its result to all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from specplug import Batch, CommittedOutput, Draft, DraftInput, TargetOutput, VerifyOutput
from specplug.speculative.host_copy import upload

V = TypeVar("V")


def _first_rows(widths: Sequence[int]) -> list[int]:
    """Return the first row of each request."""
    return [end - width for end, width in zip(accumulate(widths), widths, strict=True)]


@attrs.frozen(eq=False)
class RequestSubset:
    """m of the bs requests of a step. If m is bs, every value is returned as it is.

    Args:
        chosen: [m] indices of the requests among the bs, in ascending order.
        size: bs.
        widths: committed rows of each of the bs requests; () if all have the same number.
    """

    chosen: Sequence[int]
    size: int
    widths: Sequence[int] = ()

    @property
    def is_all(self) -> bool:
        """Whether m is bs; so it is in an idle step, which has no requests."""
        return len(self.chosen) == self.size

    @property
    def is_empty(self) -> bool:
        """Whether the step has requests, and none of them is in the subset."""
        return not self.chosen and self.size > 0

    def narrow(self, value: V) -> V:
        """Return the m requests' part of a batch, a draft, a draft input, a committed output or a
        tensor [bs, …]; any other value as it is."""
        return value if self.is_all else self._narrow(value)

    def _narrow(self, value: Any) -> Any:
        match value:
            case Tensor():
                return value[self._index(value)]
            case Batch():
                return self._narrow_batch(value)
            case DraftInput(bonus_tokens=roots, state=state):
                own = {k: None if v is None else self._narrow(v) for k, v in state.items()}
                return DraftInput(bonus_tokens=self._narrow(roots), state=own)
            case Draft():
                return self._narrow_draft(value)
            case CommittedOutput():
                return self._narrow_committed(value)
        return value

    def _index(self, beside: Tensor) -> Tensor:
        return upload(self.chosen, beside.device)

    def _each(self, values: Sequence[V]) -> tuple[V, ...]:
        """Return the m requests' values; () stays ()."""
        return tuple(values[place] for place in self.chosen) if values else ()

    def _rows(self, widths: Sequence[int]) -> list[int]:
        """Return the rows of the m requests, given the number of rows of each of the bs."""
        first = _first_rows(widths)
        return list(chain.from_iterable(range(first[i], first[i] + widths[i]) for i in self.chosen))

    def _narrow_batch(self, batch: Batch) -> Batch:
        """Return the m requests' batch, without an attention plan."""
        return attrs.evolve(
            batch,
            requests=self._each(batch.requests),
            req_indices=self._narrow(batch.req_indices),
            seq_lens=self._narrow(batch.seq_lens),
            chunk_widths=self._each(batch.chunk_widths),
            chunk_ends=self._each(batch.chunk_ends),
            first_chunk=self._each(batch.first_chunk),
            last_chunk=self._each(batch.last_chunk),
            max_draft_nodes=self._each(batch.max_draft_nodes),
            max_draft_slots=self._each(batch.max_draft_slots),
            drafters=self._each(batch.drafters),
            attention=None,
        )

    def _narrow_committed(self, output: CommittedOutput) -> CommittedOutput:
        widths = self.widths or (len(output.next_tokens) // self.size,) * self.size
        rows = upload(self._rows(widths), output.last_rows.device)
        before = _first_rows(widths)
        moved = [
            now - before[place]
            for now, place in zip(_first_rows(self._each(widths)), self.chosen, strict=True)
        ]
        return CommittedOutput(
            next_tokens=output.next_tokens[rows],
            own_tokens=output.own_tokens[rows],
            per_node={name: tensor[rows] for name, tensor in output.per_node.items()},
            last_rows=self._narrow(output.last_rows) + upload(moved, rows.device),
            accept_lens=self._narrow(output.accept_lens),
            bonus_tokens=self._narrow(output.bonus_tokens),
        )

    def _narrow_draft(self, draft: Draft) -> Draft:
        return Draft(
            tokens=self._narrow(draft.tokens),
            parents=self._narrow(draft.parents),
            widths=None if draft.widths is None else self._each(draft.widths),
            depth=draft.depth,
            scores=self._narrow(draft.scores),
        )

    def widen_draft(self, made: Draft, roots: Tensor) -> Draft:
        """Return the m requests' drafts, and roots alone for the others.

        Args:
            roots: [bs] int64.
        """
        if self.is_all:
            return made
        index, width = self._index(roots), made.width
        widths = [1] * self.size
        for place, own in zip(self.chosen, made.widths or (width,) * len(self.chosen), strict=True):
            widths[place] = own
        parents = None
        if made.parents is not None:
            order = torch.arange(width, device=roots.device) - 1
            parents = order.repeat(self.size, 1).index_copy_(0, index, made.parents)
        tokens = roots.unsqueeze(1).repeat(1, width).index_copy_(0, index, made.tokens)
        scores = None
        if made.scores is not None:
            scores = made.scores.new_zeros(self.size, width).index_copy_(0, index, made.scores)
        return Draft(
            tokens=tokens,
            parents=parents,
            widths=None if set(widths) == {width} else tuple(widths),
            depth=made.depth,
            scores=scores,
        )

    def narrow_nodes(self, draft: Draft, output: TargetOutput) -> TargetOutput:
        """Return the target's output at the nodes of the m requests.

        Args:
            draft: of the bs requests.
        """
        if self.is_all:
            return output
        rows = self._node_rows(draft)
        return TargetOutput(
            predict=output.predict[rows],
            logits=output.logits[rows],
            per_node={name: tensor[rows] for name, tensor in output.per_node.items()},
        )

    def widen_verified(
        self, made: VerifyOutput, draft: Draft, lent: TargetOutput, output: TargetOutput
    ) -> VerifyOutput:
        """Return the accepted nodes of the m requests, and the roots of the others.

        Args:
            made: of the m requests.
            draft, output: of the bs requests. ``output.per_node`` gets the outputs that the plugin
                has added to ``lent``, with zeros for the others.
            lent: the output that the plugin was given.
        """
        if self.is_all:
            return made
        index, rows = self._index(draft.tokens), self._node_rows(draft)
        for name, tensor in lent.per_node.items():
            if name not in output.per_node:
                every = tensor.new_zeros((draft.total, *tensor.shape[1:]))
                output.per_node[name] = every.index_copy_(0, rows, tensor)
        accepted = made.accept_index
        accept_index = accepted.new_full((self.size, accepted.shape[1]), -1)
        accept_index[:, 0] = draft.offsets
        moved = torch.where(accepted < 0, -1, rows[accepted.clamp(min=0)])
        return VerifyOutput(
            predict=output.predict.index_copy(0, rows, made.predict),
            accept_index=accept_index.index_copy_(0, index, moved),
            accept_lens=torch.ones_like(draft.offsets).index_copy_(0, index, made.accept_lens),
            bonus_tokens=output.predict[draft.offsets].index_copy_(0, index, made.bonus_tokens),
        )

    def _node_rows(self, draft: Draft) -> Tensor:
        """Return the flat indices of the m requests' nodes."""
        return upload(self._rows(draft.widths or (draft.width,) * self.size), draft.tokens.device)
