"""Stop strings in a text that grows, all of them found in one pass over it.

This is the automaton of Aho and Corasick, "Efficient string matching", CACM 18 (1975): however many
strings there are, a character of text takes constant time on average.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Some strings, ready to be searched for.

    A state is the number of a prefix of the strings: the longest one that the text so far ends
    with. State 0 is the empty prefix.

    Args:
        strings: none of them empty.

    Attributes:
        depth: characters of each state's prefix.
        found: for each state the longest of the strings that the text ends with, or None.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.depth = [0]
        self.found: list[str | None] = [None]
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]
        for string in strings:
            self._add(string)
        self._link()

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
                self._next.append({})
                self._shorter.append(0)
            state = following
        self.found[state] = string

    def _link(self) -> None:
        """Set for each state, by depth, the longest shorter state that its text also ends with."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for character, following in self._next[state].items():
                shorter = self._shorter[following] = self.step(self._shorter[state], character)
                self.found[following] = self.found[following] or self.found[shorter]
                states.append(following)


@lru_cache(maxsize=64)
def stop_strings(strings: tuple[str, ...]) -> StopStrings | None:
    """Return the strings ready to be searched for, or None if there are none.

    Requests with the same strings share them.
    """
    return StopStrings(strings) if strings else None
