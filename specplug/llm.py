"""``LLM``: the embedded engine as a Python object. Names are those vLLM users know."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs
import torch

from specplug.algorithm import DEFAULT_MODEL, SpecConfig
from specplug.bounds import check_integer, shown
from specplug.disagg.instances import (
    check_mode,
    identity_of,
    make_decode_instance,
    make_prefill_instance,
)
from specplug.distributed.rank_group import join_ranks, tells_ranks
from specplug.engine.engine import Engine
from specplug.engine.engine_runtime import EngineRuntime
from specplug.engine.features import Features
from specplug.engine.input_processor import InputProcessor, Prompt
from specplug.engine.kv_transfer import KVTransfer
from specplug.engine.per_token_outputs import core_outputs
from specplug.engine.request import Request
from specplug.engine.scheduler import Scheduler, SchedulerConfig
from specplug.engine.statistics import Statistics
from specplug.engine.step import StepRunner
from specplug.engine.turns import Turns
from specplug.errors import FallbackWarning, InstanceError, RankError, UsageError
from specplug.kv.page_pool import PagePool
from specplug.kv.prefix_cache import PrefixCache
from specplug.kv.request_table import RequestTable
from specplug.model.device_memory import in_gib, memory_of
from specplug.model.loading import (
    ASSETS,
    backend_of,
    choose_device,
    choose_dtype,
    find_model,
    load_tokenizer,
    optional_path,
    read_eos_token_ids,
    read_target_config,
    set_threads,
    trim_heap,
)
from specplug.model.model_runner import ModelRunner
from specplug.outputs import RequestOutput
from specplug.registry import Registry, build_plugin_manager
from specplug.sampling_params import SamplingParams
from specplug.speculative.defaults import CoreDefaults
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.runtime import RankInfo

if TYPE_CHECKING:
    from specplug.disagg.decode_instance import DecodeInstance
    from specplug.disagg.prefill_instance import PrefillInstance

_log = logging.getLogger(__name__)
_CPU_POOL_BYTES = 512 << 20
_CUDA_POOL_SHARE = 0.6
_REST, _MOMENT = 0.01, 0.002
"""Seconds that a rank without work waits for another to call; less where an instance may ask."""

_OF_ONE_SIDE = ("self", "disaggregation", "disaggregation_address")
"""Arguments in which the two sides of a pair in one process differ."""

_Make = TypeVar("_Make", bound=Callable[..., None])


def _frees(make: _Make) -> _Make:
    """Around ``LLM.__init__``: what it has made until it fails is freed."""

    @functools.wraps(make)
    def guarded(self: LLM, *args: Any, **kwargs: Any) -> None:
        try:
            make(self, *args, **kwargs)
        except BaseException:
            self._free()
            raise

    return cast(_Make, guarded)


class LLM:
    """A model under an algorithm, ready to generate.

    Several threads may use one LLM: their requests share its steps, and each gets its own outputs.

    Args:
        model: folder or hub id of a causal LM of transformers; None or ``"tiny-code"``: the
            default model that ships with specplug.
        tokenizer: folder or hub id of its tokenizer; None: the model's own. Without one, prompts
            are token ids and outputs have no text.
        dtype: "auto" (float32 on the CPU, else the checkpoint's), "float32", "bfloat16",
            "float16" or "float64".
        device: "cpu", "cuda", "cuda:1", …; None: CUDA if there is one.
        seed: from which requests without a seed get theirs.
        speculative_algorithm: name of an installed algorithm, or a plugin object.
        speculative_draft_model_path: folder of its draft weights.
        speculative_num_steps, speculative_eagle_topk, speculative_num_draft_tokens: draft depth S,
            branches K, nodes N; None: the algorithm's defaults.
        page_size: tokens a KV page.
        chunked_prefill_size: the token budget of a step: most prompt tokens, and with
            ``enable_mixed_chunk`` the nodes of drafts too; None: no limit.
        enable_mixed_chunk: prompts and drafts share a step, so that a long prompt holds up nobody;
            else prompts go first, in steps of their own.
        max_running_requests: most requests that run at a time; more wait.
        max_total_tokens: slots of the KV pool; None: what fits a memory budget.
        max_model_len: context length; None: the model's.
        disable_overlap_schedule: process each step's results before the next step is launched.
        disable_radix_cache: do not keep the KV of prompts and outputs for others that begin alike.
        disable_cuda_graph: do not record passes as CUDA graphs (on the CPU there are none).
        disable_extensions: names of installed extensions that this run goes without.
        skip_model_check: do not prove at loading that the model gives its own logits here. A model
            that would be refused then runs, and its tokens may be wrong.
        disaggregation: "prefill": prefill for the decode instances at the address; "decode": have
            prompts prefilled by the instances that register there; "both": the two sides in this
            process, with a transfer between them. None: one engine does both. See
            docs/disaggregation.md.
        disaggregation_address: tcp://HOST:PORT where the decode instance waits; a prefill instance
            may serve several, with commas between them. None: port 30100 of this machine.
        disaggregation_timeout: seconds without progress after which a decode instance gives a
            request to another prefill instance, or ends it with an error if there is none.
        num_threads: torch's threads on the CPU, which are the whole process's. None: one for a
            model of under 50 million parameters, whose operations are too short to share (two
            threads on busy cores then wait for one another), else torch's own choice.
        dp_rank, dp_size: this process's place among those that share the work; one LLM in each.
        dp_address: host:port at which rank 0 listens for the others.
        dp_timeout: seconds of silence after which another rank is taken for dead.
        enable_dp_attention: each rank has its own requests and KV, and a part of every MLP, so all
            ranks step together: see ``step``.

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
    _runtime: EngineRuntime = None  # type: ignore[assignment]
    _remote: DecodeInstance | None = None
    _prefill: PrefillInstance | None = None
    _partner: LLM | None = None

    @tells_ranks
    @_frees
    def __init__(
        self,
        model: str | Path | None = None,
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
        disable_extensions: Sequence[str] = (),
        skip_model_check: bool = False,
        disaggregation: str | None = None,
        disaggregation_address: str | None = None,
        disaggregation_timeout: float = 30.0,
        num_threads: int | None = None,
        dp_rank: int = 0,
        dp_size: int = 1,
        dp_address: str | None = None,
        dp_timeout: float = 15.0,
        enable_dp_attention: bool = False,
    ) -> None:
        self._inbox: list[Request] = []
        self._turns = Turns()
        same = {name: value for name, value in locals().items() if name not in _OF_ONE_SIDE}
        for name, value, optional in (
            ("page_size", page_size, False),
            ("chunked_prefill_size", chunked_prefill_size, True),
            ("max_running_requests", max_running_requests, False),
            ("max_total_tokens", max_total_tokens, True),
            ("max_model_len", max_model_len, True),
            ("num_threads", num_threads, True),
        ):
            if value is not None or not optional:
                check_integer(name, value)
        if type(seed) is not int:
            raise UsageError(f"seed={shown(seed)}: expected an integer")
        check_mode(
            disaggregation,
            disaggregation_address,
            disaggregation_timeout,
            shares_mlps=enable_dp_attention and dp_size != 1,
        )
        registry = Registry()
        selected = registry.select(speculative_algorithm)
        extensions = registry.extensions(disable_extensions)
        manager = build_plugin_manager(selected, extensions, CoreDefaults())
        self._hooks = HookCalls(manager, selected, extensions)
        where = choose_device(device)
        path = find_model(model)
        config = SpecConfig.resolve(
            selected.info,
            num_steps=speculative_num_steps,
            topk=speculative_eagle_topk,
            num_draft_tokens=speculative_num_draft_tokens,
            draft_model_path=optional_path(speculative_draft_model_path),
            model_name=DEFAULT_MODEL if path == str(ASSETS / "tiny_code") else None,
            target_config=read_target_config(path),
        )
        self._ranks = join_ranks(
            RankInfo(rank=dp_rank, world_size=dp_size),
            dp_address,
            where,
            dp_timeout,
            {
                **{k: v for k, v in config.target_config.items() if not k.startswith("_")},
                "dtype": dtype,
                "device": where.type,
                "dp_size": dp_size,
                "skip_model_check": skip_model_check,
            },
            enabled=enable_dp_attention,
        )
        self.spec_config = config = self._hooks.validate_config(config)
        for adjustment in config.adjustments:
            warnings.warn(f"{config.algorithm}: {adjustment}", FallbackWarning, stacklevel=3)
        self._runner = ModelRunner(
            path,
            choose_dtype(dtype, where),
            where,
            self._ranks,
            identified=disaggregation is not None,
            skip_check=skip_model_check,
        )
        if where.type == "cpu":
            set_threads(num_threads, self._runner.num_parameters)
        self.tokenizer = load_tokenizer(tokenizer, path)
        self.context_len = min(max_model_len or self._runner.context_len, self._runner.context_len)
        self._features = Features.of_run(
            selected.info,
            disable_overlap_schedule=disable_overlap_schedule,
            disable_radix_cache=disable_radix_cache,
        )
        self._runtime = runtime = EngineRuntime(
            config,
            self._runner,
            self.context_len,
            max_running_requests,
            page_size=page_size,
            chunked_prefill_size=chunked_prefill_size,
            overlap=self._features.is_on("overlap"),
            graphs=where.type == "cuda" and not disable_cuda_graph and self._ranks is None,
            draft_verifies=self._hooks.supports_target_verify_for_draft(),
            rank=RankInfo(rank=dp_rank, world_size=dp_size),
            outputs=core_outputs(self._runner, backend_of(self.tokenizer)),
        )
        runtime.worker = self._hooks.create_worker(runtime)
        runtime.seal()
        self._limits = SchedulerConfig(
            max_running_requests=max_running_requests,
            chunked_prefill_size=chunked_prefill_size,
            mixed_chunk=enable_mixed_chunk,
            columns=config.num_steps + 1,
            num_draft_tokens=config.num_draft_tokens,
            num_lookahead_slots=max(
                config.num_draft_tokens, config.num_draft_slots, config.num_steps + 1
            ),
            steps_in_flight=2 if self._features.is_on("overlap") else 1,
        )
        cache, table = self._allocate(runtime, page_size, max_total_tokens)
        self._disaggregation = disaggregation
        self._input_processor = InputProcessor(
            runner=self._runner,
            tokenizer=self.tokenizer,
            pool=cache.pool,
            context_len=self.context_len,
            eos_token_ids=read_eos_token_ids(self._runner),
            outputs=runtime.outputs.values(),
            seed=seed,
        )
        if disaggregation in ("decode", "both"):
            self._remote = make_decode_instance(
                runtime,
                self._runner,
                cache,
                address=disaggregation_address,
                timeout=disaggregation_timeout,
                both=disaggregation == "both",
            )
        self._engine = self._make_engine(runtime, cache, table)
        if disaggregation == "prefill":
            self._prefill = make_prefill_instance(
                identity_of(self._runner, config, page_size),
                address=disaggregation_address,
                prepare=self.prepare,
                submit=self._submit,
                abort=self.abort,
            )
        if self._remote is not None and disaggregation == "both":
            other = {"disaggregation": "prefill", "disaggregation_address": self._remote.address}
            self._partner = LLM(**same, **other)

    def _free(self) -> None:
        """Leave the instances that this one works with, and let go of the model and its caches,
        so that no reference cycle keeps them until the garbage collector comes by."""
        try:
            for other in (self._partner, self._prefill, self._remote):
                if other is not None:
                    other.close()
        finally:
            self._partner = self._prefill = self._remote = None
            self._drop_tensors()
            self._inbox.clear()
            self._engine = self._input_processor = None  # type: ignore[assignment]
            self._runtime = self._runner = None  # type: ignore[assignment]
            trim_heap()

    def _drop_tensors(self) -> None:
        for holder in (self._runtime, self._runner):
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
        with self._turns:
            if self._engine is None:
                return
            try:
                with suppress(RankError):  # the end of all, which has been told
                    self._abort_all()
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
            One output a prompt, in the prompts' order.

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
        return [outputs[request.request_id] for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Generator[RequestOutput, None, None]:
        """Complete prompts and yield what came, step by step; ``delta`` is the new text.

        The last output of each request has a ``finish_reason``. Closing the iterator aborts what
        still runs.

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
            UsageError: the prompt or a setting cannot be used.
        """
        request = self.prepare(prompt, sampling_params, priority=priority)
        self.submit(request)
        return request.request_id

    def prepare(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> Request:
        """Check a prompt and its settings and make a request of them, for ``submit``.

        To tokenize a long prompt or to compile a grammar takes a while. Like ``abort``, and unlike
        all else here, it does not wait for the step that another thread runs.

        Raises:
            UsageError: the prompt or a setting cannot be used.
        """
        prompts: list[Any] = [prompt]
        (request,) = self._make_all(prompts, sampling_params, priority)
        return request

    def submit(self, request: Request) -> None:
        """Queue a prepared request for ``step``.

        Raises:
            UsageError: this is a prefill instance, which takes requests from decode instances.
        """
        self._check_takes_requests()
        self._submit(request)

    def _submit(self, request: Request) -> None:
        with self._turns:
            self._check_open()
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
        with self._turns:
            self._check_open()
            if self._prefill is not None:
                self._step_prefill(wait=True)
                return []
            if self._engine.has_work or not self._inbox:
                self._step()
            moved = [request for request in _emptied(self._inbox) if not request.delivered]
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
        return self._ranks is not None or self._disaggregation in ("prefill", "decode")

    def wait_for_ranks(self) -> None:
        """Do this rank's work, and take part in the others' until they have none: until every rank
        has called this as often as this one.

        Raises:
            RankError: another rank has failed.
        """
        self._check_open()
        step = self._step if self._prefill is None else self._run_prefill
        while self._engine.has_work:
            step()
        if self._ranks is None:
            return
        for _ in ("nothing to launch", "nothing on the device"):
            self._ranks.channel.say_done()
            while not self._ranks.channel.all_done:
                step()
            self._ranks.settle()

    def abort(self, request_id: str) -> None:
        """End a request; its output so far comes with ``finish_reason="abort"``.

        May be called at any time, from any thread, and between two outputs of ``stream``.
        """
        engine = self._engine  # which another thread may close
        if engine is not None:
            engine.abort(request_id)

    def stats(self) -> dict[str, Any]:
        """Totals since the engine was made; see ``specplug.engine.statistics``."""
        with self._turns:
            self._check_open()
            stats = self._engine.statistics.as_dict()
            if self._remote is not None:
                stats |= self._remote.transfers.as_dict()
            return stats

    @property
    def occupancy(self) -> dict[str, int]:
        """What the engine holds now: requests "running" and "waiting"; pages "total" (all but the
        padding page), "free", "cached", and "available", those that are free or cached for nobody
        who runs."""
        self._check_open()
        scheduler = self._engine.scheduler
        cache = scheduler.cache
        return {
            "running": len(scheduler.running),
            "waiting": len(self._engine.requests) - len(scheduler.running),
            "total": cache.pool.num_pages - 1,
            "free": cache.pool.num_free,
            "cached": cache.num_pages,
            "available": cache.num_available,
        }

    def flush_cache(self) -> None:
        """Forget all cached prefixes.

        Raises:
            UsageError: requests are running.
        """
        with self._turns:
            self._check_open()
            if self._engine.has_work:
                raise UsageError("flush_cache: requests are running; wait for them or abort them")
            self._engine.scheduler.cache.clear()
            if self._partner is not None:
                self._partner.flush_cache()

    def reset_stats(self) -> None:
        """Start counting anew."""
        with self._turns:
            self._check_open()
            self._engine.statistics = Statistics()
            if self._remote is not None:
                self._remote.reset_transfers()
            if self._partner is not None:
                self._partner.reset_stats()

    @property
    def effective_config(self) -> dict[str, Any]:
        """What the run really uses, what was adjusted and what is off, and why."""
        self._check_open()
        config = attrs.asdict(self.spec_config, filter=lambda a, _: a.name != "target_config")
        pool = self._engine.scheduler.cache.pool
        return {
            **config,
            **self._features.states,
            "cuda_graph": self._engine.cuda_graph,
            "dp_attention": "off: not enabled" if self._ranks is None else "on",
            "dp_rank": self._ranks.rank if self._ranks is not None else 0,
            "dp_size": self._ranks.size if self._ranks is not None else 1,
            "mixed_chunk": "on" if self._limits.mixed_chunk else "off: not enabled",
            "disaggregation": self._disaggregation or "off",
            "disaggregation_address": self._remote.address if self._remote else None,
            "chunked_prefill_size": self._limits.chunked_prefill_size,
            "max_running_requests": self._limits.max_running_requests,
            "page_size": pool.page_size,
            "max_total_tokens": pool.num_tokens,
            "context_len": self.context_len,
            "extensions": self._hooks.extensions,
            "device": str(self._runner.device),
            "num_threads": torch.get_num_threads(),
            "dtype": str(self._runner.dtype).removeprefix("torch."),
        }

    def check_pool(self) -> None:
        """Assert that every KV page is free, cached, or owned by one running request."""
        with self._turns:
            self._check_open()
            self._engine.scheduler.check()
            if self._partner is not None:
                self._partner.check_pool()

    def _allocate(
        self, runtime: EngineRuntime, page_size: int, max_total_tokens: int | None
    ) -> tuple[PrefixCache, RequestTable]:
        """The KV pool, who hands out its pages, and the table of whose they are."""
        limits, config = self._limits, self.spec_config
        width = (
            self.context_len + limits.steps_in_flight * limits.columns + limits.num_lookahead_slots
        )
        num_slots = max_total_tokens or _default_slots(runtime, width)
        num_pages = -(-num_slots // page_size) + 1
        _check_memory(runtime, num_pages * page_size, width, max_total_tokens)
        try:
            table = RequestTable(runtime.req_table_size, width, page_size, runtime.device)
            runtime.allocate_pool(num_pages * page_size, table)
        except (
            RuntimeError,
            MemoryError,
            OSError,
        ) as error:  # there is as much, but others have it
            size = in_gib(num_pages * page_size * runtime.bytes_per_slot())
            raise UsageError(
                f"max_total_tokens={num_slots}: the KV pool needs {size}, and {runtime.device} has "
                "no such room now; lower max_total_tokens or max_running_requests, or free memory"
            ) from error
        lookahead = config.draft_lookahead
        if lookahead is None:
            lookahead = 1 if runtime.has_draft_cache else 0
        enabled = self._features.is_on("prefix_cache")
        return PrefixCache(PagePool(num_pages, page_size), lookahead, enabled=enabled), table

    def _make_engine(
        self, runtime: EngineRuntime, cache: PrefixCache, table: RequestTable
    ) -> Engine:
        future_map = self._hooks.create_future_map(runtime)
        transfer = KVTransfer(runtime, cache.lookahead)
        return Engine(
            scheduler=Scheduler(self._limits, cache, table),
            steps=StepRunner(runtime, self._runner, self._hooks, future_map, transfer, self._ranks),
            runtime=runtime,
            hooks=self._hooks,
            overlap=self._limits.steps_in_flight > 1,
            remote=self._remote,
            ranks=self._ranks,
            rest=_REST if self._disaggregation is None else _MOMENT,
        )

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
        return self._input_processor.requests(prompts, sampling_params, priority)

    def _run(
        self, requests: Sequence[Request], *, partial: bool
    ) -> Generator[RequestOutput, None, None]:
        live = {request.request_id: request for request in requests}
        inbox: list[Request] = []  # a step of another stream, or thread, may move ours
        with self._turns:
            self._check_open()  # it may have been closed since the requests were made
            self._check_takes_requests()
            for request in requests:
                request.inbox = inbox
                self._engine.add(request)
        try:
            while live:
                with self._turns:
                    if not inbox:
                        assert self._engine is None or self._engine.has_work, "requests were lost"
                        self._step()
                    moved = [request for request in _emptied(inbox) if request.request_id in live]
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

    def _step(self) -> None:
        """Run a step, if the engine is still there."""
        with self._turns:
            if self._engine is None:  # closed in the middle of a stream: its requests were aborted
                return
            if self._partner is not None:
                self._partner._step_prefill(wait=False)
            self._take(self._engine.step)

    def _take(self, move: Callable[[], list[Request]]) -> None:
        """Have requests moved, and put them where they are waited for."""
        moved: list[Request] = []
        try:
            with self._ranks.stepping() if self._ranks is not None else nullcontext():
                moved = move()
        except BaseException as error:
            cause = error if self._ranks is None else self._ranks.end(error)
            moved = self._engine.abandon(cause)
            if cause is not error:
                raise cause from error
            raise
        finally:
            for request in moved:
                request.inbox.append(request)

    def _step_prefill(self, *, wait: bool) -> None:
        """Take what decode instances ask for, run a step, and send them what it gave."""
        assert self._prefill is not None
        # With other ranks the step itself waits, for these too.
        self._prefill.receive(wait=wait and not self._engine.has_work and self._ranks is None)
        self._run_prefill()

    def _run_prefill(self) -> None:
        """Run a step if there is work, or another rank may call, and send what it gave."""
        assert self._prefill is not None
        if self._engine.has_work or self._ranks is not None:
            try:
                self._step()
            except InstanceError:
                raise
            except Exception:  # its requests have ended; who waits for them is told
                _log.exception("a step has failed")
        outbox = self._engine.outbox
        self._prefill.send(outbox.popleft() for _ in range(len(outbox)))
        self._prefill.tell_failed(_emptied(self._inbox))

    def _drain(self, requests: Sequence[Request]) -> None:
        """Process aborts and what is in flight, so that nothing of these requests stays behind."""
        while True:
            with self._turns:
                done = self._engine is None or not self._engine.has_work
                if done or all(r.finished and not r.in_flight for r in requests):
                    break
                self._step()

    def _abort_all(self) -> None:
        for request in self._engine.requests:
            self._engine.abort(request.request_id)
        if self._engine.has_work:
            self._take(self._engine.drain)


def _check_memory(
    runtime: EngineRuntime, num_slots: int, width: int, max_total_tokens: int | None
) -> None:
    """Refuse a KV pool, or a table of whose slots are whose, that the device can never hold."""
    memory = memory_of(runtime.device)
    table = runtime.req_table_size * width * torch.int64.itemsize
    if table > memory:
        raise UsageError(
            f"max_running_requests={runtime.max_running_requests}: the table of their slots, "
            f"{width} for each, needs {in_gib(table)}; expected at most the {in_gib(memory)} that "
            f"{runtime.device} has; lower it, or max_model_len"
        )
    pool = num_slots * runtime.bytes_per_slot()
    if pool > memory:
        typed = max_total_tokens is not None
        what = f"max_total_tokens={shown(max_total_tokens)}" if typed else f"{num_slots} KV slots"
        raise UsageError(
            f"{what}: needs {in_gib(pool)}, {runtime.bytes_per_slot()} bytes a token; expected at "
            f"most the {in_gib(memory)} that {runtime.device} has; lower max_total_tokens, "
            "page_size or max_model_len"
        )


def _default_slots(runtime: EngineRuntime, width: int) -> int:
    """As many slots as a memory budget holds, at most what all running requests can need."""
    if runtime.device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(runtime.device)[0] * _CUDA_POOL_SHARE)
    else:
        budget = _CPU_POOL_BYTES
    most = runtime.max_running_requests * width
    return max(width, min(most, budget // runtime.bytes_per_slot()))


def _emptied(inbox: list[Request]) -> list[Request]:
    """What is in the inbox, each request once; it is empty then."""
    moved = list(dict.fromkeys(inbox))
    inbox.clear()
    return moved
