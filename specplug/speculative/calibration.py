"""How likely a draft's nodes are to be accepted, learnt from what the target took.

A drafter's scores are what its softmax says, or a count, and no promise. ``Calibration`` counts on
the device, for nodes at a depth whose paths have like scores, how many were accepted, and makes
rates of it. Scores along a path depend on each other, so the rate is that of the whole path, not a
product of its nodes' rates. Requests whose tokens are chosen by other rules are counted apart
(``RequestKind``). No count changes a token: it says which nodes a cut keeps, and what a report
predicts.

Counts are integers, so that they do not depend on the order in which a device adds them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from specplug.kernels.kernel_table import MOST_NODES, Operation, kernels_in_c, runs_triton
from specplug.kernels.score_tables import BINS, DEPTHS, LOGITS, Outcome, ScoreTables
from specplug.sampling_params import Needs
from specplug.speculative.draft import Draft, arange
from specplug.speculative.verify import VerifyOutput

_PRIOR = 16
"""Observations for which a bin's own probability counts around it, what is expected of a bin at all
depths, and its rate over all depths at one depth."""

_AROUND = 9
"""Bins, itself among them, that are around a bin."""

_REFRESH = 16
"""Steps after which the rates are computed anew from the counts."""

_HALF_LIFE = 1024
"""Steps after which a count weighs half: texts change."""


class RequestKind(IntEnum):
    """The rules by which a request's tokens are chosen, as far as they matter to acceptance."""

    GREEDY = 0
    SAMPLED = 1
    CONSTRAINED = 2
    """Penalties, biases or a grammar change what the target takes, and the drafter knows none."""

    @classmethod
    def of(cls, needs: Needs) -> RequestKind:
        """Return the kind of a request with these needs."""
        if needs & (Needs.PENALTIES | Needs.BIAS | Needs.GRAMMAR | Needs.MIN_TOKENS):
            return cls.CONSTRAINED
        return cls.SAMPLED if needs & Needs.NOISE else cls.GREEDY


