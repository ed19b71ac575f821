"""Whether scores rank nodes: those that the target took above those that it did not."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import attrs
import numpy as np

from specplug import Batch, Draft, RequestOutput, hookimpl
from specplug.testing.check import Failure

OWN = "its own"
MISPLACED: Mapping[str, tuple[int, int]] = {
    "the request before": (1, 0),
    "the request after": (-1, 0),
    "the node before": (0, 1),
    "the node after": (0, -1),
}
"""Whose a node's score may be by mistake; and how many rows and nodes further on its own one is
then."""

MOST_BETTER = 0.05
"""By how much a score from elsewhere may rank better, above what is chance: neighbouring nodes are
about as likely."""

LEAST_OF_CLAIMED = 1 / 3
"""The least part of what scores claim to tell that they tell. Scores that are about the same claim
little, so that weak ones are right; but a drafter may be too sure."""

DEVIATIONS = 3.0
"""Standard deviations that are chance."""

LEAST_NODES = 30
"""Nodes that were taken, and nodes that were not, from which on ranks say something."""


@attrs.frozen
class ScoredNodes:
    """Nodes whose parents the target took, of siblings the first one.

    Attributes:
        requests: [n] int64, a number for the request of each.
        depths: [n] int64, from 1 on.
        taken: [n] bool.
        scores: by whose they are, ``OWN`` or one of ``MISPLACED``, [n] float64; NaN where there is
            none.
    """

    requests: np.ndarray
    depths: np.ndarray
    taken: np.ndarray
    scores: Mapping[str, np.ndarray]

    def ranks(self, names: Sequence[str]) -> Ranks:
        """Return how the scores of these names rank the nodes that have them all."""
        has = np.all([np.isfinite(self.scores[name]) for name in names], axis=0)
        _, requests = np.unique(self.requests[has], return_inverse=True)
        depths, taken = self.depths[has], self.taken[has]
        pairs = np.zeros((1 + len(names), *2 * (requests.max(initial=-1) + 1,)))
        for depth in np.unique(depths):
            up, down = (np.flatnonzero((depths == depth) & kind) for kind in (taken, ~taken))
            of = requests[up][:, None], requests[down][None]
            np.add.at(pairs[0], of, 1.0)
            for place, name in enumerate(names, 1):
                scores = self.scores[name][has]
                np.add.at(pairs[place], of, _above(scores[up], scores[down]))
        return Ranks(int(taken.sum()), int((~taken).sum()), pairs)

    def claimed(self) -> float:
        """Return the share of pairs that would be ranked rightly if scores were what they say, the
        logarithms of probabilities; 0.5: they say the same of all."""
        right = every = 0.0
        for depth in np.unique(self.depths):
            scores = self.scores[OWN][self.depths == depth]
            chances = np.exp(np.minimum(scores, 0.0))
            weights = chances[:, None] * (1 - chances)[None]
            np.fill_diagonal(weights, 0.0)
            right += float((weights * _above(scores, scores)).sum())
            every += float(weights.sum())
        return right / every if every else 0.5


def _above(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return [len(a), len(b)], 1 where the one is the greater, 0.5 where both are equal."""
    higher: np.ndarray = (a[:, None] > b[None]) + 0.5 * (a[:, None] == b[None])
    return higher


@attrs.frozen
class Ranks:
    """Pairs of a node that was taken and one that was not, of the same depth.

    Attributes:
        taken, refused: nodes of both kinds.
        pairs: [1 + names, requests, requests], by the request of either: how many, and how many
            each kind of score ranks rightly.
    """

    taken: int
    refused: int
    pairs: np.ndarray

    @property
    def shares(self) -> np.ndarray:
        """[names] the share that each kind of score ranks rightly; 0.5 is chance."""
        return _shares(self.pairs)

    def deviation(self, of: Callable[[np.ndarray], float]) -> float:
        """Return the standard deviation of what ``of`` makes of ``shares``: by what it is without
        one of the requests, whose nodes are taken together (the jackknife)."""
        count = self.pairs.shape[1]
        without = [
            of(_shares(np.delete(np.delete(self.pairs, i, axis=1), i, axis=2)))
            for i in range(count)
        ]
        return math.sqrt((count - 1) * float(np.var(without)))

    @property
    def are_enough(self) -> bool:
        """Whether they say something."""
        return min(self.taken, self.refused) >= LEAST_NODES


def _shares(pairs: np.ndarray) -> np.ndarray:
    sums = pairs.sum((1, 2))
    return sums[1:] / sums[0] if sums[0] else np.full(len(sums) - 1, 0.5)


@attrs.frozen
class _Call:
    """What ``propose`` gave: roots, and of each row tokens, parents and scores of its nodes."""

    roots: Sequence[tuple[tuple[int, ...], int]]
    tokens: Sequence[Sequence[int]]
    parents: Sequence[Sequence[int]]
    scores: Sequence[Sequence[float]]

    def score(self, row: int, node: int) -> float:
        """Return a node's score; NaN: there is no such node, or it is a root."""
        scores = self.scores[row]
        return scores[node] if 0 < node < len(scores) else math.nan


