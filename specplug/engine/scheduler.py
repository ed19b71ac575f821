"""Which requests run next, and which give way when the KV pool runs short."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter

import attrs

from specplug.algorithm import SpecConfig
from specplug.config import EngineConfig
from specplug.engine.request import Request, RequestStatus, salt_of
from specplug.engine.step_values import (
    Decode,
    PlacedPrefill,
    Prefill,
    PrefillChunk,
    SchedulerOutput,
)
from specplug.engine.waiting_queue import WaitingQueue
from specplug.kv.prefix_cache import CachedPage, PrefixCache
from specplug.kv.request_table import RequestTable

_APART = 4
"""Decode steps from one prefill to the next, where few prompts would hold up many requests: those
that come in this time share a pass. Over few rows one takes a GPU as long as a plain step."""
_FEW_BESIDE = 16
"""Requests that decode for each prompt, at least, where prompts are few."""


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """The limits of a run. The defaults are those of plain decoding without overlap.

    Attributes:
        max_running_requests: most requests that have a row at a time.
        chunked_prefill_size: the token budget of a step; None: no limit.
        mixed_chunk: prompts and drafts share a step and its budget; else prompts go first, alone.
        columns: C, the most tokens that a decode step commits for a request.
        num_draft_tokens: N, the most nodes that a decode step verifies for a request.
        num_lookahead_slots: slots after its committed length that a decode step would write, N or
            more: a draft model may need more for its own keys.
        verify_budget: the most nodes that a decode step verifies of all requests; None: no limit.
        steps_in_flight: steps launched before the first one's results are processed.
    """

    max_running_requests: int
    chunked_prefill_size: int | None = None
    mixed_chunk: bool = False
    columns: int = 1
    num_draft_tokens: int = 1
    num_lookahead_slots: int = 1
    verify_budget: int | None = None
    steps_in_flight: int = 1

    @classmethod
    def of_run(cls, config: EngineConfig, spec: SpecConfig, *, overlap: bool) -> SchedulerConfig:
        """Return the limits that a run's settings give, with those of its speculation.

        Args:
            overlap: whether a step is launched before the last one's results are processed.
        """
        return cls(
            max_running_requests=config.max_running_requests,
            chunked_prefill_size=config.chunked_prefill_size,
            mixed_chunk=config.enable_mixed_chunk,
            columns=spec.num_steps + 1,
            num_draft_tokens=spec.num_draft_tokens,
            num_lookahead_slots=spec.num_lookahead_slots,
            verify_budget=config.verify_budget,
            steps_in_flight=2 if overlap else 1,
        )

    def budget_for(self, bs: int) -> int | None:
        """Return the most nodes that a decode step of ``bs`` requests verifies, their roots at
        least; None: no limit."""
        return None if self.verify_budget is None else max(self.verify_budget, bs)


class Scheduler:
    """Holds the waiting and the running requests, and chooses what each step launches.

    A request is admitted when there are pages for all of its known tokens. Pages for what it
    generates are given step by step. Cached pages that no request uses count as
    free.

    When pages run out,

    1. drafts shrink to the slots there are (``_fair_shares``);
    2. if a request cannot take a step even without a draft, all give up the pages that only their
       drafts would use (``_drop_draft_pages``);
    3. then a running request is retracted: it waits again, and is prefilled anew
       (``_choose_retracted``).

    The first of the running requests is never retracted while another runs, so there is always
    progress.

    A request whose rotary frequencies change at some length (``Request.outgrows``) is retracted
    when it reaches that length.

    Args:
        config: the limits of the run.
        cache: where pages come from.
        table: where rows come from.
        lacking: told the name of a request, returns of how many of its last tokens a draft model
            lacks the keys.
        leave: the same of a request that gives up its row.

    Attributes:
        waiting: requests without a row.
        running: requests with a row, in the order of ``Request.sort_key``.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        table: RequestTable,
        lacking: Callable[[str], int] = lambda request_id: 0,
        leave: Callable[[str], int] = lambda request_id: 0,
    ) -> None:
        self.config = config
        self._lacking, self._leave = lacking, leave
        self.cache = cache
        self.table = table
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self._admitted: list[Request] = []
        self._retracted: list[Request] = []
        self._placed: list[PlacedPrefill] = []
        self._lost_prefixes = 0
        self._evicted = 0
        self._refused: tuple[str, int] | None = None
        self._decoded = _APART  # steps since the last prefill

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all requests that have not ended."""
        yield from self.waiting
        yield from self.running

    def find(self, request_ids: Collection[str]) -> list[Request]:
        """Return those of these names that have not ended."""
        waiting = (self.waiting.get(request_id) for request_id in request_ids)
        running = (request for request in self.running if request.request_id in request_ids)
        return [*filter(None, waiting), *running]

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.shared = self.cache.root
        self.waiting.add(request)

    def schedule(self) -> SchedulerOutput | None:
        """Return what to launch next; None if there is nothing to launch.

        Prompts go first, in steps of their own, once there are enough of them; with ``mixed_chunk``
        both kinds share a step.
        """
        self._retract_outgrown()
        budget = self.config.chunked_prefill_size or 1 << 60
        if self.config.mixed_chunk:
            decode = self._schedule_decode()
            prefill = self._schedule_prefill(self._left_for_prompts(budget, decode))
        else:
            decode = self._schedule_decode() if self._waits_for_prompts() else None
            prefill = None if decode else self._schedule_prefill(budget)
            if not (decode or prefill):
                decode = self._schedule_decode()
            self._decoded = 0 if prefill else self._decoded + 1
        return self._step(prefill, decode) if prefill or decode or self._placed else None

    def _waits_for_prompts(self) -> bool:
        """Return whether waiting prompts wait for others to share their step: the last prefill was
        a moment ago, and for each of them many requests decode. What is begun goes on."""
        first = self.waiting.first()
        if self._decoded >= _APART or first is None or first.received is not None:
            return False
        prompts = min(len(self.waiting), self.table.num_free)
        decoding = sum([request.may_decode for request in self.running])
        return 0 < _FEW_BESIDE * prompts <= decoding and not any(
            request.status is RequestStatus.PREFILLING for request in self.running
        )

    def _left_for_prompts(self, budget: int, decode: Decode | None) -> int:
        """Return the tokens of a step's budget that its decode half leaves: at least a page's, so
        that a prompt moves on however many drafts there are."""
        most = self.config.num_draft_tokens
        used = sum(min(nodes, most) for nodes in decode.max_draft_nodes) if decode else 0
        if decode and decode.verify_budget is not None:
            used = min(used, decode.verify_budget)
        return max(budget - used, self.cache.pool.page_size)

    def _step(self, prefill: Prefill | None, decode: Decode | None) -> SchedulerOutput:
        step = SchedulerOutput(
            prefill=prefill,
            decode=decode,
            placed=tuple(self._placed),
            lost_prefixes=self._lost_prefixes,
            admitted=tuple(self._admitted),
            retracted=tuple(self._retracted),
            evicted_pages=self.cache.evicted - self._evicted,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            free_pages=self.cache.pool.num_free,
            cached_pages=self.cache.num_pages,
        )
        self._admitted.clear()
        self._retracted.clear()
        self._placed.clear()
        self._lost_prefixes = 0
        self._evicted = self.cache.evicted
        return step

    # Prefill

    def _schedule_prefill(self, budget: int) -> Prefill | None:
        chunks = []
        prefilling = iter([r for r in self.running if r.status is RequestStatus.PREFILLING])
        while budget:
            begun = next(prefilling, None)
            request = begun or self._admit()
            if request is None:
                break
            if request.received is not None and self._place_received(request):
                continue
            chunk = self._launch_chunk(request, budget, is_first=begun is None)
            budget -= chunk.end - chunk.start
            chunks.append(chunk)
        return Prefill(chunks=tuple(chunks)) if chunks else None

    def _admit(self) -> Request | None:
        """Give the first of the waiting requests a row, and pages for all of its known tokens.

        Returns None, and leaves it waiting, if there are not enough, or a step of it is in flight.
        """
        request = self.waiting.first()
        if request is None or not self.table.num_free or request.in_flight:
            return None
        if self._refused == (request.request_id, self.cache.changes):
            return None  # no page has come back since it was refused
        request.choose_rotary()
        most = self._most_reused(request)
        shared = self.cache.match(request.token_ids, most, request.page_kind)
        self.cache.lock(shared)
        size = self.cache.pool.pages_for(len(request.token_ids))
        if size - shared.depth + self._headroom(request) > self.cache.num_available:
            self.cache.unlock(shared)
            self._refused = request.request_id, self.cache.changes
            return None
        self._enter(request, shared, size)
        self.waiting.remove(request)  # last, so that no interrupt can lose it
        return request

    def _most_reused(self, request: Request) -> int:
        """Return the most tokens of a request that may come from the cache.

        The last one may not: its row gives the next token. Nor may those whose per-token outputs
        the request still lacks.
        """
        most = len(request.token_ids) - 1
        return min([most, *(each.num_reusable for each in request.outputs.values())])

    def _headroom(self, request: Request) -> int:
        """Return the pages to leave for the running requests when this one is admitted.

        Without them it would soon be retracted again; a request that was retracted leaves more.
        Where nothing runs it is 0: whatever fits is admitted.
        """
        soon = len(self.running) * self.cache.pool.pages_for(self.config.columns)
        return soon * (1 + request.times_retracted)

    def _enter(self, request: Request, shared: CachedPage, num_pages: int) -> None:
        """Give a request its row and pages; it starts after the cached prefix ``shared``."""
        insort(self.running, request, key=attrgetter("sort_key"))
        pages = [node.page for node in shared.path()][::-1]
        request.pages = pages + self.cache.take_pages(num_pages - shared.depth)
        request.shared = shared
        request.num_computed_tokens = request.max_computed_tokens = (
            shared.depth * self.cache.pool.page_size
        )
        if not request.times_retracted:
            request.num_cached = request.num_computed_tokens
        request.status = RequestStatus.PREFILLING
        request.req_index = self.table.take_row(
            floor=request.num_computed_tokens, rotary_len=request.rotary_len
        )
        self.table.write(request.req_index, request.pages, range(num_pages))
        self._admitted.append(request)

    def _launch_chunk(self, request: Request, budget: int, *, is_first: bool) -> PrefillChunk:
        """Cut the next chunk of a prompt, at most ``budget`` tokens."""
        start, known = request.num_computed_tokens, len(request.token_ids)
        end = min(known, start + budget)
        request.num_computed_tokens = request.max_computed_tokens = end
        request.in_flight += 1
        if end == known:
            request.status = RequestStatus.RUNNING
        return PrefillChunk(
            request=request,
            start=start,
            end=end,
            is_first=is_first,
            is_last=end == known,
            recomputed=max(0, min(end, request.peak_computed_tokens) - start),
        )

    def _place_received(self, request: Request) -> bool:
        """Start an admitted request where the prefill of another instance ends.

        Returns False if it must be prefilled here: the prefix cache has meanwhile lost pages before
        what was received, or the first token needs other rotary frequencies than the prompt has.
        """
        received, request.received = request.received, None
        assert received is not None
        turned = request.rotary_set != request.rule.set_of(received.end)
        if received.start > request.num_computed_tokens or turned:
            self._lost_prefixes += 1
            return False
        shared = request.shared.depth
        self._placed.append(
            PlacedPrefill(
                request=request,
                received=received,
                start=request.num_computed_tokens,
                pages=tuple(request.pages[shared:]),
            )
        )
        request.draft_state = received.draft_state
        request.num_computed_tokens = request.max_computed_tokens = received.end
        request.status = RequestStatus.RUNNING
        replaced = self._insert_final_pages(request)
        assert not replaced, "a page is cached that the match did not find"
        return True

    # Decode

    def _schedule_decode(self) -> Decode | None:
        """Give every request that can take a decode step the pages for its draft."""
        lookahead, columns = self.config.num_lookahead_slots, self.config.columns
        requests = [r for r in self.running if r.may_decode]
        short = self._short(requests, lookahead)
        if _total(short) > self.cache.num_available:
            requests = self._secure_roots(requests)
            short = self._fair_shares(requests)
        if not requests:
            return None
        for request, missing in short:
            self._give(request, missing)
        size = self.cache.pool.page_size
        max_draft_nodes = []
        for request in requests:
            bound = request.max_computed_tokens
            own = len(request.pages) * size - min(bound, request.last_root)
            own = min(own, request.outgrows - bound)
            assert own >= 1, (request.request_id, bound, len(request.pages))
            max_draft_nodes.append(own if own < lookahead else lookahead)
            request.max_computed_tokens = bound + columns
            request.in_flight += 1
        return Decode(
            requests=tuple(requests),
            max_draft_nodes=tuple(max_draft_nodes),
            verify_budget=self.config.budget_for(len(requests)),
            slots=tuple(r.max_computed_tokens - columns + lookahead for r in requests),
        )

    def _short(self, requests: Sequence[Request], slots: int) -> list[tuple[Request, int]]:
        """Return the requests that lack pages for ``slots`` after their committed length, and how
        many pages each lacks. A whole draft takes ``num_lookahead_slots``."""
        pool = self.cache.pool
        size = pool.page_size
        return [
            (r, pool.pages_for(self._most_committed(r) + slots) - len(r.pages))
            for r in requests
            if r.max_computed_tokens + slots > len(r.pages) * size < self._most_committed(r) + slots
        ]

    def _fair_shares(self, requests: Sequence[Request]) -> list[tuple[Request, int]]:
        """Divide the pages that are left so that the narrowest draft is as wide as possible, since
        a draft's first nodes are worth most. Returns requests and the pages each gets."""
        available, widths = self.cache.num_available, range(1, self.config.num_lookahead_slots + 1)
        slots = bisect_right(
            widths, available, key=lambda most: _total(self._short(requests, most))
        )
        shares = dict(self._short(requests, slots))
        if slots < len(widths):
            left = available - sum(shares.values())
            for request, _ in self._short(requests, slots + 1)[:left]:
                shares[request] = shares.get(request, 0) + 1
        return list(shares.items())

    def _secure_roots(self, requests: Sequence[Request]) -> list[Request]:
        """Give each request the slot of its root, so that it can take a step without a draft.

        Returns those that have it. The others were retracted, or wait for pages that a step in
        flight may free.
        """
        secured = []
        for request in requests:
            least = self._most_committed(request) + 1
            while request.req_index and not self._grow(request, least):
                if self._drop_draft_pages():
                    continue
                loser = self._choose_retracted(request)
                if loser is request and self._others_in_flight(request):
                    break
                self.retract(loser)
            else:
                secured.append(request)
        return [request for request in secured if request.req_index]

    def _others_in_flight(self, request: Request) -> bool:
        """Return whether another request may end by a step whose results are not processed."""
        return any(other.in_flight for other in self.running if other is not request)

    def _grow(self, request: Request, num_slots: int) -> bool:
        """Give a request pages for ``num_slots``, or as many as there are; return whether it has
        all of them."""
        missing = self.cache.pool.pages_for(num_slots) - len(request.pages)
        return missing <= 0 or self._give(request, missing) == missing

    def _give(self, request: Request, num_pages: int) -> int:
        """Give a request so many pages, or as many as there are; return how many."""
        new = self.cache.take_pages(min(num_pages, self.cache.num_available))
        request.pages += new
        added = range(len(request.pages) - len(new), len(request.pages))
        self.table.write(request.req_index, request.pages, added)
        return len(new)

    def _most_committed(self, request: Request) -> int:
        """Return the most slots that its committed tokens can take once all launched steps are
        done. Steps launched after its last root do not count."""
        return min(request.max_computed_tokens, request.last_root)

    def _drop_draft_pages(self) -> bool:
        """Take back the pages that only nodes of drafts would use; return whether there were
        any."""
        dropped = False
        for request in self.running:
            tokens = max(self._most_committed(request) + 1, len(request.token_ids))
            needed = self.cache.pool.pages_for(tokens)
            if needed < len(request.pages):
                surplus = range(needed, len(request.pages))
                self.cache.pool.free(request.pages[needed:])
                del request.pages[needed:]
                self.table.write(request.req_index, request.pages, surplus)
                self._refused = None
                dropped = True
        return dropped

    def _choose_retracted(self, short: Request) -> Request:
        """Return the request to retract for one that is ``short`` of a page.

        Of those that come after it, it is the one of the least priority with the fewest tokens to
        compute again, the last of equals. If none comes after it, it is the request itself.
        """
        later = self.running[self.running.index(short) + 1 :] or [short]
        lowest = max(request.priority for request in later)
        last_first = (r for r in reversed(later) if r.priority == lowest)
        return min(last_first, key=self._loss)

    def _loss(self, request: Request) -> int:
        """Return the tokens that must be computed again if the request is retracted."""
        return request.num_computed_tokens - self.cache.num_shared_with_others(request.shared)

    def _retract_outgrown(self) -> None:
        """Retract the requests that have reached the length at which all of their tokens need
        other rotary frequencies."""
        for request in [
            r for r in self.running if r.num_computed_tokens >= r.outgrows and not r.in_flight
        ]:
            self.retract(request)

    def retract(self, request: Request) -> None:
        """Take a request's row and pages, and let it wait again at its old place.

        What it has computed stays in the prefix cache while there is room.
        """
        request.status = RequestStatus.WAITING
        self.waiting.add(request)  # first, so that no interrupt can lose it
        self._give_up(request)
        request.peak_computed_tokens = max(
            request.peak_computed_tokens, request.num_computed_tokens
        )
        request.num_computed_tokens = request.max_computed_tokens = 0
        request.draft_state = {}
        request.times_retracted += 1
        self._retracted.append(request)

    # Afterwards

    def processed(self, request: Request, committed: int | None) -> None:
        """Bring a request up to date once a launched step of it has been processed.

        Args:
            committed: tokens that a decode step committed; None for a prefill chunk.
        """
        request.in_flight -= 1
        if request.finished:
            self.release(request)
        elif request.req_index:  # not retracted since
            if committed is not None:
                request.num_computed_tokens += committed
                request.max_computed_tokens -= self.config.columns - committed
            else:
                lacking = self._lacking(request.request_id)
                replaced = self._insert_final_pages(request, lacking)
                self.table.write(request.req_index, request.pages, replaced)

    def release(self, request: Request) -> None:
        """Take back the row and pages of a finished request.

        Steps in flight may still write to them. They are launched before any step of the next
        owner, so that they write first.
        """
        assert request.finished
        if request.req_index:
            self._give_up(request)
        elif self.waiting.get(request.request_id):
            self.waiting.remove(request)

    def _give_up(self, request: Request) -> None:
        self._insert_final_pages(request, self._leave(request.request_id))
        self.cache.release(request.pages, request.shared)
        self.table.free(request.req_index)
        request.pages, request.shared, request.req_index = [], self.cache.root, 0
        self.running.remove(request)

    def _insert_final_pages(self, request: Request, lacking: int = 0) -> list[int]:
        """Insert the request's final pages into the prefix cache, but for the last ``lacking``
        tokens.

        Returns the indices of its pages that were replaced by equal cached ones.
        """
        request.shared, replaced = self.cache.insert(
            request.pages,
            request.shared,
            request.token_ids,
            request.num_computed_tokens - lacking,
            request.page_kind,
        )
        return replaced

    def forget_text(self, cache_salt: str | None) -> None:
        """Free the cached pages of all requests of a salt, or of all requests if it is None, but
        for pages that a running request uses."""
        if cache_salt is None:
            self.cache.clear()
        else:
            self.cache.clear(lambda kind: salt_of(kind) == cache_salt)

    def reset(self) -> list[Request]:
        """Forget all requests and cached pages, in whatever state they are; return the requests."""
        requests = list(dict.fromkeys(self))
        for request in requests:
            self._leave(request.request_id)
        self.cache.reset()
        self.table.reset()
        self.waiting = WaitingQueue()
        self.running.clear()
        self._admitted.clear()
        self._retracted.clear()
        self._placed.clear()
        self._lost_prefixes = 0
        self._refused = None
        for request in requests:
            request.req_index, request.pages, request.shared = 0, [], self.cache.root
        return requests

    def check(self) -> None:
        """Assert that no page and no row is lost."""
        self.cache.check((request.pages, request.shared) for request in self.running)
        rows = [request.req_index for request in self.running]
        assert len(set(rows)) == len(rows), "two requests share a row"
        assert 0 not in rows, "a running request has the padding row"
        assert self.table.num_free + len(rows) == self.table.req_table_size - 1, "a row leaked"
        assert self.running == sorted(self.running, key=attrgetter("sort_key"))
        assert not any(request.req_index for request in self.waiting), "a waiting request has a row"


def _total(short: Sequence[tuple[Request, int]]) -> int:
    """Return the pages that all of them lack together."""
    return sum(missing for _, missing in short)
