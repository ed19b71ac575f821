"""What the scheduler wants launched next."""

from __future__ import annotations

import attrs

from specplug.engine.request import ReceivedPrefill, Request


@attrs.frozen(kw_only=True)
class PrefillChunk:
    """Tokens ``start`` to ``end`` of a request that are prefilled in one step: of its prompt, and
    of what it had generated when it was retracted.

    Attributes:
        is_first: whether the request has just got its row.
        is_last: whether it holds the request's last known token, so that the next is sampled.
        recomputed: how many of its tokens had been computed before a retraction.
    """

    request: Request
    start: int
    end: int
    is_first: bool
    is_last: bool
    recomputed: int

    @property
    def tokens(self) -> list[int]:
        """The tokens of the chunk."""
        return self.request.token_ids[self.start : self.end]


@attrs.frozen(kw_only=True)
class PlacedPrefill:
    """A prefill of another instance whose request has just got its pages here.

    Attributes:
        start: the first position to write; those before it were found in the prefix cache.
        pages: those of the positions from ``start`` on.
    """

    request: Request
    received: ReceivedPrefill
    start: int
    pages: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Prefill:
    """Chunks to prefill in one step."""

    chunks: tuple[PrefillChunk, ...]

    @property
    def requests(self) -> tuple[Request, ...]:
        """The request of each chunk."""
        return tuple(chunk.request for chunk in self.chunks)


@attrs.frozen(kw_only=True)
class Decode:
    """Requests that take one decode step.

    Attributes:
        max_draft_nodes: for each, the most nodes that have a slot after its committed length; 1 to
            ``num_lookahead_slots``.
        slots: for each, the most slots that it may reach.
    """

    requests: tuple[Request, ...]
    max_draft_nodes: tuple[int, ...]
    slots: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Step:
    """What to launch next: a prefill, a decode step, or both in one pass of the target.

    Attributes:
        placed: prefills of other instances whose requests have just got a row. Their KV is to be
            written in this order: a page may be given up and taken again in between.
        lost_prefixes: received prefills that do not begin where the prefix cache now ends, so that
            their requests are prefilled here.
        admitted: requests that have just got a row.
        retracted: requests that have just lost theirs.
        evicted_pages: pages that the prefix cache has just lost.
        num_running, num_waiting: requests.
        free_pages, cached_pages: of the KV pool.
        is_warm_up: whether it serves nobody; see ``WarmUp``.
    """

    prefill: Prefill | None
    decode: Decode | None
    placed: tuple[PlacedPrefill, ...] = ()
    lost_prefixes: int = 0
    admitted: tuple[Request, ...]
    retracted: tuple[Request, ...]
    evicted_pages: int
    num_running: int
    num_waiting: int
    free_pages: int
    cached_pages: int
    is_warm_up: bool = False

    @property
    def mode(self) -> str:
        """ "prefill", "decode", "mixed", or "receive" if it has no pass."""
        if self.prefill and self.decode:
            return "mixed"
        return "prefill" if self.prefill else "decode" if self.decode else "receive"

    @property
    def max_slots(self) -> int:
        """The most slots that a request of it reaches."""
        ends = [chunk.end for chunk in self.prefill.chunks] if self.prefill else []
        ends += [placed.received.end for placed in self.placed]
        return max([*ends, *(self.decode.slots if self.decode else ())])

    @property
    def requests(self) -> tuple[Request, ...]:
        """All that take part, each in one half."""
        return tuple(r for half in (self.prefill, self.decode) if half for r in half.requests)
