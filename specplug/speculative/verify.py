"""Exact acceptance, and the compaction of what a pass leaves to the accepted path.

A drafted token is accepted if it is the target's own token at its parent.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from specplug.kernels.kernel_table import runs_tree_kernels
from specplug.speculative.draft import Draft, arange, described, is_dense


@attrs.frozen(eq=False)
class AcceptedRows:
    """What compaction needs of accepted paths, if the launch that found them has left it.

    Attributes:
        rows: [bs·C] int64 flat node indices: each path, then its root again.
        next_tokens, own_tokens: [bs·C] int64, the tokens after and at these nodes.
        last_rows: [bs] int64, which of the rows is each path's last.
    """

    rows: Tensor
    next_tokens: Tensor
    own_tokens: Tensor
    last_rows: Tensor


@attrs.define(eq=False, kw_only=True)
class VerifyOutput:
    """What the target made of a draft. C = ``accept_index.shape[1]`` is the one stride.

    Attributes:
        predict: [T] int64, the target's token after each node. Of a ``verify`` hook's result the
            engine does not use it: its own counts.
        accept_index: [bs, C] int64, flat node indices of the accepted path, -1 padded; the root is
            always accepted.
        accept_lens: [bs] int64, accepted tokens **with** the bonus token, 1 to C.
        bonus_tokens: [bs] int64, the target's token after the last accepted node.
        accepted_rows: the same for compaction. The core alone sets it, on a GPU.
    """

    predict: Tensor
    accept_index: Tensor
    accept_lens: Tensor
    bonus_tokens: Tensor
    accepted_rows: AcceptedRows | None = attrs.field(init=False, default=None)

    def check(self, draft: Draft, predict: Tensor, most_columns: int, *, values: bool) -> None:
        """Refuse what is no result for ``draft``: by type, dtype and shape, and by ``values`` too,
        which are read on the host.

        Args:
            predict: [T] int64, the target's token after each node.
            most_columns: the greatest C.

        Raises:
            ValueError: what was found, and what was expected.
        """
        bs, columns = len(draft.tokens), self.columns
        if not 1 <= columns <= most_columns:
            raise ValueError(f"{columns} columns; expected 1 to {most_columns}, num_steps + 1")
        like = draft.tokens
        for name, shape in (
            ("predict", (draft.total,)),
            ("accept_index", (bs, columns)),
            ("accept_lens", (bs,)),
            ("bonus_tokens", (bs,)),
        ):
            found = getattr(self, name)
            if not (
                is_dense(found)
                and (found.shape, found.dtype, found.device) == (shape, like.dtype, like.device)
            ):
                raise ValueError(
                    f"{name} {described(found)}; expected {list(shape)} of {like.dtype} on "
                    f"{like.device}"
                )
        if values:
            kept = self.bounded(draft, predict)
            for name in ("predict", "accept_index", "accept_lens", "bonus_tokens"):
                found, sound = getattr(self, name), getattr(kept, name)
                if not torch.equal(found, sound):
                    why = (
                        "a path from the root, each of whose tokens the target gives at its parent"
                    )
                    if name == "predict":
                        why = "the target's own tokens, target_output.predict"
                    raise ValueError(f"{name}={found.tolist()}; expected {sound.tolist()}: {why}")

    @property
    def columns(self) -> int:
        """C."""
        index = self.accept_index
        return index.shape[1] if is_dense(index) and index.dim() == 2 else 0

    def bounded(self, draft: Draft, predict: Tensor) -> VerifyOutput:
        """Cut this result to the longest valid prefix of each path: from the root on, each node a
        child of the one before it, its token what ``predict`` says at its parent. So what is
        accepted stands in the request's own slots, and is what the target generates, whatever
        ``self.predict`` says. Nothing is read on the CPU.

        Args:
            predict: [T] int64, the target's token after each node.
        """
        width = draft.width
        padded = draft.pad(predict, fill=-1)
        local = self.accept_index - draft.offsets.unsqueeze(1)
        inside = (self.accept_index >= 0) & (local >= 0) & (local < width)
        local = torch.where(inside, local, 0)
        counts = padded.gather(1, local) >= 0
        parents = local - 1 if draft.parents is None else draft.parents.gather(1, local)
        follows = inside & counts
        follows[:, 0] = True
        local[:, 0] = 0
        follows[:, 1:] &= parents[:, 1:] == local[:, :-1]
        follows[:, 1:] &= draft.tokens.gather(1, local)[:, 1:] == padded.gather(1, local)[:, :-1]
        if draft.parents is not None:
            follows[:, 1:] &= ~draft.lost.gather(1, local)[:, 1:]
        columns = torch.arange(self.columns, device=local.device)
        follows &= columns < self.accept_lens.unsqueeze(1).clamp(min=1)
        accept_lens = follows.to(torch.int64).cumprod(1).sum(1)
        local = torch.where(columns < accept_lens.unsqueeze(1), local, -1)
        return _output(draft, predict, padded, local, accept_lens)


def verify_tree(draft: Draft, predict: Tensor) -> VerifyOutput:
    """Accept the longest path from the root along which the draft is what the target says.

    No loop over nodes or depths and nothing read on the host: a node is on the path exactly if no
    node among itself and its ancestors differs from the target's token at its parent.

    Args:
        draft: bs requests of N nodes.
        predict: [T] int64, the target's token after each node.
    """
    if runs_tree_kernels(draft.tokens):
        return _verify_at_once(draft, predict)
    padded = draft.pad(predict, fill=-1)
    if draft.parents is None:
        return _verify_chain(draft, predict, padded)
    bs, width = draft.tokens.shape
    expected = padded.gather(1, draft.parents.clamp(min=0))
    wrong = (draft.tokens != expected) | draft.lost
    wrong[:, 0] = False
    if draft.is_ragged:
        wrong |= padded < 0
    accepted = ~(draft.mask & wrong.unsqueeze(1)).any(-1)
    depths, columns = draft.depths, draft.columns
    # Of equal siblings, which no drafter should make, both are accepted: one path is taken.
    deepest = torch.where(accepted, depths, -1).argmax(1, keepdim=True)
    path = draft.mask.gather(1, deepest.unsqueeze(2).expand(-1, -1, width)).squeeze(1)
    column = torch.where(path, depths, columns)  # the last column collects the rest
    order = arange(width, predict.device).expand(bs, -1)
    local = order.new_full((bs, columns + 1), -1).scatter_(1, column, order)[:, :columns]
    accept_lens = depths.gather(1, deepest).squeeze(1) + 1
    return _output(draft, predict, padded, local, accept_lens)


def _verify_at_once(draft: Draft, predict: Tensor) -> VerifyOutput:
    """Do the same in one launch, which leaves what ``compact`` needs too."""
    from specplug.kernels.tree import verify_drafts

    tree = None
    if draft.parents is not None:
        tree = draft.parents, draft.mask, draft.depths, draft.lost
    offsets = draft.offsets if draft.is_ragged else None
    index, rows, next_tokens, own_tokens, lens, bonus_tokens, last_rows = verify_drafts(
        draft.tokens, tree, draft.columns, predict, offsets
    )
    verified = VerifyOutput(
        predict=predict, accept_index=index, accept_lens=lens, bonus_tokens=bonus_tokens
    )
    verified.accepted_rows = AcceptedRows(rows, next_tokens, own_tokens, last_rows)
    return verified


def _verify_chain(draft: Draft, predict: Tensor, padded: Tensor) -> VerifyOutput:
    bs, columns = draft.tokens.shape[0], draft.columns
    right = draft.tokens[:, 1:columns] == padded[:, : columns - 1]
    if draft.is_ragged:
        right &= padded[:, 1:columns] >= 0
    accept_lens = right.to(torch.int64).cumprod(1).sum(1) + 1
    order = arange(columns, predict.device).expand(bs, -1)
    local = torch.where(order < accept_lens.unsqueeze(1), order, -1)
    return _output(draft, predict, padded, local, accept_lens)


def _output(
    draft: Draft, predict: Tensor, padded: Tensor, local: Tensor, accept_lens: Tensor
) -> VerifyOutput:
    last = local.gather(1, (accept_lens - 1).unsqueeze(1))
    index = local + draft.offsets.unsqueeze(1)
    if draft.places is not None:  # padding has requests without a node, after the last one
        index = index.clamp(max=draft.total - 1)
    return VerifyOutput(
        predict=predict,
        accept_index=torch.where(local >= 0, index, -1),
        accept_lens=accept_lens,
        bonus_tokens=padded.gather(1, last).squeeze(1),
    )


@attrs.define(eq=False, kw_only=True)
class TargetOutput:
    """A decode step's results over all T nodes, before anything is accepted.

    ``verify`` gets copies of ``predict`` and ``per_node``. ``logits`` may be overwritten by the
    next pass.

    Attributes:
        predict: [T] int64, the token that the target generates after each node.
        logits: [T, V], as they left the model.
        per_node: named tensors of leading size T: everything the target put out for each node
            (hidden states, log-probabilities, routed experts, …), and what a plugin adds.
            Compaction walks this container, so no output can be forgotten.
    """

    predict: Tensor
    logits: Tensor
    per_node: dict[str, Tensor] = attrs.field(factory=dict)


@attrs.define(eq=False, kw_only=True)
class CommittedOutput:
    """What the target computed about committed tokens: prefill chunks, or accepted paths.

    R is the number of prefill tokens, or bs·C after a verify, with ``accept_lens`` of each
    request's C rows in use. The other rows repeat its root: their results mean nothing, and nothing
    may be drawn from them.

    Attributes:
        next_tokens: [R] int64, the token **after** each row's position.
        own_tokens: [R] int64, the token **at** each row's position: a prefill's prompt tokens, or
            the accepted nodes, the root first.
        per_node: named tensors of leading size R.
        last_rows: [bs] int64, each request's last row that counts.
        accept_lens: [bs] int64, rows of each request that count: after a verify the accepted
            tokens with the bonus token, 1 to C; of a prefill the width of each chunk. So the
            position of ``bonus_tokens`` is ``batch.seq_lens + accept_lens`` in both.
        bonus_tokens: [bs] int64, the token after each request's last row, ``next_tokens`` there:
            what the target generates, or of a chunk that does not end its prompt the next prompt
            token.
    """

    next_tokens: Tensor
    own_tokens: Tensor
    per_node: Mapping[str, Tensor] = attrs.field(factory=dict)
    last_rows: Tensor
    accept_lens: Tensor
    bonus_tokens: Tensor


OF_REQUESTS = "next_tokens", "own_tokens", "last_rows", "accept_lens", "bonus_tokens"
"""The tensors of a ``CommittedOutput`` that are not of each node, in their order."""


def compact(
    verified: VerifyOutput, tokens: Tensor, per_node: Mapping[str, Tensor]
) -> CommittedOutput:
    """Keep the rows of the accepted path, R = bs·C of them, in order of position.

    Columns after a request's ``accept_lens`` repeat its root, so every row is a real one and no
    shape depends on what was accepted.

    Args:
        tokens: [T] int64, the nodes of which ``verified`` was made.
        per_node: named tensors of leading size T.
    """
    accepted = verified.accepted_rows
    if accepted is None:
        accepted = _accepted_rows(verified, tokens)
    return CommittedOutput(
        next_tokens=accepted.next_tokens,
        own_tokens=accepted.own_tokens,
        per_node={name: tensor[accepted.rows] for name, tensor in per_node.items()},
        last_rows=accepted.last_rows,
        accept_lens=verified.accept_lens,
        bonus_tokens=verified.bonus_tokens,
    )


def _accepted_rows(verified: VerifyOutput, tokens: Tensor) -> AcceptedRows:
    index = verified.accept_index
    bs, columns = index.shape
    rows = torch.where(index >= 0, index, index[:, :1]).reshape(-1)
    starts = torch.arange(bs, device=index.device) * columns
    last_rows = starts + verified.accept_lens - 1
    return AcceptedRows(rows, verified.predict[rows], tokens[rows], last_rows)
