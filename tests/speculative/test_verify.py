"""Acceptance is a walk down the tree; compaction keeps what that walk met."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import Draft, VerifyOutput, verify_tree
from specplug.speculative.verify import compact

VOCAB_SIZE = 8
exactly = settings(max_examples=400, deadline=None, derandomize=True, database=None)


@attrs.frozen
class Case:
    """Padded drafts, and the target's token after each node that counts."""

    depth: int
    widths: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    parents: tuple[tuple[int, ...], ...]
    predict: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.widths)

    def tree(self) -> Draft:
        shape = self.size, -1 if self.size else 1
        tokens = torch.tensor(self.tokens, dtype=torch.int64).view(shape)
        parents = torch.tensor(self.parents, dtype=torch.int64).view(shape)
        return Draft.tree(tokens, parents, self.depth, self.widths)

    def flat(self) -> torch.Tensor:
        flat = [
            t for row, width in zip(self.predict, self.widths, strict=True) for t in row[:width]
        ]
        return torch.tensor(flat, dtype=torch.int64)

    def walk(self, b: int) -> list[int]:
        """The accepted nodes of request b, from the root, one by one."""
        path = [0]
        while True:
            wanted = self.predict[b][path[-1]]
            children = [i for i in range(1, self.widths[b]) if self.parents[b][i] == path[-1]]
            right = [i for i in children if self.tokens[b][i] == wanted]
            if not right:
                return path
            path += right


@st.composite
def cases(draw: Callable[..., Any], chain: bool = False) -> Case:
    size, width = draw(st.integers(0, 4)), draw(st.integers(1, 9))
    depth = width - 1 if chain else draw(st.integers(min(1, width - 1), 5))
    token = st.integers(0, VOCAB_SIZE - 1)
    widths, tokens, parents, predict = [], [], [], []
    for _ in range(size):
        nodes, above, depths = [draw(token)], [-1], [0]
        for i in range(1, width):
            open_to = [
                p
                for p in range(i)
                if depths[p] < depth and above.count(p) < VOCAB_SIZE and (p == i - 1 or not chain)
            ]
            parent = draw(st.sampled_from(open_to))
            taken = {nodes[j] for j in range(i) if above[j] == parent}
            nodes.append(draw(token.filter(lambda t, taken=taken: t not in taken)))
            above.append(parent)
            depths.append(depths[parent] + 1)
        widths.append(draw(st.integers(1, width)))
        tokens.append(tuple(nodes))
        parents.append(tuple(above))
        below = [[nodes[j] for j in range(width) if above[j] == i] for i in range(width)]
        likely = [st.sampled_from(children) | token if children else token for children in below]
        predict.append(tuple(draw(of_node) for of_node in likely))
    return Case(depth, tuple(widths), tuple(tokens), tuple(parents), tuple(predict))


def _check(case: Case, draft: Draft, verified: VerifyOutput) -> None:
    assert verified.accept_index.shape == (case.size, draft.columns)
    assert verified.predict.tolist() == case.flat().tolist()
    root = 0
    for b in range(case.size):
        path = case.walk(b)
        padding = [-1] * (draft.columns - len(path))
        assert verified.accept_index[b].tolist() == [root + i for i in path] + padding
        assert int(verified.accept_lens[b]) == len(path)
        assert int(verified.bonus_tokens[b]) == case.predict[b][path[-1]]
        root += case.widths[b]


def _check_links(case: Case, draft: Draft, verified: VerifyOutput) -> None:
    """As a kernel goes: to the first child while its token is right, else to the next sibling."""
    next_token, next_sibling = (link.tolist() for link in draft.links)
    for b in range(case.size):
        path, node = [0], next_token[b][0]
        while node >= 0:
            if case.tokens[b][node] == case.predict[b][path[-1]]:
                path.append(node)
                node = next_token[b][node]
            else:
                node = next_sibling[b][node]
        first = int(draft.offsets[b])
        accepted = [i - first for i in verified.accept_index[b].tolist() if i >= 0]
        assert path == accepted
        # Every node that counts is met exactly once by following all links.
        met, stack = [], [0]
        while stack:
            node = stack.pop()
            met.append(node)
            stack += [n for n in (next_token[b][node], next_sibling[b][node]) if n >= 0]
        assert sorted(met) == list(range(case.widths[b]))


@exactly
@given(case=cases())
def test_trees_are_accepted_as_by_a_plain_walk(case: Case) -> None:
    """And as by a walk along the links."""
    draft = case.tree()
    verified = verify_tree(draft, case.flat())
    _check(case, draft, verified)
    _check_links(case, draft, verified)


@exactly
@given(case=cases(chain=True))
def test_chains_are_accepted_as_by_a_plain_walk(case: Case) -> None:
    tokens = torch.tensor(case.tokens, dtype=torch.int64).view(case.size, -1 if case.size else 1)
    draft = Draft.chain(tokens, case.widths)
    verified = verify_tree(draft, case.flat())
    _check(case, draft, verified)
    _check_links(case, draft, verified)


