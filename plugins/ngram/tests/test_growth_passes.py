"""The passes in Triton and in C grow the drafts that torch grows."""

from __future__ import annotations

import random

import attrs
import pytest
import torch
from torch import Tensor

from specplug import Draft
from specplug_ngram.compiled_drafter import load_library
from specplug_ngram.compiled_growth import CompiledGrowth
from specplug_ngram.growth import Grow
from specplug_ngram.growth_input import Form, packed
from specplug_ngram.growth_kernels import grow_by_kernels, write_by_kernel
from specplug_ngram.path_continuation import LEAST_SCORE, grow_in_torch, write_in_torch
from specplug_ngram.worker import HostDraft

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@attrs.frozen
class Case:
    """The arguments of a pass."""

    texts: Tensor
    draft: Draft
    given: Tensor
    rows: Tensor
    ends: Tensor
    form: Form

    def run(self, grow: Grow, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """Return the texts as the pass leaves them, and what it returns, on the host."""
        draft, texts = self.draft, self.texts.clone().to(device)
        moved = attrs.evolve(
            draft,
            tokens=draft.tokens.to(device),
            parents=None if draft.parents is None else draft.parents.to(device),
            scores=None if draft.scores is None else draft.scores.to(device),
        )
        of_requests = (each.to(device) for each in (self.given, self.rows, self.ends))
        found = grow(texts, moved, *of_requests, self.form)
        return texts.cpu(), [tensor.cpu() for tensor in found]


def tree_of(chance: random.Random, width: int, vocab: int) -> list[tuple[int, int]]:
    """Return the token and parent of each node of a random tree; siblings differ."""
    nodes, taken = [(0, -1)], set()
    while len(nodes) < width:
        parent = max(chance.randrange(len(nodes)), chance.randrange(len(nodes)))
        token = chance.randrange(vocab)
        if (token, parent) not in taken:
            taken.add((token, parent))
            nodes.append((token, parent))
    return nodes


def depth_of(tree: list[tuple[int, int]]) -> int:
    """Return the greatest depth of a node."""
    depths: list[int] = []
    for _, parent in tree:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return max(depths)


def case_of(seed: int, *, is_exact: bool = False, least: int = 1) -> Case:
    """Draw a case of drafts of at least so many nodes; in an exact one sums of scores are not
    rounded, and many are equal."""
    chance = random.Random(seed)
    bs, own_nodes = chance.randint(1, 4), chance.choice([1, 2, 5, 8])
    width = least + chance.randrange(9)
    vocab, length = chance.choice([3, 5, 9]), chance.choice([20, 60, 1500])
    rows = torch.tensor(chance.sample(range(1, 6), bs))
    texts = torch.randint(vocab, (6, length), generator=torch.Generator().manual_seed(seed))
    ends = torch.tensor([chance.randrange(length + 2) for _ in range(bs)])
    if chance.random() < 0.2:
        ends[0] = chance.randrange(4)

    def score() -> float:
        if chance.random() < 0.1:
            return chance.choice([LEAST_SCORE, -torch.inf])
        return -chance.randrange(9) / 8 if is_exact else -3 * chance.random()

    def scores(count: int) -> Tensor:
        return torch.tensor([[0.0] + [score() for _ in range(count - 1)] for _ in range(bs)])

    trees = [tree_of(chance, width, vocab) for _ in range(bs)]
    is_chain, has_scores = chance.random() < 0.4, chance.random() < 0.8
    tokens = torch.tensor([[token for token, _ in tree] for tree in trees])
    draft = Draft(
        tokens=tokens,
        parents=None if is_chain else torch.tensor([[p for _, p in tree] for tree in trees]),
        widths=None,
        depth=max(width - 1, 0),
        scores=scores(width) if has_scores else None,
    )
    others = [tree_of(chance, own_nodes, vocab) for _ in range(bs)]
    own = HostDraft(
        tokens=torch.tensor([[token for token, _ in tree] for tree in others]),
        parents=torch.tensor([[p for _, p in tree] for tree in others]),
        scores=scores(own_nodes),
        widths=[chance.randint(1, own_nodes) for _ in range(bs)],
        depth=own_nodes - 1,
    )
    widths = [chance.randint(1, width) for _ in range(bs)]
    novelty = [chance.choice([0.05, 1.0, 8.0, torch.inf]) for _ in range(bs)]
    given = packed(own if own_nodes > 1 else None, widths, novelty, own_nodes)
    # Without scores many paths are equal: a sum of more than two terms depends on their order.
    steps = 0 if is_exact else chance.randint(0, 7 if has_scores else 2)
    deepest = max(map(depth_of, [*trees, *others]))
    depth = (max(deepest, width - 1) if is_chain else deepest) + chance.choice([steps, steps // 2])
    form = Form(chance.randint(1, width + own_nodes - 1), steps, depth)
    return Case(texts.int(), draft, given, rows, ends, form)


@pytest.fixture(scope="module")
def compiled() -> CompiledGrowth:
    library = load_library()
    if library is None:
        pytest.skip("no C compiler")
    return CompiledGrowth(library)


def check(case: Case, grow: Grow, device: torch.device) -> None:
    """Compare what a pass grows with what torch does. The last column of a text is of no use."""
    texts, expected = case.run(grow_in_torch, device)
    texts_of_pass, found = case.run(grow, device)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[2], expected[2])
    assert torch.equal(texts[:, :-1], texts_of_pass[:, :-1])


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_kernels_grow_as_torch_does(seed: int, is_exact: bool) -> None:
    check(case_of(seed, is_exact=is_exact), grow_by_kernels, DEVICE)


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("start", range(0, 1000, 100))
def test_c_grows_as_torch_does(start: int, is_exact: bool, compiled: CompiledGrowth) -> None:
    for seed in range(start, start + 100):
        check(case_of(seed, is_exact=is_exact), compiled.grow, CPU)


@pytest.mark.parametrize("depth", [2, 3, 5, 9])
def test_continued_paths_end_at_the_depth(depth: int, compiled: CompiledGrowth) -> None:
    text = torch.arange(30, dtype=torch.int32).remainder(10).unsqueeze(0)
    draft = Draft.chain(torch.tensor([[5, 6, 7]]))
    given = packed(None, [3], [1.0], 1)
    rows, ends = torch.tensor([0]), torch.tensor([25])
    case = Case(text, draft, given, rows, ends, Form(12, 7, depth))
    check(case, grow_by_kernels, DEVICE)
    check(case, compiled.grow, CPU)
    _, (_, parents, _) = case.run(grow_in_torch, CPU)
    assert int((parents >= 0).sum()) == depth


@pytest.mark.parametrize("least", [60, 120])
def test_wide_drafts_grow_alike(least: int, compiled: CompiledGrowth) -> None:
    for seed in range(4):
        check(case_of(seed, least=least), grow_by_kernels, DEVICE)
        check(case_of(seed, least=least), compiled.grow, CPU)


@pytest.mark.parametrize("columns", [1, 5])
@pytest.mark.parametrize("by", ["C", "Triton"])
def test_tokens_are_written_as_by_torch(by: str, columns: int, compiled: CompiledGrowth) -> None:
    device, write = (CPU, compiled.write) if by == "C" else (DEVICE, write_by_kernel)
    texts = [torch.zeros(4, 12, dtype=torch.int32, device=device) for _ in range(2)]
    rows, ends = (torch.tensor(each, device=device) for each in ([3, 1], [2, 9]))
    tokens = torch.arange(2 * columns, device=device).view(2, -1) + 1
    write_in_torch(texts[0], tokens, rows, ends)
    write(texts[1], tokens, rows, ends)
    assert texts[0][:, :-1].any()
    assert torch.equal(texts[0][:, :-1], texts[1][:, :-1])
