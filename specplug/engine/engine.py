"""The embedded engine: takes requests, runs steps, hands out what they gave."""

from __future__ import annotations

import logging
import time
from collections import ChainMap, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from itertools import count
from threading import get_ident
from typing import Protocol

from specplug import debug
from specplug.distributed.rank_group import RankGroup
from specplug.engine.cuda_graphs import CudaGraphs
from specplug.engine.engine_runtime import EngineRuntime
from specplug.engine.kv_transfer import PrefillSlice
from specplug.engine.request import Request, RequestStatus
from specplug.engine.scheduler import Scheduler
from specplug.engine.statistics import Statistics
from specplug.engine.step import StepRunner
from specplug.engine.step_values import KVSlice, SchedulerOutput, StepResult
from specplug.speculative.calibration import RequestKind
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.report import RequestReport, StepReport

_log = logging.getLogger(__name__)


class RemotePrefill(Protocol):
    """Has requests prefilled by other instances. ``specplug.disagg`` implements it."""

    @property
    def has_work(self) -> bool:
        """Whether a request is here or away."""

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all requests that are here or away."""

    def add(self, request: Request) -> None:
        """Queue a request for a prefill elsewhere."""

    def poll(self, num_waiting: int, *, wait: bool) -> list[Request]:
        """Return the requests that have come back, each with ``received`` or ``error`` set.

        Args:
            num_waiting: requests that came back before and have no row yet.
            wait: block for a moment if there is none; the engine has nothing else to do.
        """

    def find(self, request_ids: Collection[str]) -> list[Request]:
        """Return the requests of these names that are here or away."""

    def remove(self, request: Request) -> bool:
        """Forget a request that has ended; return False if it is not here."""

    def reset(self) -> list[Request]:
        """Forget all requests, and return them."""


class Engine:
    """The loop between a scheduler, which chooses steps, and a step runner, which launches them.

    Args:
        scheduler: holds the requests.
        steps: launches what is scheduled.
        runtime: of the run, which hooks get.
        hooks: of the run's plugins, which get the reports.
        graphs: of the run.
        overlap: whether a step is launched before the results of the last one are processed.
        ranks: that step together with this one; None: it is alone.
        rest: seconds that a step without work waits for another rank to call.
        remote: has requests prefilled by other instances; None: they are prefilled here.

    Attributes:
        scheduler, steps, runtime, hooks: as given.
        statistics: of the steps so far.
        outbox: prefilled slices for other instances, until the prefill instance sends them.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        steps: StepRunner,
        runtime: EngineRuntime,
        hooks: HookCalls,
        graphs: CudaGraphs,
        overlap: bool,
        remote: RemotePrefill | None = None,
        ranks: RankGroup | None = None,
        rest: float = 0.0,
    ) -> None:
        self.scheduler = scheduler
        self.outbox: deque[PrefillSlice] = deque()
        self._stepped_by: int | None = None
        self._remote = remote
        self.statistics = Statistics()
        self.steps = steps
        self.runtime = runtime
        self.hooks = hooks
        self._graphs = graphs
        self._carries_state = hooks.declares_state
        self._told_stateless = False
        self._ranks = ranks
        self._rest = rest
        self._numbers = count(1)
        self._launched: deque[StepResult] = deque()
        self._launching: SchedulerOutput | None = None
        self._moved: list[Request] = []
        self._received: deque[Request] = deque()
        self._aborted: deque[str] = deque()
        self._overlap = overlap

    @property
    def has_work(self) -> bool:
        """Whether another ``step`` is needed."""
        away = self._remote is not None and self._remote.has_work
        return away or self.scheduler.has_work or bool(self._launched)

    @property
    def _is_busy(self) -> bool:
        """Whether there is work in this process, not at other instances alone."""
        return self.scheduler.has_work or bool(self._launched)

    @property
    def is_in_step(self) -> bool:
        """Whether the calling thread runs a step of this engine now."""
        return self._stepped_by == get_ident()

    @property
    def requests(self) -> list[Request]:
        """All requests that have not ended."""
        return [*self._received, *(self._remote or ()), *self.scheduler]

    @property
    def occupancy(self) -> dict[str, int]:
        """Requests and pages by state, as in ``LLM.occupancy``."""
        cache, running = self.scheduler.cache, len(self.scheduler.running)
        return {
            "running": running,
            "waiting": len(self.requests) - running,
            "total": cache.pool.num_pages - 1,
            "free": cache.pool.num_free,
            "cached": cache.num_pages,
            "available": cache.num_available,
        }

    def add(self, request: Request) -> None:
        """Queue a request."""
        if self._remote is not None:
            self._remote.add(request)
        else:
            self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request before the next step; unknown and ended ones are ignored."""
        self._aborted.append(request_id)

    def step(self) -> None:
        """Launch the next step, process a launched one, and put the requests that moved into their
        inboxes.

        Raises:
            BaseException: the step has failed. Its error has ended all requests, and other ranks
                are told.
        """
        self._run(self._overlap_step if self._overlap else self._plain_step)

    def drain(self) -> None:
        """Process aborts and all launched steps, and launch none; otherwise as ``step``."""
        self._run(self._process_all)

    def forget_text(self, cache_salt: str | None) -> None:
        """Drop what is kept of requests of this salt, or of all requests if it is None, in the
        prefix cache and by plugins. What running requests need stays.

        Raises:
            BaseException: as ``step``.
        """

        def forget() -> None:
            self._process_aborts()  # until then they use their pages
            self.scheduler.forget_text(cache_salt)
            self.hooks.on_text_forgotten(self.runtime, cache_salt)

        self._run(forget)

    def _run(self, move: Callable[[], None]) -> None:
        """Have requests moved, and put each into its inbox, those that a failure ends too."""
        self._stepped_by = get_ident()
        try:
            with self._ranks.stepping() if self._ranks is not None else nullcontext():
                move()
                if debug.DEBUG:
                    self.scheduler.check()
                    self.steps.order.check([r.request_id for r in self.scheduler.running])
        except BaseException as error:
            cause = error if self._ranks is None else self._ranks.end(error)
            self._abandon(cause)
            if cause is not error:
                raise cause from error
            raise
        finally:
            self._stepped_by = None
            moved, self._moved = self._moved, []
            for request in moved:
                request.inbox.append(request)

    def _abandon(self, error: BaseException) -> None:
        """End every request after a step has failed.

        What was launched is lost, and so is the prefix cache, which may hold pages it wrote.
        """
        lost = [result.step for result in self._launched]
        lost += [self._launching] if self._launching is not None else []
        touched = [request for step in lost for request in step.requests]
        self._launched.clear()
        self._launching = None
        self.outbox.clear()
        reset = [*self._received, *(self._remote.reset() if self._remote else ())]
        reset += self.scheduler.reset()
        self._received.clear()
        ended = [request for request in dict.fromkeys(reset) if not request.finished]
        for request in (*touched, *ended):
            request.in_flight = 0
        for request in ended:
            request.error = f"{type(error).__name__}: {error}"
            request.finish("error")
            with suppress(Exception):  # ``error`` is the one to tell
                self._report_finished(request)
        self._moved += [*touched, *ended]

    def _plain_step(self) -> None:
        """Launch a step, then process it."""
        self._process_aborts()
        self._take_received()
        if self._launch():
            self._process()

    def _overlap_step(self) -> None:
        """Launch a step, then process the one before it while this one runs."""
        self._process_aborts()
        self._take_received()
        newly_launched = 1 if self._launch() else 0
        if len(self._launched) > newly_launched:  # an older step is still to be processed
            self._process()

    def _process_all(self) -> None:
        """Process aborts and all launched steps."""
        self._process_aborts()
        while self._launched:
            self._process()

    def _launch(self) -> bool:
        """Launch the next step; return whether there was anything to launch."""
        began = time.perf_counter()
        step = self._launching = self.scheduler.schedule()
        if step is None:
            self._idle()
            return False
        for request in step.admitted:
            self._admit(request)
        scheduled, num_cold = time.perf_counter(), self._graphs.num_cold
        result = self.steps.run(step)
        result.is_cold = self._graphs.num_cold > num_cold
        result.caught_up = self.steps.order.caught_up()
        result.number = next(self._numbers)
        result.host_seconds = scheduled - began
        self._launched.append(result)
        self._launching = None
        return True

    def _admit(self, request: Request) -> None:
        """Write an admitted request's settings to its row of the sampler."""
        output: Sequence[int] = request.output_token_ids
        if request.status is RequestStatus.RUNNING:  # a root is counted when it is verified
            output = output[: request.num_computed_tokens - len(request.prompt_token_ids)]
        self.steps.sampler.admit(
            request.req_index,
            request.params,
            request.seed,
            request.prompt_token_ids,
            output,
            request.params.banned_tokens(request.eos_token_ids),
        )
        self.steps.calibration.admit(request.req_index, RequestKind.of(request.needs))

    def _idle(self) -> None:
        """Take part in a step of another rank; if none has called, wait for a moment."""
        if self._ranks is None:
            return
        if not self._is_busy:
            self._ranks.rest(self._rest)
        if self._ranks.called:
            self.steps.idle()
            self.statistics.steps["idle"] += 1

    def _process(self) -> None:
        """Wait for the oldest launched step, and hand out its results."""
        result = self._launched[0]
        result.wait()
        if self._ranks is not None:
            self._ranks.check()  # what a failed rank left unfinished is nothing to hand out
        began = time.perf_counter()
        result.advance_grammars()
        sampled = self._process_prefill(result)
        kept = self._process_decode(result)
        self._moved += result.step.requests
        self._launched.popleft()
        result.host_seconds += time.perf_counter() - began
        report = _report(result, sampled, kept)
        self.statistics.add(report)
        self.hooks.on_step(self.runtime, report)

    def _process_prefill(self, result: StepResult) -> list[bool]:
        """Hand out the results of a prefill; return for each chunk whether it gave a token."""
        prefill, given = result.prefill, []
        if result.step.prefill is None or prefill is None:
            return []
        tokens, end = prefill.tokens.tolist(), 0
        for i, chunk in enumerate(result.step.prefill.chunks):
            request = chunk.request
            rows = slice(end, end := end + chunk.end - chunk.start)
            ended = request.finished
            if prefill.outputs is not None and not ended:
                prefill.outputs.give(request, chunk.start, rows, sampled=i)
            taken = request.extend(tokens[i : i + 1]) if chunk.is_last else 0
            if taken and len(request.output_token_ids) > 1:  # it was prefilled before
                request.accept_lens.append(taken)
            given.append(taken == 1)
            if chunk.is_last and request.finished and not ended:
                self._report_finished(request)
            self.scheduler.processed(request, committed=None)
        for kv in prefill.slices:
            i = result.step.prefill.requests.index(kv.request)
            self.outbox.append(_prefill_slice(kv, tokens[i]))
        return given

    def _process_decode(self, result: StepResult) -> list[int]:
        """Hand out the results of a decode step; return how many tokens each request took."""
        decode, kept = result.decode, []
        if result.step.decode is None or decode is None:
            return []
        tokens, accept_lens = decode.tokens.tolist(), decode.accept_lens.tolist()
        columns = len(tokens[0])
        requests = result.step.decode.requests
        self.steps.order.learn([request.request_id for request in requests], accept_lens)
        for i, request in enumerate(requests):
            accepted, first = accept_lens[i], i * columns
            ended = request.finished
            if decode.outputs is not None and not ended:
                root = len(request.token_ids) - 1
                decode.outputs.give(request, root, slice(first, first + accepted))
            taken = request.extend(tokens[i][:accepted])
            if taken:
                request.accept_lens.append(taken)
            if request.finished and not ended:
                self._report_finished(request)
            kept.append(taken)
            self.scheduler.processed(request, committed=accepted)
        return kept

    def _take_received(self) -> None:
        """Queue the requests that another instance has prefilled, with their first token."""
        if self._remote is None:
            return
        # With other ranks ``_idle`` waits, for their calls too.
        wait = not self._is_busy and self._ranks is None
        self._received += self._remote.poll(len(self.scheduler.waiting), wait=wait)
        while self._received:
            request = self._received[0]
            self._moved.append(request)
            if request.error is not None:
                request.finish("error")
            else:
                self._append_first(request)
            if request.finished:
                request.received = None
                self._report_finished(request)
            else:
                self.scheduler.add(request)
            self._received.popleft()  # last, so that an error loses no request

    def _append_first(self, request: Request) -> None:
        """Give a received request what came with its prefill: its first token and its outputs."""
        received = request.received
        assert received is not None
        if request.grammar_state is not None:
            request.grammar_state.advance([received.first_token])
        for collected in request.outputs.values():
            collected.take_received(received.outputs)
        request.append(received.first_token)
        stateless = self._carries_state and not received.draft_state
        self.statistics.add_received(received.num_bytes, stateless=stateless)
        if stateless and not self._told_stateless:
            self._told_stateless = True
            _log.warning(
                "request %s came without a draft state: %s drafts it from its last tokens, as all "
                "that come so (counted as 'stateless' in the statistics)",
                request.request_id,
                self.runtime.config.algorithm,
            )

    def _process_aborts(self) -> None:
        """End the requests that ``abort`` has named, wherever they are."""
        wanted: dict[str, None] = {}
        while self._aborted:  # others may add to it meanwhile
            wanted[self._aborted.popleft()] = None
        if not wanted:
            return
        away = self._remote.find(wanted) if self._remote is not None else []
        for request in (*away, *self.scheduler.find(wanted)):
            request.finish("abort")
            if self._remote is None or not self._remote.remove(request):
                self.scheduler.release(request)
            self._moved.append(request)
            self._report_finished(request)

    def _report_finished(self, request: Request) -> None:
        """Count an ended request and tell the extensions."""
        assert request.status is RequestStatus.FINISHED
        report = RequestReport(
            request_id=request.request_id,
            finish_reason=request.finish_reason or "error",
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=request.num_cached,
            num_output_tokens=len(request.output_token_ids),
            times_retracted=request.times_retracted,
            accept_lens=tuple(request.accept_lens),
        )
        self.statistics.add_request(report)
        self.hooks.on_request_finished(self.runtime, report)


