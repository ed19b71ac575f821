"""What a step costs: seconds over its rows, requests, context and drafters.

The target's time over rows is a curve with a knot at each size that passes are padded to, between
which it is a line; nothing says that it is straight or bends one way (rows touch more experts; a
product runs in tiles). A drafter's time is a sum: for drafting at all, for each depth (a pass), for
each request and for each node, and for drafting for some of the requests alone: that takes many
small launches, for which a fast device waits. While the host looks text up, after what the step
before has committed is known there, a device runs the other drafters' passes: of the two the longer
one counts, and a part of the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs
import numpy as np

from specplug.speculative.buckets import MOST_ROWS, row_buckets
from specplug.speculative.choice.cost_filter import DRAFTED, PLAIN, CostFilter

Array = np.ndarray
Several = Sequence[float] | Array

_KNOTS = np.array([*row_buckets(MOST_ROWS), 1536, 2048, 4096], dtype=np.float64)
_LOWER = np.concatenate([[0.0], _KNOTS[:-1]])
_OF_DRAFTER = 5  # any, depth, requests, nodes, some
_FIXED = len(_KNOTS) + 3  # and each request, context, raggedness
SHOWN = 0.6
"""How much of the shorter one of two counts where a device drafts while the host looks text up: the
drafts are put together after both."""
_OF_USUAL = 100
"""Steps with an algorithm's drafts over which goes what these are believed to cost mostly."""
_REVERTS = 0.2
"""Share of the way that an algorithm's costs go back to that, each time."""
_AGAIN = 0.25
"""How much of that is left after each return that did not last ``_LASTING`` steps with drafts."""
_LASTING = 32
_MOST_RETURNS = 4
_LIKENESS = 0.8
"""How much a row costs alike in two neighbouring spans of the curve."""


@attrs.frozen(eq=False, kw_only=True)
class StepWork:
    """What is done in a decode step.

    Attributes:
        bs: requests.
        rows: of the target's pass, before padding.
        context: committed tokens of all requests.
        ragged: whether requests have differing numbers of nodes.
        depths: [A] the deepest draft of each algorithm; 0: it drafts nothing.
        requests: [A] for how many each drafts.
        nodes: [A] how many it drafts, without roots.
        asked: [A] how many it was asked for; (): not known.
    """

    bs: int
    rows: float
    context: float
    ragged: bool
    depths: Several
    requests: Several
    nodes: Several
    asked: Several = ()

    def without(self, free: Collection[int]) -> StepWork:
        """Return it with nothing of what these algorithms did to draft."""

        def left(values: Several) -> list[float]:
            return [0 if a in free else each for a, each in enumerate(values)]

        depths, requests, nodes = map(left, (self.depths, self.requests, self.nodes))
        return attrs.evolve(self, depths=depths, requests=requests, nodes=nodes)


@attrs.frozen(kw_only=True)
class DeclaredCosts:
    """Costs of a step as fractions of a plain step of one request: what is assumed before any is
    measured, and kept where steps have to repeat one by one.

    Attributes:
        request: of each request after the first.
        row: of each row of the target's pass after the first.
        context: of a thousand committed tokens.
        draft: of drafting at all.
        depth: of each depth of the deepest draft.
        drafting: of each request that is drafted for.
        node: of each drafted node, beside its row.
        some: of drafting for some of the requests, not for all.
        ragged: of a step whose requests have differing numbers of nodes.
    """

    request: float = 0.02
    row: float = 0.02
    context: float = 0.005
    draft: float = 0.03
    depth: float = 0.05
    drafting: float = 0.005
    node: float = 0.001
    some: float = 0.01
    ragged: float = 0.01

    def of_text(self) -> DeclaredCosts:
        """Return those of an algorithm that drafts from text on the host: its drafts are there as
        soon as it looks for them, however deep."""
        return attrs.evolve(self, draft=self.draft / 2, depth=0.0, node=0.0)


CPU_COSTS = DeclaredCosts(request=0.08, row=0.03, draft=0.06, depth=0.06)
"""About those of the default model on one thread."""
GPU_COSTS = DeclaredCosts(
    request=0.005, row=0.0042, draft=0.02, depth=0.04, drafting=0.002, some=0.1
)
"""About those of an 8B Llama in bf16 on an H200 (a chain of 5 takes 1.02, 1.15 and 1.57 times a
plain step at batch sizes 1, 8 and 32)."""