@exactly
@given(case=cases())
def test_compaction_walks_every_output(case: Case) -> None:
    draft = case.tree()
    verified = verify_tree(draft, case.flat())
    total = sum(case.widths)
    per_node = {
        "hidden_states": torch.arange(total * 3.0).view(total, 3),
        "routed_experts": torch.arange(total * 4).view(total, 2, 2),
        "score": torch.arange(total, dtype=torch.float64),
    }
    nodes = draft.flatten(draft.tokens)
    kept = compact(verified, nodes, per_node)
    columns = draft.columns
    assert list(kept.per_node) == list(per_node)
    assert kept.next_tokens.shape == (case.size * columns,)
    for name, tensor in kept.per_node.items():
        assert tensor.shape == (case.size * columns, *per_node[name].shape[1:])
    root = 0
    for b in range(case.size):
        path = case.walk(b)
        first = b * columns
        assert int(kept.last_rows[b]) == first + len(path) - 1
        for column in range(columns):
            # After the accepted path the root is repeated, so that every row is a real one.
            node = root + (path[column] if column < len(path) else 0)
            assert int(kept.next_tokens[first + column]) == int(case.flat()[node])
            assert int(kept.own_tokens[first + column]) == int(nodes[node])
            for name, tensor in kept.per_node.items():
                assert torch.equal(tensor[first + column], per_node[name][node])
        root += case.widths[b]
    assert torch.equal(kept.accept_lens, verified.accept_lens)
    assert torch.equal(kept.bonus_tokens, verified.bonus_tokens)


def test_a_root_alone_accepts_itself_and_its_bonus_token() -> None:
    verified = verify_tree(Draft.chain(torch.tensor([[7], [8]])), torch.tensor([3, 4]))
    assert verified.accept_index.tolist() == [[0], [1]]
    assert verified.accept_lens.tolist() == [1, 1]
    assert verified.bonus_tokens.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"accept_lens": [1]}, "accept_index"),
        ({"accept_lens": [0]}, "accept_index"),
        ({"accept_index": [[0, 2]]}, "accept_index"),
        ({"accept_index": [[-1, -1]]}, "accept_index"),
        ({"bonus_tokens": [5]}, "bonus_tokens"),
        ({"predict": [2, 9, 9]}, "predict"),
        ({"predict": [-2, 3, 4]}, "predict"),
        ({"predict": [1, 3, 10]}, "predict"),
    ],
)
def test_a_result_that_is_no_path_is_told(changes: dict[str, Any], why: str) -> None:
    draft = Draft.tree(torch.tensor([[7, 1, 2]]), torch.tensor([[-1, 0, 0]]), 1)
    values = {"predict": [1, 3, 4], "accept_index": [[0, 1]], "accept_lens": [2]}
    values["bonus_tokens"] = [3]
    sound = VerifyOutput(**{name: torch.tensor(value) for name, value in values.items()})
    predict = sound.predict.clone()
    sound.check(draft, predict, 2, values=True)
    wrong = attrs.evolve(sound, **{name: torch.tensor(v) for name, v in changes.items()})
    with pytest.raises(ValueError, match=f"{why}=.*; expected"):
        wrong.check(draft, predict, 2, values=True)


@exactly
@given(case=cases(), data=st.data())
def test_any_result_is_bounded_to_a_path(case: Case, data: st.DataObject) -> None:
    """A sound one stays as it is; of any other what is left is a path from each root, of the
    target's own tokens."""
    draft, total, predict = case.tree(), sum(case.widths), case.flat()
    sound = verify_tree(draft, predict)
    kept = sound.bounded(draft, predict)
    for name in ("predict", "accept_index", "accept_lens", "bonus_tokens"):
        assert torch.equal(getattr(kept, name), getattr(sound, name)), name
    number = st.integers(-2, 12)

    def numbers(*shape: int) -> torch.Tensor:
        size = math.prod(shape)
        drawn = data.draw(st.lists(number, min_size=size, max_size=size))
        return torch.tensor(drawn, dtype=torch.int64).view(shape)

    columns = data.draw(st.integers(1, draft.columns))
    kept = VerifyOutput(
        predict=numbers(total),
        accept_index=numbers(case.size, columns),
        accept_lens=numbers(case.size),
        bonus_tokens=numbers(case.size),
    ).bounded(draft, predict)
    assert torch.equal(kept.predict, predict)
    root = 0
    for b, width in enumerate(case.widths):
        length = int(kept.accept_lens[b])
        index = kept.accept_index[b].tolist()
        assert 1 <= length <= min(columns, width)
        assert index[0] == root
        assert index[length:] == [-1] * (columns - length)
        for before, node in pairwise(index[:length]):
            assert case.parents[b][node - root] == before - root
            assert case.tokens[b][node - root] == int(kept.predict[before])
        assert int(kept.bonus_tokens[b]) == int(kept.predict[index[length - 1]])
        assert 0 <= int(kept.bonus_tokens[b]) < VOCAB_SIZE
        root += width


def test_equal_siblings_are_one_path() -> None:
    """No drafter should make them, and they must not take the run down."""
    tokens, parents = torch.tensor([[5, 7, 7, 8]]), torch.tensor([[-1, 0, 0, 2]])
    draft = Draft(tokens=tokens, parents=parents, widths=None, depth=2)
    verified = verify_tree(draft, torch.tensor([7, 8, 8, 9]))
    assert verified.accept_index.tolist() == [[0, 2, 3]]
    assert verified.accept_lens.tolist() == [3]
    assert verified.bonus_tokens.tolist() == [9]
