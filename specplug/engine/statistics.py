"""What a run has done so far: the sum of its steps' reports."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any

import attrs
import numpy as np

from specplug.speculative.report import Reliability, RequestReport, StepReport, reliability_of

_FOLDED = 64
"""Steps whose nodes are summed up together: a sum of few takes as long as one of many."""


@attrs.define(eq=False)
class ScoredNodes:
    """The reliability of the nodes of many steps, summed up when it is read."""

    _sums: dict[int, tuple[int, float, int]] = attrs.field(init=False, factory=dict)
    _steps: list[np.ndarray] = attrs.field(init=False, factory=list)

    def add(self, nodes: np.ndarray) -> None:
        """Count the nodes of a step, as ``StepReport.scored_nodes`` has them."""
        self._steps.append(nodes)
        if len(self._steps) >= _FOLDED:
            self._fold()

    def _fold(self) -> None:
        steps, self._steps = self._steps, []
        for percentage, more in reliability_of(np.concatenate(steps)).items():
            nodes, predicted, accepted = self._sums.get(percentage, (0, 0.0, 0))
            self._sums[percentage] = nodes + more[0], predicted + more[1], accepted + more[2]

    @property
    def reliability(self) -> Reliability:
        """Of all nodes so far, in ascending order."""
        if self._steps:
            self._fold()
        return dict(sorted(self._sums.items()))


@attrs.define(kw_only=True)
class Statistics:
    """Totals over all steps.

    Attributes:
        requests: ended requests by finish reason.
        steps: by mode, as ``StepReport`` has it, and "idle" where only other ranks had rows.
        prompt_tokens: tokens that were prefilled.
        recomputed_tokens: how many of them for a second time, after a retraction.
        cached_tokens: tokens that were found in the prefix cache instead.
        output_tokens: generated and kept.
        decode_steps: steps with a decode half (each for a whole batch).
        verifications: decode steps times the requests in them.
        proposed: nodes proposed beyond the roots, those too that were cut before the target's pass.
        drafted: nodes verified beyond the roots.
        verifications_by_drafter, drafted_by_drafter, accepted_by_drafter: these three by what
            drafted for the request; "NONE" where nothing did.
        accepted: tokens that came out of verifications, bonus tokens included.
        accepted_by_length: how often a verification gave 1, 2, … tokens.
        drafted_by_depth: how often a verified draft was 0, 1, 2, … tokens deep below its root.
        widths: how often 1, 2, … nodes were verified for a request.
        received: requests that another instance has prefilled; each came with a first token.
        received_bytes: of their KV and draft state.
        stateless: how many of these came without the draft state that the algorithm carries, and
            drafted first from their last tokens alone.
        received_tokens: tokens whose KV went into the pool so.
        lost_prefixes: received requests that were prefilled here all the same, because the prefix
            cache had lost the pages before what was received.
        retractions: times that a request lost its pages.
        evicted_pages: pages that the prefix cache lost.
        seconds: time of the steps with a decode half, by part, as in ``StepReport``.
        prefill_seconds: time of the other steps, without the host's.
        prefill_host_seconds: the host's time for the other steps.
    """

    requests: Counter[str] = attrs.field(factory=Counter)
    steps: Counter[str] = attrs.field(factory=Counter)
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    decode_steps: int = 0
    verifications: int = 0
    proposed: int = 0
    drafted: int = 0
    accepted: int = 0
    verifications_by_drafter: Counter[str] = attrs.field(factory=Counter)
    drafted_by_drafter: Counter[str] = attrs.field(factory=Counter)
    accepted_by_drafter: Counter[str] = attrs.field(factory=Counter)
    accepted_by_length: Counter[int] = attrs.field(factory=Counter)
    drafted_by_depth: Counter[int] = attrs.field(factory=Counter)
    widths: Counter[int] = attrs.field(factory=Counter)
    _scored_nodes: ScoredNodes = attrs.field(init=False, factory=ScoredNodes)
    received: int = 0
    received_bytes: int = 0
    stateless: int = 0
    received_tokens: int = 0
    lost_prefixes: int = 0
    retractions: int = 0
    evicted_pages: int = 0
    seconds: Counter[str] = attrs.field(factory=Counter)
    prefill_seconds: float = 0.0
    prefill_host_seconds: float = 0.0

    @property
    def mean_accept_length(self) -> float:
        """Accepted tokens per verification, the bonus token included; 0 before the first."""
        return self.accepted / self.verifications if self.verifications else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """The share of prompt tokens whose KV was in the prefix cache."""
        asked = self.cached_tokens + self.prompt_tokens + self.received_tokens
        return self.cached_tokens / asked if asked else 0.0

    @property
    def drafted_by_position(self) -> list[int]:
        """Drafts that reached draft position 1, 2, … (1 is the root's child)."""
        return _at_least(self.drafted_by_depth)

    @property
    def accepted_by_position(self) -> list[int]:
        """Drafts of which position 1, 2, … was accepted; as long as ``drafted_by_position``."""
        lengths = self.accepted_by_length.items()
        accepted = _at_least(Counter({length - 1: count for length, count in lengths}))
        return accepted + [0] * (len(self.drafted_by_position) - len(accepted))

    @property
    def calibration_error(self) -> float:
        """The expected calibration error of the drafts' scores: how far what was predicted is from
        what was accepted, over the steps of 5 %, each by its share of the nodes; 0 without any.
        Guo et al., "On Calibration of Modern Neural Networks", arXiv 1706.04599."""
        nodes = sum(self.scored.values())
        gaps = (abs(self.predicted[b] - self.accepted_of_scored[b]) for b in self.scored)
        return sum(gaps) / nodes if nodes else 0.0

    @property
    def scored(self) -> dict[int, int]:
        """Drafted nodes with a score, by the predicted percentage of being accepted; 35 stands for
        35 to 40, and so on."""
        return {bin: nodes for bin, (nodes, _, _) in self._scored_nodes.reliability.items()}

    @property
    def predicted(self) -> dict[int, float]:
        """Of these, the sum of what was predicted, 1 a node at most."""
        return {bin: found for bin, (_, found, _) in self._scored_nodes.reliability.items()}

    @property
    def accepted_of_scored(self) -> dict[int, int]:
        """Of these, how many were accepted."""
        return {bin: found for bin, (_, _, found) in self._scored_nodes.reliability.items()}

    def add(self, step: StepReport) -> None:
        """Count a step."""
        self.steps[step.mode] += 1
        self.prompt_tokens += sum(step.prefill_tokens)
        self.recomputed_tokens += sum(step.recomputed_tokens)
        self.cached_tokens += sum(step.cached_tokens) + sum(step.received_cached)
        self.output_tokens += sum(step.sampled) + sum(step.kept)
        self.retractions += len(step.retracted_ids)
        self.evicted_pages += step.evicted_pages
        self.received_tokens += sum(step.received_tokens)
        self.lost_prefixes += step.lost_prefixes
        if step.decode_ids:
            self._add_decode(step)
            self.seconds.update(step.seconds)
        else:
            seconds = dict(step.seconds)
            self.prefill_host_seconds += seconds.pop("host", 0.0)
            self.prefill_seconds += sum(seconds.values())

    def _add_decode(self, step: StepReport) -> None:
        """Count the verifications of requests that had not ended before the results came.

        A draft counts as deep as its nodes allow. That is exact for chains, and for trees that are
        as deep as they declare.
        """
        counted = [i for i, kept in enumerate(step.kept) if kept]
        widths = [step.widths[i] for i in counted]
        accept_lens = [step.accept_lens[i] for i in counted]
        self.decode_steps += 1
        self.verifications += len(counted)
        self.proposed += sum(step.proposed[i] - 1 for i in counted)
        self.drafted += sum(widths) - len(widths)
        self.accepted += sum(accept_lens)
        self.accepted_by_length.update(accept_lens)
        for width, count in Counter(widths).items():
            self.drafted_by_depth[min(width - 1, step.depth)] += count
            self.widths[width] += count
        for i in counted if step.drafters else ():
            drafter = step.drafters[i]
            self.verifications_by_drafter[drafter] += 1
            self.drafted_by_drafter[drafter] += step.widths[i] - 1
            self.accepted_by_drafter[drafter] += step.accept_lens[i]
        self._scored_nodes.add(step.scored_nodes)

    def add_request(self, request: RequestReport) -> None:
        """Count an ended request."""
        self.requests[request.finish_reason] += 1

    def add_received(self, num_bytes: int, *, stateless: bool) -> None:
        """Count a request that came with its first token."""
        self.received += 1
        self.received_bytes += num_bytes
        self.stateless += stateless
        self.output_tokens += 1

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        values = attrs.asdict(self, filter=_is_public, value_serializer=_plain)
        values["steps"].setdefault("idle", 0)
        derived = (
            "scored",
            "predicted",
            "accepted_of_scored",
            "mean_accept_length",
            "cache_hit_rate",
            "calibration_error",
            "drafted_by_position",
            "accepted_by_position",
        )
        return {**values, **{name: getattr(self, name) for name in derived}}


def _at_least(counts: Counter[int]) -> list[int]:
    """Return how many of the counted numbers are at least 1, at least 2, …, up to the greatest."""
    numbers = range(max(counts, default=0), 0, -1)
    return list(accumulate(counts[number] for number in numbers))[::-1]


def _is_public(attribute: Any, value: Any) -> bool:
    return not attribute.name.startswith("_")


def _plain(instance: Any, attribute: Any, value: Any) -> Any:
    return dict(sorted(value.items())) if isinstance(value, Counter) else value