@attrs.frozen(eq=False)
class KnownCosts:
    """Costs as they were after so many changes, for what is asked at each step.

    Attributes:
        changes: ``CostFilter.changes``.
        curve: [R] float64, seconds of the target's rows alone.
        fixed: of each request after the first, of a thousand committed tokens, of raggedness.
        drafters: as ``StepCosts.drafters``.
    """

    changes: int
    curve: Array
    fixed: list[float]
    drafters: list[list[float]]


@attrs.define(eq=False)
class _Usual:
    """What an algorithm's drafts cost mostly.

    Attributes:
        costs: [5] as ``StepCosts.drafters``.
        steps: in which it has drafted.
        drafted: those of them since it last paused.
        returns: how often it has drafted again since its costs went back, and not for long.
    """

    costs: Array = attrs.field(factory=lambda: np.zeros(_OF_DRAFTER))
    steps: int = 0
    drafted: int = 0
    returns: int = 0

    @property
    def is_known(self) -> bool:
        """Whether it has drafted for so long that this means something."""
        return self.steps >= _LASTING

    def note(self, own: Array) -> None:
        """Count a step with its drafts, which are believed to cost so much."""
        self.steps += 1
        self.drafted += 1
        self.costs = self.costs + (own - self.costs) / min(self.steps, _OF_USUAL)

    def pause(self) -> float:
        """Count some steps without, once it is known; return the share of the way that its costs go
        back."""
        if self.drafted:
            again = 0 if self.drafted >= _LASTING else self.returns + 1
            self.returns, self.drafted = min(again, _MOST_RETURNS), 0
        return float(_REVERTS * _AGAIN**self.returns)


