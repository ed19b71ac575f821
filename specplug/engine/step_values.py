"""The values of a step: what the scheduler wants launched, its rows on the device, its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self, overload

import attrs
from torch import Tensor

from specplug.engine.request import ReceivedPrefill, Request
from specplug.engine.step_clock import StepClock
from specplug.engine.step_outputs import HostOutputs, WantedOutputs
from specplug.grammar.state import HostTree
from specplug.model.model_runner import PassPart
from specplug.sampling_params import Needs
from specplug.speculative.draft import Draft
from specplug.speculative.draft_plan import DraftPlan
from specplug.speculative.hook_order import Chunks, Committed, Drafted
from specplug.speculative.host_copy import Arrival, host_copy
from specplug.speculative.paged_plan import PagedPlan


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
        verify_budget: the most nodes of all together, one for each at least; None: no limit.
        slots: for each, the most slots that it may reach.
        drafter: who drafts, as in ``Scheduled``.
    """

    requests: tuple[Request, ...]
    max_draft_nodes: tuple[int, ...]
    verify_budget: int | None = None
    slots: tuple[int, ...]
    drafter: int | None = None


@attrs.frozen(kw_only=True)
class SchedulerOutput:
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
        is_warm_up: whether it is a step of ``WarmUp``, before the first request.
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


class ReadOnlyTokens(Sequence[int]):
    """A read-only view of a list of tokens that the engine adds to. A slice of it is a copy."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]

    def __repr__(self) -> str:
        return repr(self._tokens)


class ReadOnlyRequest:
    """Implements ``RequestView``.

    It is made anew for each batch. If a request kept it, the two would refer to each other, and
    only the garbage collector could free them.
    """

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self._request.prompt_token_ids

    @property
    def token_ids(self) -> Sequence[int]:
        return ReadOnlyTokens(self._request.token_ids)

    @property
    def max_tokens(self) -> int:
        return self._request.max_tokens

    @property
    def cache_salt(self) -> str | None:
        return self._request.params.cache_salt

    @property
    def draft_state(self) -> Mapping[str, Tensor]:
        return MappingProxyType(dict(self._request.draft_state))


@attrs.frozen(eq=False, kw_only=True)
class RequestGroup:
    """The requests of a step that prefill, or those that decode, and what they need together.

    Attributes:
        needs: what any of them needs.
        wanted: what they want for each token besides the token; None: nothing.
    """

    requests: tuple[Request, ...]
    needs: Needs
    wanted: WantedOutputs | None

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Self:
        """Return the group of these requests."""
        needs = before = Needs.NOTHING
        for request in requests:
            if request.needs is not before:  # mostly all need the same
                before = request.needs
                needs |= before
        wanted = WantedOutputs(requests) if needs & Needs.OUTPUTS else None
        return cls(requests=tuple(requests), needs=needs, wanted=wanted)

    @property
    def points(self) -> tuple[Any, ...]:
        """Where the target's pass is to be read for what they want."""
        return self.wanted.points if self.wanted else ()


@attrs.frozen(eq=False, kw_only=True)
class ChunkRows:
    """The rows of a prefill.

    Attributes:
        plan: where the chunks' tokens stand.
    """

    group: RequestGroup
    chunks: Chunks
    plan: PagedPlan

    @property
    def part(self) -> PassPart:
        """Their part of the target's pass: the logits of each chunk's last row are wanted."""
        return PassPart(self.chunks.tokens, self.plan, last_rows=self.chunks.last_rows)


@attrs.frozen(eq=False, kw_only=True)
class NodeRows:
    """The rows of a decode step.

    Attributes:
        plan: where the drafts' nodes stand.
        tree: of the draft, on its way to the host, if a request has a grammar.
    """

    group: RequestGroup
    drafted: Drafted
    plan: PagedPlan
    tree: HostTree | None = None

    @property
    def part(self) -> PassPart:
        """Their part of the target's pass: the logits of all rows are wanted."""
        return PassPart(self.drafted.draft, self.plan)

    def padded(self, draft: Draft, plan: PagedPlan) -> Self:
        """Return them in the tensors of a recorded pass, for which the batch is padded.

        Args:
            plan: of the nodes as chains.
        """
        rows, starts = plan.req_indices, plan.starts
        drafted = attrs.evolve(self.drafted, req_indices=rows, seq_lens=starts, draft=draft)
        return attrs.evolve(self, drafted=drafted, plan=plan.of_nodes(draft))


@attrs.define(eq=False, kw_only=True)
class KVSlice:
    """The KV of consecutive positions of a request, on its way from the pool to the host.

    Attributes:
        request: whose it is.
        start, end: the positions.
        caches: of the target and of each draft cache, [layers, 2, end - start, Hkv, D].
        draft_state: named tensors of the request, without a leading size; only with the last slice.
    """

    request: Request
    start: int
    end: int
    caches: tuple[Tensor, ...]
    draft_state: dict[str, Tensor] = attrs.field(factory=dict)


