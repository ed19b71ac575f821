"""Trees through a lattice are what best first finds, node by node."""

from __future__ import annotations

import heapq
import math

import pytest
import torch
from torch import Tensor

from specplug import Draft, Lattice, likeliest_tree, longest_path


def random_lattice(bs: int, steps: int, width: int, *, pairs: bool) -> Lattice:
    """Candidates of random tokens; their scores depend on the candidate before, or do not."""
    torch.manual_seed(0)
    tokens = torch.stack([torch.randperm(50)[:width] for _ in range(bs * steps)])
    scores = [
        torch.randn(bs, width if pairs and step else 1, width, dtype=torch.float64)
        for step in range(steps)
    ]
    return Lattice(
        tokens.view(bs, steps, width).unbind(1), [3 * each.log_softmax(-1) for each in scores]
    )


def best_first(
    lattice: Lattice, request: int, topk: int, count: int
) -> dict[tuple[int, ...], float]:
    """The ``count`` likeliest paths of a request, as tokens, and the sum of each one's scores."""
    heap: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = [(0.0, (), ())]
    found: dict[tuple[int, ...], float] = {}
    while heap and len(found) <= count:
        loss, ranks, path = heapq.heappop(heap)
        found[path] = -loss
        if len(ranks) == len(lattice.tokens):
            continue
        scores = lattice.scores[len(ranks)][request]
        row = scores[ranks[-1] if len(scores) > 1 else 0]
        for rank in row.topk(topk).indices.tolist():
            token = int(lattice.tokens[len(ranks)][request, rank])
            heapq.heappush(heap, (loss - float(row[rank]), (*ranks, rank), (*path, token)))
    del found[()]
    return found


def paths_of(tokens: Tensor, parents: Tensor, scores: Tensor) -> dict[tuple[int, ...], float]:
    """All paths of one request's tree from its root, and the sum of each one's scores."""
    paths: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for token, parent, score in zip(
        tokens[1:].tolist(), parents[1:].tolist(), scores[1:].tolist(), strict=True
    ):
        path, above = paths[parent]
        paths.append(((*path, token), above + score))
    return dict(paths[1:])


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    ("steps", "width", "topk", "nodes"),
    [(1, 4, 4, 5), (1, 4, 2, 9), (4, 3, 3, 5), (4, 3, 3, 20), (7, 5, 2, 16), (7, 5, 5, 64)],
)
def test_tree_has_the_nodes_that_best_first_finds(
    pairs: bool, steps: int, width: int, topk: int, nodes: int
) -> None:
    lattice = random_lattice(3, steps, width, pairs=pairs)
    roots = torch.tensor([7, 8, 9])
    tokens, parents, scores = likeliest_tree(lattice, roots, topk, nodes)
    Draft.tree(tokens, parents, steps, scores=scores).check(values=True)
    assert tokens[:, 0].tolist() == [7, 8, 9]
    for request in range(3):
        found = paths_of(tokens[request], parents[request], scores[request])
        expected = best_first(lattice, request, topk, nodes - 1)
        assert found.keys() == expected.keys()
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("steps", "width"), [(1, 4), (2, 4), (5, 3)])
def test_path_is_expected_to_be_accepted_furthest(pairs: bool, steps: int, width: int) -> None:
    lattice = random_lattice(3, steps, width, pairs=pairs)
    tokens, scores = longest_path(lattice)
    for request in range(3):
        everything = best_first(lattice, request, width, sum(width**s for s in range(1, steps + 1)))
        whole = [path for path in everything if len(path) == steps]

        def furthest(path: tuple[int, ...], sums: dict[tuple[int, ...], float]) -> float:
            return sum(math.exp(sums[path[: i + 1]]) for i in range(len(path)))

        best = max(whole, key=lambda path: furthest(path, everything))
        assert tuple(tokens[request].tolist()) == best
        assert float(scores[request].sum()) == pytest.approx(everything[best])


def test_path_prefers_a_sure_start_to_a_likelier_whole() -> None:
    """Greedy takes b, then has 0.1 ahead; the likeliest whole is a's."""
    first = torch.tensor([[[0.4, 0.6]]]).log()
    then = torch.tensor([[[0.9, 0.1], [0.5, 0.5]]]).log()
    tokens = [torch.tensor([[10, 11]]), torch.tensor([[20, 21]])]
    path, scores = longest_path(Lattice(tokens, [first, then]))
    assert path.tolist() == [[11, 20]]  # 0.6 + 0.3 against 0.4 + 0.36
    torch.testing.assert_close(scores.exp(), torch.tensor([[0.6, 0.5]]))


def test_tree_of_no_request_has_no_row() -> None:
    lattice = random_lattice(2, 3, 4, pairs=True)
    empty = Lattice([t[:0] for t in lattice.tokens], [s[:0] for s in lattice.scores])
    tokens, parents, scores = likeliest_tree(empty, torch.zeros(0, dtype=torch.int64), 4, 8)
    assert tokens.shape == parents.shape == scores.shape == (0, 8)
