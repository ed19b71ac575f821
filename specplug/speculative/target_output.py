"""What a pass of the target leaves, and its compaction to the accepted path."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from specplug.speculative.verify import AcceptedRows, VerifyOutput


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
