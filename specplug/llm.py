"""``LLM``: the embedded engine as a Python object. Names are those vLLM users know."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from specplug.config import EngineConfig, config_of, one_way
from specplug.engine.engine import Engine
from specplug.engine.input_processor import Prompt
from specplug.engine.request import Request, take_all
from specplug.engine.speculation import speculation_of
from specplug.engine.statistics import Statistics
from specplug.engine.turns import Turns
from specplug.errors import PluginError, UsageError, shown
from specplug.kernels.compilations import compilations_counted
from specplug.kernels.kernel_table import c_declined
from specplug.model.loading import choose_device
from specplug.outputs import RequestOutput, by_prompt
from specplug.run import Run, effective_config, start_run, startup_lines, times_of_start
from specplug.sampling_params import SamplingParams
from specplug.startup import Startup

if TYPE_CHECKING:
    from specplug.disagg.decode_instance import DecodeInstance
    from specplug.disagg.prefill_loop import PrefillLoop

_log = logging.getLogger(__name__)


class LLM:
    """A model under an algorithm, ready to generate.

    Several threads may use one LLM: their requests share its steps, and each gets its own outputs.

    Args:
        model: folder or hub id of a causal LM of transformers; None: the default model that ships
            with specplug. Or an ``EngineConfig``, alone, which has all settings.
        others: the settings of the same names in ``EngineConfig``; docs/settings.md shows them.

    Raises:
        UsageError: a value cannot be used, or the algorithm is not installed.
        PluginError: the algorithm's plugin is broken.
        CheckpointError: the model or the draft model cannot be loaded, or do not fit.
        RankError: not all ranks came, or one has failed.
    """

    _run: Run | None = None  # before the start has succeeded, and after ``close``
    _partner: LLM | None = None

    @one_way
    def __init__(
        self,
        model: str | Path | EngineConfig | None = None,
        *,
        tokenizer: str | Path | None = None,
        dtype: str = "auto",
        device: str | None = None,
        seed: int = 0,
        speculative_algorithm: str | object = "NONE",
        speculative_draft_model_path: str | Path | None = None,
        speculative_num_steps: int | None = None,
        speculative_eagle_topk: int | None = None,
        speculative_num_draft_tokens: int | None = None,
        speculative_settings: Mapping[str, Any] | None = None,
        page_size: int = 16,
        chunked_prefill_size: int | None = 512,
        max_running_requests: int = 8,
        max_total_tokens: int | None = None,
        max_model_len: int | None = None,
        enable_mixed_chunk: bool = False,
        verify_budget: int | None = None,
        draft_choice: str | None = None,
        deterministic_drafts: bool = False,
        disable_overlap_schedule: bool = False,
        disable_radix_cache: bool = False,
        disable_cuda_graph: bool = False,
        disable_row_invariance: bool = False,
        warm_up: str = "auto",
        disable_cpu_kernels: bool = False,
        disable_extensions: Sequence[str] = (),
        extensions: Sequence[object] = (),
        skip_model_check: bool = False,
        disaggregation: str | None = None,
        disaggregation_address: str | None = None,
        disaggregation_key: str | None = None,
        disaggregation_timeout: float = 30.0,
        num_threads: int | None = None,
        dp_rank: int = 0,
        dp_size: int = 1,
        dp_address: str | None = None,
        dp_timeout: float = 15.0,
        enable_dp_attention: bool = False,
    ) -> None:
        self._start(config_of(**{k: v for k, v in locals().items() if k != "self"}))

    def _start(self, config: EngineConfig) -> None:
        """Make the run. If that fails, what is made is freed, and the other ranks are told."""
        began, device = time.perf_counter(), choose_device(config.device)
        self.config = config
        self._inbox: list[Request] = []
        self._prepared: WeakSet[Request] = WeakSet()  # and not submitted yet
        self._turns = Turns(device)
        self._startup = Startup()
        with c_declined(config.disable_cpu_kernels):
            with self._turns, compilations_counted(device) as compiled:
                run = start_run(config, device, self._startup)
                if config.disaggregation == "both":
                    self._partner = _partner_of(run)
                self._run = run
            for line in startup_lines(run):
                _log.info(line)
        self.spec_config, self.tokenizer = run.algorithm.config, run.tokenizer
        for line in times_of_start(run, self._startup, compiled):
            _log.info(line)
        _log.info("ready in %.1f s", time.perf_counter() - began)

    @property
    def run(self) -> Run:
        """The parts that serve the requests. To look inside; what it has may change from one
        version to the next.

        Raises:
            UsageError: this LLM is closed.
        """
        if self._run is None:
            raise UsageError("this LLM is closed; make another one")
        return self._run

    @property
    def engine(self) -> Engine:
        """The engine that runs the requests: its scheduler, its runtime, its steps. To look
        inside, as ``run``."""
        return self.run.engine

    @property
    def decode_instance(self) -> DecodeInstance | None:
        """What has prompts prefilled by other instances; None where they are prefilled here."""
        return None if self._run is None else self._run.decode_instance

    @property
    def partner(self) -> LLM | None:
        """With ``disaggregation="both"`` the prefill instance that works for this one; otherwise
        None."""
        return self._partner

    @property
    def prefill_loop(self) -> PrefillLoop | None:
        """The loop of a prefill instance, which ``step`` runs; None in any other role."""
        return None if self._run is None else self._run.prefill_loop

    @property
    def context_len(self) -> int:
        """Most tokens of a request, prompt and output."""
        return self.run.kv.context_len

    def __del__(self) -> None:
        if self._run is not None and not sys.is_finalizing():  # forgotten without ``close``
            self._run.drop_tensors()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._run is not None and self._run.ranks is not None:
                if error is None:
                    self.wait_for_ranks()
                else:
                    self._run.ranks.end(error)
        finally:
            self.close()

    def close(self) -> None:
        """End all requests and free the model and its caches. Ranks that have work then cannot go
        on: ``wait_for_ranks`` first, as the end of a ``with`` does."""
        with self._turn("close"):
            if self._run is None:
                return
            try:
                self._run.close()
            finally:
                self._run = self._partner = None
                self._inbox.clear()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        on_finished: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all together, and wait for all of them.

        Args:
            prompts: texts or lists of token ids; one alone may stand without a list.
            sampling_params: one for all, or one for each.
            priority: one for all, or one for each. Requests of a lower one are admitted first, and
                are the last to give way when the KV pool runs short; equal ones in their order.
            on_finished: called with each request's output when it ends (for a progress bar).

        Returns:
            One output per prompt, in the prompts' order. With ``SamplingParams.n`` its ``outputs``
            are all of the prompt's, itself the first; ``on_finished`` is called with each.

        Raises:
            UsageError: a prompt or a setting cannot be used; nothing has run then.
        """
        outputs: dict[str, RequestOutput] = {}
        requests = self._make_all(prompts, sampling_params, priority)
        with closing(self._outputs(requests, partial=False)) as ended:
            for output in ended:
                outputs[output.request_id] = output
                if on_finished is not None:
                    on_finished(output)
        return by_prompt([outputs[request.request_id] for request in requests])

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Generator[RequestOutput, None, None]:
        """Complete prompts and yield what came, step by step; ``delta`` is the new text.

        The last output of each request has a ``finish_reason``. Closing the iterator aborts what
        still runs. With ``SamplingParams.n`` each of a prompt's outputs is a request of its own,
        told apart by its ``index``.

        Raises:
            UsageError: a prompt or a setting cannot be used; nothing runs then.
        """
        return self._outputs(self._make_all(prompts, sampling_params, priority), partial=True)

    def add_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> str:
        """Queue a request for ``step``, at any time; for callers that have a loop of their own.

        Returns:
            Its name, which its outputs have too.

        Raises:
            UsageError: the prompt or a setting cannot be used, or several outputs are asked for.
        """
        if sampling_params is not None and sampling_params.n > 1:
            raise UsageError(
                f"n={sampling_params.n}: add_request queues one output; expected 1, and a call for "
                "each, with seeds of their own, or generate or stream"
            )
        (request,) = self.prepare(prompt, sampling_params, priority=priority)
        self.submit(request)
        return request.request_id

    def prepare(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> list[Request]:
        """Check a prompt and its settings, and make a request of each of its ``n`` outputs, for
        ``submit``.

        To tokenize a long prompt or to compile a grammar takes a while. Like ``abort``, and unlike
        all else here, it does not wait for the step that another thread runs.

        Raises:
            UsageError: the prompt or a setting cannot be used.
        """
        prompts: list[Any] = [prompt]
        return self._make_all(prompts, sampling_params, priority)

    def submit(self, request: Request) -> None:
        """Queue a prepared request for ``step``.

        Raises:
            UsageError: it is no request that ``prepare`` of this LLM has made, or it was submitted
                before; or this is a prefill instance, which takes requests from decode instances.
        """
        if not isinstance(request, Request):
            raise UsageError(
                f"submit: request={shown(request)}: expected a request that prepare() has made; "
                "give a prompt to add_request()"
            )
        with self._turn("submit"):
            self._check_takes_requests()
            try:
                self._prepared.remove(request)
            except KeyError:
                raise UsageError(
                    f"submit: request {shown(request.request_id)} was submitted before, or another "
                    "LLM has prepared it; expected one that prepare() of this LLM has made, once; "
                    "prepare another one"
                ) from None
            request.inbox = self._inbox
            self.engine.add(request)

    def step(self) -> list[RequestOutput]:
        """Launch the next step of all requests, and process one that was launched: the outputs of
        those requests from ``add_request`` that moved, or ended, by it.

        With data-parallel attention a step has one pass of the target in which every rank takes
        part. So the loop of each rank calls ``step`` for as long as any of them has work, and may
        always call it: without work anywhere it waits for 10 ms at most. A rank that does
        not call it keeps the others waiting, which ``must_step`` tells.

        Raises:
            RankError: another rank has failed, or has closed while this one has work.
            PluginError: a hook has failed. All requests have ended then, with that error, and the
                next call returns their outputs.
        """
        with self._turn("step"):
            run = self.run
            if run.prefill_loop is not None:
                run.prefill_loop.step(wait=True)
                return []
            if run.engine.has_work or not self._inbox:
                self._step()
            moved = [request for request in take_all(self._inbox) if not request.delivered]
            for request in moved:
                request.delivered = request.finished
            return [request.output() for request in moved]

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something left to do or to return."""
        return bool(self._inbox) or (self._run is not None and self._run.engine.has_work)

    @property
    def must_step(self) -> bool:
        """Whether this rank has work, or another has begun a step and waits for this one."""
        ranks = None if self._run is None else self._run.ranks
        return (ranks is not None and ranks.called) or self.has_unfinished_requests

    @property
    def has_peers(self) -> bool:
        """Whether other processes may want something of this one at any time (another rank a step,
        a prefill or decode instance an answer), so that ``step`` is to be called again and again,
        requests or not. With nothing to do it blocks for a moment."""
        return self.config.dp_size > 1 or self.config.disaggregation in ("prefill", "decode")

    def wait_for_ranks(self) -> None:
        """Do this rank's work, and take part in the others' until they have none: until every rank
        has called this as often as this one.

        Raises:
            RankError: another rank has failed.
        """
        run = self.run
        while run.engine.has_work:
            self._work()
        if run.ranks is not None:
            run.ranks.finish(self._work)

    def abort(self, request_id: str) -> None:
        """End a request; its output so far comes with ``finish_reason="abort"``.

        May be called at any time, from any thread, and between two outputs of ``stream``.
        """
        if not isinstance(request_id, str):
            raise UsageError(f"abort: request_id={shown(request_id)}: expected a request's id")
        run = self._run  # which another thread may close
        if run is not None:
            run.engine.abort(request_id)

    def stats(self) -> dict[str, Any]:
        """Return ``totals``, and in "speculation" what speculation brought, or None; see
        ``specplug.engine.speculation``. That takes milliseconds of the engine's time."""
        with self._turns:
            choice = self.run.choice
            brought = None if choice is None else choice.benefit
            return {
                **self.totals(),
                "speculation": speculation_of(self.engine.statistics, brought),
            }

    def totals(self) -> dict[str, Any]:
        """Return totals since the engine was made; see ``specplug.engine.statistics``."""
        with self._turns:
            totals = self.engine.statistics.as_dict()
            if self.decode_instance is not None:
                totals |= self.decode_instance.transfers.as_dict()
            return totals

    @property
    def occupancy(self) -> dict[str, int]:
        """What the engine holds now: requests "running" and "waiting"; pages "total" (all but the
        padding page), "free", "cached", and "available", those that are free, or cached and used by
        no running request."""
        return self.engine.occupancy

    def flush_cache(self, cache_salt: str | None = None) -> None:
        """Forget the text of earlier requests: cached prefixes, and what an algorithm keeps of it.

        May be called at any time. Requests that run go on, and their tokens stay the same. What
        they use of the prefix cache stays too, also when they have ended: flush it again then.

        Args:
            cache_salt: that of the requests whose text is forgotten; one that no request has had
                changes nothing. None: the text of all requests.

        Raises:
            UsageError: the salt is none that requests can have.
            PluginError: a hook has failed. All requests have ended then, with that error.
        """
        salt = SamplingParams(cache_salt=cache_salt).cache_salt
        with self._turn("flush_cache"):
            self.engine.forget_text(salt)
            if self._partner is not None:
                self._partner.flush_cache(salt)

    def reset_stats(self) -> None:
        """Start counting anew."""
        with self._turn("reset_stats"):
            self.engine.statistics = Statistics()
            if self.run.choice is not None:
                self.run.choice.taken.clear()
            if self.decode_instance is not None:
                self.decode_instance.reset_transfers()
            if self._partner is not None:
                self._partner.reset_stats()

    @property
    def startup_seconds(self) -> dict[str, float]:
        """How long each part of the start took, in the order in which they began."""
        return dict(self._startup.seconds)

    @property
    def effective_config(self) -> dict[str, Any]:
        """What the run really uses, what was adjusted and what is off, and why."""
        return effective_config(self.run)

    def check_pool(self) -> None:
        """Assert that every KV page is free, cached, or owned by one running request."""
        with self._turn("check_pool"):
            self.engine.scheduler.check()
            if self._partner is not None:
                self._partner.check_pool()

    @property
    def _is_in_step(self) -> bool:
        """Whether this thread runs a step of this engine, or of its partner."""
        return any(run.engine.is_in_step for run in self._runs)

    @property
    def _runs(self) -> list[Run]:
        """The runs of this LLM and of its partner that another thread has not closed yet."""
        llms = [llm for llm in (self, self._partner) if llm is not None]
        return [run for llm in llms if (run := llm._run) is not None]

    def _turn(self, method: str) -> Turns:
        """Return the turns, for ``method`` to wait for its own.

        Raises:
            PluginError: it was called in the middle of a step, by a hook of it.
        """
        if self._is_in_step:
            hooks = (run.algorithm.hooks.running for run in self._runs)
            hook = next(filter(None, hooks), "what a step calls")
            raise PluginError(
                f"{hook} called {method}() of the engine whose step it is part of; expected hooks "
                "to leave it alone but for abort(); call it when the step is over, or in another "
                "thread that the hook does not wait for"
            )
        return self._turns

    def _check_takes_requests(self) -> None:
        if self.run.prefill_loop is not None:
            raise UsageError(
                "this is a prefill instance: it takes its requests from decode instances; give "
                "them to one of these, and call step() here"
            )

    def _make_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
    ) -> list[Request]:
        requests = self.run.input_processor.requests(prompts, sampling_params, priority)
        self._prepared.update(requests)
        return requests

    def _outputs(
        self, requests: Sequence[Request], *, partial: bool
    ) -> Generator[RequestOutput, None, None]:
        live = {request.request_id: request for request in requests}
        inbox: list[Request] = []  # a step of another stream, or thread, may move ours
        method = "stream" if partial else "generate"
        with self._turn(method):
            self._check_takes_requests()
            for request in requests:
                request.inbox = inbox
                self.engine.add(request)
        try:
            while live:
                with self._turn(method):
                    if not inbox:
                        assert self._run is None or self.engine.has_work, "requests were lost"
                        self._step()
                    moved = [request for request in take_all(inbox) if request.request_id in live]
                    outputs = [r.output() for r in moved if r.finished or partial]
                for output in outputs:
                    if output.finish_reason is not None:
                        del live[output.request_id]
                    yield output
        finally:
            for request_id in live:
                self.abort(request_id)
            self._drain(requests)
            inbox.clear()  # a request in its own inbox would wait for the garbage collector

    def _work(self) -> None:
        """Run a step, as the ranks that are waited for need it."""
        with self._turn("wait_for_ranks"):
            if self.prefill_loop is None:
                self._step()
            else:
                self.prefill_loop.run()

    def _step(self) -> None:
        """Run a step, unless ``close`` has ended all requests. The turn is this thread's."""
        if self._run is None:
            return
        if self._partner is not None and self._partner.prefill_loop is not None:
            self._partner.prefill_loop.step(wait=False)
        self._run.engine.step()

    def _drain(self, requests: Sequence[Request]) -> None:
        """Process aborts and what is in flight, so that nothing of these requests is left."""
        while not self._is_in_step:  # else the next step aborts them: an iterator is closed in one
            with self._turns:
                done = self._run is None or not self._run.engine.has_work
                if done or all(r.finished and not r.in_flight for r in requests):
                    break
                self._step()


def _partner_of(run: Run) -> LLM:
    """Make the prefill instance that works for a run in this process. The run closes it first; if
    it cannot be made, the run is closed."""
    assert run.decode_instance is not None
    try:
        partner = LLM(run.config.of_partner(run.decode_instance.address))
    except BaseException:
        run.close()
        raise
    run.on_close(partner.close)
    return partner