def _prefill_slice(kv: KVSlice, token: int) -> PrefillSlice:
    """Return a slice for another instance; the last one brings the first token and the outputs."""
    request = kv.request
    if kv.end < len(request.prompt_token_ids):
        return PrefillSlice(kv=kv)
    outputs = [collected.tensors() for collected in request.outputs.values()]
    return PrefillSlice(kv=kv, first_token=token, outputs=dict(ChainMap(*outputs)))


def _report(result: StepResult, sampled: Sequence[bool], kept: Sequence[int]) -> StepReport:
    step, decode = result.step, result.decode
    chances = None
    if decode is not None and decode.chances is not None:
        chances = decode.chances.numpy()
        chances.flags.writeable = False
    chunks = step.prefill.chunks if step.prefill else ()
    plan = decode.plan if decode else None
    return StepReport(
        number=result.number,
        mode=step.mode,
        prefill_ids=tuple(chunk.request.request_id for chunk in chunks),
        prefill_tokens=tuple(chunk.end - chunk.start for chunk in chunks),
        recomputed_tokens=tuple(chunk.recomputed for chunk in chunks),
        cached_tokens=tuple(chunk.start if chunk.is_first else 0 for chunk in chunks),
        sampled=tuple(sampled),
        decode_ids=tuple(r.request_id for r in step.decode.requests) if step.decode else (),
        proposed=decode.proposed if decode else (),
        drafters=decode.drafters if decode else (),
        planned=decode.planned if decode else (),
        reason=plan.reason if plan else "",
        expected_tokens=plan.expected_tokens if plan else None,
        expected_seconds=plan.expected_seconds if plan else None,
        widths=decode.widths if decode else (),
        depth=decode.tokens.shape[1] - 1 if decode else 0,
        accept_lens=tuple(decode.accept_lens.tolist()) if decode else (),
        kept=tuple(kept),
        chances=chances,
        retracted_ids=tuple(request.request_id for request in step.retracted),
        evicted_pages=step.evicted_pages,
        num_running=step.num_running,
        num_waiting=step.num_waiting,
        received_ids=tuple(u.request.request_id for u in step.placed),
        received_tokens=tuple(u.received.end - u.start for u in step.placed),
        received_cached=tuple(u.start for u in step.placed),
        lost_prefixes=step.lost_prefixes,
        free_pages=step.free_pages,
        cached_pages=step.cached_pages,
        draft_seconds=decode.draft_seconds if decode else 0.0,
        seconds={**result.clock.seconds(), "host": result.host_seconds},
        is_cold=result.is_cold,
        caught_up=result.caught_up,
    )
