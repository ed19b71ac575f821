"""LOOKAHEAD: its pool, and the conformance kit."""

from __future__ import annotations

from shallow_tests import ShallowTests

from specplug_lookahead import Lookahead, Trie, algorithm


class TestLookahead(ShallowTests):
    algorithm = algorithm


def test_paths_that_begin_alike_share_nodes() -> None:
    trie = Trie(7, most=4, deepest=2)
    first = trie.add(0, 1)
    assert trie.add(0, 1) == first
    assert trie.add(first, 2) == 2
    assert trie.add(2, 3) is None  # too deep
    assert trie.add(0, 4) == 3
    assert trie.add(0, 5) is None  # no room
    assert (trie.tokens, trie.parents) == ([7, 1, 2, 4], [-1, 0, 1, 0])


def test_what_followed_in_the_prompt_is_drafted() -> None:
    guessed = Lookahead([1, 2, 3, 4, 9, 9, 1], window=1, size=4)
    trie = guessed.draft(most=4, deepest=3, candidates=1)
    assert trie.tokens == [1, 2, 3, 4]


def test_what_the_target_says_of_the_window_is_drafted() -> None:
    guessed = Lookahead([5, 6], window=1, size=2)  # the window: the guess 6
    trie = guessed.draft(most=8, deepest=4, candidates=1)
    said = [-1] * len(trie.tokens)
    said[trie.tokens.index(6, 1)] = 8
    guessed.learn(said)
    guessed.commit([6])
    assert 8 in guessed.draft(most=3, deepest=1, candidates=2).tokens
