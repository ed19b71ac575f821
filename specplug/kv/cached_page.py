"""A node of the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

Key = tuple[int, ...]


@attrs.define(eq=False)
class CachedPage:
    """A node of the tree.

    Attributes:
        page: the page; 0 at the root.
        key: its tokens and the ``lookahead`` tokens behind them; of a first page before them the
            ``rotary_set``, unless that is 0.
        parent: the page before it; None at the root.
        depth: pages on the path to it, itself included.
        children: by key.
        users: running requests whose path goes through it.
        last_used: when that was; of an unused page never before its child's.
        queued: whether it stands in the order of eviction.
    """

    page: int = 0
    key: Key = ()
    parent: CachedPage | None = None
    depth: int = 0
    children: dict[Key, CachedPage] = attrs.field(factory=dict)
    users: int = 0
    last_used: int = 0
    queued: bool = False

    def path(self) -> Iterator[CachedPage]:
        """Itself and the pages before it, the root excluded."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent
