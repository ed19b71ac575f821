"""Blocks whose tokens are drawn one after the other, by a head that knows the ones before: chains,
and trees in the way of EAGLE-2 (arXiv 2406.16858)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
import torch
from torch import Tensor

from specplug import select_nodes

State = tuple[Tensor, ...]
"""What a head knows of paths: tensors of leading size R, an entry for each."""


class DrawingHead(Protocol):
    """A head that corrects the logits of a block's rows by the tokens drawn before them."""

    def begin(self, roots: Tensor, anchors: Tensor) -> State:
        """Return what is known of paths that end at their roots [bs].

        Args:
            anchors: [bs, hidden], the roots' own rows of the blocks.
        """

    def correct(
        self, index: int, logits: Tensor, hidden: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """Correct the logits [R, V_draft] of one row of each path.

        Args:
            index: of the drafting row in its block, from 0 on.
            hidden: [R, hidden] of the rows.

        Returns:
            Logits [R, V_draft], and what is known now.
        """

    def read(self, tokens: Tensor, state: State) -> State:
        """Return what is known when paths go on with tokens [R]."""


@attrs.frozen(eq=False)
class DrawnBlocks:
    """The rows of blocks that a head is to draw tokens for.

    Attributes:
        head: the head.
        roots: [bs] int64.
        anchors: [bs, hidden], the roots' own rows.
        hidden: [S, bs, hidden] of the drafting rows.
        logits: [S, bs, V_draft] of them, each by itself.
        couple: adds the target's noise to logits [bs * F, V_draft] of row i of F paths each.
        likeliest: takes logits [R, V_draft], returns each row's best token in the target's ids and
            its log-probability, [R] each.
        token_ids: [V_draft] int64, the draft's vocabulary in the target's ids.
    """

    head: DrawingHead
    roots: Tensor
    anchors: Tensor
    hidden: Tensor
    logits: Tensor
    couple: Callable[[Tensor, int, int], Tensor]
    likeliest: Callable[[Tensor], tuple[Tensor, Tensor]]
    token_ids: Tensor

    def chain(self) -> tuple[Tensor, Tensor]:
        """Draw the likeliest token of each row.

        Returns:
            Tokens [bs, S] int64, and their log-probabilities [bs, S].
        """
        state = self.head.begin(self.roots, self.anchors)
        drawn: list[tuple[Tensor, Tensor]] = []
        for index, (row, logits) in enumerate(zip(self.hidden, self.logits, strict=True)):
            if drawn:
                state = self.head.read(drawn[-1][0], state)
            corrected, state = self.head.correct(index, logits, row, state)
            drawn.append(self.likeliest(self.couple(corrected, index, 1)))
        tokens, scores = (torch.stack(each, dim=1) for each in zip(*drawn, strict=True))
        return tokens, scores

    def tree(self, topk: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
        """Expand the K best nodes of each level by K children, then keep the best of all.

        Args:
            topk: K.
            nodes: N, the root included; fewer are returned if there are no more.

        Returns:
            Tokens and parents, [bs, N] int64 each, and scores, [bs, N] float32, for ``Draft.tree``.
        """
        bs = len(self.roots)
        state = self.head.begin(self.roots, self.anchors)
        sums = self.logits.new_zeros(bs, 1, dtype=torch.float32)
        places = torch.full_like(self.roots.unsqueeze(1), -1)
        levels: list[tuple[Tensor, Tensor, Tensor]] = []
        for index in range(len(self.hidden)):
            paths = sums.shape[1]
            scores, tokens, state = self._children(index, paths, state, topk)
            sums = (sums.unsqueeze(2) + scores.view(bs, paths, topk)).flatten(1)
            tokens = tokens.view(bs, -1)
            levels.append((sums, tokens, places.repeat_interleave(topk, dim=1)))
            if index + 1 == len(self.hidden):
                break
            # The best of this level go on.
            sums, best = sums.topk(topk, dim=1)
            order = torch.arange(bs, device=best.device).unsqueeze(1)
            above = (order * paths + best // topk).view(-1)
            state = self.head.read(
                tokens.gather(1, best).view(-1), tuple(each[above] for each in state)
            )
            places = best + (0 if index == 0 else topk + (index - 1) * topk * topk)
        all_sums, all_tokens, parents = (
            torch.cat(parts, dim=1) for parts in zip(*levels, strict=True)
        )
        most = min(nodes, all_sums.shape[1] + 1)
        return select_nodes(self.roots, all_sums, all_tokens, parents, most)

    def _children(
        self, index: int, paths: int, state: State, topk: int
    ) -> tuple[Tensor, Tensor, State]:
        """Return the K best tokens after each of F paths of a request.

        Returns:
            Log-probabilities [bs * F, K], tokens [bs * F, K] int64, and what is known.
        """
        row, logits = self.hidden[index], self.logits[index]
        if paths > 1:
            row, logits = (
                each.repeat_interleave(paths, dim=0, output_size=len(each) * paths)
                for each in (row, logits)
            )
        corrected, state = self.head.correct(index, logits, row, state)
        coupled = self.couple(corrected, index, paths)
        # Scores add up over the depth and are compared: half precision would round them away.
        precise = torch.promote_types(coupled.dtype, torch.float32)
        scores, best = coupled.log_softmax(-1, dtype=precise).topk(topk, dim=-1)
        return scores, self.token_ids[best], state
