"""Whether drafts pay: what is measured of steps with drafts and of steps without, and chosen of it.

A draft that is not taken costs a step its time and gives nothing, and how much it costs depends on
the model, the device and the number of requests. So it is measured, for batches of 1, of 2 or 3, of
4 to 7, … apart: tokens a second with drafts, and without. The better way goes on; the other one is
tried again now and then, as rarely as it is slower.
"""

from __future__ import annotations

import logging
from statistics import median

import attrs

logger = logging.getLogger("vllm.specplug")

WINDOW = 8
"""Steps of which a rate is made."""
SETTLING = 2
"""Steps after a change that do not count: the first one drafts, or did, for the other way."""
LEAST_REST = 64
"""Steps between two trials of the slower way, at least."""
PRICE = 0.005
"""The share of the time that trials may take away."""
MARGIN = 1.02
"""How much faster the other way has to be found."""
MEMORY = 64
"""Steps of a request of which the tokens of a step are averaged: one request's vary a lot."""


@attrs.define
class Way:
    """Steps of batches of alike sizes, with drafts or without.

    Attributes:
        drafts: whether with drafts.
        tokens: that a step gives a request.
        step: seconds of a step; 0: not known yet.
        last_rate: as ``rate``, of the last steps alone.
    """

    drafts: bool
    tokens: float = 0.0
    step: float = 0.0
    last_rate: float = 0.0
    _known: int = 0
    _counted: list[tuple[int, int, float]] = attrs.field(factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second of a request; 0: not known yet."""
        return self.tokens / self.step if self.step else 0.0

    def add(self, requests: int, tokens: int, seconds: float) -> bool:
        """Add a step, which gave requests so many tokens. Return whether a rate was made."""
        self._counted.append((requests, tokens, seconds))
        if len(self._counted) < WINDOW:
            return False
        each, got, took = zip(*self._counted, strict=True)
        # The median: a step in which the machine did something else says nothing of drafts.
        self.step = median(took)
        kept = max(0, min(self._known, MEMORY - sum(each)))
        self._known = kept + sum(each)
        self.tokens = (self.tokens * kept + sum(got)) / self._known
        self.last_rate = sum(got) / sum(each) / self.step
        self.clear()
        return True

    def clear(self) -> None:
        """Drop the steps of which no rate was made yet."""
        self._counted.clear()


class Payoff:
    """Chooses for batches of alike sizes whether to draft.

    Attributes:
        drafts: whether the next steps draft.
    """

    def __init__(self, size: str) -> None:
        self._size = size
        self._best, self._other = Way(True), Way(False)
        self._now = self._best
        self._rest = self._left = LEAST_REST
        self._settling = SETTLING

    @property
    def drafts(self) -> bool:
        return self._now.drafts

    def observe(self, step: DecodeStep, seconds: float) -> None:
        """Learn what a step gave, and how long it took."""
        if step.drafts != self.drafts:
            return  # it was scheduled before the last change
        if self._settling:
            self._settling -= 1
        elif self._now.add(step.num_requests, step.tokens, seconds):
            if self._now is self._other:
                self._judge()
            else:
                self._go_on()

    def _go_on(self) -> None:
        """Try the other way if its time has come, or if this one has become slower than it was."""
        self._left -= WINDOW
        slower = self._best.rate * MARGIN < self._other.rate
        if self._left <= 0 or (slower and self._rest - self._left >= LEAST_REST // 2):
            self._change(self._other)

    def _judge(self) -> None:
        """After a trial go on with the better way."""
        if self._other.rate > self._best.rate * MARGIN:
            self._best, self._other = self._other, self._best
            self._tell()
        best, other = self._best, self._other
        trial = (WINDOW + 2 * SETTLING) * other.step
        # Where the trial went better than those before it, the next one is soon.
        lost = trial * (1 - max(other.rate, other.last_rate) / best.rate)
        self._left = self._rest = max(LEAST_REST, round(lost / PRICE / best.step))
        self._change(best)

    def _change(self, way: Way) -> None:
        if way is not self._now:
            self._now, self._settling = way, SETTLING
        way.clear()

    def _tell(self) -> None:
        rates = {way.drafts: way.rate for way in (self._best, self._other)}
        logger.info(
            "specplug: %s: %s; tokens/s of each: %.1f with drafts, %.1f without",
            self._size,
            "drafts go on" if self._best.drafts else "no drafts for now",
            rates[True],
            rates[False],
        )


@attrs.frozen
class DecodeStep:
    """A step in which all requests decode, all with drafts or all without.

    Attributes:
        tokens: that they got together.
    """

    num_requests: int
    drafts: bool
    tokens: int


class DraftWidths:
    """How many tokens to draft for each request, by the number of requests: what vLLM's scheduler
    has as its ``dynamic_sd_lookup``.

    Args:
        most: for each number of requests, the tokens to draft where drafts pay.
    """

    def __init__(self, most: list[int]) -> None:
        self._most = most
        self._payoffs: dict[int, Payoff] = {}
        self._last: tuple[tuple[Payoff, bool], float] | None = None

    def __getitem__(self, num_requests: int) -> int:
        return self._most[num_requests] if self._of(num_requests).drafts else 0

    def note(self, step: DecodeStep | None, now: float) -> None:
        """Note a step, in the order in which results come.

        Args:
            step: None: not all of its requests decode, or some have drafts and others have none.
            now: seconds, when its result came.
        """
        if step is None:
            self._last = None
            return
        payoff = self._of(step.num_requests)
        like = payoff, step.drafts
        if self._last is not None and self._last[0] == like and now > self._last[1]:
            payoff.observe(step, now - self._last[1])
        self._last = like, now

    def _of(self, num_requests: int) -> Payoff:
        """Return what is known of batches of about that size."""
        power = num_requests.bit_length()
        found = self._payoffs.get(power)
        if found is None:
            first = 1 << power >> 1
            size = "1 request" if first == 1 else f"{first} to {2 * first - 1} requests"
            found = self._payoffs[power] = Payoff(size)
        return found
