"""What extensions are told after a step and after a request; the statistics are sums of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import attrs
import numpy as np

RELIABILITY_STEP = 5
"""Percent."""

Reliability = Mapping[int, tuple[int, float, int]]
"""By the predicted percentage of being accepted, in steps of ``RELIABILITY_STEP``: how many nodes,
the sum of what was predicted (1 a node at most), and how many were accepted."""


def reliability_of(nodes: np.ndarray) -> Reliability:
    """Return the reliability of nodes [n] float32: the probability with which each was expected to
    be accepted, negative if it was not, 0 if it does not count."""
    nodes = nodes[nodes != 0]
    chances = np.abs(nodes)
    last = 100 // RELIABILITY_STEP - 1
    bins = np.minimum((chances * (100 / RELIABILITY_STEP)).astype(np.int64), last)
    rows = np.bincount(bins), np.bincount(bins, chances), np.bincount(bins, nodes > 0)
    return {
        RELIABILITY_STEP * place: (count, predicted, int(accepted))
        for place, (count, predicted, accepted) in enumerate(
            zip(*(row.tolist() for row in rows), strict=True)
        )
        if count
    }


@attrs.frozen(kw_only=True)
class StepReport:
    """One processed step. Tuples of equal description belong together, one entry per request.

    Attributes:
        number: of the step, from 1 on.
        mode: "prefill", "decode", "mixed", or "receive" if it only took in what was received.
        prefill_ids: requests of which the step computed prompt tokens.
        prefill_tokens: how many of each; those of a request that was retracted are its output too.
        recomputed_tokens: how many of these had been computed before a retraction.
        cached_tokens: how many of each request's tokens came from the prefix cache instead, at the
            first of its steps; then 0.
        sampled: for each, whether the step ended its prompt and so gave a token.
        decode_ids: requests that took a decode step.
        proposed: nodes of each one's draft as the algorithm made it, the root included.
        drafters: what drafted for each, by name; "NONE" where nothing did.
        planned: the most nodes that were to be drafted for each, the root included.
        reason: why drafts were chosen so, as ``DraftPlan`` says it; "": it was not said, or nothing
            was chosen.
        expected_tokens, expected_seconds: what that choice expected of the decode requests: their
            tokens, bonus tokens included, and the time of the step; None: it was not estimated.
        widths: nodes verified for each, the root included: fewer where a draft was cut.
        depth: of the deepest draft, below its root.
        accept_lens: tokens accepted for each, the bonus token included.
        kept: how many of these it took; fewer if one of them ended it, none if it had ended.
        chances: [bs, N] float32, at each node after the root the probability with which it was
            expected to be accepted, negative if it was not, and 0 if it does not count; None if the
            drafts had no scores.
        retracted_ids: requests that lost their pages when the step was scheduled.
        evicted_pages: pages that the prefix cache lost then.
        received_ids: requests whose prefill came from another instance and went into the pool.
        received_tokens: of each, the tokens whose KV came so.
        received_cached: of each, the tokens that came from the prefix cache instead.
        lost_prefixes: received requests that are prefilled here, because the prefix cache lost
            the pages before what was received.
        num_running, num_waiting: requests, when it was scheduled.
        free_pages, cached_pages: of the KV pool, then; those of the cache that a request uses too
            are among the latter.
        seconds: time by part. Of the device, where that has a clock of its own, else of the host:
            "propose" the draft (and its plans), "target" the pass of the target, "verify" sampling,
            acceptance and compaction, "extend" the draft model's context, "receive" what was
            received. And of the host:
            "host", scheduling the step and processing its results.
        draft_seconds: the host's time of drafting, that of choosing who drafts not included.
        is_cold: whether a pass of it ran as it is, or was recorded, that later steps replay: it
            took longer than they will.
        caught_up: the algorithms that were fed what several steps before it have committed, because
            they draft in it and did not before, or because much waited: so it took longer.
    """

    number: int
    mode: str
    prefill_ids: tuple[str, ...] = ()
    prefill_tokens: tuple[int, ...] = ()
    recomputed_tokens: tuple[int, ...] = ()
    cached_tokens: tuple[int, ...] = ()
    sampled: tuple[bool, ...] = ()
    decode_ids: tuple[str, ...] = ()
    proposed: tuple[int, ...] = ()
    drafters: tuple[str, ...] = ()
    planned: tuple[int, ...] = ()
    reason: str = ""
    expected_tokens: float | None = None
    expected_seconds: float | None = None
    widths: tuple[int, ...] = ()
    depth: int = 0
    accept_lens: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    chances: np.ndarray | None = attrs.field(default=None, eq=False, repr=False)
    retracted_ids: tuple[str, ...] = ()
    evicted_pages: int = 0
    received_ids: tuple[str, ...] = ()
    received_tokens: tuple[int, ...] = ()
    received_cached: tuple[int, ...] = ()
    lost_prefixes: int = 0
    num_running: int = 0
    num_waiting: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    seconds: dict[str, float]
    draft_seconds: float = 0.0
    is_cold: bool = False
    caught_up: tuple[str, ...] = ()

    @cached_property
    def predicted(self) -> tuple[float, ...]:
        """Drafted tokens that were expected to be accepted, for each; () if the drafts had no
        scores. Their sum beside that of ``accept_lens`` less one each says how well scores are
        calibrated."""
        if self.chances is None:
            return ()
        return tuple(np.abs(self.chances[:, 1:]).sum(1).tolist())

    @property
    def scored_nodes(self) -> np.ndarray:
        """[n] float32, the ``chances`` of the nodes after the roots, of requests that took
        tokens."""
        if self.chances is None:
            return np.zeros(0, np.float32)
        nodes = self.chances[:, 1:]
        if not all(self.kept):
            nodes = nodes[np.fromiter(self.kept, np.int64) > 0]
        return nodes.ravel()

    @cached_property
    def reliability(self) -> Reliability:
        """What was predicted beside what was accepted, of the drafts of requests that took
        tokens."""
        return reliability_of(self.scored_nodes)


@attrs.frozen(kw_only=True)
class RequestReport:
    """One ended request. A host may know no more of it than its name.

    Attributes:
        request_id: its name.
        finish_reason: "stop", "length", "abort" or "error"; "" from a host that does not know.
        num_prompt_tokens: length of its prompt.
        num_cached_tokens: how many of these were in the prefix cache when it was first admitted.
        num_output_tokens: tokens generated.
        times_retracted: how often it lost its pages.
        accept_lens: tokens of each pass after its first token: those kept at a decode step, or one
            where it was prefilled again.
    """

    request_id: str
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    times_retracted: int = 0
    accept_lens: tuple[int, ...] = ()
