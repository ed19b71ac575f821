"""What a pass that grows drafts is told by the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specplug_ngram.worker import HostDraft

FIELDS = 3
"""Numbers of a node, and as many of a request, in what ``packed`` returns."""


class Form(NamedTuple):
    """The plain numbers of a pass.

    Attributes:
        width: nodes of each request that are left.
        steps: tokens that a path is continued by; 0: none is.
        depth: the greatest depth of what is appended.
    """

    width: int
    steps: int
    depth: int


def packed(
    own: HostDraft | None, widths: Sequence[int], novelty: Sequence[float], nodes: int
) -> Tensor:
    """Return what the host knows in one tensor, for one copy to the device.

    Args:
        own: the host's draft; None: it has none.
        widths: [bs], nodes that count of the draft that is grown.
        novelty: [bs], of each request; infinite: its paths are not continued.
        nodes: M, those of ``own``.

    Returns:
        [bs, 3·M + 3] int32: tokens [M], parents [M], bits of scores [M], all of ``own``; then the
        nodes of ``own`` that count, ``widths``, and the bits of ``novelty``.
    """
    bs = len(widths)
    found = torch.zeros(bs, FIELDS * nodes + FIELDS, dtype=torch.int32)
    floats = found.view(torch.float32)
    own_widths: Sequence[int] = (1,) * bs
    if own is None:
        found[:, nodes] = -1  # the root's parent
    else:
        own_widths = own.widths
        found[:, :nodes] = own.tokens
        found[:, nodes : 2 * nodes] = own.parents
        floats[:, 2 * nodes : 3 * nodes] = own.scores
    found[:, -3:-1] = torch.tensor([own_widths, widths]).T
    floats[:, -1] = torch.tensor(novelty)
    return found


class Told(NamedTuple):
    """What ``packed`` has packed, [bs, M] and [bs].

    Attributes:
        tokens, parents: [bs, M] int64, of the host's draft.
        scores: [bs, M] float32.
        own_widths, widths: [bs] int64.
        novelty: [bs] float32.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    own_widths: Tensor
    widths: Tensor
    novelty: Tensor

    @classmethod
    def of(cls, given: Tensor) -> Told:
        """Take apart what ``packed`` has returned."""
        nodes = given.shape[1] // FIELDS - 1
        integers, floats = given.long(), given.view(torch.float32)
        return cls(
            integers[:, :nodes],
            integers[:, nodes : 2 * nodes],
            floats[:, 2 * nodes : 3 * nodes],
            integers[:, -3],
            integers[:, -2],
            floats[:, -1],
        )
