"""The histories of all owners, within one budget of bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import attrs

from specplug_ngram.history import TOKEN_BYTES, History, capacity_for

FIRST_CAPACITY = 256
"""The tokens that an owner's first tables have room for."""


@attrs.define(eq=False)
class Owner:
    """A history, and the number of running requests that write to it and draft from it."""

    history: History
    running: int = 0


class Index:
    """A history for each owner. A request drafts from its owner's history and from the corpus.

    An owner's tables double as its text grows. If the budget is full, they make room so: owners
    without a running request go, the least recently used first; then the largest owner loses the
    older half of its tokens, if it is larger than the tables that need room. What cannot grow after
    that drops its oldest tokens. So an owner's drafts may depend on how much the others have
    written, and never on what.

    Args:
        most_bytes: the most bytes of all tables, of the corpus too.
        relink: of the histories.
        first_capacity: the tokens that an owner's first tables have room for.

    Attributes:
        corpus: a history that all owners draft from, and none writes to; None: there is none.
        num_bytes: the bytes of all tables.
    """

    def __init__(
        self,
        most_bytes: int,
        relink: Callable[[int], None] | None = None,
        first_capacity: int = FIRST_CAPACITY,
    ) -> None:
        self.most_bytes = most_bytes
        self.corpus: History | None = None
        self.num_bytes = 0
        self._relink = relink
        self._first = first_capacity
        self._owners: dict[Hashable, Owner] = {}  # those without a request in order of last use
        self._full: list[History] = []

    def __len__(self) -> int:
        """Return the number of owners."""
        return len(self._owners)

    @property
    def num_tokens(self) -> int:
        """The tokens of all owners, without the corpus."""
        return sum(len(owner.history) for owner in self._owners.values())

    def history(self, key: Hashable) -> History | None:
        """Return an owner's history; None if the index has none of it."""
        owner = self._owners.get(key)
        return None if owner is None else owner.history

    def bytes_with(self, num_tokens: int) -> int:
        """Return the bytes of a corpus of so many tokens and of an owner's first tables."""
        return (capacity_for(num_tokens) + self._first) * TOKEN_BYTES

    def open_corpus(self, num_tokens: int) -> History | None:
        """Make the corpus, for so many tokens. None: the budget has no room for it and an owner."""
        if self.bytes_with(num_tokens) > self.most_bytes:
            return None
        self.corpus = History(capacity_for(num_tokens))
        self.num_bytes += self.corpus.num_bytes
        return self.corpus

    def open(self, key: Hashable) -> History | None:
        """Return the history of an owner for one more running request, a new one for a new owner.

        None: the budget has no room for it. ``close`` is to be called in any case but this one.
        """
        owner = self._owners.get(key)
        if owner is None:
            if not self._make_room(self._first, 0):
                return None
            owner = self._owners[key] = Owner(History(self._first, self._relink))
            self.num_bytes += owner.history.num_bytes
        owner.running += 1
        return owner.history

    def close(self, key: Hashable, *, keep: bool) -> None:
        """End a request's use of its owner's history.

        Args:
            keep: whether the text stays for the owner's next requests.
        """
        owner = self._owners[key]
        owner.running -= 1
        if owner.running:
            return
        del self._owners[key]
        if keep:
            self._owners[key] = owner  # now the most recently used
        else:
            self.num_bytes -= owner.history.num_bytes
        self._let_grow()

    def remove(self, key: Hashable) -> None:
        """Drop an owner's text. Its running requests go on, and write to an empty history."""
        owner = self._owners.get(key)
        if owner is None:
            return
        self.num_bytes -= owner.history.num_bytes
        if owner.running:
            owner.history.clear(self._first)
            self.num_bytes += owner.history.num_bytes
        else:
            del self._owners[key]
        self._let_grow()

    def clear(self) -> None:
        """Drop the text of all owners. The corpus stays."""
        for key in list(self._owners):
            self.remove(key)

    def reserve(self, history: History, count: int) -> None:
        """Make room for ``count`` more tokens of a history, as far as the budget allows."""
        needed = history.lacks(count)
        if not needed:
            return
        before, capacity = history.capacity, capacity_for(needed)
        while capacity > before and not self._make_room(capacity, before):
            capacity //= 2
        if capacity > history.capacity:
            history.resize(capacity)
            self.num_bytes += (capacity - before) * TOKEN_BYTES
        if capacity < needed:
            self._fill(history)

    def _make_room(self, capacity: int, before: int) -> bool:
        """Make room for tables of a capacity in the place of smaller ones; return whether that was
        possible."""
        more = (capacity - before) * TOKEN_BYTES
        corpus = 0 if self.corpus is None else self.corpus.num_bytes
        if corpus + capacity * TOKEN_BYTES > self.most_bytes:
            return False
        while self.num_bytes + more > self.most_bytes:
            idle = next((key for key, each in self._owners.items() if not each.running), None)
            if idle is not None:
                self.num_bytes -= self._owners.pop(idle).history.num_bytes
                continue
            running = (owner.history for owner in self._owners.values())
            largest = max(running, key=lambda history: history.capacity, default=None)
            if largest is None or largest.capacity <= max(capacity, self._first):
                return False
            half = largest.capacity // 2
            largest.resize(half)
            self._fill(largest)
            self.num_bytes -= half * TOKEN_BYTES
        return True

    def _fill(self, history: History) -> None:
        """Let a history grow no more before another one makes room."""
        history.is_full = True
        self._full.append(history)

    def _let_grow(self) -> None:
        """Let full histories grow again, since room was made."""
        for history in self._full:
            history.is_full = False
        self._full.clear()
