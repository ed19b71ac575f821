"""Exact acceptance: a drafted token is accepted if it is the target's own token at its parent."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from specplug.debug import DEBUG
from specplug.spec.draft import Draft


@attrs.define(eq=False, kw_only=True)
class VerifyOutput:
    """What the target made of a draft. C = ``accept_index.shape[1]`` is the one stride.

    Attributes:
        predict: [T] int64, the target's token after each node.
        accept_index: [bs, C] int64, flat node indices of the accepted path, -1 padded; the root is
            always accepted.
        accept_lens: [bs] int64, accepted tokens **with** the bonus token, 1 to C.
        bonus_tokens: [bs] int64, the target's token after the last accepted node.
    """

    predict: Tensor
    accept_index: Tensor
    accept_lens: Tensor
    bonus_tokens: Tensor

    def __attrs_post_init__(self) -> None:
        assert self.accept_index.shape[0] == self.accept_lens.shape[0] == len(self.bonus_tokens)
        if DEBUG and len(self.accept_lens):
            counted = (self.accept_index >= 0).sum(1)
            assert bool((counted == self.accept_lens).all()), (self.accept_index, self.accept_lens)
            assert bool((self.accept_lens >= 1).all()), self.accept_lens


def verify_tree(draft: Draft, predict: Tensor) -> VerifyOutput:
    """Accept the longest path from the root along which the draft is what the target says.

    No loop over nodes or depths and nothing read on the host: a node is on the path exactly if no
    node among itself and its ancestors differs from the target's token at its parent.

    Args:
        draft: bs requests of N nodes.
        predict: [T] int64, the target's token after each node.
    """
    padded = draft.pad(predict, fill=-1)
    if draft.parents is None:
        return _verify_chain(draft, predict, padded)
    bs, width = draft.tokens.shape
    expected = padded.gather(1, draft.parents.clamp(min=0))
    wrong = draft.tokens != expected
    wrong[:, 0] = False
    if draft.widths is not None:
        wrong |= padded < 0
    accepted = ~(draft.mask & wrong.unsqueeze(1)).any(-1)
    columns = draft.columns
    column = torch.where(accepted, draft.depths, columns)  # the last column collects the rest
    order = torch.arange(width, device=predict.device).expand(bs, -1)
    local = order.new_full((bs, columns + 1), -1).scatter_(1, column, order)[:, :columns]
    # Equal siblings, which no drafter should make, share a column: they are the same continuation.
    accept_lens = (local >= 0).sum(1)
    return _output(draft, predict, padded, local, accept_lens)


def _verify_chain(draft: Draft, predict: Tensor, padded: Tensor) -> VerifyOutput:
    bs = draft.tokens.shape[0]
    right = draft.tokens[:, 1:] == padded[:, :-1]
    if draft.widths is not None:
        right &= padded[:, 1:] >= 0
    accept_lens = right.to(torch.int64).cumprod(1).sum(1) + 1
    order = draft.depths.expand(bs, -1)
    local = torch.where(order < accept_lens.unsqueeze(1), order, -1)
    return _output(draft, predict, padded, local, accept_lens)


def _output(
    draft: Draft, predict: Tensor, padded: Tensor, local: Tensor, accept_lens: Tensor
) -> VerifyOutput:
    last = local.gather(1, (accept_lens - 1).unsqueeze(1))
    return VerifyOutput(
        predict=predict,
        accept_index=torch.where(local >= 0, local + draft.offsets.unsqueeze(1), -1),
        accept_lens=accept_lens,
        bonus_tokens=padded.gather(1, last).squeeze(1),
    )
