"""``LLM``: the embedded engine as a Python object. Names are those vLLM users know."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from specplug.algorithm import AlgorithmInfo, SpecConfig
from specplug.config import EngineConfig, config_of, one_way
from specplug.disagg.instances import identity_of, make_decode_instance
from specplug.disagg.prefill_loop import PrefillLoop
from specplug.distributed.rank_group import RankGroup, join_ranks
from specplug.engine.assembly import (
    effective_config,
    make_engine,
    plan_steps,
    startup_lines,
    times_of_start,
    warm_up_state,
)
from specplug.engine.core_outputs import core_outputs
from specplug.engine.cuda_graphs import CudaGraphs
from specplug.engine.engine import Engine
from specplug.engine.engine_runtime import EMBEDDED, EngineRuntime
from specplug.engine.features import Features
from specplug.engine.input_processor import InputProcessor, Prompt
from specplug.engine.kv_pool import KVPool
from specplug.engine.request import Request, take_all
from specplug.engine.scheduler import Scheduler
from specplug.engine.statistics import Statistics
from specplug.engine.turns import Turns
from specplug.engine.warm_up import WarmUp
from specplug.errors import PluginError, RankError, UsageError, shown
from specplug.kernels.compilations import compilations_counted
from specplug.kernels.cpu_compiler import compiling_declined
from specplug.kernels.cpu_kernels import cpu_kernels_of_draft
from specplug.kv.prefix_cache import PrefixCache
from specplug.model.loading import (
    backend_of,
    choose_device,
    load_target,
    load_tokenizer,
    resolve_speculation,
    trim_heap,
)
from specplug.model.model_runner import ModelRunner
from specplug.model.sampler import Sampler
from specplug.outputs import RequestOutput, by_prompt
from specplug.sampling_params import SamplingParams
from specplug.speculative.algorithm_start import start_algorithm
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.output_kind import OutputKind
from specplug.startup import Startup

if TYPE_CHECKING:
    from specplug.disagg.decode_instance import DecodeInstance

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

    # None before they are made, and after ``close``.
    _engine: Engine = None  # type: ignore[assignment]
    _input_processor: InputProcessor = None  # type: ignore[assignment]
    _runner: ModelRunner = None  # type: ignore[assignment]
    _kv: KVPool = None  # type: ignore[assignment]
    _runtime: EngineRuntime = None  # type: ignore[assignment]
    _ranks: RankGroup | None = None
    _decode_instance: DecodeInstance | None = None
    _prefill: PrefillLoop | None = None
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
        page_size: int = 16,
        chunked_prefill_size: int | None = 512,
        max_running_requests: int = 8,
        max_total_tokens: int | None = None,
        max_model_len: int | None = None,
        enable_mixed_chunk: bool = False,
        disable_overlap_schedule: bool = False,
        disable_radix_cache: bool = False,
        disable_cuda_graph: bool = False,
        disable_row_invariance: bool = False,
        warm_up: str = "auto",
        disable_cpu_kernels: bool = False,
        disable_extensions: Sequence[str] = (),
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
        """Make the run. If that fails, free what is made, and tell the other ranks."""
        self.config = config
        self._inbox: list[Request] = []
        self._prepared: WeakSet[Request] = WeakSet()  # and not submitted yet
        self._turns = Turns()
        self._startup = Startup()
        began = time.perf_counter()
        try:
            device = choose_device(config.device)
            self._turns = Turns(device)
            with self._turns, compilations_counted(device) as compiled:
                self._make(config, device)
        except BaseException as error:
            try:
                self._free()
            finally:
                cause = error if self._ranks is None else self._ranks.fail(error)
            if cause is not error:
                raise cause from error
            raise
        slots = self._engine.scheduler.cache.pool.num_tokens
        for line in startup_lines(config, self._runtime, self._runner.target, self._kv, slots):
            _log.info(line)
        for line in times_of_start(self._startup, self._graphs, device, compiled):
            _log.info(line)
        _log.info("ready in %.1f s", time.perf_counter() - began)

    def _make(self, config: EngineConfig, device: torch.device) -> None:
        """Make the parts of the run, each from those before it."""
        startup = self._startup

        def resolve(info: AlgorithmInfo) -> SpecConfig:
            with startup.part("reading the configuration"):
                typed = resolve_speculation(config, info)
            self._ranks = join_ranks(config, device, typed.target_config)
            return typed

        algorithm = start_algorithm(
            config.speculative_algorithm,
            resolve,
            host=EMBEDDED,
            disable_extensions=config.disable_extensions,
            calls=HookCalls,
        )
        self._hooks, ranks = algorithm.hooks, self._ranks
        self.spec_config = spec = algorithm.config

        target = load_target(config, device, ranks, startup)
        self._runner = runner = ModelRunner(target)
        with startup.part("loading the tokenizer"):
            self.tokenizer = load_tokenizer(config)
        self._features = features = Features.of_run(config, algorithm.info)
        overlap = features.is_on("overlap")
        limits = plan_steps(config, spec, overlap=overlap)
        self._graphs = graphs = CudaGraphs(config, runner)
        self._kv = kv = KVPool(config, limits, target, graphs=graphs.obstacle is None)
        sampler = Sampler(kv.table.req_table_size, target.vocab_size, device)
        own = core_outputs(target, backend_of(self.tokenizer))
        outputs: dict[str, OutputKind] = {output.name: output for output in own}
        self._runtime = runtime = EngineRuntime(
            config,
            spec,
            target,
            kv=kv,
            sampler=sampler,
            graphs=graphs,
            overlap=overlap,
            draft_verifies=algorithm.draft_verifies,
            outputs=outputs,
        )
        with (
            startup.part("loading the draft"),
            cpu_kernels_of_draft(target.cpu_kernels),
            compiling_declined(config.disable_cpu_kernels),
        ):
            algorithm.create_worker(runtime)

        lookahead = spec.draft_lookahead
        if lookahead is None:
            lookahead = 1 if kv.has_draft_cache else 0
        with startup.part("allocating the KV pool"):
            pool = kv.allocate(config.max_total_tokens)
            cache = PrefixCache(pool, lookahead, enabled=features.is_on("prefix_cache"))
        scheduler = Scheduler(limits, cache, kv.table)
        self._decode_instance = remote = make_decode_instance(config, spec, target, kv, cache)
        self._engine = make_engine(
            config, runtime, runner, kv, sampler, algorithm, scheduler, remote=remote, ranks=ranks
        )
        self._input_processor = InputProcessor(
            config,
            target,
            self.tokenizer,
            pool,
            context_len=kv.context_len,
            outputs=outputs.values(),
        )
        if warm_up_state(config, graphs, device) == "on":
            decodes = config.disaggregation != "prefill"
            warm_up = WarmUp(
                self._engine.steps, algorithm.hooks, limits, decodes=decodes, ranks=ranks
            )
            with startup.part("warming up"):
                warm_up.run(startup.advance)
        self._take_role(config)

    def _take_role(self, config: EngineConfig) -> None:
        """Make what lets the engine prefill for others, or the instance that prefills for it."""
        if config.disaggregation == "prefill":
            identity = identity_of(self._runner.target, self.spec_config, config.page_size)
            self._prefill = PrefillLoop(
                config, identity, self._engine, self._input_processor, self._ranks
            )
        elif config.disaggregation == "both" and self._decode_instance is not None:
            self._partner = LLM(config.of_partner(self._decode_instance.address))

    @property
    def engine(self) -> Engine:
        """The engine that runs the requests: its scheduler, its runtime, its steps. To look
        inside; what it has may change from one version to the next."""
        self._check_open()
        return self._engine

    @property
    def decode_instance(self) -> DecodeInstance | None:
        """What has prompts prefilled by other instances; None where they are prefilled here."""
        return self._decode_instance

    @property
    def partner(self) -> LLM | None:
        """With ``disaggregation="both"`` the prefill instance that works for this one; otherwise
        None."""
        return self._partner

    @property
    def prefill_loop(self) -> PrefillLoop | None:
        """The loop of a prefill instance, which ``step`` runs; None in any other role."""
        return self._prefill

    @property
    def context_len(self) -> int:
        """Most tokens of a request, prompt and output."""
        self._check_open()
        return self._runtime.context_len

    def _free(self) -> None:
        """Leave the instances that this one works with, and let go of the model and its caches,
        so that no reference cycle keeps them until the garbage collector comes by."""
        try:
            for other in (self._partner, self._prefill, self._decode_instance):
                if other is not None:
                    other.close()
        finally:
            self._partner = self._prefill = self._decode_instance = None
            self._drop_tensors()
            self._inbox.clear()
            self._engine = self._input_processor = None  # type: ignore[assignment]
            self._runtime = self._runner = self._kv = None  # type: ignore[assignment]
            trim_heap()

    def _drop_tensors(self) -> None:
        for holder in (self._runtime, self._kv, self._runner):
            if holder is not None:
                holder.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # forgotten without ``close``
            self._drop_tensors()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._ranks is not None and self._engine is not None:
                if error is None:
                    self.wait_for_ranks()
                else:
                    self._ranks.end(error)
        finally:
            self.close()

    def close(self) -> None:
        """End all requests and free the model and its caches. Ranks that have work then cannot go
        on: ``wait_for_ranks`` first, as the end of a ``with`` does."""
        with self._turn("close"):
            if self._engine is None:
                return
            try:
                with suppress(RankError):  # the end of all, which has been told
                    for request in self._engine.requests:
                        self._engine.abort(request.request_id)
                    if self._engine.has_work:
                        self._engine.drain()
            finally:
                self._free()
                if self._ranks is not None:
                    self._ranks.close()

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
        with closing(self._run(requests, partial=False)) as ended:
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
        return self._run(self._make_all(prompts, sampling_params, priority), partial=True)

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
        self._check_takes_requests()
        with self._turn("submit"):
            self._check_open()
            try:
                self._prepared.remove(request)
            except KeyError:
                raise UsageError(
                    f"submit: request {shown(request.request_id)} was submitted before, or another "
                    "LLM has prepared it; expected one that prepare() of this LLM has made, once; "
                    "prepare another one"
                ) from None
            request.inbox = self._inbox
            self._engine.add(request)

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
            self._check_open()
            if self._prefill is not None:
                self._prefill.step(wait=True)
                return []
            if self._engine.has_work or not self._inbox:
                self._step()
            moved = [request for request in take_all(self._inbox) if not request.delivered]
            for request in moved:
                request.delivered = request.finished
            return [request.output() for request in moved]

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something left to do or to return."""
        return bool(self._inbox) or (self._engine is not None and self._engine.has_work)

    @property
    def must_step(self) -> bool:
        """Whether this rank has work, or another has begun a step and waits for this one."""
        waits = self._ranks is not None and self._ranks.called
        return waits or self.has_unfinished_requests

    @property
    def has_peers(self) -> bool:
        """Whether other processes may want something of this one at any time (another rank a step,
        a prefill or decode instance an answer), so that ``step`` is to be called again and again,
        requests or not. With nothing to do it blocks for a moment."""
        return self._ranks is not None or self.config.disaggregation in ("prefill", "decode")

    def wait_for_ranks(self) -> None:
        """Do this rank's work, and take part in the others' until they have none: until every rank
        has called this as often as this one.

        Raises:
            RankError: another rank has failed.
        """
        self._check_open()
        while self._engine.has_work:
            self._work()
        if self._ranks is not None:
            self._ranks.finish(self._work)

    def abort(self, request_id: str) -> None:
        """End a request; its output so far comes with ``finish_reason="abort"``.

        May be called at any time, from any thread, and between two outputs of ``stream``.
        """
        if not isinstance(request_id, str):
            raise UsageError(f"abort: request_id={shown(request_id)}: expected a request's id")
        engine = self._engine  # which another thread may close
        if engine is not None:
            engine.abort(request_id)

    def stats(self) -> dict[str, Any]:
        """Return totals since the engine was made; see ``specplug.engine.statistics``."""
        with self._turns:
            self._check_open()
            stats = self._engine.statistics.as_dict()
            if self._decode_instance is not None:
                stats |= self._decode_instance.transfers.as_dict()
            return stats

    @property
    def occupancy(self) -> dict[str, int]:
        """What the engine holds now: requests "running" and "waiting"; pages "total" (all but the
        padding page), "free", "cached", and "available", those that are free or cached for nobody
        who runs."""
        self._check_open()
        return self._engine.occupancy

    def flush_cache(self) -> None:
        """Forget all cached prefixes.

        Raises:
            UsageError: requests are running.
        """
        with self._turn("flush_cache"):
            self._check_open()
            if self._engine.has_work:
                raise UsageError("flush_cache: requests are running; wait for them or abort them")
            self._engine.scheduler.cache.clear()
            if self._partner is not None:
                self._partner.flush_cache()

    def reset_stats(self) -> None:
        """Start counting anew."""
        with self._turn("reset_stats"):
            self._check_open()
            self._engine.statistics = Statistics()
            if self._decode_instance is not None:
                self._decode_instance.reset_transfers()
            if self._partner is not None:
                self._partner.reset_stats()

    @property
    def startup_seconds(self) -> dict[str, float]:
        """How long each part of the start took, in the order in which they began."""
        return dict(self._startup.seconds)

    @property
    def effective_config(self) -> dict[str, Any]:
        """What the run really uses, what was adjusted and what is off, and why."""
        self._check_open()
        return effective_config(
            self.config,
            self._runtime,
            self._engine,
            self._graphs,
            features=self._features.states,
            extensions=self._hooks.extensions,
            disaggregation_address=self._decode_instance.address if self._decode_instance else None,
        )

    def check_pool(self) -> None:
        """Assert that every KV page is free, cached, or owned by one running request."""
        with self._turn("check_pool"):
            self._check_open()
            self._engine.scheduler.check()
            if self._partner is not None:
                self._partner.check_pool()

    @property
    def _is_in_step(self) -> bool:
        """Whether this thread runs a step of this engine, or of its partner."""
        instances = [llm for llm in (self, self._partner) if llm is not None]
        engines = [llm._engine for llm in instances]  # which another thread may close
        return any(engine is not None and engine.is_in_step for engine in engines)

    def _turn(self, method: str) -> Turns:
        """Return the turns, for ``method`` to wait for its own.

        Raises:
            PluginError: it was called in the middle of a step, by a hook of it.
        """
        if self._is_in_step:
            hooks = [self._hooks.running, self._partner and self._partner._hooks.running]
            who = next(filter(None, hooks), "what a step calls")
            raise PluginError(
                f"{who} called {method}() of the engine whose step it is part of; expected hooks "
                "to leave it alone but for abort(); call it when the step is over, or in another "
                "thread that the hook does not wait for"
            )
        return self._turns

    def _check_takes_requests(self) -> None:
        if self._prefill is not None:
            raise UsageError(
                "this is a prefill instance: it takes its requests from decode instances; give "
                "them to one of these, and call step() here"
            )

    def _check_open(self) -> None:
        if self._engine is None:
            raise UsageError("this LLM is closed; make another one")

    def _make_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
    ) -> list[Request]:
        self._check_open()
        requests = self._input_processor.requests(prompts, sampling_params, priority)
        self._prepared.update(requests)
        return requests

    def _run(
        self, requests: Sequence[Request], *, partial: bool
    ) -> Generator[RequestOutput, None, None]:
        live = {request.request_id: request for request in requests}
        inbox: list[Request] = []  # a step of another stream, or thread, may move ours
        method = "stream" if partial else "generate"
        with self._turn(method):
            self._check_open()  # it may have been closed since the requests were made
            self._check_takes_requests()
            for request in requests:
                request.inbox = inbox
                self._engine.add(request)
        try:
            while live:
                with self._turn(method):
                    if not inbox:
                        assert self._engine is None or self._engine.has_work, "requests were lost"
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
        """Run a step for nobody in particular."""
        with self._turn("wait_for_ranks"):
            if self._prefill is None:
                self._step()
            else:
                self._prefill.run()

    def _step(self) -> None:
        """Run a step, if the engine is still there. The turn is this thread's."""
        if self._engine is None:  # closed in the middle of a stream: its requests were aborted
            return
        if self._partner is not None and self._partner.prefill_loop is not None:
            self._partner.prefill_loop.step(wait=False)
        self._engine.step()

    def _drain(self, requests: Sequence[Request]) -> None:
        """Process aborts and what is in flight, so that nothing of these requests is left."""
        while not self._is_in_step:  # else the next step aborts them: an iterator is closed in one
            with self._turns:
                done = self._engine is None or not self._engine.has_work
                if done or all(r.finished and not r.in_flight for r in requests):
                    break
                self._step()