class Calibration:
    """The counts of a run, and the rates that they give.

    Args:
        req_table_size: rows of the request table.
        device: of the counts.
    """

    def __init__(self, req_table_size: int, device: torch.device) -> None:
        bounds = torch.tensor(LOGITS, dtype=torch.float32, device=device)
        odds = [LOGITS[0] - 0.125, *(bound + 0.125 for bound in LOGITS)]
        self._own = torch.tensor(odds, dtype=torch.float32, device=device).sigmoid_()
        # Roots have cells of their own, the last ones: their rate is 1, and they are not counted.
        self._roots = len(RequestKind) * DEPTHS * BINS
        seen, taken = torch.zeros(2, self._roots + BINS, dtype=torch.int64, device=device)
        self._tables = ScoreTables(
            bounds=torch.nn.functional.logsigmoid(bounds),
            first_cells=torch.zeros(req_table_size, 1, dtype=torch.int64, device=device),
            rates=torch.ones(self._roots + BINS, dtype=torch.float32, device=device),
            seen=seen,
            taken=taken,
        )
        self._kinds = [RequestKind.GREEDY] * req_table_size
        self._in_c = kernels_in_c(Operation.SCORES, device, torch.float32)
        self._steps = 0
        self._refresh()

    def clear(self) -> None:
        """Forget all that was counted."""
        self._steps = 0
        self._tables.seen.zero_()
        self._tables.taken.zero_()
        self._refresh()

    def admit(self, row: int, kind: RequestKind) -> None:
        """Say of what kind the request is that gets a row of the request table."""
        if self._kinds[row] is not kind:
            self._kinds[row] = kind
            self._tables.first_cells[row].fill_(kind * DEPTHS * BINS)

    def count_step(self) -> None:
        """Count a step; from time to time compute the rates anew, of counts that fade."""
        self._steps += 1
        if self._steps % _HALF_LIFE == 0:
            self._tables.seen.bitwise_right_shift_(1)
            self._tables.taken.bitwise_right_shift_(1)
        if self._steps % _REFRESH == 0:
            self._refresh()

    def _refresh(self) -> None:
        """Compute the rates: of a bin at a depth from its counts, those of the bin at all depths,
        those of the bins beside it, and the bin's own probability, each the less the more there is
        of the one before."""
        seen, taken, rates = (
            each[: self._roots].view(len(RequestKind), DEPTHS, BINS)
            for each in (self._tables.seen, self._tables.taken, self._tables.rates)
        )
        all_taken, all_seen = (x.sum(1, keepdim=True).float() for x in (taken, seen))
        of_bins = (all_taken + _PRIOR * self._expected(all_taken, all_seen)) / (all_seen + _PRIOR)
        torch.div(taken + _PRIOR * of_bins, seen + _PRIOR, out=rates)

    def _expected(self, taken: Tensor, seen: Tensor) -> Tensor:
        """Return what a bin's own counts are not yet to say: its own probability, and by how much
        more the bins around it were accepted than theirs. A drafter is sure too little, or too
        much, of like nodes alike, and single bins fill slowly.

        Args:
            taken, seen: [kinds, 1, BINS] float32.
        """
        excess = _around(taken - seen * self._own) / (_around(seen) + _PRIOR)
        return (self._own + excess).clamp_(0.0, 1.0)

    def survival(self, draft: Draft, req_indices: Tensor) -> Tensor | None:
        """Return the probability that each node is accepted with all that it hangs from, [bs, N]
        float32, at most its parent's; None if the draft has no scores.

        Args:
            req_indices: [bs] int64, each request's row in the request table.
        """
        if draft.scores is None:
            return None
        kernel = self._kernel_for(draft.scores)
        if kernel is not None:
            return kernel(draft.scores, _tree(draft), self._tables, req_indices)
        return draft.least_along_paths(self._tables.rates[self._cells(draft, req_indices)])

    def observe(self, draft: Draft, req_indices: Tensor, accepted: VerifyOutput) -> Tensor | None:
        """Count what the target took of a draft.

        Args:
            draft: of which ``accepted`` was made.
            req_indices: [bs] int64, each request's row in the request table; of row 0, which is
                padding, nothing is counted.

        Returns:
            [bs, N] float32, at each node after the root the probability with which it was expected
            to be accepted, negative if it was not, and 0 if it does not count. None if the draft
            has no scores.
        """
        if draft.scores is None:
            return None
        kernel = self._kernel_for(draft.scores)
        if kernel is not None:
            counts = draft.counts if draft.is_ragged else None
            outcome = Outcome(accepted.accept_index, accepted.accept_lens, draft.offsets, counts)
            return kernel(draft.scores, _tree(draft), self._tables, req_indices, outcome)
        cells = self._cells(draft, req_indices)
        order = arange(draft.width, cells.device)
        is_node = (order > 0).expand_as(cells)
        if draft.is_ragged:
            is_node = is_node & (order < draft.counts.unsqueeze(1))
        chances = draft.least_along_paths(self._tables.rates[cells])
        chances[:, 1:] *= is_node[:, 1:]
        is_accepted = _accepted(draft, accepted)
        is_counted = is_node & (req_indices > 0).unsqueeze(1)  # batches of recordings are padded
        is_taken = is_counted & is_accepted
        self._tables.seen.scatter_add_(0, cells.view(-1), is_counted.view(-1).long())
        self._tables.taken.scatter_add_(0, cells.view(-1), is_taken.view(-1).long())
        return torch.where(is_accepted, chances, -chances)

    def _kernel_for(self, scores: Tensor) -> Callable[..., Tensor] | None:
        """Return the kernel that computes both; None: torch does."""
        if scores.shape[1] > MOST_NODES:
            return None
        if self._in_c is not None:
            return self._in_c.score_nodes
        if runs_triton(Operation.SCORES, scores.device, scores.dtype):
            from specplug.kernels.scored_nodes import score_nodes

            return score_nodes
        return None

    def _cells(self, draft: Draft, req_indices: Tensor) -> Tensor:
        """Return the cell of each node, [bs, N] int64."""
        assert draft.scores is not None
        bins = torch.bucketize(draft.survival, self._tables.bounds, right=True)
        bins[:, 0] = self._roots
        bins += (draft.depths - 1).clamp_(0, DEPTHS - 1).mul_(BINS)  # 0 for the root
        bins[:, 1:] += self._tables.first_cells[req_indices]
        return bins


def _around(counts: Tensor) -> Tensor:
    """Return the sum of the bins around each: [kinds, 1, BINS] float32."""
    return _AROUND * F.avg_pool1d(counts, _AROUND, stride=1, padding=_AROUND // 2)


def _tree(draft: Draft) -> tuple[Tensor, Tensor] | None:
    return None if draft.parents is None else (draft.mask, draft.depths)


def _accepted(draft: Draft, accepted: VerifyOutput) -> Tensor:
    """Return which nodes were accepted, [bs, N] bool."""
    if draft.parents is None:
        order = arange(draft.width, draft.tokens.device)
        return order < accepted.accept_lens.unsqueeze(1)
    index, (bs, width) = accepted.accept_index, draft.tokens.shape
    local = torch.where(index >= 0, index - draft.offsets.unsqueeze(1), width)
    taken = torch.zeros(bs, width + 1, dtype=torch.bool, device=index.device)
    return taken.scatter_(1, local, True)[:, :width]
