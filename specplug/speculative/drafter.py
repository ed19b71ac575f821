"""Chains and trees of a network that goes from one token to the next: what all such drafters share.

A tree is EAGLE-2's: expand by cumulative score, then keep the best of all candidates. Li et al.,
arXiv 2406.16858.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

import attrs
import torch
from torch import Tensor

from specplug.errors import UsageError
from specplug.kernels.argmax import LikeliestTokens
from specplug.speculative.draft import Draft
from specplug.speculative.hook_order import Batch
from specplug.speculative.noise import couple
from specplug.speculative.runtime import AttentionPlan, Runtime
from specplug.speculative.tree import select_nodes


@attrs.define(eq=False)
class _Frontier:
    """The F best nodes of the last level of a tree that is being expanded; K, or fewer where the
    KV pool is short.

    Attributes:
        tokens: [bs, F] int64.
        scores: [bs, F] cumulative log-probabilities.
        hidden: [bs * F, H], what each node's parent left; None if the network hands on nothing.
        places: [bs, F] int64, their index among all candidates.
        mask: [bs, F, lead + levels * F] bool over the slots written so far: ancestors and itself.
    """

    tokens: Tensor
    scores: Tensor
    hidden: Tensor | None
    places: Tensor
    mask: Tensor


class Drafter(ABC):
    """Drafts with a network that goes from one token to the next: ``FeatureDrafter`` and
    ``TokenDrafter``.

    ``chain`` and ``tree`` draft from the first tokens after the root, which a subclass finds.
    Their passes are ``advance``. All that they do runs on the device.

    Raises:
        UsageError: ``topk`` is greater than the draft's vocabulary.

    Args:
        runtime: the engine's.
        token_ids: [V_draft] int64, the network's vocabulary in the target's ids.
        lead: slots from a request's ``seq_lens`` on that are taken before those of the first
            drafted tokens: 1 if the network has the root's keys there, 0 if it has them one slot
            before.

    Attributes:
        runtime, token_ids, lead: as given.
        topk: K.
        num_steps: S, the most tokens of a path.
        num_draft_tokens: N, the most nodes of a request, its root included.
    """

    def __init__(self, runtime: Runtime, *, token_ids: Tensor, lead: int) -> None:
        self.runtime = runtime
        self.token_ids = token_ids
        self.lead = lead
        self.topk = runtime.config.topk
        if self.topk > len(token_ids):
            raise UsageError(
                f"topk={self.topk}: the draft model knows {len(token_ids)} tokens; "
                "expected no more than these"
            )
        self.num_steps = runtime.config.num_steps
        self.num_draft_tokens = runtime.config.num_draft_tokens
        self._find_likeliest = LikeliestTokens(runtime.device)
        self._itself = torch.eye(self.topk, dtype=torch.bool, device=runtime.device)
        self._order = torch.arange(self.topk, device=runtime.device)

    _draft_chain: Callable[..., tuple[Tensor, Tensor]]
    """Takes the batch, what a subclass begins with, and S; returns what ``chain`` does."""
    _draft_tree: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """Takes the batch, what a subclass begins with, F, N and S; returns what ``tree`` does."""

    @abstractmethod
    def advance(
        self, tokens: Tensor, hidden: Tensor | None, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor | None]:
        """Run a pass over drafted tokens.

        Args:
            tokens: [R] int64 target ids.
            hidden: [R, H], what the row before each left; None if the network hands on nothing.
            plan: their places. ``plan.positions`` are counted from ``seq_lens + lead``.

        Returns:
            The logits [R, V_draft] of the token after each, and what each leaves: [R, H] or None.
        """

    def keep(self, scores: Tensor, step: int) -> Tensor | None:
        """Say which chains keep the token that they have just got. A chain that does not ends
        before it: that token and all after it have the score of minus infinity, and so are the
        first that a cut drops (``verify_budget``, a short KV pool). Without a cut the target
        verifies them: how many rows it has must be known on the host.

        A subclass overrides it, with operations of the device alone.

        Args:
            scores: [bs, step], those of each chain's tokens so far.
            step: how many these are, from 1 on.

        Returns:
            [bs] bool; None: all do.
        """
        return None

    def fit(self, batch: Batch) -> tuple[int, int]:
        """Return how many nodes of each request are drafted, the root included, and how many steps
        deep, by what the batch has room for."""
        nodes = min(self.num_draft_tokens, max(batch.max_draft_nodes))
        return nodes, min(self.num_steps, nodes - 1)

    def _drafted(self, batch: Batch, begin: Sequence[Tensor], nodes: int, steps: int) -> Draft:
        """Return a chain if K is 1, else a tree, as the recorded passes draft it.

        Args:
            begin: what both passes take after the batch.
            nodes, steps: as ``fit`` returns them; at least 2 nodes.
        """
        if self.topk == 1:
            drafted, scores = self._draft_chain(batch, *begin, steps)
            return Draft.chain(drafted, scores=scores)
        beam = self.beam(batch.max_draft_slots or batch.max_draft_nodes, steps)
        drafted, parents, scores = self._draft_tree(batch, *begin, beam, nodes, steps)
        return Draft.tree(drafted, parents, steps, scores=scores)

    def _plan_drafted(
        self,
        batch: Batch,
        width: int,
        *,
        offset: int,
        depth: int | None = None,
        mask: Tensor | None = None,
    ) -> AttentionPlan:
        """Plan a pass over drafted tokens, ``width`` a request, from ``seq_lens + offset`` on.

        Args:
            depth: of all of them, from ``seq_lens`` on; None: each is one deeper than the one
                before it.
        """
        starts, plan = self._drafted_text(batch)
        positions = None if depth is None else (starts + depth).unsqueeze(1).expand(-1, width)
        return plan(batch, starts, width, offset=offset, positions=positions, mask=mask)

    def _drafted_text(self, batch: Batch) -> tuple[Tensor, Callable[..., AttentionPlan]]:
        """Return where the text begins that drafts are added to, [bs] int64, and what plans passes
        over it."""
        return batch.seq_lens, self.runtime.plan_attention

    def chain(
        self,
        batch: Batch,
        roots: Tensor,
        tokens: Tensor,
        scores: Tensor,
        hidden: Tensor | None,
        steps: int,
    ) -> tuple[Tensor, Tensor]:
        """Draft ``steps`` tokens, each from the one before: nothing to rank, nothing to select.

        Args:
            roots: [bs] int64.
            tokens, scores: [bs, K] of the first tokens after the roots, as ``likeliest`` gives
                them.
            hidden: [bs, H], what the pass that gave them has left; None: nothing.
            steps: at least 1.

        Returns:
            Tokens [bs, steps + 1] int64, the roots first, and their scores, float32.
        """
        token, score = tokens[:, 0], scores[:, 0]
        chain, chain_scores = [roots, token], [torch.zeros_like(score), score]
        kept = self._kept(None, chain_scores)
        for step in range(1, steps):
            plan = self._plan_drafted(batch, 1, offset=self.lead + step - 1)
            logits, hidden = self.advance(token, hidden, plan)
            token, score = self.likeliest_token(
                batch, logits, batch.seq_lens.unsqueeze(1), step + 1
            )
            chain.append(token)
            chain_scores.append(score)
            kept = self._kept(kept, chain_scores)
        return torch.stack(chain, dim=1), torch.stack(chain_scores, dim=1).to(torch.float32)

    def _kept(self, before: Tensor | None, scores: list[Tensor]) -> Tensor | None:
        """Return which chains go on, and end the others: the last of ``scores`` is theirs."""
        kept = self.keep(torch.stack(scores[1:], dim=1), len(scores) - 1) if self._ends else None
        if kept is None:
            return before
        if before is not None:
            kept = kept & before
        scores[-1] = scores[-1].masked_fill(~kept, float("-inf"))
        return kept

    @property
    def _ends(self) -> bool:
        """Whether a subclass ends chains early."""
        return type(self).keep is not Drafter.keep

    def tree(
        self,
        batch: Batch,
        roots: Tensor,
        tokens: Tensor,
        scores: Tensor,
        hidden: Tensor | None,
        beam: int,
        nodes: int,
        steps: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Expand the F best nodes at each step, then keep the best of all candidates.

        Args:
            roots, tokens, scores, hidden, steps: as in ``chain``.
            beam: F.
            nodes: of each request, its root included.

        Returns:
            Tokens and parents, [bs, nodes] int64 each, and scores, [bs, nodes] float32.
        """
        bs = batch.size
        mask = self._itself[:beam, :beam].expand(bs, -1, -1)
        if self.lead:
            mask = torch.cat((mask.new_ones(bs, beam, self.lead), mask), dim=2)
        frontier = _Frontier(
            tokens=tokens[:, :beam],
            scores=scores[:, :beam],
            hidden=None
            if hidden is None
            else hidden.repeat_interleave(beam, dim=0, output_size=bs * beam),
            places=self._order[:beam].expand(bs, -1),
            mask=mask,
        )
        candidates = [(scores, tokens, torch.full_like(tokens, -1))]
        for step in range(1, steps):
            frontier, children = self._expand(batch, frontier, step)
            candidates.append(children)
        all_scores, all_tokens, parents = (
            torch.cat(parts, dim=1) for parts in zip(*candidates, strict=True)
        )
        nodes = min(nodes, all_scores.shape[1] + 1)
        return select_nodes(roots, all_scores, all_tokens, parents, nodes)

    def beam(self, max_draft_nodes: Sequence[int], steps: int) -> int:
        """Return F, the nodes of each level to expand: K, or as many as have slots for their keys.

        Each level takes F slots of every request, ``steps - 1`` levels. A node without a slot would
        be expanded as if it were not there. Who has no slot for each level even of a chain keeps
        too few nodes for its lower levels to matter, so it does not hold back the others.
        """
        levels = steps - 1
        if not levels:
            return self.topk
        rooms = (own - self.lead for own in max_draft_nodes)
        return min((self.topk, *(room // levels for room in rooms if room >= levels)))

    def _expand(
        self, batch: Batch, frontier: _Frontier, step: int
    ) -> tuple[_Frontier, tuple[Tensor, Tensor, Tensor]]:
        """Find the K children of each node of the frontier, and the F best of them, which is the
        next.

        Returns:
            The next frontier, and all F * K children: scores, tokens and parents [bs, F * K].
        """
        bs, topk, lead = batch.size, self.topk, self.lead
        beam = frontier.tokens.shape[1]
        positions = (batch.seq_lens + lead + step - 1).unsqueeze(1).expand(-1, beam)
        plan = self._plan_drafted(
            batch,
            beam,
            offset=lead + (step - 1) * beam,
            depth=lead + step - 1,
            mask=frontier.mask,
        )
        logits, hidden = self.advance(frontier.tokens.reshape(-1), frontier.hidden, plan)
        children, scores = self.likeliest(batch, logits, positions, 2 - lead)
        scores = (frontier.scores.unsqueeze(2) + scores.view(bs, beam, topk)).view(bs, -1)
        children = children.view(bs, -1)
        parents = frontier.places.repeat_interleave(topk, dim=1)
        best_scores, best = scores.topk(beam, dim=1)
        above = best // topk
        rows = (torch.arange(bs, device=best.device).unsqueeze(1) * beam + above).view(-1)
        lineage = frontier.mask.gather(1, above.unsqueeze(2).expand(-1, -1, lead + step * beam))
        following = _Frontier(
            tokens=children.gather(1, best),
            scores=best_scores,
            hidden=None if hidden is None else hidden[rows],
            places=best + topk + (step - 1) * beam * topk,
            mask=torch.cat((lineage, self._itself[:beam, :beam].expand(bs, -1, -1)), dim=2),
        )
        return following, (scores, children, parents)

    def likeliest(
        self, batch: Batch, logits: Tensor, *positions: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        """Return the K best tokens of each row, [R, K] int64 target ids, and their log-scores
        [R, K]. In a batch that samples they are chosen with the target's noise (``couple``).

        Args:
            logits: [R, V_draft], R = bs * w.
            positions: [bs, w] where the tokens would stand, as the terms of a sum: of a greedy
                batch they are not added up.
        """
        if self.topk == 1:
            token, score = self.likeliest_token(batch, logits, *positions)
            return token.unsqueeze(1), score.unsqueeze(1)
        logits = self._coupled(batch, logits, *positions)
        # Scores add up over the depth and are compared: half precision would round them away.
        scores, best = logits.log_softmax(-1, dtype=precise(logits.dtype)).topk(self.topk, dim=-1)
        return self.token_ids[best], scores

    def likeliest_token(
        self, batch: Batch, logits: Tensor, *positions: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        """Return the best token of each row and its log-score, [R] each; the arguments as in
        ``likeliest``."""
        return self._find_likeliest(self._coupled(batch, logits, *positions), self.token_ids)

    def _coupled(self, batch: Batch, logits: Tensor, *positions: Tensor | int) -> Tensor:
        """Return the scores of each row, [R, V_draft]; the arguments as in ``likeliest``."""
        if batch.greedy:
            return logits
        summed = torch.as_tensor(reduce(add, positions))
        return couple(self.runtime, batch, logits, summed, self.token_ids)


def precise(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores that are computed in ``dtype``: float32 or better."""
    return torch.promote_types(dtype, torch.float32)
