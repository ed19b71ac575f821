"""The latest tokens of all requests, and an index of their n-grams."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import attrs

ORDERS = (8, 2)
"""The lengths n of the indexed n-grams, longest first. With pairs alone a long match is lost if
other requests have often written its last pair since. Lengths between the two found no more."""

GROWTH = 1 << 12
"""The number of entries by which the tables grow until the history is full."""


@attrs.define(eq=False)
class Stream:
    """One request's end in the history.

    Attributes:
        last: the entry of the request's latest token; 0 if it has none.
        recent: the request's latest tokens, as many as the longest n-gram has.
    """

    last: int = 0
    recent: tuple[int, ...] = ()


class History:
    """A ring of the last ``capacity`` tokens that any request read or wrote, in that order.

    Each entry links to the entries before and after it in its own request, so requests may
    interleave. For each of ``ORDERS`` it links to the latest earlier entry whose n-gram has the
    same hash, like zlib's LZ77 chains. Adding a token writes one entry, and one slot of a hash
    table for each order. It overwrites the oldest entry; a link to an overwritten entry ends its
    chain.

    So the time of a token and the memory are constant, and the tables are never rehashed. The
    tokens at a place that a hash leads to are compared: a collision can hide a place, but the
    drafter never takes a wrong one.

    Entries are counted from 1 and never reused; entry i is kept until i + capacity is added.

    Args:
        capacity: the number of tokens kept, a power of two.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity.bit_count() == 1, capacity
        self.capacity = capacity
        self.end = 0
        self._mask = capacity - 1
        self._tokens = array("i")
        self._before = array("q")
        self._after = array("q")
        self._same = [array("q") for _ in ORDERS]
        self._heads = [array("q", bytes(8 * capacity)) for _ in ORDERS]

    def __len__(self) -> int:
        """Return the number of tokens kept."""
        return min(self.end, self.capacity)

    @property
    def num_bytes(self) -> int:
        """The allocated bytes of all tables."""
        tables = (self._tokens, self._before, self._after, *self._same, *self._heads)
        return sum(table.itemsize * len(table) for table in tables)

    @property
    def addresses(self) -> list[int]:
        """The memory addresses of the tables: tokens, links before and after, then chains and their
        heads by order. They change when ``reserve`` returns True."""
        tables = (self._tokens, self._before, self._after, *self._same, *self._heads)
        return [table.buffer_info()[0] for table in tables]

    def reserve(self, count: int) -> bool:
        """Make room for more entries, and return whether the tables' addresses have changed."""
        needed = min(self.end + count + 1, self.capacity)
        has_moved = needed > len(self._tokens)
        while needed > len(self._tokens):
            self._grow()
        return has_moved

    def extend(self, stream: Stream, tokens: Sequence[int]) -> None:
        """Append tokens to a request."""
        mask, recent, before = self._mask, stream.recent, stream.last
        self.reserve(len(tokens))
        for token in tokens:
            self.end = now = self.end + 1
            slot = now & mask
            self._tokens[slot] = token
            self._after[slot] = 0
            self._before[slot] = before
            if before and before > now - self.capacity:
                self._after[before & mask] = now
            recent = (*recent[1 - ORDERS[0] :], token)
            for order, same, heads in zip(ORDERS, self._same, self._heads, strict=True):
                same[slot] = 0
                if len(recent) >= order:
                    head = hash(recent[-order:]) & mask
                    same[slot], heads[head] = heads[head], now
            before = now
        stream.last, stream.recent = before, recent

    def matches(self, stream: Stream, limit: int) -> tuple[int, list[int]]:
        """Find the earlier places of the longest suffix of a request.

        Args:
            stream: the request.
            limit: the most places to look up for each order, latest first.

        Returns:
            The length of the match, at most the longest order, and the entries of its last tokens,
            latest first; 0 and [] if no suffix matches. Each entry has a following one.
        """
        if stream.last <= max(self.end - self.capacity, 0):
            return 0, []
        for order, same in zip(ORDERS, self._same, strict=True):
            longest, places = self._longest(stream, same, limit)
            if longest >= order:
                return longest, places
        return 0, []

    def continuations(self, entries: Sequence[int]) -> dict[int, list[int]]:
        """Group entries by their tokens, in the order of ``entries``."""
        found: dict[int, list[int]] = {}
        for entry in entries:
            found.setdefault(self._tokens[entry & self._mask], []).append(entry)
        return found

    def following(self, entries: Sequence[int]) -> list[int]:
        """Return each entry's next entry in its request, if it has one."""
        following = (self._after[entry & self._mask] for entry in entries)
        return [entry for entry in following if entry]

    def _longest(self, stream: Stream, same: array[int], limit: int) -> tuple[int, list[int]]:
        """Return the length of the longest match among the latest places of a chain, and the
        places that have it."""
        oldest = max(self.end - self.capacity, 0)
        longest = 0
        places: list[int] = []
        place = stream.last
        for _ in range(limit):
            place = same[place & self._mask]
            if place <= oldest:
                break
            # At the end of another running request no token has followed yet.
            length = self._length(stream, place) if self._after[place & self._mask] else 0
            if length > longest:
                longest, places = length, []
            if length == longest:
                places.append(place)
        return longest, places

    def _length(self, stream: Stream, place: int) -> int:
        """Return the number of the request's latest tokens that match those up to ``place``."""
        oldest = max(self.end - self.capacity, 0)
        length = 0
        for token in reversed(stream.recent):
            if place <= oldest or self._tokens[place & self._mask] != token:
                break
            length += 1
            place = self._before[place & self._mask]
        return length

    def _grow(self) -> None:
        count = min(GROWTH, self.capacity - len(self._tokens))
        self._tokens.frombytes(bytes(4 * count))
        for table in (self._before, self._after, *self._same):
            table.frombytes(bytes(8 * count))
