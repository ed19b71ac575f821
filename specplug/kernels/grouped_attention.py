"""Paged attention of a batch on the CPU, a few requests at a time.

``paged_attention_reference`` copies the keys and values of the whole batch, each request padded to
the longest, and reads the copies again. For a dozen requests they are larger than a core's cache,
so each byte comes from memory three times. Here requests of like lengths make a group whose copies
stay in the cache, and a group is padded to its own longest request only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import attrs
import torch
from torch import Tensor

from specplug.kernels.attention_form import AttentionForm
from specplug.kernels.paged_attention import attention_reference

GROUP_BYTES = 1 << 20
"""The most bytes of copied keys and values in a group of several requests."""

_GROUP_COST = 1 << 16
"""Elements of keys whose padding costs as much as the calls of another group."""

_QUERIES_PER_KEY = 32
"""Queries whose scores with a key take as long as copying the key and its value."""


@attrs.frozen
class Group:
    """Requests that are attended together.

    Attributes:
        requests: their indices in the batch.
        width: query rows of the widest.
        length: keys of the longest.
    """

    requests: tuple[int, ...]
    width: int
    length: int


def group_requests(
    widths: Sequence[int], lengths: Sequence[int], row_elements: int, row_bytes: int
) -> tuple[Group, ...]:
    """Divide a batch into groups, in the order of widths and lengths.

    A request joins the group before it if that costs no more than a group of its own, and the
    group's copies still fit ``GROUP_BYTES``.

    Args:
        widths: query rows of each request, at least 1.
        lengths: the keys that each request's queries may see, at least 1.
        row_elements: of a key.
        row_bytes: of a key and its value.
    """

    def cost(count: int, width: int, length: int) -> float:
        return count * length * (1 + width / _QUERIES_PER_KEY) * row_elements

    order = sorted(range(len(widths)), key=lambda i: (widths[i], lengths[i]))
    groups: list[Group] = []
    for i in order:
        alone = Group((i,), widths[i], lengths[i])
        if groups:
            last = groups[-1]
            count = len(last.requests)
            width, length = max(last.width, alone.width), max(last.length, alone.length)
            apart = cost(count, last.width, last.length) + cost(1, alone.width, alone.length)
            if (
                cost(count + 1, width, length) <= apart + _GROUP_COST
                and (count + 1) * length * row_bytes <= GROUP_BYTES
            ):
                groups[-1] = Group((*last.requests, i), width, length)
                continue
        groups.append(alone)
    return tuple(groups)


class GroupedAttention:
    """The attention of one pass, group by group.

    Args:
        groups: of all requests of the batch.
        widths: query rows of each request; R is their sum.
        table: [bs, L] int64 slots of each request's keys.
        page_size: slots that stand together; the lengths of the groups and L are multiples of it.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        widths: Sequence[int],
        table: Tensor,
        page_size: int,
    ) -> None:
        self._groups = groups
        self._page_size = page_size
        self._biases: dict[tuple[int | None, int], list[Tensor]] = {}
        self._order = torch.tensor([i for group in groups for i in group.requests])
        pages = table[self._order, ::page_size] // page_size
        sizes = [len(group.requests) for group in groups]
        self._pages = [
            part[:, : group.length // page_size].reshape(-1)
            for group, part in zip(groups, pages.split(sizes), strict=True)
        ]
        self._rows, self._places = _rows_and_places(groups, widths)

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: Callable[[int | None], Tensor],
        form: AttentionForm,
    ) -> Tensor:
        """Attend as ``paged_attention_reference`` does: q [R, H, D] to [R, H * D].

        Args:
            visible: returns which keys each query sees, [bs, Q, L] bool, for a sliding window's
                length or None. The same each time. It is not kept: the plan, whose method it is,
                keeps this object, and the two would wait for the garbage collector.
        """
        heads, head_dim = q.shape[1:]
        biases = self._biases_for(visible, form.window, heads // keys.shape[1], q.dtype)
        if self._rows is not None:
            q = q.index_select(0, self._rows)
        # Whole pages are copied: fewer and longer stretches of memory.
        paged = -1, self._page_size * keys.shape[1] * keys.shape[2]
        keys_of_page, values_of_page = keys.view(paged), values.view(paged)
        parts, start = [], 0
        for group, pages, bias in zip(self._groups, self._pages, biases, strict=True):
            count, width = len(group.requests), group.width
            end = start + count * width
            shape = count, group.length, *keys.shape[1:]
            out = attention_reference(
                q[start:end].view(count, width, heads, head_dim).transpose(1, 2),
                keys_of_page.index_select(0, pages).view(shape),
                values_of_page.index_select(0, pages).view(shape),
                bias,
                form,
            )
            parts.append(out.transpose(1, 2).reshape(end - start, heads * head_dim))
            start = end
        out = torch.cat(parts)
        return out if self._places is None else out.index_select(0, self._places)

    def _biases_for(
        self,
        visible: Callable[[int | None], Tensor],
        window: int | None,
        fold: int,
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Return each group's additive mask, made once per pass and kind of layer."""
        biases = self._biases.get((window, fold))
        if biases is None:
            hidden = visible(window).logical_not()[self._order].unsqueeze(1)
            bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            sizes = [len(group.requests) for group in self._groups]
            biases = self._biases[window, fold] = [
                _repeat(part[:, :, : group.width, : group.length], fold)
                for group, part in zip(self._groups, bias.split(sizes), strict=True)
            ]
        return biases


def _rows_and_places(
    groups: Sequence[Group], widths: Sequence[int]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the row [R] at each place of the groups' padded rows, row 0 where there is none; and
    the place of each row. Both None if the rows stand so already."""
    firsts = [end - width for width, end in zip(widths, accumulate(widths), strict=True)]
    rows: list[int] = []
    places = [0] * sum(widths)
    for group in groups:
        for i in group.requests:
            first, width = firsts[i], widths[i]
            places[first : first + width] = range(len(rows), len(rows) + width)
            rows += range(first, first + width)
            rows += [0] * (group.width - width)
    if rows == list(range(len(places))):
        return None, None
    return torch.tensor(rows), torch.tensor(places)


def _repeat(bias: Tensor, fold: int) -> Tensor:
    """Repeat [n, 1, Q, L] for the heads that share keys."""
    return bias if fold == 1 else bias.repeat(1, 1, fold, 1)