class ScoreRecorder:
    """An extension that takes down each draft that has scores, as the algorithm made it."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    @hookimpl(wrapper=True)
    def propose(self, batch: Batch) -> Generator[None, Draft | None, Draft | None]:
        """Look at what is proposed."""
        positions = batch.seq_lens.tolist()
        draft = yield
        if batch.is_warm_up or draft is None or draft.scores is None:
            return draft
        widths = draft.widths or (draft.width,) * len(positions)
        prompts = [tuple(request.prompt_token_ids) for request in batch.requests]
        chains = [list(range(-1, draft.width - 1))] * len(positions)
        parents = chains if draft.parents is None else draft.parents.tolist()

        def cut(rows: Sequence[Sequence[float]]) -> list[Sequence[float]]:
            return [row[:width] for row, width in zip(rows, widths, strict=True)]

        self._calls.append(
            _Call(
                list(zip(prompts, positions, strict=True)),
                cut(draft.tokens.tolist()),  # type: ignore[arg-type]
                cut(parents),  # type: ignore[arg-type]
                cut(draft.scores.tolist()),
            )
        )
        return draft

    def nodes(self, outputs: Sequence[RequestOutput]) -> ScoredNodes:
        """Return the nodes of which it is known whether the target took them, or would have.

        Args:
            outputs: of all requests that were drafted for.
        """
        texts = {tuple(o.prompt_token_ids): (*o.prompt_token_ids, *o.token_ids) for o in outputs}
        numbers = {prompt: number for number, prompt in enumerate(texts)}
        shifts = {OWN: (0, 0), **MISPLACED}
        facts, scores = list[tuple[int, int, bool]](), list[list[float]]()
        for call in self._calls:
            count = len(call.roots)
            for row, (prompt, position) in enumerate(call.roots):
                for node, depth, taken in _followed(call, row, texts[prompt][position + 1 :]):
                    facts.append((numbers[prompt], depth, taken))
                    scores.append(
                        [
                            math.nan
                            if rows % count == 0 != rows  # the row itself
                            else call.score((row + rows) % count, node + nodes)
                            for rows, nodes in shifts.values()
                        ]
                    )
        known = np.array(facts, np.int64).reshape(-1, 3)
        columns = np.array(scores, np.float64).reshape(-1, len(shifts)).T
        return ScoredNodes(
            requests=known[:, 0],
            depths=known[:, 1],
            taken=known[:, 2] > 0,
            scores=dict(zip(shifts, columns, strict=True)),
        )


def _followed(call: _Call, row: int, text: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """Yield the first child of each node that is on the way of the text: its place, its depth, and
    whether it is on it too.

    Args:
        text: the tokens after the root.
    """
    tokens, depths, seen = call.tokens[row], {0: 0}, set[int]()
    for node, parent in enumerate(call.parents[row]):
        if node == 0 or parent not in depths or depths[parent] == len(text):
            continue
        depth = depths[parent] + 1
        if tokens[node] == text[depth - 1]:
            depths[node] = depth
        if parent not in seen:
            seen.add(parent)
            yield node, depth, node in depths


def told_ranks(nodes: ScoredNodes) -> str:
    """Return how well scores rank nodes, in words; "" if there are too few to tell.

    Raises:
        Failure: scores from elsewhere rank them better, or the scores tell far less than they
            claim.
    """
    own = nodes.ranks([OWN])
    if not own.are_enough:
        return ""
    _refuse_misplaced(nodes)
    (share,), claimed = own.shares, nodes.claimed()
    least = LEAST_OF_CLAIMED * (claimed - 0.5) - DEVIATIONS * own.deviation(lambda s: s[0])
    if share - 0.5 < least:
        raise Failure(
            f"of a node that was taken and one of the same depth that was not, the taken one has "
            f"the greater score in {100 * share:.0f} % of the pairs; expected about "
            f"{100 * claimed:.0f} %, as the scores claim, and at least {100 * (0.5 + least):.0f} "
            "%; 50 % is chance: scores are those of other nodes, or are computed from something "
            "else than the drafts"
        )
    return f"{100 * share:.0f} % ranked rightly, {100 * claimed:.0f} % claimed"


def _refuse_misplaced(nodes: ScoredNodes) -> None:
    """Refuse scores that are in truth those of other nodes.

    Raises:
        Failure: scores from elsewhere rank nodes better.
    """
    found = {name: nodes.ranks([OWN, name]) for name in MISPLACED}
    gains = {name: _gain(each.shares) for name, each in found.items() if each.are_enough}
    name = max(gains, key=gains.__getitem__, default="")
    if name and gains[name] > MOST_BETTER + DEVIATIONS * found[name].deviation(_gain):
        own, other = found[name].shares
        raise Failure(
            f"scores seem to be those of {name}: of a node that was taken and one of the same "
            f"depth that was not, the taken one has the greater score in {100 * own:.0f} % of the "
            f"pairs, and in {100 * other:.0f} % if scores are moved back by one; expected most as "
            "they are: Draft.scores[row, node] is of Draft.tokens[row, node]"
        )


def _gain(shares: np.ndarray) -> float:
    """Return by how much another kind of score ranks better than the own one."""
    return float(shares[1] - shares[0])
