"""The embedded engine: takes requests, runs steps, hands out what they gave."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from specplug.debug import DEBUG
from specplug.engine.outputs import Logprob
from specplug.engine.request import Request, RequestStatus
from specplug.engine.runtime import EngineRuntime
from specplug.engine.scheduler import Decode, Prefill, Scheduler
from specplug.engine.statistics import Statistics
from specplug.engine.step import StepResult, StepRunner
from specplug.spec.report import RequestReport, StepReport


class Engine:
    """A scheduler, a step runner, and the loop between them.

    Args:
        scheduler: holds the requests.
        steps: runs what is scheduled.
        runtime: of the run; its sampler is told of admitted requests.
        hooks: the plugin manager's ``hook``, for the reports.
        overlap: whether a step is launched before the last one's results are processed.
        tokenizer: the ``tokenizers.Tokenizer``, for the text of log-probabilities; or None.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        steps: StepRunner,
        runtime: EngineRuntime,
        hooks: Any,
        overlap: bool,
        tokenizer: Any | None,
    ) -> None:
        self.scheduler = scheduler
        self.statistics = Statistics()
        self._steps = steps
        self._runtime = runtime
        self._hooks = hooks
        self._tokenizer = tokenizer
        self._launched: deque[StepResult] = deque()
        self._aborted: deque[str] = deque()
        self.step = self.overlap_step if overlap else self.plain_step

    @property
    def has_work(self) -> bool:
        """Whether another ``step`` is needed."""
        return self.scheduler.has_work or bool(self._launched)

    @property
    def cuda_graph(self) -> str:
        """Whether passes are replayed as CUDA graphs: "on", or "off" and why."""
        return self._runtime.cuda_graph

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request before the next step; unknown and ended ones are ignored."""
        self._aborted.append(request_id)

    def abandon(self, error: BaseException) -> None:
        """End every request after a step has failed: what was launched is lost."""
        self._launched.clear()
        self.scheduler.admitted.clear()
        for request in list(self.scheduler):
            request.in_flight = 0
            ends = not request.finished
            if ends:
                request.error = f"{type(error).__name__}: {error}"
                request.finish("error")
            self.scheduler.release_if_idle(request)
            if ends:
                with suppress(Exception):  # ``error`` is the one to tell
                    self._report_finished(request)

    def plain_step(self) -> list[Request]:
        """Launch a step and process it; the requests that moved."""
        moved = self._process_aborts()
        scheduled = self._schedule()
        if scheduled is not None:
            moved += self._process(self._steps.run(scheduled))
        self._check_idle()
        return moved

    def overlap_step(self) -> list[Request]:
        """Launch a step, then process the one before it while this one runs."""
        moved = self._process_aborts()
        scheduled = self._schedule()
        if scheduled is not None:
            self._launched.append(self._steps.run(scheduled))
        if len(self._launched) > (scheduled is not None):
            moved += self._process(self._launched.popleft())
        self._check_idle()
        return moved

    def _schedule(self) -> Prefill | Decode | None:
        scheduled = self.scheduler.schedule()
        for request in self.scheduler.admitted:
            self._runtime.sampler.admit(request)
        self.scheduler.admitted.clear()
        return scheduled

    def _process(self, result: StepResult) -> list[Request]:
        result.wait()
        tokens, accept_lens = result.tokens.tolist(), result.accept_lens.tolist()
        logprobs = {name: tensor.tolist() for name, tensor in result.logprobs.items()}
        if isinstance(result.scheduled, Prefill):
            kept = self._process_prefill(result, tokens, logprobs)
            self.statistics.count_prefill(result.seconds)
        else:
            kept = self._process_decode(result, tokens, accept_lens, logprobs)
            counted = [i for i, tokens_kept in enumerate(kept) if tokens_kept]
            self.statistics.count_decode(
                [result.widths[i] for i in counted],
                [accept_lens[i] for i in counted],
                depth=len(tokens[0]) - 1,
                seconds=result.seconds,
            )
        requests = result.scheduled.requests
        self._hooks.on_step(
            runtime=self._runtime,
            report=StepReport(
                mode="prefill" if isinstance(result.scheduled, Prefill) else "decode",
                request_ids=tuple(request.request_id for request in requests),
                widths=result.widths,
                accept_lens=tuple(kept),
                seconds=result.seconds,
            ),
        )
        return list(requests)

    def _process_prefill(
        self, result: StepResult, tokens: list[list[int]], logprobs: dict[str, Any]
    ) -> list[int]:
        assert isinstance(result.scheduled, Prefill)
        kept, end = [], 0
        for i, chunk in enumerate(result.scheduled.chunks):
            request = chunk.request
            start, end = end, end + result.widths[i]
            if result.routed_experts is not None:
                request.append_experts(result.routed_experts[start:end])
            self.statistics.prompt_tokens += chunk.end - chunk.start
            count = self._append(request, tokens[i], logprobs, i) if chunk.is_last else 0
            kept.append(count)
            if count and request.finished:
                self._report_finished(request)
            self.scheduler.processed(request, committed=None)
        return kept

    def _process_decode(
        self,
        result: StepResult,
        tokens: list[list[int]],
        accept_lens: list[int],
        logprobs: dict[str, Any],
    ) -> list[int]:
        columns = len(tokens[0])
        kept = []
        for i, request in enumerate(result.scheduled.requests):
            count = self._append(request, tokens[i][: accept_lens[i]], logprobs, i * columns)
            if count and result.routed_experts is not None:
                row = i * columns
                request.append_experts(result.routed_experts[row : row + count])
            if count:
                request.accept_lens.append(count)
                if request.finished:
                    self._report_finished(request)
            kept.append(count)
            self.scheduler.processed(request, committed=accept_lens[i])
        return kept

    def _append(
        self, request: Request, tokens: Sequence[int], logprobs: dict[str, Any], row: int
    ) -> int:
        """Give a request its tokens up to the one that ends it; how many it took."""
        taken = 0
        for token in tokens:
            if request.finished:
                break
            request.append(token, self._token_logprobs(request, logprobs, row + taken))
            taken += 1
        self.statistics.output_tokens += taken
        return taken

    def _token_logprobs(
        self, request: Request, logprobs: dict[str, Any], row: int
    ) -> dict[int, Logprob] | None:
        count = request.params.logprobs
        if count is None:
            return None
        values = zip(
            logprobs["logprob_ids"][row][: count + 1],
            logprobs["logprobs"][row],
            logprobs["logprob_ranks"][row],
            strict=False,
        )
        chosen: dict[int, Logprob] = {}
        for token, value, rank in values:
            text = None if self._tokenizer is None else self._tokenizer.decode([token])
            chosen.setdefault(token, Logprob(logprob=value, rank=rank, decoded_token=text))
        return chosen

    def _process_aborts(self) -> list[Request]:
        if not self._aborted:
            return []
        wanted = set(self._aborted)
        self._aborted.clear()
        ended = [r for r in self.scheduler if r.request_id in wanted and not r.finished]
        for request in ended:
            request.finish("abort")
            self._report_finished(request)
            self.scheduler.release_if_idle(request)
        return ended

    def _report_finished(self, request: Request) -> None:
        assert request.status is RequestStatus.FINISHED
        reason = request.finish_reason or "error"
        self.statistics.requests[reason] += 1
        self._hooks.on_request_finished(
            runtime=self._runtime,
            report=RequestReport(
                request_id=request.request_id,
                finish_reason=reason,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_output_tokens=len(request.output_token_ids),
                accept_lens=tuple(request.accept_lens),
            ),
        )

    def _check_idle(self) -> None:
        if DEBUG:
            self.scheduler.check()
            if not self.has_work:
                pool = self.scheduler.pool
                assert pool.num_free == pool.num_available == pool.num_pages - 1, "a page leaked"
