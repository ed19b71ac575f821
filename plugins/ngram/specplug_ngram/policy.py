"""How sure a continuation is, and whether to propose it pays."""

from __future__ import annotations

import math

import attrs

REQUEST_COST = 0.11
NODE_COST = 0.03
DRAFT_COST = 0.1
PADDING_COST = 0.05
"""What a step takes longer for each request but one; for each drafted node of any request; for
having a draft at all; and then for each request but one, since attention pads all of them to the
widest. In units of a plain step of one request, measured with the default model on a CPU. A GPU has
more to spare, so there they err on the side of proposing less."""

FIRST_NOVELTY = 8.0
LEARNING_RATE = 0.3
LEAST_NOVELTY, MOST_NOVELTY = 0.05, 50.0


@attrs.define
class Novelty:
    """How readily a request leaves what was seen before: the escape estimate of PPM, with one
    parameter that is learned from every token, proposed or not.

    After a match of n tokens that was followed by something t times, the next token is one of
    those with probability t / (t + novelty / n^1.5), divided among them by their counts. The
    longer the match and the more often it was seen, the surer. Verbatim repetition drives novelty
    down within a few tokens, hot sampling drives it up, and then nothing is proposed.

    Attributes:
        log: the parameter's logarithm.
    """

    log: float = math.log(FIRST_NOVELTY)

    def known(self, matched: int, total: int) -> float:
        """Probability that the next token is one of those that followed ``total`` times."""
        return total / (total + math.exp(self.log - 1.5 * math.log(matched)))

    def learn(self, known: float, was_known: bool) -> None:
        """Move along the gradient of the log-likelihood of what came."""
        log = self.log + LEARNING_RATE * (known - was_known)
        self.log = min(max(log, math.log(LEAST_NOVELTY)), math.log(MOST_NOVELTY))


@attrs.frozen
class StepCost:
    """When a draft pays: if its step makes more tokens for its cost than a plain one.

    Attributes:
        bs: requests of the batch, which share the step.
    """

    bs: int

    @property
    def plain(self) -> float:
        """Of a step without drafts."""
        return 1 + REQUEST_COST * (self.bs - 1)

    @property
    def least(self) -> float:
        """The probability from which on a node is worth its own cost."""
        return NODE_COST * self.bs / self.plain

    def pays(self, gain: float, nodes: int) -> bool:
        """Whether drafting ``nodes``, of which ``gain`` should be accepted, is worth the step."""
        padding = PADDING_COST * (self.bs - 1)
        drafted = self.plain + DRAFT_COST + padding + NODE_COST * nodes
        return (self.bs + gain) * self.plain > self.bs * drafted