class StepCosts:
    """The expected seconds of a step.

    Args:
        algorithms: A, how many can draft.
        declared: what is assumed at first; by algorithm what differs from the first one's.
        padded: whether the target's rows are padded to buckets, where there are recordings of them.
        waiting: the algorithms that draft on the host, while a device drafts for the others.
        is_fixed: whether nothing is learned: what is declared stays, in its own unit.
    """

    def __init__(
        self,
        algorithms: int,
        declared: DeclaredCosts | Sequence[DeclaredCosts],
        *,
        padded: bool,
        waiting: Collection[int] = (),
        is_fixed: bool = False,
    ) -> None:
        every = (
            [declared] * max(1, algorithms)
            if isinstance(declared, DeclaredCosts)
            else list(declared)
        )
        first = every[0]
        rising = first.row * (_KNOTS - _LOWER)
        costs = [1.0, *rising[1:], first.request, first.context, first.ragged]
        scales = [*(0.15 * np.minimum(_KNOTS - _LOWER, 64) ** 0.5), 0.02, 0.02, 0.05]
        for each in every[:algorithms]:
            costs += [each.draft, each.depth, each.drafting, each.node, each.some]
            scales += [0.1, 0.1, 0.02, 0.01, 0.3]
        likeness = np.eye(len(costs))
        spans = np.arange(1, len(_KNOTS))
        likeness[1 : len(_KNOTS), 1 : len(_KNOTS)] = _LIKENESS ** abs(spans - spans[:, None])
        parts = DRAFTED + 1 + algorithms
        self._filter = CostFilter(np.array(costs), np.array(scales), likeness, parts)
        self._is_fixed = is_fixed
        self._padded = padded
        self.waiting = tuple(waiting)
        self.algorithms = algorithms
        self._rows_table = np.zeros((0, len(_KNOTS)))
        self._known = KnownCosts(-1, np.zeros(0), [], [])
        self._usual = [_Usual() for _ in range(algorithms)]

    @property
    def is_measured(self) -> bool:
        """Whether the costs are seconds, of steps that were seen."""
        return self._filter.is_measured

    def seconds(self, work: StepWork) -> float:
        """Return the expected time of a step."""
        return float(self._weights(work) @ self._filter.costs)

    def draft_seconds(self, work: StepWork) -> float:
        """Return the expected time of drafting."""
        return self._expected(work, target=False, drafting=True)

    def doubt(self, work: StepWork) -> float:
        """Return the standard deviation of ``seconds``, as a share."""
        return self._filter.doubt(self._weights(work))

    def plain_doubt(self, bs: int, context: float) -> float:
        """Return the ``doubt`` of a step of ``bs`` requests in which nothing is drafted.

        Args:
            context: committed tokens of all requests. Where that is much the same in all steps,
                what it takes is known only together with the rest.
        """
        nothing = (0,) * self.algorithms
        work = StepWork(
            bs=bs,
            rows=bs,
            context=context,
            ragged=False,
            depths=nothing,
            requests=nothing,
            nodes=nothing,
        )
        return self.doubt(work)

    def observe(
        self,
        work: StepWork,
        seconds: float,
        draft_seconds: float | None = None,
        *,
        trusted: bool = False,
        waited: bool = True,
    ) -> None:
        """Learn how long a step took.

        Args:
            seconds: of the whole step.
            draft_seconds: how many of them the drafting took; None: not known apart.
            trusted: as in ``CostFilter.observe``.
            waited: whether the drafting of those that wait took what it does: not where drafts of a
                host were taken as they were foreseen. Then it is taken to have taken nothing.
        """
        if self._is_fixed or not seconds > 0:
            return
        whole = None if trusted else seconds
        part = DRAFTED if any(work.requests) else PLAIN
        work = work if waited else work.without(self.waiting)
        if draft_seconds is None or part == PLAIN or draft_seconds >= seconds:
            self._learn(work, seconds, part, (True, True), whole)
            return
        self._learn(work, seconds - draft_seconds, part, (True, False), whole)
        self._note_usual(work)
        if draft_seconds > 0 and any(work.requests):
            hidden = self._hidden(work)
            shown = [a for a in range(self.algorithms) if a not in hidden]
            part = DRAFTED + 1 + max(shown, key=lambda a: work.requests[a])
            self._learn(work, draft_seconds, part, (False, True), whole)

    def _note_usual(self, work: StepWork) -> None:
        """Learn what the algorithms that drafted in a step cost mostly."""
        for a, requests in enumerate(work.requests):
            if requests:
                self._usual[a].note(self.drafters[a])

    def revert(self, algorithms: Sequence[int]) -> None:
        """Believe that algorithms that have not drafted for some steps cost nearer to what they do
        mostly: a host that was late for a while would else be believed to be for good, because what
        seems too dear is not drafted."""
        for a in algorithms:
            usual = self._usual[a]
            if usual.is_known and not self._is_fixed:
                start = _FIXED + _OF_DRAFTER * a
                share = usual.pause()
                self._filter.revert(slice(start, start + _OF_DRAFTER), usual.costs, share)

    def _learn(
        self,
        work: StepWork,
        seconds: float,
        part: int,
        of: tuple[bool, bool],
        whole: float | None,
    ) -> None:
        """Learn how long the target's pass, the drafting, or both took, if that tells anything.

        Args:
            part: as in ``CostFilter``.
            of: whether the time is of the target, and whether it is of the drafters.
            whole: seconds of the whole step; None: this time is trusted.
        """
        target, drafting = of
        if whole is not None:
            expected = self._expected(work, target=target, drafting=drafting)
            if not self._filter.tells(seconds, expected, part, whole):
                return
        weights = self._weights(work)
        if not target:
            weights[:_FIXED] = 0.0
        if not drafting:
            weights[_FIXED:] = 0.0
        self._filter.observe(weights, seconds, part, trusted=whole is None)

    def _expected(self, work: StepWork, *, target: bool, drafting: bool) -> float:
        """Return ``seconds`` of the target, of the drafters, or of both. In plain numbers: it is
        asked at each step."""
        rows, total = round(work.rows), 0.0
        known = self.known(rows)
        if target:
            request, context, ragged = known.fixed
            total = known.curve.item(rows) + request * (work.bs - 1) + context * work.context * 1e-3
            total += ragged * work.ragged
        if drafting:
            shorter, longer = sorted(self._sides(work))
            total += longer + SHOWN * shorter
        return total

    def _sides(self, work: StepWork) -> tuple[float, float]:
        """Return the seconds of the drafters that wait, and those of the others; those of all and
        0, if none waits."""
        known, waiting, sides = self.known(1).drafters, self.waiting, [0.0, 0.0]
        every = zip(known, work.depths, work.requests, work.nodes, strict=True)
        for a, ((any_, of_depth, request, node, some), depth, requests, nodes) in enumerate(every):
            own = any_ * (requests > 0) + of_depth * depth
            own += request * requests + node * nodes + some * (0 < requests < work.bs)
            sides[bool(waiting) and a not in waiting] += own
        return sides[0], sides[1]

    def _hidden(self, work: StepWork) -> Sequence[int]:
        """Return the algorithms whose drafting counts in part: that of others takes longer."""
        if not self.waiting:
            return ()
        waits, others = self._sides(work)
        if not waits or not others:
            return ()
        if waits < others:
            return self.waiting
        return [a for a in range(self.algorithms) if a not in self.waiting]

    def known(self, most_rows: int) -> KnownCosts:
        """Return the costs as they are, with the curve up to ``most_rows`` at least."""
        found = self._known
        if found.changes != self._filter.changes or most_rows >= len(found.curve):
            most, costs = max(most_rows, len(found.curve) - 1), self._filter.costs
            found = self._known = KnownCosts(
                changes=self._filter.changes,
                curve=self._row_weights(most)[: most + 1] @ costs[: len(_KNOTS)],
                fixed=costs[len(_KNOTS) : _FIXED].tolist(),
                drafters=self.drafters.tolist(),
            )
        return found

    def curve(self, bs: int, context: float, most_rows: int) -> Array:
        """Return the target's seconds by its rows, [most_rows + 1] float64; the first ``bs`` mean
        nothing, as a step has a row for each request.

        Args:
            context: committed tokens of all requests.
        """
        known = self.known(most_rows)
        request, of_context, _ = known.fixed
        fixed = request * (bs - 1) + of_context * (context * 1e-3)
        curve: Array = known.curve[: most_rows + 1] + fixed
        return curve

    def plain_seconds(self, bs: int) -> float:
        """Return the target's seconds in a step of ``bs`` requests in which nothing is drafted, but
        for what the context takes."""
        return self.target_seconds(bs, bs)

    def target_seconds(self, bs: int, rows: int) -> float:
        """Return the target's seconds in a step of ``bs`` requests, but for what the context
        takes."""
        known = self.known(rows)
        return float(known.curve.item(rows) + known.fixed[0] * (bs - 1))

    @property
    def ragged(self) -> float:
        """Seconds more of a step whose requests have differing numbers of nodes."""
        return float(self._filter.costs[_FIXED - 1])

    @property
    def drafters(self) -> Array:
        """[A, 5] float64, each algorithm's seconds: of drafting at all, of a depth, of a request,
        of a node, and of drafting for some of the requests alone."""
        return self._filter.costs[_FIXED:].reshape(self.algorithms, _OF_DRAFTER)

    def padded_rows(self, rows: int) -> int:
        """Return the rows that a pass of ``rows`` is padded to."""
        if not self._padded or rows > MOST_ROWS:
            return rows
        return int(_KNOTS[np.searchsorted(_KNOTS, rows)])

    def rows_within(self, bs: int, rows: int, times: float) -> int:
        """Return the most rows, as padded, of a pass that takes at most so many times as long as
        one of ``rows`` does."""
        padded, most = self.padded_rows(rows), times * self.target_seconds(bs, rows)
        for knot in _KNOTS[padded < _KNOTS].astype(int).tolist():
            if self.target_seconds(bs, knot) > most:
                break
            padded = knot
        return padded

    def _weights(self, work: StepWork) -> Array:
        weights = np.empty(_FIXED + _OF_DRAFTER * self.algorithms)
        rows = self.padded_rows(round(work.rows))
        k = len(_KNOTS)
        weights[:k] = self._row_weights(rows)[rows]
        weights[k] = work.bs - 1
        weights[k + 1] = work.context * 1e-3
        weights[k + 2] = work.ragged
        of_drafters = weights[_FIXED:].reshape(self.algorithms, _OF_DRAFTER)
        of_drafters[:, 0] = [requests > 0 for requests in work.requests]
        of_drafters[:, 1] = work.depths
        of_drafters[:, 2] = work.requests
        of_drafters[:, 3] = work.nodes
        of_drafters[:, 4] = [0 < requests < work.bs for requests in work.requests]
        for a in self._hidden(work):
            of_drafters[a] *= SHOWN
        return weights

    def _row_weights(self, most: int) -> Array:
        """Return how much of each span between knots passes of 0 to ``most`` rows (and maybe more)
        have, [rows, knots]."""
        if most >= len(self._rows_table):
            rows = np.arange(max(64, 2 * most + 1), dtype=np.float64)
            if self._padded:
                known = rows <= MOST_ROWS
                rows[known] = _KNOTS[np.searchsorted(_KNOTS, rows[known])]
            spans = (rows[:, None] - _LOWER) / (_KNOTS - _LOWER)
            self._rows_table = np.clip(spans, 0.0, 1.0)
            self._rows_table[:, 0] = 1.0
            self._rows_table[:, -1] = np.maximum(0.0, spans[:, -1])
        return self._rows_table
