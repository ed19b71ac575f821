"""Estimate how likely a continuation is, and whether proposing it pays."""

from __future__ import annotations

import math

import attrs

REQUEST_COST = 0.11
NODE_COST = 0.03
DRAFT_COST = 0.1
PADDING_COST = 0.05
"""The extra time of a step: for each request but one; for each drafted node; for having a draft at
all; and, with drafts, for each request but one, since attention pads all to the widest. The unit is
a plain step of one request, measured with the default model on a CPU. On a GPU these costs are
lower, so the policy proposes less than would pay."""

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
    """

    bs: int

    @property
    def plain(self) -> float:
        """The cost of a step without drafts."""
        return 1 + REQUEST_COST * (self.bs - 1)

    @property
    def least(self) -> float:
        """The probability above which a node is worth its cost."""
        return NODE_COST * self.bs / self.plain

    def pays(self, gain: float, nodes: int) -> bool:
        """Return whether drafting ``nodes`` pays, if ``gain`` of them are expected to be
        accepted."""
        padding = PADDING_COST * (self.bs - 1)
        drafted = self.plain + DRAFT_COST + padding + NODE_COST * nodes
        return (self.bs + gain) * self.plain > self.bs * drafted