@attrs.frozen(eq=False, kw_only=True)
class PrefillResult:
    """What a launched prefill leaves for the host.

    Attributes:
        tokens: [bs] int64, the target's token after each chunk.
        outputs: what requests asked for, of these tokens and of all rows; None if nothing.
        slices: of the requests that other instances wait for.
    """

    tokens: Tensor
    outputs: HostOutputs | None
    slices: tuple[KVSlice, ...] = ()

    @classmethod
    def send(cls, rows: ChunkRows, committed: Committed, sampled: Mapping[str, Tensor]) -> Self:
        """Start copying what a prefill has committed to the host.

        Args:
            sampled: what is wanted of the tokens after the chunks, by name, [bs, …].
        """
        output, wanted = committed.output, rows.group.wanted
        per_row = {**output.per_node, **sampled}
        return cls(
            tokens=host_copy(output.bonus_tokens),
            outputs=wanted.send(per_row, len(output.next_tokens)) if wanted else None,
        )


@attrs.frozen(eq=False, kw_only=True)
class DecodeResult:
    """What a launched decode step leaves for the host.

    Attributes:
        tokens: [bs, C] int64, the target's tokens along each accepted path.
        accept_lens: [bs] int64.
        outputs: what requests asked for, of these bs·C rows; None if nothing.
        chances: of the nodes, as ``Committed.chances``.
        proposed: nodes of each request's draft before it was cut.
        drafters, planned, plan, draft_seconds: as in ``Drafted``.
        counts: nodes verified for each request; a tensor [bs] int64 where the device alone knew
            them.
    """

    tokens: Tensor
    accept_lens: Tensor
    outputs: HostOutputs | None
    proposed: tuple[int, ...]
    drafters: tuple[str, ...]
    planned: tuple[int, ...]
    plan: DraftPlan | None
    draft_seconds: float
    counts: tuple[int, ...] | Tensor
    chances: Tensor | None

    @classmethod
    def send(cls, rows: NodeRows, committed: Committed) -> Self:
        """Start copying what a decode step has committed to the host."""
        assert committed.report is not None
        output, wanted, draft = committed.output, rows.group.wanted, rows.drafted.draft
        report = host_copy(committed.report)
        return cls(
            tokens=report[:, :-1],
            accept_lens=report[:, -1],
            outputs=wanted.send(output.per_node, len(output.next_tokens)) if wanted else None,
            proposed=rows.drafted.proposed,
            drafters=rows.drafted.drafters,
            planned=rows.drafted.planned,
            plan=rows.drafted.plan,
            draft_seconds=rows.drafted.draft_seconds,
            counts=draft.host_counts(),
            chances=None if committed.chances is None else host_copy(committed.chances),
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """Nodes verified for each request, once they are on the host."""
        return tuple(self.counts.tolist()) if isinstance(self.counts, Tensor) else self.counts


@attrs.define(eq=False, kw_only=True)
class StepResult:
    """A launched step, on its way to the host.

    Attributes:
        number: of the step (engine).
        step: what was launched.
        prefill, decode: what its halves leave.
        clock: when its parts began and ended.
        host_seconds: time of scheduling and of processing it.
        is_cold, caught_up: as in ``StepReport`` (engine).
        grammars_advanced: whether the requests' grammar_states have been advanced by it.
        arrival: of these tensors.
    """

    step: SchedulerOutput
    prefill: PrefillResult | None
    decode: DecodeResult | None
    clock: StepClock
    number: int = 0
    host_seconds: float = 0.0
    is_cold: bool = False
    caught_up: tuple[str, ...] = ()
    arrival: Arrival
    grammars_advanced: bool = False

    def wait(self) -> None:
        """Block until the tensors are there."""
        self.arrival.wait()

    def advance_grammars(self) -> None:
        """Tell the grammars of its requests what they have generated: once, as soon as it is
        there, since the next step's masks follow from it."""
        if self.grammars_advanced:
            return
        self.grammars_advanced = True
        if self.prefill is not None and self.step.prefill is not None:
            for i, chunk in enumerate(self.step.prefill.chunks):
                if chunk.request.grammar_state is not None and chunk.is_last:
                    chunk.request.grammar_state.advance([int(self.prefill.tokens[i])])
        if self.decode is not None and self.step.decode is not None:
            for i, request in enumerate(self.step.decode.requests):
                if request.grammar_state is not None:
                    count = int(self.decode.accept_lens[i])
                    request.grammar_state.advance(self.decode.tokens[i, :count].tolist())
