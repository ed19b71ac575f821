"""Where did these last few tokens stand before, and what came then?"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

LONGEST = 8
SHORTEST = 3


class SuffixIndex:
    """The latest place of every n-gram of one growing sequence.

    Adding a token costs the same however long the sequence is: one entry for each n from
    ``SHORTEST`` to ``LONGEST``. An n-gram is entered when its next token is known.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self.places: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        for token in tokens:
            end = len(self.tokens)
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                self.places[tuple(self.tokens[end - n : end])] = end
            self.tokens.append(token)

    def continuation(self, suffix: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that followed the longest known end of ``suffix``."""
        for n in range(min(LONGEST, len(suffix)), SHORTEST - 1, -1):
            place = self.places.get(tuple(suffix[-n:]))
            if place is not None:
                return self.tokens[place : place + count]
        return []


class SharedIndex:
    """The n-grams of ended requests, at most ``max_tokens`` tokens; the oldest go first."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._sequences: deque[SuffixIndex] = deque()
        self._places: dict[tuple[int, ...], SuffixIndex] = {}

    def add(self, sequence: SuffixIndex) -> None:
        """Take over an ended request's sequence."""
        if len(sequence.tokens) > self.max_tokens:
            return
        self._sequences.append(sequence)
        self.num_tokens += len(sequence.tokens)
        self._places.update(dict.fromkeys(sequence.places, sequence))
        while self.num_tokens > self.max_tokens:
            self._drop(self._sequences.popleft())

    def continuation(self, suffix: Sequence[int], count: int) -> list[int]:
        """As ``SuffixIndex.continuation``, over the latest request that holds the n-gram."""
        for n in range(min(LONGEST, len(suffix)), SHORTEST - 1, -1):
            gram = tuple(suffix[-n:])
            sequence = self._places.get(gram)
            if sequence is not None:
                place = sequence.places[gram]
                return sequence.tokens[place : place + count]
        return []

    def _drop(self, sequence: SuffixIndex) -> None:
        self.num_tokens -= len(sequence.tokens)
        for gram in sequence.places:
            if self._places.get(gram) is sequence:
                del self._places[gram]
