"""The tree is what a plain count of continuations says, and no larger than pays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug_ngram.draft_tree import MAX_PLACES, DraftTree, Shape, draft_tree
from specplug_ngram.history import ORDERS, History, Stream
from specplug_ngram.policy import Novelty

exactly = settings(max_examples=300, deadline=None, derandomize=True, database=None)
texts = st.lists(st.integers(0, 3), max_size=60)
Path = tuple[int, ...]


def _draft(
    text: Sequence[int], shape: Shape, least: float = 0.0, novelty: Novelty | None = None
) -> DraftTree:
    history, stream = History(1 << 14), Stream()
    history.extend(stream, text)
    return draft_tree(history, stream, novelty or Novelty(), shape, least)


def _followed(text: Sequence[int]) -> tuple[int, list[Path]]:
    """The longest match of the end, and what followed it at each of its places, latest first."""
    for order in ORDERS:
        lengths = {}
        for end in range(len(text) - 1, order - 1, -1):
            if list(text[end - order : end]) == list(text[len(text) - order :]):
                length = order
                while length < min(ORDERS[0], end) and text[end - length - 1] == text[-length - 1]:
                    length += 1
                lengths[end] = length
        latest = dict(list(lengths.items())[:MAX_PLACES])
        if latest:
            longest = max(latest.values())
            return longest, [tuple(text[end:]) for end, n in latest.items() if n == longest]
    return 0, []


def _counted(text: Sequence[int], topk: int, steps: int) -> dict[Path, float]:
    """The probability of every path of a tree without a limit of nodes."""
    matched, followed = _followed(text)
    novelty = Novelty()
    found: dict[Path, float] = {(): 1.0}
    for depth in range(steps):
        for path in [p for p in found if len(p) == depth]:
            tokens = [f[depth] for f in followed if f[:depth] == path and len(f) > depth]
            best = sorted(set(tokens), key=lambda t: (-tokens.count(t), tokens.index(t)))[:topk]
            for token in best:
                share = tokens.count(token) / len(tokens)
                known = novelty.known(matched + depth, len(tokens))
                found[*path, token] = found[path] * known * share
    return found


def _paths(tree: DraftTree) -> list[Path]:
    paths: list[Path] = [()]
    for node in tree.nodes[1:]:
        paths.append((*paths[node.parent], node.token))
    return paths


@exactly
@given(text=texts, topk=st.integers(1, 4), steps=st.integers(1, 5))
def test_without_a_limit_it_is_all_that_followed(text: list[int], topk: int, steps: int) -> None:
    tree = _draft(text, Shape(topk, steps, 10_000))
    drafted = dict(zip(_paths(tree), (node.probability for node in tree.nodes), strict=True))
    assert drafted == pytest.approx(_counted(text, topk, steps))


@exactly
@given(text=texts, topk=st.integers(1, 4), steps=st.integers(1, 5))
def test_scores_are_counted_continuations(text: list[int], topk: int, steps: int) -> None:
    tree = _draft(text, Shape(topk, steps, 10_000))
    counted = _counted(text, topk, steps)
    assert tree.scores[0] == 0
    for path, score in zip(_paths(tree)[1:], tree.scores[1:], strict=True):
        assert math.exp(score) == pytest.approx(counted[path] / counted[path[:-1]])
        assert score < 0


@exactly
@given(text=texts, topk=st.integers(1, 4), steps=st.integers(1, 5), nodes=st.integers(1, 12))
def test_with_a_limit_it_is_the_most_probable(
    text: list[int], topk: int, steps: int, nodes: int
) -> None:
    tree = _draft(text, Shape(topk, steps, nodes))
    best = sorted(_counted(text, topk, steps).values(), reverse=True)[:nodes]
    assert [node.probability for node in tree.nodes] == pytest.approx(best)


@exactly
@given(text=texts, topk=st.integers(1, 4), steps=st.integers(1, 5), nodes=st.integers(1, 12))
def test_it_is_a_tree_within_its_shape(text: list[int], topk: int, steps: int, nodes: int) -> None:
    tree = _draft(text, Shape(topk, steps, nodes), 0.1)
    paths = _paths(tree)
    assert len(set(paths)) == len(paths) <= nodes
    assert tree.nodes[0].parent == -1
    for index, node in enumerate(tree.nodes[1:], start=1):
        assert 0 <= node.parent < index
        assert node.depth == len(paths[index]) == tree.nodes[node.parent].depth + 1 <= steps
        assert sum(other.parent == node.parent for other in tree.nodes) <= topk
    assert tree.is_chain == all(b[:-1] == a for a, b in pairwise(paths))


@exactly
@given(text=texts, steps=st.integers(1, 5))
def test_a_chain_takes_the_most_frequent_then_the_latest(text: list[int], steps: int) -> None:
    tree = _draft(text, Shape(1, steps, steps + 1))
    _, followed = _followed(text)
    expected: list[int] = []
    while len(expected) < steps:
        tokens = [f[len(expected)] for f in followed if len(f) > len(expected)]
        if not tokens:
            break
        expected.append(max(tokens, key=lambda t: (tokens.count(t), -tokens.index(t))))
        followed = [f for f in followed if f[: len(expected)] == tuple(expected)]
    assert tree.is_chain
    assert [node.token for node in tree.nodes[1:]] == expected


def test_branches_are_ordered_by_frequency_then_by_time() -> None:
    text = [1, 2, 7, 0, 1, 2, 8, 0, 1, 2, 8, 0, 1, 2, 9, 5, 1, 2]
    tree = _draft(text, Shape(4, 1, 5))
    assert [node.token for node in tree.nodes[1:]] == [8, 9, 7]
    assert [node.token for node in _draft(text, Shape(2, 1, 5)).nodes[1:]] == [8, 9]
    assert not tree.is_chain


def test_rare_token_precedes_the_end_of_a_frequent_branch() -> None:
    often = [1, 2, *range(10, 17)]
    text = [*often, 30, 1, 2, 20, 31, *often, 32, 1, 2]
    tree = _draft(text, Shape(2, 7, 9), novelty=Novelty(math.log(4)))
    assert [node.token for node in tree.nodes[1:]] == [10, 11, 12, 20, 13, 14, 15, 16]


def test_only_what_is_more_probable_than_the_least_is_drafted() -> None:
    text = [*range(20), *range(5)]
    shape = Shape(1, 7, 8)
    everything = _draft(text, shape)
    assert len(everything.nodes) == 8
    for count in range(1, 8):
        tree = _draft(text, shape, least=everything.nodes[count].probability)
        assert [n.token for n in tree.nodes] == [n.token for n in everything.nodes[:count]]


def test_tree_learns_up_to_the_first_unforeseen_token() -> None:
    logs = []
    for came in ([5, 6], [5, 99], [5, 6, 7], [5, 6, 99, 8], [5, 6, 99, 9]):
        novelty = Novelty()
        _draft([1, 2, *range(3, 9), 1, 2], Shape(1, 7, 8)).learn(novelty, [3, 4, *came])
        logs.append(novelty.log)
    assert logs[2] < logs[0] < logs[1]
    assert logs[3] == logs[4] > logs[0]


def test_novelty_follows_whether_the_text_repeats() -> None:
    history, stream, novelty = History(1 << 14), Stream(), Novelty()
    shape = Shape(1, 7, 8)

    def widths(tokens: Sequence[int]) -> list[int]:
        found = []
        for token in tokens:
            tree = draft_tree(history, stream, novelty, shape, 0.15)
            found.append(len(tree.nodes))
            tree.learn(novelty, [token])
            history.extend(stream, [token])
        return found

    # Pairs that come back once, and are then followed by something new.
    pairs = [(3 * i, 3 * i + 1) for i in range(80)]
    widths([t for a, b in pairs for t in (a, b, a + 2)])
    surprising = widths([t for a, b in pairs for t in (a, b, a + 1000)])
    assert max(surprising[:30]) > 1
    assert max(surprising[-60:]) == 1
    repeating = [t for _ in range(12) for t in range(2000, 2010)]
    assert widths(repeating)[-10:] == [8] * 10
