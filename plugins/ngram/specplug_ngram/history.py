"""The latest tokens of all requests, and where the same few tokens stood before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import attrs

ORDERS = (8, 2)
"""Lengths of the n-grams that lead to earlier places; the longest comes first. Pairs alone would
lose a long match where other requests have since written its last pair often; orders between the
two found nothing more."""

GROWTH = 1 << 12
"""Entries that are added at a time until the history is full."""


@attrs.define(eq=False)
class Stream:
    """Where one request is in the history.

    Attributes:
        last: the entry of its latest token; 0 before there is one.
        recent: its latest tokens, as many as the longest n-gram has.
    """

    last: int = 0
    recent: tuple[int, ...] = ()


class History:
    """A ring of the last ``capacity`` tokens that any request read or wrote, in that order.

    Each entry knows the entries before and behind it in its own request, so requests may take
    turns, and for each of ``ORDERS`` the latest earlier entry whose n-gram has the same hash: the
    chains of LZ77 as zlib keeps them. Adding a token writes one entry and one slot of a hash table
    for each order; the entry that it overwrites is thereby forgotten, and links to it end there.
    So both time and memory are constant whatever the history's length, the oldest tokens go first,
    one at a time, and nothing is ever rehashed or swept. Hashes lead to places; what stands there
    is compared, so a collision can hide a place but never invent one.

    Entries are counted from 1 and never reused; entry i is kept until i + capacity is added.

    Args:
        capacity: tokens kept, a power of two. An entry takes ``bytes_per_token``.
    """

    bytes_per_token = 4 + 8 * (2 + 2 * len(ORDERS))

    def __init__(self, capacity: int) -> None:
        assert capacity.bit_count() == 1, capacity
        self.capacity = capacity
        self.end = 0
        self._mask = capacity - 1
        self._tokens = array("i")
        self._before = array("q")
        self._behind = array("q")
        self._same = [array("q") for _ in ORDERS]
        self._heads = [array("q", bytes(8 * capacity)) for _ in ORDERS]

    def __len__(self) -> int:
        """Tokens that are kept."""
        return min(self.end, self.capacity)

    @property
    def num_bytes(self) -> int:
        """Of all tables, as they are allocated."""
        tables = (self._tokens, self._before, self._behind, *self._same, *self._heads)
        return sum(table.itemsize * len(table) for table in tables)

    def extend(self, stream: Stream, tokens: Sequence[int]) -> None:
        """Add tokens at a request's end."""
        mask, recent, before = self._mask, stream.recent, stream.last
        for token in tokens:
            self.end = now = self.end + 1
            slot = now & mask
            if slot >= len(self._tokens):
                self._grow()
            self._tokens[slot] = token
            self._behind[slot] = 0
            self._before[slot] = before
            if before and before > now - self.capacity:
                self._behind[before & mask] = now
            recent = (*recent[1 - ORDERS[0] :], token)
            for order, same, heads in zip(ORDERS, self._same, self._heads, strict=True):
                same[slot] = 0
                if len(recent) >= order:
                    head = hash(recent[-order:]) & mask
                    same[slot], heads[head] = heads[head], now
            before = now
        stream.last, stream.recent = before, recent

    def matches(self, stream: Stream, limit: int) -> tuple[int, list[int]]:
        """What followed the longest known end of a request before.

        Args:
            limit: most places to look at for each order, the latest first.

        Returns:
            The length of the match, at most the longest order, and the entries where it ended,
            latest first; 0 and none if nothing is known. Something follows at each of them.
        """
        if stream.last <= max(self.end - self.capacity, 0):
            return 0, []
        for order, same in zip(ORDERS, self._same, strict=True):
            longest, places = self._longest(stream, same, limit)
            if longest >= order:
                return longest, places
        return 0, []

    def continuations(self, entries: Sequence[int]) -> dict[int, list[int]]:
        """The tokens at these entries, each with the entries that hold it; the order is kept."""
        found: dict[int, list[int]] = {}
        for entry in entries:
            found.setdefault(self._tokens[entry & self._mask], []).append(entry)
        return found

    def behind(self, entries: Sequence[int]) -> list[int]:
        """The entries behind these in their requests, without those that are the last."""
        following = (self._behind[entry & self._mask] for entry in entries)
        return [entry for entry in following if entry]

    def _longest(self, stream: Stream, same: array[int], limit: int) -> tuple[int, list[int]]:
        """Of the latest places on a chain, those where most of the request's end stands."""
        oldest = max(self.end - self.capacity, 0)
        longest = 0
        places: list[int] = []
        place = stream.last
        for _ in range(limit):
            place = same[place & self._mask]
            if place <= oldest:
                break
            # The end of another running request is a place, but nothing followed there yet.
            length = self._length(stream, place) if self._behind[place & self._mask] else 0
            if length > longest:
                longest, places = length, []
            if length == longest:
                places.append(place)
        return longest, places

    def _length(self, stream: Stream, place: int) -> int:
        """How many of the request's latest tokens stand at ``place`` and before it."""
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
        for table in (self._before, self._behind, *self._same):
            table.frombytes(bytes(8 * count))
