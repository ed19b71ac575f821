"""The latest tokens of one owner, and an index of their n-grams."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from ctypes import addressof

import attrs

from specplug_ngram.library import Tables

ORDERS = (8, 2)
"""The lengths n of the indexed n-grams, longest first. With pairs alone a long match is lost if
other requests have often written its last pair since. Lengths between the two found no more."""

TOKEN_BYTES = 4 + 8 * (2 + 2 * len(ORDERS))
"""The bytes of each token of the capacity: an int32, and an int64 in each other table."""


@attrs.define(eq=False)
class Stream:
    """One request's end in a history.

    Attributes:
        last: the entry of the request's latest token; 0 if it has none.
        recent: the request's latest tokens, as many as the longest n-gram has.
    """

    last: int = 0
    recent: tuple[int, ...] = ()


class History:
    """A ring of the last ``capacity`` tokens that its owner's requests read or wrote, in order.

    Each entry links to the entries before and after it in its own request, so requests may
    interleave. For each of ``ORDERS`` it links to the latest earlier entry whose n-gram has the
    same hash, like zlib's LZ77 chains. Adding a token writes one entry, and one slot of a hash
    table for each order. It overwrites the oldest entry; a link to an overwritten entry ends its
    chain.

    So the time of a token is constant; ``resize`` alone looks at all tokens. The tokens at a place
    that a hash leads to are compared: a collision can hide a place, but the drafter never takes a
    wrong one.

    Entries are counted from 1 and never reused. The entries after ``oldest`` are kept.

    Args:
        capacity: the number of tokens kept, a power of two.
        relink: makes the chains anew, given ``address``; None: Python does.
    """

    def __init__(self, capacity: int, relink: Callable[[int], None] | None = None) -> None:
        assert capacity.bit_count() == 1, capacity
        self._relink = relink
        self._tables = Tables(capacity=capacity)
        self._tokens = array("i", bytes(4 * capacity))
        self._before, self._after = (array("q", bytes(8 * capacity)) for _ in range(2))
        self._same, self._heads = _chains(capacity), _chains(capacity)
        self._tell_addresses()

    def __len__(self) -> int:
        """Return the number of tokens kept."""
        return self.end - self.oldest

    @property
    def capacity(self) -> int:
        """The most tokens kept."""
        return int(self._tables.capacity)

    @property
    def end(self) -> int:
        """The latest entry."""
        return int(self._tables.end)

    @property
    def oldest(self) -> int:
        """The latest entry that is no longer kept."""
        tables = self._tables
        return int(max(tables.start, tables.end - tables.capacity))

    @property
    def address(self) -> int:
        """The address of ``Tables``. It stays when the tables move."""
        return addressof(self._tables)

    @property
    def num_bytes(self) -> int:
        """The bytes of all tables."""
        return TOKEN_BYTES * self.capacity

    @property
    def is_full(self) -> bool:
        """Whether the tables must not grow now, so that the oldest tokens make room for others."""
        return bool(self._tables.full)

    @is_full.setter
    def is_full(self, full: bool) -> None:
        self._tables.full = full

    def lacks(self, count: int) -> int:
        """Return the tokens that it must have room for to add ``count`` and to drop none; 0 if
        there is room, or if it is full."""
        needed = len(self) + count
        return 0 if self.is_full or needed <= self.capacity else needed

    def resize(self, capacity: int) -> None:
        """Move to tables of another capacity, a power of two, with the latest tokens that have room
        there. One table after the other is moved."""
        assert capacity.bit_count() == 1, capacity
        tables, old = self._tables, self.capacity
        tables.start = max(self.oldest, tables.end - capacity)
        runs = list(_runs(tables.start + 1, tables.end + 1, old, capacity))
        self._tokens = _moved(self._tokens, capacity, runs)
        self._before = _moved(self._before, capacity, runs)
        self._after = _moved(self._after, capacity, runs)
        self._same, self._heads = _chains(0), _chains(0)  # freed before the new ones are made
        self._same, self._heads = _chains(capacity), _chains(capacity)
        tables.capacity = capacity
        self._tell_addresses()
        if self._relink is None:
            self._link_all()
        else:
            self._relink(self.address)

    def clear(self, capacity: int) -> None:
        """Drop all tokens, and move to tables of another capacity. Running requests go on."""
        self._tables.start = self.end
        self.resize(capacity)

    def extend(self, stream: Stream, tokens: Sequence[int]) -> None:
        """Append tokens to a request; beyond the capacity they take the places of the oldest."""
        capacity, start, now = self.capacity, self._tables.start, self.end
        mask, recent, before = capacity - 1, stream.recent, stream.last
        for token in tokens:
            now += 1
            slot = now & mask
            self._tokens[slot] = token
            self._after[slot] = 0
            self._before[slot] = before
            if before > max(start, now - capacity):
                self._after[before & mask] = now
            recent = (*recent[1 - ORDERS[0] :], token)
            self._link(now, recent)
            before = now
        self._tables.end = now
        stream.last, stream.recent = before, recent

    def matches(self, stream: Stream, limit: int, *, is_own: bool = True) -> tuple[int, list[int]]:
        """Find the earlier places of the longest suffix of a request.

        Args:
            stream: the request.
            limit: the most places to look up for each order, latest first.
            is_own: whether the request's tokens are in this history.

        Returns:
            The length of the match, at most the longest order, and the entries of its last tokens,
            latest first; 0 and [] if no suffix matches. Each entry has a following one.
        """
        if is_own and stream.last <= self.oldest:
            return 0, []
        for number, order in enumerate(ORDERS):
            if len(stream.recent) < order:
                continue
            if is_own:
                place = self._same[number][stream.last & self._mask]
            else:
                place = self._heads[number][hash(stream.recent[-order:]) & self._mask]
            longest, places = self._longest(stream, self._same[number], place, limit)
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

    @property
    def _mask(self) -> int:
        return self.capacity - 1

    def _tell_addresses(self) -> None:
        tables = self._tables
        for name in ("tokens", "before", "after"):
            setattr(tables, name, getattr(self, f"_{name}").buffer_info()[0])
        tables.same[:] = [table.buffer_info()[0] for table in self._same]
        tables.heads[:] = [table.buffer_info()[0] for table in self._heads]

    def _link_all(self) -> None:
        """Make the chains anew; heads are 0."""
        mask, oldest = self._mask, self.oldest
        for now in range(oldest + 1, self.end + 1):
            place, gram = now, list[int]()
            while place > oldest and len(gram) < ORDERS[0]:
                gram.append(self._tokens[place & mask])
                place = self._before[place & mask]
            self._link(now, tuple(reversed(gram)))

    def _link(self, now: int, recent: tuple[int, ...]) -> None:
        """Enter the last of the request's tokens ``recent`` into the chain of each order."""
        mask = self._mask
        for order, same, heads in zip(ORDERS, self._same, self._heads, strict=True):
            same[now & mask] = 0
            if len(recent) >= order:
                head = hash(recent[-order:]) & mask
                same[now & mask], heads[head] = heads[head], now

    def _longest(
        self, stream: Stream, same: array[int], place: int, limit: int
    ) -> tuple[int, list[int]]:
        """Return the length of the longest match among the latest places of a chain, from ``place``
        on, and the places that have it."""
        oldest = self.oldest
        longest = 0
        places: list[int] = []
        for _ in range(limit):
            if place <= oldest:
                break
            # At the end of another running request no token has followed yet.
            followed = self._after[place & self._mask]
            length = self._length(stream, place, oldest) if followed else 0
            if length > longest:
                longest, places = length, []
            if length == longest:
                places.append(place)
            place = same[place & self._mask]
        return longest, places

    def _length(self, stream: Stream, place: int, oldest: int) -> int:
        """Return the number of the request's latest tokens that match those up to ``place``."""
        length = 0
        for token in reversed(stream.recent):
            if place <= oldest or self._tokens[place & self._mask] != token:
                break
            length += 1
            place = self._before[place & self._mask]
        return length


def capacity_for(tokens: int) -> int:
    """Return the least capacity that has room for so many tokens."""
    return 1 << max(tokens - 1, 0).bit_length()


def _chains(capacity: int) -> list[array[int]]:
    return [array("q", bytes(8 * capacity)) for _ in ORDERS]


def _runs(first: int, stop: int, old: int, new: int) -> list[tuple[int, int]]:
    """Cut the entries from ``first`` to before ``stop`` where a ring of one of two capacities
    begins again: ``(first, count)`` of each run, consecutive in both."""
    found: list[tuple[int, int]] = []
    while first < stop:
        count = min(stop - first, old - first % old, new - first % new)
        found.append((first, count))
        first += count
    return found


def _moved(table: array[int], capacity: int, runs: Sequence[tuple[int, int]]) -> array[int]:
    """Return a table of another capacity with the runs of entries of ``table``."""
    moved = array(table.typecode, bytes(table.itemsize * capacity))
    for first, count in runs:
        to, at = first % capacity, first % len(table)
        moved[to : to + count] = table[at : at + count]
    return moved
