"""Whatever comes, goes and runs short when: each page and row has one owner, and who is first wins.

The machine plays the device too. A slot holds the tokens that its KV would be made of, so a page
that is shared, reused or written at the wrong moment shows as wrong content.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specplug import SamplingParams
from specplug.engine.collected_output import collect
from specplug.engine.core_outputs import RoutedExperts
from specplug.engine.request import Request, RequestStatus
from specplug.engine.scheduler import Scheduler, SchedulerConfig
from specplug.engine.step_values import Decode, Prefill, SchedulerOutput
from specplug.kv.page_allocator import PageAllocator
from specplug.kv.prefix_cache import CachedPage, PrefixCache
from specplug.kv.request_table import RequestTable

Tokens = tuple[int, ...]

COMMON: tuple[Tokens, ...] = tuple(
    tuple(int(token) for token in digits)
    for digits in ("01200112202101022211", "01200110202201120210", "20111021200102012201")
)
"""What prompts begin with; the first two only part after seven tokens."""

KINDS = (
    "prefill",
    "decode",
    "mixed",
    "hit",
    "hit after a retraction",
    "eviction",
    "retraction",
    "retraction with a step in flight",
    "a draft without room",
    "draft pages dropped",
    "waits for a step in flight",
    "another's page instead of its own",
    "abort: waiting",
    "abort: prefilling",
    "abort: running",
    "abort: in flight",
    "two in order",
)
SEEN: Counter[str] = Counter()
"""What the machine has come across; all that is wanted, or it has been too tame."""


def _request(number: int, prompt: Sequence[int], max_tokens: int, **changes: Any) -> Request:
    return Request(
        request_id=str(number),
        number=number,
        prompt=None,
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        seed=0,
        **{"params": SamplingParams(), **changes},
    )


def _continued(tokens: Tokens, length: int) -> Tokens:
    """What a target that looks at two tokens makes of a prompt: equal prefixes go on equally."""
    truth = list(tokens)
    while len(truth) < length:
        truth.append((truth[-1] + 2 * truth[max(0, len(truth) - 2)] + 1) % 3)
    return tuple(truth)


def _make(
    config: SchedulerConfig,
    num_pages: int,
    page_size: int,
    most_tokens: int,
    *,
    lookahead: int,
    caches: bool,
) -> Scheduler:
    """As ``LLM`` puts it together; ``num_pages`` can be handed out."""
    rows = config.max_running_requests + 1
    width = most_tokens + config.steps_in_flight * config.columns + config.num_lookahead_slots
    table = RequestTable(rows, width, page_size, torch.device("cpu"))
    cache = PrefixCache(PageAllocator(num_pages + 1, page_size), lookahead, enabled=caches)
    return Scheduler(config, cache, table)


@attrs.frozen
class Wanted:
    """A request to make: ``length`` tokens of a common prompt and a tail of its own."""

    common: int
    length: int
    tail: list[int]
    max_tokens: int
    priority: int
    stops: bool


WANTED_REQUESTS = st.builds(
    Wanted,
    common=st.integers(0, 2),
    length=st.one_of(st.integers(1, 6), st.integers(1, 20)),
    tail=st.lists(st.integers(0, 2), max_size=2),
    max_tokens=st.integers(1, 20),
    priority=st.integers(0, 2),
    stops=st.sampled_from([False, False, True]),
)


@attrs.define(eq=False)
class Shadow:
    """What the test itself knows of a request.

    Attributes:
        truth: its prompt and more than it may generate.
        on_device: tokens committed when all launched steps are done.
        on_host: tokens of which the host knows that their KV is there, or will be.
        floor: tokens that it found in the cache when it got its row.
        peak: most tokens that were computed when it lost its row.
        first_hit: tokens that it found when it got its first row.
        in_flight: launched steps that are not processed.
    """

    request: Request
    truth: Tokens
    on_device: int = 0
    on_host: int = 0
    floor: int = 0
    peak: int = 0
    first_hit: int | None = None
    retractions: int = 0
    in_flight: int = 0


@attrs.frozen(eq=False)
class Launched:
    """A step, what each request of its decode half accepts, and each one's retractions by then."""

    step: SchedulerOutput
    accepted: tuple[int, ...]
    retractions: dict[Request, int]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, steps are launched and processed, requests end, in any order."""

    @initialize(
        page_size=st.sampled_from([1, 3, 4, 16]),
        chunk=st.sampled_from([None, 1, 4, 7]),
        mixed=st.booleans(),
        rows=st.sampled_from([1, 2, 3, 4, 4]),
        columns=st.integers(1, 5),
        nodes=st.integers(1, 6),
        beyond=st.integers(0, 2),
        in_flight=st.integers(1, 2),
        longest=st.integers(6, 32),
        spare=st.sampled_from([0, 1, 2, 3, 5, 9, 90]),
        caches=st.sampled_from([True, True, False]),
        lookahead=st.sampled_from([0, 1, 3]),
    )
    def make(
        self,
        page_size: int,
        chunk: int | None,
        mixed: bool,
        rows: int,
        columns: int,
        nodes: int,
        beyond: int,
        in_flight: int,
        longest: int,
        spare: int,
        caches: bool,
        lookahead: int,
    ) -> None:
        self.config = SchedulerConfig(
            max_running_requests=rows,
            chunked_prefill_size=chunk,
            mixed_chunk=mixed,
            columns=columns,
            num_draft_tokens=nodes,
            num_lookahead_slots=max(nodes, columns) + beyond,
            steps_in_flight=in_flight,
        )
        pages = -(-longest // page_size) + spare
        self.scheduler = _make(
            self.config, pages, page_size, longest, lookahead=lookahead, caches=caches
        )
        self.cache, self.table = self.scheduler.cache, self.scheduler.table
        self.pool = self.cache.pool
        self.size, self.lookahead, self.longest = page_size, lookahead, longest
        self.earlier = max(lookahead - 1, 0)  # positions that a step computes again
        self.kv: dict[int, Tokens | None] = {}
        self.launched: list[Launched] = []
        self.shadows: dict[Request, Shadow] = {}
        self.ended: list[Request] = []
        self.evicted = 0
        self.untold: Counter[Request] = Counter()

    # What happens

    @precondition(lambda self: len(self.shadows) < 16)
    @rule(wanted=st.lists(WANTED_REQUESTS, min_size=1, max_size=6))
    def add(self, wanted: list[Wanted]) -> None:
        for each in wanted:
            prompt = (*COMMON[each.common][: each.length], *each.tail)[: self.longest - 1]
            request = _request(
                len(self.shadows),
                prompt,
                min(each.max_tokens, self.longest - len(prompt)),
                priority=each.priority,
                params=SamplingParams(stop_token_ids=(0,) if each.stops else ()),
            )
            self.shadows[request] = Shadow(request, _continued(prompt, self.longest + 40))
            self.scheduler.add(request)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(seed=st.integers(0, 999), turns=st.integers(1, 25), aborts=st.sampled_from([0, 0, 0.1]))
    def run(self, seed: int, turns: int, aborts: float) -> None:
        """As the engine's loop does: launch, and process what is due."""
        draw = random.Random(seed)
        for _ in range(turns):
            if self._live() and draw.random() < aborts:
                self._abort(draw.choice(self._retracted() or self._live()))
                self.all_is_as_it_must_be()
            self._turn(draw.randrange(60))
            self.all_is_as_it_must_be()

    def _turn(self, luck: int | None) -> None:
        launched = self._may_launch and self._launch(luck)
        if self.launched and not (launched and self._may_launch):
            self.process()

    @property
    def _may_launch(self) -> bool:
        return len(self.launched) < self.config.steps_in_flight

    @precondition(lambda self: self._may_launch)
    @rule(luck=st.integers(0, 59))
    def launch(self, luck: int) -> None:
        self._launch(luck)

    def _launch(self, luck: int | None) -> bool:
        """Whether there was something; without luck each request accepts one token."""
        before = list(self.scheduler.running)
        pages = {request: len(request.pages) for request in before}
        ready = [request for request in before if request.may_decode]
        step = self.scheduler.schedule()
        self._check_retractions(before, pages)
        if step is None:
            assert self.launched or not self.scheduler.has_work, "nothing would ever run again"
            return False
        assert step.prefill or step.decode
        assert Counter(step.retracted) == self.untold, "each retraction is told once"
        self.untold.clear()
        self._check_admissions(step)
        self._check_figures(step)
        accepted = self._accepted(step.decode, luck) if step.decode else ()
        retractions = {r: self.shadows[r].retractions for r in step.requests}
        self.launched.append(Launched(step, accepted, retractions))
        self._check_halves(step, ready)
        if step.prefill:
            self._check_prefill(step, step.prefill)
        if step.decode:
            self._check_decode(step.decode)
        self.table.flush()
        self._check_table()
        for chunk in step.prefill.chunks if step.prefill else ():
            self._compute_chunk(self.shadows[chunk.request], chunk.start, chunk.end)
        if step.decode:
            for request, max_draft_nodes, count in zip(
                step.decode.requests, step.decode.max_draft_nodes, accepted, strict=True
            ):
                self._compute_nodes(self.shadows[request], max_draft_nodes, count)
        for request in step.requests:
            self.shadows[request].in_flight += 1
        return True

    def _accepted(self, decode: Decode, luck: int | None) -> Tokens:
        most = enumerate(
            min(self.config.columns, max_draft_nodes) for max_draft_nodes in decode.max_draft_nodes
        )
        return tuple(1 if luck is None else 1 + (luck + 7 * i) % m for i, m in most)

    @precondition(lambda self: self.launched)
    @rule()
    def process(self) -> None:
        """The oldest step's results arrive."""
        done = self.launched.pop(0)
        for chunk in done.step.prefill.chunks if done.step.prefill else ():
            if chunk.is_last:
                self._append(chunk.request, 1)
            self._processed(done, chunk.request, None)
        if done.step.decode:
            for request, count in zip(done.step.decode.requests, done.accepted, strict=True):
                self._append(request, count)
                self._processed(done, request, count)

    def _append(self, request: Request, count: int) -> None:
        for _ in range(count):
            if not request.finished:
                request.append(self.shadows[request].truth[len(request.token_ids)])
                self.ended += [request] if request.finished else []

    def _processed(self, done: Launched, request: Request, committed: int | None) -> None:
        shadow = self.shadows[request]
        shadow.in_flight -= 1
        if committed and done.retractions[request] == shadow.retractions:
            shadow.on_host += committed
        pages = list(request.pages)
        self.scheduler.processed(request, committed=committed)
        SEEN["another's page instead of its own"] += bool(request.pages) and request.pages != pages

    @precondition(lambda self: self._live())
    @rule(which=st.integers(0, 59))
    def abort(self, which: int) -> None:
        live = self._live()
        self._abort(live[which % len(live)])

    def _live(self) -> list[Request]:
        return [request for request in self.shadows if not request.finished]

    def _retracted(self) -> list[Request]:
        return [request for request in self.scheduler.waiting if request.times_retracted]

    def _abort(self, request: Request) -> None:
        retracted = "retracted, " if request in self._retracted() else ""
        SEEN[f"abort: {retracted}{request.status.value}"] += 1
        SEEN["abort: in flight"] += request.in_flight > 0
        request.finish("abort")
        self.scheduler.release(request)
        assert request not in list(self.scheduler)

    @rule()
    def forget_text(self) -> None:
        self.scheduler.forget_text(None)
        assert self.cache.num_unused == 0

    # What is scheduled

    def _check_retractions(self, before: list[Request], pages: dict[Request, int]) -> None:
        lost = [r for r in before if r.times_retracted > self.shadows[r].retractions]
        kept = [r for r in before if r not in lost]
        assert not before or before[0] in kept, "the foremost request gave way"
        SEEN["retraction"] += len(lost)
        SEEN["retraction with a step in flight"] += any(r.in_flight for r in lost)
        SEEN["draft pages dropped"] += any(len(r.pages) < pages[r] for r in kept)
        for victim in lost:
            assert all(request.priority <= victim.priority for request in kept)
            shadow = self.shadows[victim]
            shadow.peak = max(shadow.peak, shadow.on_host)
            shadow.on_host = shadow.on_device = 0
            shadow.retractions += 1
        self.untold.update(lost)

    def _check_admissions(self, step: SchedulerOutput) -> None:
        admitted = step.admitted
        assert list(admitted) == sorted(admitted, key=lambda request: request.sort_key)
        for request in admitted:
            assert self.shadows[request].in_flight == 0, "its pages are still being written to"
            assert all(request.sort_key < other.sort_key for other in self.scheduler.waiting)

    def _check_figures(self, step: SchedulerOutput) -> None:
        self.evicted += step.evicted_pages
        SEEN["eviction"] += step.evicted_pages
        assert self.evicted == self.cache.evicted
        assert step.num_running == len(self.scheduler.running) <= self.config.max_running_requests
        assert step.num_waiting == len(self.scheduler.waiting)
        assert step.free_pages == self.pool.num_free
        assert step.cached_pages == self.cache.num_pages

    def _check_halves(self, step: SchedulerOutput, ready: list[Request]) -> None:
        assert len(set(step.requests)) == len(step.requests)
        mode = ("prefill" if step.prefill else "") + ("decode" if step.decode else "")
        assert step.mode == mode.replace("prefilldecode", "mixed")
        assert self.config.mixed_chunk or step.mode != "mixed", "prompts go alone"
        SEEN[step.mode] += 1
        prefilling = [r for r in self.scheduler.running if r.status is RequestStatus.PREFILLING]
        if step.decode or self.config.mixed_chunk:
            going = step.decode.requests if step.decode else ()
            left = [r for r in ready if r not in step.retracted]
            assert [r for r in left if r in going] == list(going)
            self._check_postponed([r for r in left if r not in going])
        if step.decode:
            assert self.config.mixed_chunk or not prefilling, "prompts go first"
        if self.config.mixed_chunk:
            assert step.prefill or not prefilling, (
                "a prompt moves on, however many drafts there are"
            )

    def _check_prefill(self, step: SchedulerOutput, prefill: Prefill) -> None:
        chunks, budget = prefill.chunks, self.config.chunked_prefill_size
        most = self.config.num_draft_tokens
        nodes = (
            sum(min(max_draft_nodes, most) for max_draft_nodes in step.decode.max_draft_nodes)
            if step.decode
            else 0
        )
        if budget is not None:
            least = nodes + self.size if self.config.mixed_chunk else 0
            assert nodes + sum(c.end - c.start for c in chunks) <= max(budget, least)
        assert all(chunk.is_last for chunk in chunks[:-1]), "the budget ends one chunk at most"
        first = [chunk.is_first for chunk in chunks]
        assert first == sorted(first), "who has a row goes on before another gets one"
        assert all(
            a.request.sort_key < b.request.sort_key for a, b in pairwise(chunks) if a.is_first
        )
        assert [chunk.request for chunk in chunks if chunk.is_first] == list(step.admitted)
        for chunk in chunks:
            shadow, known = self.shadows[chunk.request], len(chunk.request.token_ids)
            if chunk.is_first:
                shadow.floor = shadow.on_device = shadow.on_host = chunk.start
                if shadow.first_hit is None:
                    shadow.first_hit = chunk.start
                SEEN["hit"] += chunk.start > 0
                SEEN["hit after a retraction"] += chunk.start > 0 and shadow.retractions > 0
                assert chunk.start % self.size == 0
                assert chunk.start == 0 or self.cache.enabled
            assert chunk.start == shadow.on_device, "a chunk starts where the KV ends"
            assert chunk.start < chunk.end <= known
            assert chunk.is_last == (chunk.end == known)
            assert chunk.tokens == list(shadow.truth[chunk.start : chunk.end])
            assert chunk.recomputed == sum(p < shadow.peak for p in range(chunk.start, chunk.end))
            assert len(chunk.request.pages) == -(-known // self.size)
            expected = RequestStatus.RUNNING if chunk.is_last else RequestStatus.PREFILLING
            assert chunk.request.status is expected

    def _check_postponed(self, postponed: list[Request]) -> None:
        """Only the last one may be left out, and only if a step in flight may end another."""
        assert len(postponed) <= 1
        for request in postponed:
            SEEN["waits for a step in flight"] += 1
            others = [r for r in self.scheduler.running if r is not request]
            assert all(
                r.sort_key < request.sort_key or r.status is RequestStatus.PREFILLING
                for r in others
            )
            assert any(self.shadows[r].in_flight for r in others)

    def _check_decode(self, decode: Decode) -> None:
        each = zip(decode.requests, decode.max_draft_nodes, decode.slots, strict=True)
        for request, max_draft_nodes, slots in each:
            start = self.shadows[request].on_device
            assert start + self.config.columns <= request.max_computed_tokens
            assert slots >= start + self.config.num_lookahead_slots
            assert 1 <= max_draft_nodes <= self.config.num_lookahead_slots
            if max_draft_nodes < self.config.num_lookahead_slots:
                SEEN["a draft without room"] += 1
                assert self.cache.num_available == 0

    # What the device makes of it

    def _check_table(self) -> None:
        assert not self.table.slots[0].any(), "the padding row"
        slots, floors = self.table.slots.tolist(), self.table.floors.tolist()
        for request in self.scheduler.running:
            expected = [p * self.size + i for p in request.pages for i in range(self.size)]
            expected += [0] * (len(slots[0]) - len(expected))
            assert slots[request.req_index] == expected[: len(slots[0])]
            assert floors[request.req_index] == self.shadows[request].floor

    def _compute_chunk(self, shadow: Shadow, start: int, end: int) -> None:
        known = len(shadow.request.token_ids)
        self._check_context(shadow, start, known)
        shadow.on_device = shadow.on_host = end
        known += end == known  # the token that the target makes of it
        self._write(shadow, max(shadow.floor, start - self.earlier), end, known)

    def _compute_nodes(self, shadow: Shadow, max_draft_nodes: int, count: int) -> None:
        request, start = shadow.request, shadow.on_device
        reach = start + self.config.num_lookahead_slots
        if start <= request.last_root:  # else it has ended, which the host does not know
            self._check_context(shadow, start, start + 1)
            assert start + max_draft_nodes <= len(request.pages) * self.size, (
                "a node without a slot"
            )
        shadow.on_device += count
        end, known = shadow.on_device, shadow.on_device + 1
        self._write(shadow, max(shadow.floor, start - self.earlier), end, known)
        for position in range(end, min(reach, len(request.pages) * self.size)):
            assert position // self.size >= request.shared.depth, "a draft in a cached page"
            self.kv[self._slot(request, position)] = None

    def _write(self, shadow: Shadow, start: int, end: int, known: int) -> None:
        """KV of positions ``start`` to ``end``, when the first ``known`` tokens are known."""
        request = shadow.request
        for position in range(max(0, start), min(end, len(request.pages) * self.size)):
            content = shadow.truth[: min(position + 1 + self.lookahead, known)]
            slot = self._slot(request, position)
            if position // self.size < request.shared.depth:
                assert position < shadow.on_host, "a new token in a page that others can find"
                SEEN["a cached page written to again"] += 1
                assert self.kv[slot] == content, "others see what they find there change"
            self.kv[slot] = content

    def _check_context(self, shadow: Shadow, end: int, known: int) -> None:
        """What a request reads is its own tokens' KV."""
        for position in range(end):
            content = shadow.truth[: min(position + 1 + self.lookahead, known)]
            assert self.kv[self._slot(shadow.request, position)] == content, position

    def _slot(self, request: Request, position: int) -> int:
        return request.pages[position // self.size] * self.size + position % self.size

    # What always holds

    @invariant()
    def all_is_as_it_must_be(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        self._check_pages()
        running, waiting = set(self.scheduler.running), set(self.scheduler.waiting)
        for request, shadow in self.shadows.items():
            assert request.in_flight == shadow.in_flight
            assert (request in running) + (request in waiting) == (not request.finished)
            assert bool(request.req_index) == (request in running)
            assert (request.status is RequestStatus.WAITING) == (request in waiting)
            assert request.times_retracted == shadow.retractions
            assert request.num_cached == (shadow.first_hit or 0)
            assert tuple(request.token_ids) == shadow.truth[: len(request.token_ids)]
            if request in running:
                assert (
                    request.num_computed_tokens
                    == shadow.on_host
                    <= shadow.on_device
                    <= request.max_computed_tokens
                )
                assert (
                    request.in_flight or request.num_computed_tokens == request.max_computed_tokens
                )
            elif request.finished:
                assert not request.pages
            else:
                assert (
                    request.pages,
                    request.num_computed_tokens,
                    request.max_computed_tokens,
                ) == ([], 0, 0)

    def _check_pages(self) -> None:
        cached = dict(_prefixes(self.cache.root, (), self.size))
        owned = [r.pages[r.shared.depth :] for r in self.scheduler.running]
        pages = [*cached, *(page for of_request in owned for page in of_request)]
        assert len(set(pages)) == len(pages) == self.pool.num_pages - 1 - self.pool.num_free
        assert self.cache.num_pages == len(cached)
        assert self.cache.enabled or not cached
        for page, tokens in cached.items():
            first = len(tokens) - self.lookahead - self.size
            for i in range(self.size):
                content = tokens[: first + i + 1 + self.lookahead]
                assert self.kv[page * self.size + i] == content, "a page of another prefix"

    def teardown(self) -> None:
        """Left alone, everything ends, who is first first, and all is free."""
        if not hasattr(self, "scheduler"):
            return
        patient = [
            (request, request.times_retracted, request.max_tokens - len(request.output_token_ids))
            for request in self.scheduler.waiting
            if not (request.in_flight or request.params.stop_token_ids)
        ]
        for _ in range(40 * 32 * 12):
            if not self.scheduler.has_work and not self.launched:
                break
            self._turn(None)
        assert not self.scheduler.has_work
        self._check_order([(r, left) for r, n, left in patient if r.times_retracted == n])
        self.all_is_as_it_must_be()
        assert self.cache.num_available == self.pool.num_pages - 1
        assert self.table.num_free == self.config.max_running_requests
        self.cache.clear()
        assert self.pool.num_free == self.pool.num_pages - 1

    def _check_order(self, requests: list[tuple[Request, int]]) -> None:
        """Those that have no more to do than one after them have ended before it."""
        place = {request: i for i, request in enumerate(self.ended)}
        for first, less in requests:
            for second, more in requests:
                if first.sort_key < second.sort_key and less <= more:
                    SEEN["two in order"] += 1
                    assert place[first] < place[second]


def _prefixes(node: CachedPage, before: Tokens, size: int) -> Iterator[tuple[int, Tokens]]:
    """Each cached page, and the tokens up to its end and after it that it is found by."""
    for key, child in node.children.items():
        yield child.page, before + key
        yield from _prefixes(child, before + key[:size], size)


class TestScheduler(SchedulerMachine.TestCase):  # type: ignore[misc, valid-type]
    """The machine, and that it has been everywhere."""

    settings = settings(
        max_examples=500,
        stateful_step_count=20,
        phases=[Phase.generate],  # to make a failure smaller takes minutes
        deadline=None,
        derandomize=True,
        database=None,
    )

    def runTest(self) -> None:
        SEEN.clear()
        super().runTest()
        assert not [what for what in KINDS if not SEEN[what]], SEEN


# One case each


def _scheduler(
    num_pages: int, page_size: int = 4, *, most_tokens: int = 64, **changes: Any
) -> Scheduler:
    """Plain decoding without overlap, unless told otherwise."""
    lookahead, caches = changes.pop("lookahead", 0), changes.pop("caches", True)
    slots = max(changes.get("num_draft_tokens", 1), changes.get("columns", 1))
    config = SchedulerConfig(**{"max_running_requests": 8, "num_lookahead_slots": slots, **changes})
    return _make(config, num_pages, page_size, most_tokens, lookahead=lookahead, caches=caches)


def _add(scheduler: Scheduler, number: int, size: int, **changes: Any) -> Request:
    """A request whose prompt is like no other's, unless told otherwise."""
    prompt = changes.pop("prompt", tuple(range(1000 * number, 1000 * number + size)))
    request = _request(number, prompt, changes.pop("max_tokens", 40), **changes)
    scheduler.add(request)
    return request


def _process(scheduler: Scheduler, step: SchedulerOutput, accepted: dict[Request, int]) -> None:
    """The step's results: each request takes one token, or what it ``accepted``."""
    for chunk in step.prefill.chunks if step.prefill else ():
        if chunk.is_last and not chunk.request.finished:
            chunk.request.append(-1)
        scheduler.processed(chunk.request, committed=None)
    for request in step.decode.requests if step.decode else ():
        count = accepted.get(request, 1)
        for _ in range(count):
            if not request.finished:
                request.append(-1)
        scheduler.processed(request, committed=count)


def _turn(scheduler: Scheduler, accepted: dict[Request, int] | None = None) -> SchedulerOutput:
    """One step, launched and processed."""
    step = scheduler.schedule()
    assert step is not None
    _process(scheduler, step, accepted or {})
    scheduler.check()
    return step


def _end(scheduler: Scheduler, request: Request) -> None:
    request.finish("abort")
    scheduler.release(request)


def test_admission_is_by_priority_then_arrival() -> None:
    scheduler = _scheduler(64, max_running_requests=3)
    requests = [_add(scheduler, i, 4, priority=p) for i, p in enumerate((2, 0, 1, 0, -1))]
    assert _turn(scheduler).admitted == tuple(requests[i] for i in (4, 1, 3))
    assert scheduler.running == [requests[i] for i in (4, 1, 3)]
    assert scheduler.waiting.first() is requests[2]


def test_no_more_requests_run_than_there_are_rows() -> None:
    scheduler = _scheduler(64, max_running_requests=2)
    requests = [_add(scheduler, i, 4, max_tokens=3) for i in range(5)]
    step = _turn(scheduler)
    assert step.admitted == tuple(requests[:2])
    assert (step.num_running, step.num_waiting) == (2, 3)
    _end(scheduler, requests[0])
    assert _turn(scheduler).admitted == (requests[2],)


def test_a_chunked_prompt_goes_on_before_another_begins() -> None:
    scheduler = _scheduler(64, chunked_prefill_size=5)
    first, second = _add(scheduler, 0, 7), _add(scheduler, 1, 6)
    chunks = []
    for _ in range(3):
        step = _turn(scheduler)
        assert step.prefill
        chunks.append([(c.request, c.start, c.end, c.is_last) for c in step.prefill.chunks])
    assert chunks == [
        [(first, 0, 5, False)],
        [(first, 5, 7, True), (second, 0, 3, False)],
        [(second, 3, 6, True)],
    ]
    assert _turn(scheduler).mode == "decode"


@pytest.mark.parametrize(("budget", "sizes"), [(12, [10, 6]), (8, [6, 6, 4]), (5, [4, 4, 4, 4])])
def test_in_a_mixed_step_drafts_eat_the_budget_but_for_a_page(
    budget: int, sizes: list[int]
) -> None:
    """Two nodes a step; the second prompt has sixteen tokens."""
    scheduler = _scheduler(
        64, mixed_chunk=True, chunked_prefill_size=budget, num_draft_tokens=2, columns=2
    )
    _add(scheduler, 0, 4)
    _turn(scheduler)
    late = _add(scheduler, 1, 16)
    found = []
    while late.status is not RequestStatus.RUNNING:
        step = _turn(scheduler)
        assert step.mode == "mixed"
        assert step.prefill
        found.append(sum(chunk.end - chunk.start for chunk in step.prefill.chunks))
    assert found == sizes


def test_without_mixed_steps_prompts_go_first() -> None:
    scheduler = _scheduler(64, chunked_prefill_size=4)
    _add(scheduler, 0, 4)
    _turn(scheduler)
    _add(scheduler, 1, 12)
    assert [_turn(scheduler).mode for _ in range(4)] == ["prefill"] * 3 + ["decode"]


def _until_retraction(scheduler: Scheduler, fast: Request) -> SchedulerOutput:
    """``fast`` accepts four tokens a step, the others one."""
    for _ in range(20):
        step = _turn(scheduler, {fast: 4})
        if step.retracted:
            return step
    raise AssertionError("nobody had to give way")


def _decoding(count: int, rows: int) -> Scheduler:
    """So many requests that decode, just prefilled, in a batch of ``rows``."""
    scheduler = _make(
        SchedulerConfig(max_running_requests=rows), 256, 4, 64, lookahead=0, caches=False
    )
    for number in range(count):
        scheduler.add(_request(number, (0, 1, 2), 40))
    step = scheduler.schedule()
    assert step is not None
    assert step.prefill is not None
    _processed(scheduler, step)
    return scheduler


def _processed(scheduler: Scheduler, step: SchedulerOutput) -> None:
    for request in step.requests:
        request.output_token_ids.append(0)
        scheduler.processed(request, 1 if step.decode else None)


def _kinds(scheduler: Scheduler, steps: int) -> str:
    """What the next steps are: prefills or decode steps."""
    kinds = ""
    for _ in range(steps):
        step = scheduler.schedule()
        assert step is not None
        kinds += "p" if step.prefill else "d"
        _processed(scheduler, step)
    return kinds


def test_few_prompts_wait_for_others_where_many_decode() -> None:
    scheduler = _decoding(32, rows=36)
    scheduler.add(_request(40, (1, 1), 4))
    assert _kinds(scheduler, 2) == "dd"
    scheduler.add(_request(41, (1, 2), 4))
    assert _kinds(scheduler, 4) == "ddpd", "both together, four steps after the last prefill"


def test_prompts_do_not_wait_that_are_many_or_come_seldom() -> None:
    scheduler = _decoding(32, rows=36)
    for number in (40, 41, 42):
        scheduler.add(_request(number, (1, 1), 4))
    assert _kinds(scheduler, 5) == "pdddd", "for each of them ten decode"
    scheduler.add(_request(43, (1, 2), 4))
    assert _kinds(scheduler, 2) == "pd"


def test_prompts_do_not_wait_where_few_decode() -> None:
    scheduler = _decoding(8, rows=36)
    scheduler.add(_request(40, (1, 1), 4))
    assert _kinds(scheduler, 2) == "pd"
    full = _decoding(32, rows=32)
    full.add(_request(40, (1, 1), 4))
    assert _kinds(full, 2) == "dd", "there is no row"


@pytest.mark.parametrize(("priorities", "victim"), [((0, 0, 0, 0), 2), ((0, 2, 1, 1), 1)])
def test_retraction_takes_least_priority_then_fewest_tokens(
    priorities: Tokens, victim: int
) -> None:
    scheduler = _scheduler(12, columns=4)
    requests = [
        _add(scheduler, i, size, priority=priority)
        for i, (size, priority) in enumerate(zip((4, 8, 5, 8), priorities, strict=True))
    ]
    assert set(_turn(scheduler).admitted) == set(requests)
    lost = requests[victim]
    assert _until_retraction(scheduler, requests[0]).retracted == (lost,)
    assert lost.status is RequestStatus.WAITING
    assert (lost.req_index, lost.pages, lost.times_retracted) == (0, [], 1)
    assert scheduler.waiting.first() is lost


def test_who_is_before_the_short_one_does_not_give_way() -> None:
    """The second request needs the page, and would itself lose least; the third gives way."""
    scheduler = _scheduler(12, columns=4)
    first, fast, last = (_add(scheduler, i, size) for i, size in enumerate((5, 2, 21)))
    _turn(scheduler)
    assert _until_retraction(scheduler, fast).retracted == (last,)
    assert fast.num_computed_tokens < last.peak_computed_tokens
    assert scheduler.running == [first, fast]


def test_what_another_running_request_has_too_is_no_loss() -> None:
    scheduler = _scheduler(12, columns=4)
    fast = _add(scheduler, 0, 9, prompt=(*range(8), 50))
    others = [_add(scheduler, 1, 8), _add(scheduler, 2, 5)]
    _turn(scheduler)
    longest = _add(scheduler, 3, 10, prompt=(*range(8), 60, 61))
    _turn(scheduler)
    assert longest.num_cached == 8
    assert _until_retraction(scheduler, fast).retracted == (longest,)
    assert all(request.num_computed_tokens < longest.peak_computed_tokens for request in others)
    assert scheduler.cache.num_shared_with_others(fast.shared) == 0, (
        "nobody else uses them any more"
    )


def test_retracted_request_keeps_its_place_in_the_queue() -> None:
    scheduler = _scheduler(12, columns=4, max_running_requests=4)
    requests = [_add(scheduler, i, size, max_tokens=17) for i, size in enumerate((4, 8, 5, 8, 4))]
    _turn(scheduler)
    fast, lost, later = requests[0], requests[2], requests[4]
    _until_retraction(scheduler, fast)
    assert list(scheduler.waiting) == [later, lost]
    assert scheduler.waiting.first() is lost
    computed = lost.peak_computed_tokens
    assert computed == 8
    while lost.status is RequestStatus.WAITING:
        step = _turn(scheduler, {fast: 4})
    assert step.admitted[0] is lost
    assert step.prefill
    chunk = step.prefill.chunks[0]
    assert (chunk.start, chunk.end, chunk.is_last) == (lost.num_computed_tokens - 9, 9, True)
    assert chunk.recomputed == computed - chunk.start
    assert (lost.num_cached, lost.times_retracted) == (0, 1)


def test_who_was_retracted_may_be_aborted_while_it_waits_again() -> None:
    scheduler = _scheduler(12, columns=4)
    requests = [_add(scheduler, i, size) for i, size in enumerate((4, 5, 8, 5))]
    _turn(scheduler)
    (lost,) = _until_retraction(scheduler, requests[0]).retracted
    assert scheduler.waiting.first() is lost
    _end(scheduler, lost)
    scheduler.check()
    assert scheduler.waiting.first() is None
    for request in requests:
        if not request.finished:
            _end(scheduler, request)
    assert not scheduler.has_work
    assert scheduler.cache.num_available == 12


def test_of_those_who_lose_the_same_who_came_last_gives_way() -> None:
    scheduler = _scheduler(12, columns=4)
    requests = [_add(scheduler, i, size) for i, size in enumerate((4, 5, 8, 5))]
    _turn(scheduler)
    assert _until_retraction(scheduler, requests[0]).retracted == (requests[3],)


def test_retracted_request_waits_for_its_steps_in_flight() -> None:
    scheduler = _scheduler(8, steps_in_flight=2)
    lost, other = _add(scheduler, 0, 4), _add(scheduler, 1, 4)
    for _ in range(3):
        _turn(scheduler)
    first = scheduler.schedule()
    assert first is not None
    assert lost.in_flight == 1
    _end(scheduler, other)
    scheduler.retract(lost)
    later = _add(scheduler, 2, 1)
    assert scheduler.schedule() is None
    _process(scheduler, first, {})
    step = scheduler.schedule()
    assert step is not None
    assert step.prefill
    assert step.retracted == (lost,)
    assert [chunk.request for chunk in step.prefill.chunks] == [lost, later]
    assert step.prefill.chunks[0].end == len(lost.token_ids) == 8
    assert step.prefill.chunks[0].recomputed == 6 - step.prefill.chunks[0].start


def test_drafts_shrink_before_anyone_gives_way() -> None:
    """The first accepts one token a step, the second two, of pages of four."""
    scheduler = _scheduler(6, num_draft_tokens=8, columns=2)
    first, second = _add(scheduler, 0, 3), _add(scheduler, 1, 4)
    _turn(scheduler)
    rooms = []
    for _ in range(5):
        step = _turn(scheduler, {second: 2})
        assert step.retracted == ()
        assert step.decode
        rooms.append(step.decode.max_draft_nodes)
    assert rooms == [(8, 8), (8, 6), (7, 4), (6, 2), (1, 4)]
    assert (len(first.pages), len(second.pages)) == (2, 4), "one page was for a draft alone"


def test_decode_short_of_pages_shares_them_evenly() -> None:
    """Nobody gets the whole of a draft while another has none."""
    scheduler = _scheduler(25, num_draft_tokens=16, columns=2, page_size=1)
    for number in range(4):
        _add(scheduler, number, 3)
    _turn(scheduler)
    step = _turn(scheduler)
    assert step.decode
    assert step.decode.max_draft_nodes == (4, 3, 3, 3)


def test_room_of_a_draft_model_is_all_that_it_may_write() -> None:
    """Its own keys may need more slots than the target has nodes."""
    scheduler = _scheduler(25, num_draft_tokens=4, columns=2, num_lookahead_slots=16, page_size=1)
    _add(scheduler, 0, 12)
    _turn(scheduler)
    step = _turn(scheduler)
    assert step.decode
    assert step.decode.max_draft_nodes == (13,)


def test_cached_pages_that_nobody_uses_go_before_drafts_do() -> None:
    scheduler = _scheduler(10, num_draft_tokens=8, columns=2)
    earlier = _add(scheduler, 2, 13, max_tokens=1)
    _turn(scheduler)
    assert earlier.finished
    assert (scheduler.cache.num_pages, scheduler.cache.num_unused) == (3, 3)
    for number in range(2):
        _add(scheduler, number, 4)
    _turn(scheduler)
    evicted = []
    for _ in range(6):
        step = _turn(scheduler)
        assert step.retracted == ()
        assert step.decode
        assert step.decode.max_draft_nodes == (8, 8)
        evicted.append(step.evicted_pages)
    assert evicted == [0, 1, 0, 0, 0, 2]


@pytest.mark.parametrize("caches", [True, False])
def test_refused_request_is_retried_when_the_cache_changes(
    caches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = _scheduler(4, caches=caches, lookahead=1)
    looked_at: list[int] = []
    match = scheduler.cache.match

    def matched(tokens: Sequence[int], most: int, kind: int) -> CachedPage:
        looked_at.append(len(tokens))
        return match(tokens, most, kind)

    monkeypatch.setattr(scheduler.cache, "match", matched)
    running, refused = _add(scheduler, 0, 9), _add(scheduler, 1, 8)
    _turn(scheduler)
    assert looked_at == [9, 8]
    _turn(scheduler)
    assert looked_at == [9, 8] + [8] * caches, "what was kept could have been its prefix"
    for _ in range(2):
        _turn(scheduler)
    assert looked_at == [9, 8] + [8] * caches
    _end(scheduler, running)
    assert _turn(scheduler).admitted == (refused,)
    assert looked_at[-1] == 8


def test_another_request_than_the_refused_one_is_looked_at() -> None:
    scheduler = _scheduler(4, caches=False)
    _add(scheduler, 0, 5)
    refused = _add(scheduler, 1, 9)
    _turn(scheduler)
    urgent = _add(scheduler, 2, 3, priority=-1)
    assert _turn(scheduler).admitted == (urgent,)
    assert list(scheduler.waiting) == [refused]


def test_an_aborted_waiting_request_leaves_the_queue_at_once() -> None:
    scheduler = _scheduler(64, max_running_requests=1)
    requests = [_add(scheduler, i, 4) for i in range(3)]
    _turn(scheduler)
    _end(scheduler, requests[1])
    assert list(scheduler.waiting) == [requests[2]]
    assert list(scheduler) == [requests[2], requests[0]]
    _end(scheduler, requests[0])
    assert _turn(scheduler).admitted == (requests[2],)
    _end(scheduler, requests[2])
    assert not scheduler.has_work
    assert scheduler.schedule() is None


def test_admission_leaves_room_for_running_requests() -> None:
    """One page for each of them, two after a retraction; none where nothing runs."""
    for retractions, needed in ((0, 6), (1, 8), (2, 10)):
        for num_pages in (needed - 1, needed):
            scheduler = _scheduler(num_pages)
            for i in range(2):
                _add(scheduler, i, 4)
            _turn(scheduler)
            late = _add(scheduler, 2, 8)
            late.times_retracted = retractions
            step = _turn(scheduler)
            assert (step.admitted == (late,)) == (num_pages == needed)
    alone = _scheduler(2)
    request = _add(alone, 0, 8)
    request.times_retracted = 3
    assert _turn(alone).admitted == (request,)


def test_cached_prefix_needs_no_page_and_gives_no_room() -> None:
    scheduler = _scheduler(4)
    first = _add(scheduler, 0, 0, prompt=range(13), max_tokens=1)
    _turn(scheduler)
    assert first.finished
    assert scheduler.cache.num_unused == 3
    again = _add(scheduler, 1, 0, prompt=range(13))
    step = _turn(scheduler)
    assert step.prefill
    assert [(c.start, c.end) for c in step.prefill.chunks] == [(12, 13)]
    assert again.num_cached == 12
    assert (step.evicted_pages, step.free_pages, step.cached_pages) == (0, 0, 3)
    assert scheduler.table.floors[again.req_index] == 0, "not flushed"
    scheduler.table.flush()
    assert scheduler.table.floors[again.req_index] == 12


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    scheduler = _scheduler(64)
    _add(scheduler, 0, 0, prompt=range(8), max_tokens=1)
    _turn(scheduler)
    again = _add(scheduler, 1, 0, prompt=range(8))
    _turn(scheduler)
    assert again.num_cached == 4


def test_who_wants_its_experts_computes_what_has_none_yet() -> None:
    scheduler = _scheduler(64)
    _add(scheduler, 0, 0, prompt=range(12), max_tokens=1)
    _turn(scheduler)
    params = SamplingParams(return_routed_experts=True)
    request = _add(scheduler, 1, 0, prompt=range(12), params=params)
    request.outputs = collect([RoutedExperts(num_routers=1)], params, 12)
    step = _turn(scheduler)
    assert step.prefill
    assert step.prefill.chunks[0].start == 0
    request.outputs["routed_experts"].take(0, {"routed_experts": torch.zeros(9, 1, 1)})
    scheduler.retract(request)
    step = _turn(scheduler)
    assert step.prefill
    assert step.prefill.chunks[0].start == 8, "the ninth token's page has tokens without"


def test_a_prompt_keeps_the_pages_that_it_has_not_come_to_yet() -> None:
    """Those who generate beside it give way, the last one first, for pages that it will need."""
    scheduler = _scheduler(12, mixed_chunk=True, chunked_prefill_size=3, columns=2)
    others = []
    for number in range(2):
        others.append(_add(scheduler, number, 4))
        _turn(scheduler)
    prompt = _add(scheduler, 2, 24, priority=-1)
    retracted = []
    while prompt.status is not RequestStatus.RUNNING:
        step = _turn(scheduler, dict.fromkeys(others, 2))
        assert step.prefill
        assert len(prompt.pages) == 6
        retracted += [request.number for request in step.retracted]
    assert retracted == [1]


def test_tokens_lost_by_two_retractions_count_as_recomputed() -> None:
    scheduler = _scheduler(16, chunked_prefill_size=4, caches=False)
    request = _add(scheduler, 0, 12)
    for _ in range(3):
        _turn(scheduler)
    for _ in range(2):
        scheduler.retract(request)
        step = _turn(scheduler)
        assert step.prefill
        assert step.prefill.chunks[0].recomputed == 4
    step = _turn(scheduler)
    assert step.prefill
    assert step.prefill.chunks[0].recomputed == 4, "the first time it came as far as 12"


def test_requests_are_found_by_name_wherever_they_are() -> None:
    scheduler = _scheduler(64, max_running_requests=1)
    requests = [_add(scheduler, i, 4) for i in range(3)]
    _turn(scheduler)
    assert scheduler.find(["0", "2", "never there"]) == [requests[2], requests[0]]
    _end(scheduler, requests[2])
    assert scheduler.find(["2"]) == []


def test_disabled_cache_keeps_no_page() -> None:
    scheduler = _scheduler(16, caches=False)
    request = _add(scheduler, 0, 12)
    for _ in range(5):
        step = _turn(scheduler)
        assert step.cached_pages == 0
    _end(scheduler, request)
    assert scheduler.cache.pool.num_free == 16


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("page twice", "a KV page leaked or has two owners"),
        ("page lost", "a KV page leaked or has two owners"),
        ("row twice", "two requests share a row"),
        ("padding row", "a running request has the padding row"),
        ("row lost", "a row leaked"),
        ("row kept", "a waiting request has a row"),
    ],
)
def test_the_check_tells_what_is_wrong(harm: str, message: str) -> None:
    scheduler = _scheduler(16, max_running_requests=3)
    one, other = _add(scheduler, 0, 3), _add(scheduler, 1, 3)
    _turn(scheduler)
    if harm == "page twice":
        other.pages = list(one.pages)
    elif harm == "page lost":
        scheduler.cache.pool.take(1)
    elif harm == "row twice":
        other.req_index = one.req_index
    elif harm == "padding row":
        one.req_index = 0
    elif harm == "row lost":
        scheduler.table.take_row(floor=0, rotary_len=1)
    else:
        _add(scheduler, 2, 3).req_index = 3
    with pytest.raises(AssertionError, match=message):
        scheduler.check()
