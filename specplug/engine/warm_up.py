"""Runs the steps of a run once before its first request, so that no request waits for a compiler.

A kernel is compiled when it is first launched, for some shapes anew, and a pass is recorded when
its shape occurs for the first or the second time. Here every shape occurs that requests commonly
bring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from specplug.distributed.rank_group import RankGroup
from specplug.engine.hook_watch import HookWatch
from specplug.engine.request import Request
from specplug.engine.scheduler import SchedulerConfig
from specplug.engine.step import StepRunner
from specplug.engine.step_values import (
    Decode,
    Prefill,
    PrefillChunk,
    SchedulerOutput,
    StepResult,
)
from specplug.sampling_params import SamplingParams
from specplug.speculative.buckets import (
    MANY_ROWS,
    MOST_IN_PARTS,
    MOST_ROWS,
    PRODUCT_STEP,
    batch_sizes,
    row_buckets,
)
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.planned_drafts import TimedStep, WarmDrafter

_LONGEST_PROMPT = 2048
"""Prompt tokens from which on no kernel is compiled anew for more."""
_MOST_PROMPTS = 8
"""Prompts that fill a step together; more are rare."""
_ROWS_OF_CHUNKS = 64, 128, 256, 384, 512, 768, 1024
"""Rows of the passes over chunks of several prompts that are recorded."""
_SEVERAL_PROMPTS = 15, 31
"""Prompts of such passes; those of the second one come together beside ``_MANY`` requests, for
which they wait (``Scheduler``). There is another one with places for all of a batch: of 256, that
takes few prompts twice as long."""
_MANY = 128
_AHEAD = 3
"""Prefills that a device still runs while the host launches a step that is to be timed."""
_MOST_TIMES, _ALIKE = 4, 1.03
"""How often a step is timed at most, and how many times as long the second of two may have taken
that are alike."""
_FEW = 8
"""Requests up to which drafts of which three quarters are wide have as many rows, about, as those
of which all but one are."""
_PROMPT = 2
"""Prompt tokens of a request that is to decode."""
_REST = 0.01
"""Seconds that a rank which is done waits for another to call."""

_GREEDY = SamplingParams()
_SAMPLED = SamplingParams(temperature=0.7)
_TRUNCATED = SamplingParams(temperature=0.7, top_k=50, top_p=0.9)
_KINDS = _GREEDY, _SAMPLED, _TRUNCATED
"""What follows a recorded pass is recorded for each of them."""


class WarmUp:
    """The warm-up of a run: steps of stand-in requests.

    Their rows of the request table hold slot 0 alone, the padding page's, so they need no page,
    however small the pool is, and leave none in the prefix cache. The scheduler, the statistics
    and the reports know nothing of them. Hooks see them as ``Batch.is_warm_up``. A row's settings,
    lengths and draft state are written anew for the request that gets it.

    Not warmed up is what few requests ask for: penalties, biases, grammars, per-token outputs.

    Args:
        steps: of the run, before its first request.
        hooks: of the run.
        limits: of the run's steps.
        decodes: whether the run has decode steps; a prefill instance has none.
        drafters: the choices that the run may make of who drafts.
        ranks: that step together with this one; None: it is alone. They may take more or fewer
            steps: a rank that is done takes part in the others'.
        measures: whether to time decode steps, once all is recorded.

    Attributes:
        timed: these steps.
    """

    def __init__(
        self,
        steps: StepRunner,
        hooks: HookCalls,
        limits: SchedulerConfig,
        *,
        decodes: bool,
        drafters: Sequence[WarmDrafter],
        ranks: RankGroup | None,
        measures: bool = False,
    ) -> None:
        self.timed: list[TimedStep] = []
        self._steps = steps
        self._watch = HookWatch(hooks)
        self._limits = limits
        self._decodes = decodes
        self._drafters = drafters
        self._ranks = ranks
        self._measures = measures and decodes and ranks is None
        most = min(
            limits.chunked_prefill_size or _LONGEST_PROMPT,
            _LONGEST_PROMPT,
            steps.kv.context_len - 1,
        )
        self._most_rows = max(1, most)

    def run(self, advance: Callable[[int, int], None]) -> None:
        """Run all steps.

        Args:
            advance: called with how many are done, and of how many.

        Raises:
            PluginError: a hook has failed.
            RankError: another rank has failed.
        """
        forms = self._steps.runner.forms
        # A padded pass is recorded when its form comes for the second time.
        times = 1 if forms is None else 2
        steps = [step for step in self.steps() for _ in range(times)]
        to_time = [*self._to_time()] if self._measures else []
        of = len(steps) + len(to_time)
        if forms is not None:
            forms.stands_in = False
        self._steps.kv.table.write(0, (), [0])  # the padding page, which the first step enters
        for done, step in enumerate(steps):
            advance(done, of)
            self._run(step)
        for done, (prefill, decode) in enumerate(to_time, len(steps)):
            advance(done, of)
            self._time(prefill, decode)
        advance(of, of)
        if self._ranks is not None:
            self._ranks.finish(self._take_part)
        if forms is not None:
            forms.stands_in = True
        for pool in self._steps.kv.tensors:  # the padding page's slot, as it was
            pool[:, :, 0].zero_()
        self._steps.calibration.clear()

    def _run(self, step: SchedulerOutput) -> None:
        self._admit(step)
        with self._stepping(), self._watch.step():
            self._steps.run(step).wait()

    def _admit(self, step: SchedulerOutput) -> None:
        for request in step.admitted:
            self._steps.sampler.admit(request.req_index, request.params, request.seed)

    def _time(self, prefill: SchedulerOutput, decode: SchedulerOutput) -> None:
        """Time a decode step, the least of some times until two are alike: a host that is held up
        lengthens one, and what seems dear is not drafted again for long."""
        times: list[float] = []
        while len(times) < _MOST_TIMES and not _are_alike(times):
            result = self._run_behind(prefill, decode)
            seconds = result.clock.seconds()
            del seconds["propose"]
            times.append(sum(seconds.values()))
        assert result.decode is not None
        widths = result.decode.widths
        self.timed.append(TimedStep(size=len(widths), width=max(widths), seconds=min(times)))

    def _run_behind(self, prefill: SchedulerOutput, decode: SchedulerOutput) -> StepResult:
        """Run a decode step that is launched while its requests' prefills run."""
        self._admit(prefill)
        with self._stepping(), self._watch.step():
            for _ in range(_AHEAD):
                self._steps.run(prefill)
            result = self._steps.run(decode)
            result.wait()
        return result

    def _take_part(self) -> None:
        """Run a step of another rank, or wait for a moment."""
        assert self._ranks is not None
        self._ranks.rest(_REST)
        if self._ranks.called:
            with self._stepping():
                self._steps.idle()

    def _stepping(self) -> AbstractContextManager[None]:
        return nullcontext() if self._ranks is None else self._ranks.stepping()

    def steps(self) -> Iterator[SchedulerOutput]:
        """Yield the steps: prompts of all lengths at which a kernel has another form, then decode
        steps at every batch size that is recorded, of all kinds."""
        for width in _lengths(self._most_rows):
            yield _prefill(self._requests([width]))
        if self._steps.runner.forms is not None:
            yield from self._many_chunks()
        sizes = batch_sizes(self._limits.max_running_requests)
        for size in sizes:
            if 1 < size <= min(_MOST_PROMPTS, self._most_rows // 2):
                yield from self._together(size)
            for params in _KINDS:
                yield from self._decode(size, params)
        if self._steps.runner.forms is not None:
            yield from self._many_nodes(sizes[-1])
        if self._limits.mixed_chunk:
            yield from self._mixed()

    def _together(self, size: int) -> Iterator[SchedulerOutput]:
        """Yield steps that prompts fill together: of one length, and one of them far longer."""
        share = self._most_rows // size
        short = max(1, share // 4)
        for length in (share, short):
            first = self._most_rows - (size - 1) * length
            yield _prefill(self._requests([first] + [length] * (size - 1)), is_last=False)

    def _many_chunks(self) -> Iterator[SchedulerOutput]:
        """Yield steps that several prompts fill, and steps that few tokens of many fill, one of
        them longer: their forms have room for what is left of any prompts that the prefix cache
        has, or that go on."""
        running, most = self._limits.max_running_requests, self._limits.chunked_prefill_size
        for rows in _ROWS_OF_CHUNKS:
            if rows > (most or _LONGEST_PROMPT):
                break
            many = min(running - 1, rows // 2)
            several = _SEVERAL_PROMPTS[: 1 if running < _MANY else 2]
            for size in sorted({*(min(size, many) for size in several), many} - {0, 1}):
                for longest in (MOST_IN_PARTS, min(rows, self._most_rows)):
                    lengths = _filled(rows, size, longest)
                    if lengths:
                        yield _prefill(self._requests(lengths))

    def _decode(self, size: int, params: SamplingParams) -> Iterator[SchedulerOutput]:
        """Yield steps in which ``size`` requests are prefilled, and steps in which they decode."""
        requests = self._requests([_PROMPT] * size, params)
        if not self._decodes:
            yield _prefill(requests)
            return
        for drafter in self._drafters:
            for rooms in self._rooms(size, drafter):
                # Prefilled each time anew, or they would grow by what a step accepts.
                yield _prefill(requests)
                yield _step(decode=self._decode_half(requests, rooms, drafter.who))

    def _many_nodes(self, size: int) -> Iterator[SchedulerOutput]:
        """Yield steps of a full batch whose drafts of differing widths have each number of rows
        that forms and products are padded to: for many rows cuBLAS has other kernels."""
        requests = self._requests([_PROMPT] * size)
        for drafter in self._drafters:
            whole = drafter.num_draft_tokens
            if not (self._decodes and drafter.is_ragged):
                continue
            most = size * whole - 1
            many = range(MANY_ROWS + PRODUCT_STEP, most + 1, PRODUCT_STEP)
            for rows in sorted({*row_buckets(most), *many}):
                if rows <= size:
                    continue
                wide, more = divmod(rows - size, whole - 1)
                rooms = (whole,) * wide + (1 + more,) + (1,) * (size - wide - 1)
                yield _prefill(requests)
                yield _step(decode=self._decode_half(requests, rooms, drafter.who))

    def _to_time(self) -> Iterator[tuple[SchedulerOutput, SchedulerOutput]]:
        """Yield the steps to time: a prefill, and a step in which all requests have drafts of one
        width, of some widths."""
        for size in batch_sizes(self._limits.max_running_requests):
            requests, timed = self._requests([_PROMPT] * size), set[int]()
            for drafter in self._drafters:
                for width in sorted({*_doubled(drafter.num_draft_tokens)} - timed):
                    timed.add(width)
                    decode = self._decode_half(requests, (width,) * size, drafter.who)
                    yield _prefill(requests), _step(decode=decode)

    def _mixed(self) -> Iterator[SchedulerOutput]:
        """Yield steps that decode at every batch size, and that a prompt fills."""
        running, whole = self._limits.max_running_requests, self._limits.num_lookahead_slots
        if running < 2 or not self._decodes:
            return
        for size in batch_sizes(running - 1):
            width = max(1, self._most_rows - size * self._limits.num_draft_tokens)
            *requests, prompt = self._requests([_PROMPT] * size + [width])
            yield _prefill(requests)
            decode = self._decode_half(requests, (whole,) * size, self._drafters[0].who)
            yield _step(prefill=_chunks([prompt]), decode=decode, admitted=(prompt,))

    def _decode_half(
        self, requests: Sequence[Request], rooms: tuple[int, ...], who: int | None
    ) -> Decode:
        """Return the decode half of requests with room for so many nodes each, cut to the budget of
        the run. ``who`` drafts."""
        limits = self._limits
        end = max(len(request.token_ids) for request in requests) + limits.num_lookahead_slots
        return Decode(
            requests=tuple(requests),
            max_draft_nodes=rooms,
            verify_budget=limits.budget_for(len(requests)),
            slots=(end,) * len(requests),
            drafter=who,
        )

    def _rooms(self, size: int, drafter: WarmDrafter) -> Iterator[tuple[int, ...]]:
        """Yield the nodes that the drafts of a batch may have. A draft model fills the room that
        there is, and what grows its drafts adds to them in few steps. What drafts without one is as
        wide as there is something to propose, each request for itself."""
        whole = self._limits.num_lookahead_slots
        yield (whole,) * size
        for width in drafter.widths:
            yield (width,) * size
        if not drafter.is_ragged:
            return
        yield (1,) * size
        if size > 1:
            yield tuple(1 if number % 2 else whole for number in range(size))
        if size > 3 and self._steps.runner.forms is not None:
            yield tuple(1 if number % 4 == 0 else whole for number in range(size))
            for part in (4, 8):
                yield tuple(1 if number % part else whole for number in range(size))
            if size > _FEW:
                yield (1,) + (whole,) * (size - 1)

    def _requests(
        self, lengths: Sequence[int], params: SamplingParams = _GREEDY
    ) -> tuple[Request, ...]:
        """Return requests with prompts of these lengths, as far as the context goes, in the first
        rows of the request table."""
        vocab_size = self._steps.runner.target.vocab_size
        most = max(1, self._steps.kv.context_len - 1)
        return tuple(
            Request(
                request_id=str(-row),  # a number, as others have, but no other's
                number=-row,
                prompt=None,
                # Scattered, so that a mixture's experts all have something to do.
                prompt_token_ids=tuple(i * 7919 % vocab_size for i in range(min(length, most))),
                params=params,
                max_tokens=1,
                seed=row,
                needs=params.needs,
                req_index=row,
            )
            for row, length in enumerate(lengths, 1)
        )


def _prefill(requests: Sequence[Request], *, is_last: bool = True) -> SchedulerOutput:
    return _step(prefill=_chunks(requests, is_last=is_last), admitted=tuple(requests))


def _chunks(requests: Sequence[Request], *, is_last: bool = True) -> Prefill:
    """Return whole prompts; without the last token of the last one, if that is not the last
    chunk."""
    ends = [len(request.token_ids) for request in requests]
    ends[-1] -= not is_last
    return Prefill(
        chunks=tuple(
            PrefillChunk(
                request=request,
                start=0,
                end=end,
                is_first=True,
                is_last=end == len(request.token_ids),
                recomputed=0,
            )
            for request, end in zip(requests, ends, strict=True)
            if end
        )
    )


def _step(
    prefill: Prefill | None = None,
    decode: Decode | None = None,
    admitted: tuple[Request, ...] = (),
) -> SchedulerOutput:
    return SchedulerOutput(
        prefill=prefill,
        decode=decode,
        admitted=admitted,
        retracted=(),
        evicted_pages=0,
        num_running=0,
        num_waiting=0,
        free_pages=0,
        cached_pages=0,
        is_warm_up=True,
    )


def _are_alike(times: Sequence[float]) -> bool:
    """Return whether the two least of some times are."""
    if len(times) < 2:
        return False
    least, second = sorted(times)[:2]
    return second <= _ALIKE * least


def _lengths(most: int) -> list[int]:
    """Return the lengths of prompts, up to ``most``, at which a pass has another form."""
    return [*row_buckets(most), *(rows for rows in _doubled(most) if rows > MOST_ROWS)]


def _filled(rows: int, size: int, longest: int) -> list[int]:
    """Return the lengths of so many prompts of ``rows`` tokens together, the first ones as long as
    one may be; none if these have no room for them."""
    lengths, left = [1] * size, rows - size
    for place in range(size):
        more = min(left, longest - 1)
        lengths[place] += more
        left -= more
    return [] if left else lengths


def _doubled(most: int) -> list[int]:
    """Return 1, 2, 4, … below ``most``, and ``most``."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]
