"""Estimate how likely a continuation is, and whether proposing it pays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs


@attrs.frozen
class Costs:
    """What a step takes more, as parts of a plain step of one request.

    They are figures, not learned from the steps of a run: drafts would depend on the clock then.
    Nobody could repeat a run step by step, and the ranks of one target, which draft each for
    itself, would draft differently.

    Attributes:
        request: for each request but one.
        node: for each drafted node.
        draft: for having a draft at all.
        padding: with drafts, for each request but one, since attention pads all to the widest.
        uniform: whether all chains of a step are to be equally long. The host runs such a step as
            one recording, sampling and acceptance included, and needs few of them.
    """

    request: float
    node: float
    draft: float
    padding: float
    uniform: bool = False


CPU_COSTS = Costs(request=0.11, node=0.03, draft=0.1, padding=0.05)
"""Measured with the default model on one thread."""

GPU_COSTS = Costs(request=0.009, node=0.0042, draft=0.01, padding=0.001, uniform=True)
"""Fitted to an 8B Llama in bf16 with a context of 1,024 on an H200. A plain step takes 4.43, 4.53,
4.99 and 7.26 ms at batch 1, 4, 16 and 64: by these figures 4.43, 4.55, 5.03 and 6.95. A chain of 5
drafts that cost nothing to make takes 1.02, 1.15 and 1.57 times a plain step at batch 1, 8 and 32:
by these figures 1.03, 1.17 and 1.56."""

FIRST_NOVELTY = 8.0
LEARNING_RATE = 0.3
LEAST_NOVELTY, MOST_NOVELTY = 0.05, 50.0


@attrs.define
class Novelty:
    """The probability that a request continues with something new: PPM's escape estimate.

    Its one parameter is learned from every token, proposed or not.

    After a match of n tokens that was followed by something t times, the next token is one of those
    with probability t / (t + novelty / n^1.5), divided among them by their counts. The longer the
    match and the more often it was seen, the likelier. Verbatim repetition drives novelty down
    within a few tokens. Sampling at high temperature drives it up; then nothing is proposed.

    Attributes:
        log: the parameter's logarithm.
    """

    log: float = math.log(FIRST_NOVELTY)

    def known(self, matched: int, total: int) -> float:
        """Estimate the probability that the next token is one of those that followed before."""
        return total / (total + math.exp(self.log - 1.5 * math.log(matched)))

    def learn(self, known: float, was_known: bool) -> None:
        """Follow the gradient of the log-likelihood of the token that came."""
        log = self.log + LEARNING_RATE * (known - was_known)
        self.log = min(max(log, math.log(LEAST_NOVELTY)), math.log(MOST_NOVELTY))


@attrs.frozen
class StepCost:
    """Decides whether a draft pays: whether its step makes more tokens for its cost.

    Attributes:
        bs: requests of the batch, which share the step.
        costs: of the device.
    """

    bs: int
    costs: Costs = CPU_COSTS

    @property
    def plain(self) -> float:
        """The cost of a step without drafts."""
        return 1 + self.costs.request * (self.bs - 1)

    @property
    def least(self) -> float:
        """The probability above which a node is worth its cost."""
        return self.costs.node * self.bs / self.plain

    def pays(self, gain: float, nodes: int) -> bool:
        """Return whether drafting ``nodes`` pays, if ``gain`` of them are expected to be
        accepted."""
        return (self.bs + gain) * self.plain > self.bs * self._drafted(nodes)

    def best_width(self, gains: Sequence[float]) -> int:
        """Return how many nodes each request is to have, root included, if all have equally many.

        It is all, half, a quarter of them and so on, whichever makes most tokens for its cost; 1 if
        no draft pays.

        Args:
            gains: the expected number of accepted nodes at each depth, 0 at the roots'.
        """
        best, most, width = 1, self.bs / self.plain, len(gains)
        while width > 1:
            tokens = self.bs + sum(gains[:width])
            speed = tokens / self._drafted(self.bs * (width - 1))
            if speed > most:
                best, most = width, speed
            width //= 2
        return best

    def _drafted(self, nodes: int) -> float:
        """The cost of a step with so many drafted nodes."""
        costs = self.costs
        padding = costs.padding * (self.bs - 1)
        return self.plain + costs.draft + padding + costs.node * nodes
