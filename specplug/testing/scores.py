"""The check of scores: they say how likely a node is to be accepted, and rank nodes by it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import attrs

from specplug import StepReport, hookimpl
from specplug.speculative.report import reliability_of
from specplug.testing.blindness import refuse_quick
from specplug.testing.check import Failure, NotApplicable, check
from specplug.testing.configuration import SIMPLEST
from specplug.testing.laboratory import Laboratory
from specplug.testing.score_ranks import ScoreRecorder, told_ranks

MOST_ERROR = 0.05
"""The greatest calibration error, a difference of probabilities, above that of chance: rates are
still being learnt."""

ENOUGH = 800
"""Nodes with a score, from which on the error says something."""


@check("gold.scores", "gold", "scores say how likely a node is to be accepted")
def scores(laboratory: Laboratory) -> str:
    """Compare what was predicted of nodes with how many were accepted, once rates are learnt; and
    the scores of nodes that were taken with those of others."""
    refuse_quick(laboratory)
    prompts = laboratory.held_out()
    params = laboratory.params(len(prompts), sampled=False, max_tokens=64)
    scored, recorder = ScoredRequests(), ScoreRecorder()
    with laboratory.engine({**SIMPLEST, "batch": 8}, extensions=[scored, recorder]) as llm:
        half = len(prompts) // 2
        outputs = llm.generate(prompts[:half], params[:half])
        scored.bins.clear()
        outputs += llm.generate(prompts[half:], params[half:])
    bins = {percentage: Bin(tuple(each.values())) for percentage, each in scored.bins.items()}
    count = sum(each.nodes for each in bins.values())
    if count < ENOUGH:
        raise NotApplicable(f"{count} nodes with a score; it takes {ENOUGH} to tell")
    error = sum(abs(each.excess) for each in bins.values()) / count
    most = MOST_ERROR + sum(each.deviation for each in bins.values()) / count
    if error > most:
        worst = max(bins, key=lambda percentage: abs(bins[percentage].excess))
        found = bins[worst]
        raise Failure(
            f"calibration error {error:.3f} over {count} nodes; expected at most {most:.3f}: of "
            f"the {found.nodes} nodes predicted at about {worst} % "
            f"{100 * found.accepted / found.nodes:.0f} % were accepted; a score is the logarithm "
            "of a probability, and means the same in all steps"
        )
    ranked = told_ranks(recorder.nodes(outputs))
    told = f"calibration error {error:.3f} over {count} nodes, {most:.3f} allowed"
    return f"{told}; {ranked}" if ranked else told


@attrs.frozen
class Nodes:
    """Nodes of a request, of like predictions.

    Attributes:
        count, accepted: how many.
        predicted: how many were to be accepted.
    """

    count: int = 0
    predicted: float = 0.0
    accepted: int = 0

    @property
    def excess(self) -> float:
        """How many more were accepted than predicted."""
        return self.accepted - self.predicted


class ScoredRequests:
    """An extension that adds up each request's nodes.

    Attributes:
        bins: by the predicted percentage and the request.
    """

    def __init__(self) -> None:
        self.bins: defaultdict[int, dict[str, Nodes]] = defaultdict(dict)

    @hookimpl
    def on_step(self, report: StepReport) -> None:
        """Add those of a step."""
        if report.chances is None:
            return
        rows = zip(report.decode_ids, report.kept, report.chances[:, 1:], strict=True)
        for request, kept, chances in rows:
            for percentage, found in reliability_of(chances).items() if kept else ():
                of_request = self.bins[percentage]
                old = of_request.get(request, Nodes())
                sums = zip(attrs.astuple(old), found, strict=True)
                of_request[request] = Nodes(*(a + b for a, b in sums))


@attrs.frozen
class Bin:
    """Nodes of like predictions.

    Attributes:
        requests: those of each request.
    """

    requests: Sequence[Nodes]

    @property
    def nodes(self) -> int:
        """How many."""
        return sum(each.count for each in self.requests)

    @property
    def accepted(self) -> int:
        """How many of them."""
        return sum(each.accepted for each in self.requests)

    @property
    def excess(self) -> float:
        """How many more were accepted than predicted."""
        return sum(each.excess for each in self.requests)

    @property
    def deviation(self) -> float:
        """The standard deviation of ``excess``, by how far requests are from their common rate.

        Nodes of a request are accepted together: those of a draft hang from each other, and a text
        is easy or hard. So what is independent is the requests, and their number counts. The rates
        were learnt from as many other requests, and err as much again.
        """
        rate = self.excess / self.nodes
        return math.sqrt(2 * sum((each.excess - rate * each.count) ** 2 for each in self.requests))
