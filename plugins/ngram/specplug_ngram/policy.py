"""The probability of a continuation, and whether proposing it pays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs


@attrs.frozen
class Costs:
    """The additional time of a step, as fractions of a plain step of one request.

    The fractions are constants, not measured during a run. Otherwise drafts would depend on the
    clock: a run could not be repeated step by step, and the ranks of one target, which draft
    separately, would draft differently.

    They decide after drafting, by what each node is worth; the core's choice of drafts decides
    before. With that choice in their place, 8 prompts of the default model on one thread gave 0.89
    to 0.99 times the tokens a second (medians of 5 interleaved rounds, shared machine).

    Attributes:
        request: the time of each request after the first.
        node: the time of each drafted node.
        draft: the time of any draft at all.
        padding: the time of each request after the first in a step with drafts, since attention
            pads every request to the widest draft.
        uniform: whether all chains of a step should have the same length. The host runs such a step
            as one recording, sampling and acceptance included, and needs few recordings.
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
4.99 and 7.26 ms at batch sizes 1, 4, 16 and 64; these constants give 4.43, 4.55, 5.03 and 6.95. A
step with a chain of 5 drafted tokens, drafting not counted, takes 1.02, 1.15 and 1.57 times a plain
step at batch sizes 1, 8 and 32; these constants give 1.03, 1.17 and 1.56."""

FIRST_NOVELTY = 8.0
LEARNING_RATE = 0.3
LEAST_NOVELTY, MOST_NOVELTY = 0.05, 50.0


@attrs.define
class Novelty:
    """The probability that a request continues with a token that is new after its match: PPM's
    escape estimate.

    If tokens followed a match of n tokens t times, the next token is one of them with probability
    t / (t + novelty / n^1.5), divided among them by their counts. So the probability grows with the
    length of the match and with its number of occurrences. The parameter ``novelty`` is learned
    from every token, proposed or not. Verbatim repetition lowers it within a few tokens. Sampling
    at a high temperature raises it; then no token is proposed.

    Attributes:
        log: the logarithm of ``novelty``.
    """

    log: float = math.log(FIRST_NOVELTY)

    def known(self, matched: int, total: int) -> float:
        """Return the probability that the next token is one that followed before.

        Args:
            matched: n, the length of the match.
            total: t, how often it occurred with a following token.
        """
        return total / (total + math.exp(self.log - 1.5 * math.log(matched)))

    def learn(self, known: float, was_known: bool) -> None:
        """Take a step along the gradient of the next token's log-likelihood.

        Args:
            known: the probability that ``known`` returned.
            was_known: whether the next token was one that followed before.
        """
        log = self.log + LEARNING_RATE * (known - was_known)
        self.log = min(max(log, math.log(LEAST_NOVELTY)), math.log(MOST_NOVELTY))


@attrs.frozen
class StepCost:
    """Decides whether a draft pays: whether its step gives more tokens per cost.

    Attributes:
        bs: the number of requests in the step.
        costs: the device's costs.
    """

    bs: int
    costs: Costs = CPU_COSTS

    @property
    def plain(self) -> float:
        """The cost of a step without drafts."""
        return 1 + self.costs.request * (self.bs - 1)

    @property
    def least(self) -> float:
        """The probability of a node that is just worth its cost."""
        return self.costs.node * self.bs / self.plain

    def pays(self, gain: float, nodes: int) -> bool:
        """Return whether ``nodes`` drafted nodes pay, of which ``gain`` are expected to be
        accepted."""
        return (self.bs + gain) * self.plain > self.bs * self._drafted(nodes)

    def best_width(self, gains: Sequence[float]) -> int:
        """Return the number of nodes of each request, the root included, if all have the same.

        It is ``len(gains)``, or half of that, or a quarter, and so on: the width that gives the
        most tokens per cost; 1 if no draft pays.

        Args:
            gains: the expected number of accepted nodes at each depth; 0 at depth 0.
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
        """Return the cost of a step with ``nodes`` drafted nodes."""
        costs = self.costs
        padding = costs.padding * (self.bs - 1)
        return self.plain + costs.draft + padding + costs.node * nodes
