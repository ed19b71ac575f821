"""A run: the parts that serve requests, how they are made, and what they use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs
import torch

from specplug.algorithm import AlgorithmInfo, SpecConfig, find_model
from specplug.algorithm_names import is_auto
from specplug.config import FIRST, MEASURED, EngineConfig
from specplug.disagg.instances import identity_of, make_decode_instance
from specplug.disagg.prefill_loop import PrefillLoop
from specplug.distributed.rank_group import RankGroup, join_ranks
from specplug.engine.core_outputs import core_outputs
from specplug.engine.cuda_graphs import CudaGraphs
from specplug.engine.engine import Engine
from specplug.engine.engine_runtime import EMBEDDED, EngineRuntime
from specplug.engine.grammars import Grammars
from specplug.engine.input_processor import InputProcessor
from specplug.engine.kv_pool import KVPool
from specplug.engine.kv_transfer import KVTransfer
from specplug.engine.scheduler import Scheduler, SchedulerConfig
from specplug.engine.step import StepRunner
from specplug.engine.warm_up import WarmUp
from specplug.errors import RankError, warn_fallback
from specplug.heap import trim_heap
from specplug.kernels.compilations import Compilations, cache_folder
from specplug.kernels.kernel_table import compiles_triton, kernels_mode, table_lines
from specplug.kv.prefix_cache import PrefixCache
from specplug.model.device_memory import in_mib
from specplug.model.loading import (
    backend_of,
    load_target,
    load_tokenizer,
    read_target_config,
    resolve_speculation,
)
from specplug.model.model_runner import ModelRunner
from specplug.model.sampler import Sampler
from specplug.registry import Registry
from specplug.speculative.algorithm_start import StartedAlgorithm, start_algorithm
from specplug.speculative.automatic import select_algorithm
from specplug.speculative.choice.measured_choice import MeasuredChoice
from specplug.speculative.draft_state import state_spec
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.output_kind import OutputKind
from specplug.speculative.planned_drafts import drafters_of, warm_drafters
from specplug.startup import Startup

if TYPE_CHECKING:
    from specplug.disagg.decode_instance import DecodeInstance

_log = logging.getLogger(__name__)

ON = "on"
"""The state of a feature that is on; else it is "off: " and why."""

_REST, _INSTANCE_REST = 0.01, 0.002
"""Seconds that a rank without work waits for another to call; less where an instance may ask."""


@attrs.frozen(eq=False, kw_only=True)
class Loaded:
    """What a run loads before it allocates anything.

    Attributes:
        config: the settings.
        algorithm: its settings, as the algorithm takes them, and the hooks of all plugins.
        ranks: that step together with this one; None: it is alone.
        runner: of the target's passes.
        tokenizer: of transformers, or None.
        features: the states of "overlap", "prefix_cache" and "warm_up": ``ON``, or why not.
        graphs: the CUDA graphs.
        choice: of drafts, the core's own; None: it has none in this run.
    """

    config: EngineConfig
    algorithm: StartedAlgorithm[HookCalls]
    ranks: RankGroup | None
    runner: ModelRunner
    tokenizer: Any | None
    features: dict[str, str]
    graphs: CudaGraphs
    choice: MeasuredChoice | None

    @property
    def overlap(self) -> bool:
        """Whether a step is launched before the last one's results are processed."""
        return self.features["overlap"] == ON


@attrs.frozen(eq=False, kw_only=True)
class Run(Loaded):
    """The parts of an ``LLM``, which ``start_run`` makes.

    Attributes:
        kv: the KV pool.
        runtime: what plugins may use.
        engine: the scheduler and the steps.
        input_processor: makes requests.
        decode_instance: has prompts prefilled by other instances; None: they are prefilled here.
        prefill_loop: of a prefill instance; None in any other role.
    """

    kv: KVPool
    runtime: EngineRuntime
    engine: Engine
    input_processor: InputProcessor
    decode_instance: DecodeInstance | None
    prefill_loop: PrefillLoop | None
    _opened: ExitStack

    def on_close(self, close: Callable[[], None]) -> None:
        """Have ``close`` call this when the requests have ended, before it frees anything."""
        self._opened.callback(close)

    def close(self) -> None:
        """End all requests, leave the instances that this one works with, free the model and its
        caches, and leave the ranks."""
        try:
            with suppress(RankError):  # the end of all, which has been told
                for request in self.engine.requests:
                    self.engine.abort(request.request_id)
                if self.engine.has_work:
                    self.engine.drain()
        finally:
            self._opened.close()
            if self.ranks is not None:
                self.ranks.close()

    def drop_tensors(self) -> None:
        """Free the model and its caches, even while other objects still hold this run."""
        for holder in (self.runtime, self.kv, self.runner):
            holder.close()


def start_run(config: EngineConfig, device: torch.device, startup: Startup) -> Run:
    """Make the parts of a run, each from those before it. If that fails, free what is made, in the
    opposite order, and tell the other ranks.

    Args:
        config: the settings.
        device: where the model runs.
        startup: is told of each part of the start.

    Raises:
        UsageError: a value cannot be used, or the algorithm is not installed.
        PluginError: the algorithm's plugin is broken.
        CheckpointError: the model or the draft model cannot be loaded, or do not fit.
        RankError: not all ranks came, or one has failed.
    """
    with _failure_told() as joined, ExitStack() as opened:
        opened.callback(trim_heap)
        algorithm, choice = _start_algorithm(config, device, startup, joined)
        loaded = _load(config, device, startup, algorithm, choice, joined.ranks, opened)
        caches = _allocate(loaded, startup, opened)
        return _serve(loaded, caches, startup, opened)


@attrs.define
class _Joined:
    """The ranks that a start has joined; None before that, and if there are no others."""

    ranks: RankGroup | None = None


@contextmanager
def _failure_told() -> Iterator[_Joined]:
    """Tell the ranks that are joined, if what follows fails."""
    joined = _Joined()
    try:
        yield joined
    except BaseException as error:
        if joined.ranks is not None:
            cause = joined.ranks.fail(error)
            if cause is not error:
                raise cause from error
        raise


def _start_algorithm(
    config: EngineConfig, device: torch.device, startup: Startup, joined: _Joined
) -> tuple[StartedAlgorithm[HookCalls], MeasuredChoice | None]:
    """Start the algorithm, and join the other ranks once the settings are known to be right.
    Returns the choice of drafts too."""

    @cache
    def target_config() -> dict[str, Any]:
        with startup.part("reading the configuration"):
            return read_target_config(find_model(config.model))

    def resolve(info: AlgorithmInfo) -> SpecConfig:
        spec = resolve_speculation(config, info, target_config())
        joined.ranks = join_ranks(config, device, spec.target_config)
        return spec

    # An algorithm that is named is found first: what is wrong with it is told at once.
    known = target_config() if is_auto(config.speculative_algorithm) else None
    selected, automatic = select_algorithm(Registry(), config, known)
    if automatic is not None:
        _log.info(automatic.line)
    choice = _choice_of(config, selected.info)
    started = start_algorithm(
        selected,
        resolve,
        host=EMBEDDED,
        disable_extensions=config.disable_extensions,
        # It comes before the extensions, which are asked first so.
        extensions=(*([] if choice is None else [choice]), *config.extensions),
        calls=HookCalls,
    )
    return started, choice


def _choice_of(config: EngineConfig, info: AlgorithmInfo) -> MeasuredChoice | None:
    """Return the core's choice of drafts, a plugin, where there is one."""
    of_several = info.is_several or is_auto(config.speculative_algorithm)
    choice = config.draft_choice or (MEASURED if of_several else FIRST)
    if choice != MEASURED:
        return None
    return MeasuredChoice(deterministic=config.deterministic_drafts)


def _load(
    config: EngineConfig,
    device: torch.device,
    startup: Startup,
    algorithm: StartedAlgorithm[HookCalls],
    choice: MeasuredChoice | None,
    ranks: RankGroup | None,
    opened: ExitStack,
) -> Loaded:
    """Load the target and the tokenizer."""
    runner = ModelRunner(load_target(config, device, ranks, startup))
    opened.callback(runner.close)
    with startup.part("loading the tokenizer"):
        tokenizer = load_tokenizer(config)
    features = features_of(config, algorithm.info)
    graphs = CudaGraphs(config, runner)
    return Loaded(
        config=config,
        algorithm=algorithm,
        choice=choice,
        ranks=ranks,
        runner=runner,
        tokenizer=tokenizer,
        features={**features, "warm_up": _warm_up_state(config, device, graphs)},
        graphs=graphs,
    )


@attrs.frozen(eq=False, kw_only=True)
class _Caches:
    """What passes read and write.

    Attributes:
        limits: of the steps.
        kv: the KV pool.
        prefix_cache: hands out its pages.
        sampler: of the target's tokens.
        outputs: what requests can get for each token, by name; plugins' too.
        runtime: what plugins may use. It has the worker.
    """

    limits: SchedulerConfig
    kv: KVPool
    prefix_cache: PrefixCache
    sampler: Sampler
    grammars: Grammars
    outputs: dict[str, OutputKind]
    runtime: EngineRuntime


def _allocate(loaded: Loaded, startup: Startup, opened: ExitStack) -> _Caches:
    """Make the caches, of the draft model too, which is loaded here."""
    config, algorithm, target = loaded.config, loaded.algorithm, loaded.runner.target
    limits = SchedulerConfig.of_run(config, algorithm.config, overlap=loaded.overlap)
    kv = KVPool(config, limits, target, graphs=loaded.graphs.obstacle is None)
    opened.callback(kv.close)
    sampler = Sampler(kv.table.req_table_size, target.vocab_size, target.device)
    grammars = Grammars(target.vocab_size, target.device, overlap=loaded.overlap)
    outputs = {each.name: each for each in core_outputs(target, backend_of(loaded.tokenizer))}
    runtime = EngineRuntime(
        config,
        algorithm.config,
        target,
        tokenizer=loaded.tokenizer,
        kv=kv,
        sampler=sampler,
        grammars=grammars,
        graphs=loaded.graphs,
        overlap=loaded.overlap,
        draft_verifies=algorithm.draft_verifies,
        outputs=outputs,
    )
    opened.callback(runtime.close)
    with startup.part("loading the draft"):
        algorithm.create_worker(runtime)
    with startup.part("allocating the KV pool"):
        prefix_cache = kv.allocate(
            config.max_total_tokens,
            algorithm.config.draft_lookahead,
            prefix_cache=loaded.features["prefix_cache"] == ON,
        )
    return _Caches(
        limits=limits,
        kv=kv,
        prefix_cache=prefix_cache,
        sampler=sampler,
        grammars=grammars,
        outputs=outputs,
        runtime=runtime,
    )


def _serve(loaded: Loaded, caches: _Caches, startup: Startup, opened: ExitStack) -> Run:
    """Make what serves requests, and warm it up."""
    config, target = loaded.config, loaded.runner.target
    specs = [*caches.runtime.every_config()]
    kv, cache = caches.kv, caches.prefix_cache
    decode_instance = make_decode_instance(config, specs, target, kv, cache)
    if decode_instance is not None:
        opened.callback(decode_instance.close)
    engine = _make_engine(loaded, caches, decode_instance)
    drafters = drafters_of(caches.runtime)
    if loaded.choice is not None and loaded.ranks is not None:
        loaded.ranks.notes = loaded.choice.share(caches.runtime, drafters)
    inputs = InputProcessor(
        config,
        target,
        loaded.tokenizer,
        cache.pool,
        context_len=kv.context_len,
        outputs=caches.outputs.values(),
        drafters=drafters,
    )
    if loaded.features["warm_up"] == ON:
        decodes, hooks = config.disaggregation != "prefill", loaded.algorithm.hooks
        warm = warm_drafters(
            caches.runtime, plans=hooks.plans_drafts, has_draft_cache=kv.has_draft_cache
        )
        with startup.part("warming up"):
            warm_up = WarmUp(
                engine.steps,
                hooks,
                caches.limits,
                decodes=decodes,
                drafters=warm,
                ranks=loaded.ranks,
                measures=loaded.choice is not None,
            )
            warm_up.run(startup.advance)
        if loaded.choice is not None and warm_up.timed:
            text = [each.who or 0 for each in warm if each.is_ragged]
            loaded.choice.probe(caches.runtime, drafters, text, warm_up.timed)
    prefill_loop = None
    if config.disaggregation == "prefill":
        identity = identity_of(target, specs, config.page_size)
        prefill_loop = PrefillLoop(config, identity, engine, inputs, loaded.ranks)
        opened.callback(prefill_loop.close)
    return Run(
        **attrs.asdict(loaded, recurse=False),
        kv=kv,
        runtime=caches.runtime,
        engine=engine,
        input_processor=inputs,
        decode_instance=decode_instance,
        prefill_loop=prefill_loop,
        opened=opened.pop_all(),
    )


def _make_engine(loaded: Loaded, caches: _Caches, remote: DecodeInstance | None) -> Engine:
    """Make the scheduler and the steps; ``remote`` has prompts prefilled elsewhere."""
    kv, cache, runtime = caches.kv, caches.prefix_cache, caches.runtime
    transfer = KVTransfer(kv, state_spec(runtime.worker), cache.lookahead)
    order = loaded.algorithm.begin(runtime)
    kv.committed = order.committed.seq_lens
    return Engine(
        scheduler=Scheduler(caches.limits, cache, kv.table, order.lacking, order.leave),
        steps=StepRunner(loaded.runner, kv, caches.sampler, order, transfer, caches.grammars),
        runtime=runtime,
        hooks=loaded.algorithm.hooks,
        graphs=loaded.graphs,
        overlap=loaded.overlap,
        remote=remote,
        ranks=loaded.ranks,
        rest=_REST if loaded.config.disaggregation is None else _INSTANCE_REST,
    )


def features_of(config: EngineConfig, algorithm: AlgorithmInfo) -> dict[str, str]:
    """Return the states of "overlap" and "prefix_cache", which the settings or the algorithm turn
    off. What the algorithm turns off is warned of."""
    name, able = algorithm.name, algorithm.capabilities
    return {
        "overlap": _state(
            "overlap",
            refused_by="disable_overlap_schedule" if config.disable_overlap_schedule else None,
            obstacle=None if able.overlap else f"{name} drafts from what the host has read",
        ),
        "prefix_cache": _state(
            "prefix_cache",
            refused_by="disable_radix_cache" if config.disable_radix_cache else None,
            obstacle=None
            if able.prefix_cache
            else f"{name} must itself see every token that it drafts after",
        ),
    }


def _state(name: str, *, refused_by: str | None, obstacle: str | None) -> str:
    """Return the state of a feature.

    Args:
        refused_by: the setting by which the user turned it off, or None.
        obstacle: why it cannot be on, or None.
    """
    if refused_by is not None:
        return f"off: {refused_by}"
    if obstacle is not None:
        warn_fallback(f"{name} is off: {obstacle}")
        return f"off: {obstacle}"
    return ON


def _warm_up_state(config: EngineConfig, device: torch.device, graphs: CudaGraphs) -> str:
    if config.warm_up == "auto":
        compiles = graphs.obstacle is None or compiles_triton(device)
        return ON if compiles else "off: no step compiles or records here"
    return ON if config.warm_up == "on" else "off: warm_up='off'"


# What a run says of itself


def startup_lines(run: Run) -> Iterator[str]:
    """Yield what a run has loaded, and what memory it takes, in lines for a log."""
    spec, target, kv = run.algorithm.config, run.runner.target, run.kv
    device, dtype = target.device, str(target.dtype).removeprefix("torch.")
    yield (
        f"model {run.config.model}: {type(target.model).__name__}, {target.num_parameters:,} "
        f"parameters, {in_mib(target.num_bytes)} of weights in {dtype} on {device}"
    )
    for line in table_lines(device, target.dtype):
        yield f"SPECPLUG_KERNELS={kernels_mode()}: {line}"
    if target.kernels is not None:
        yield (
            f"kernels: {target.num_fused_layers} of {target.num_layers} layers are fused; row "
            f"invariance {target.row_invariance}"
        )
    draft = ""
    if spec.draft_model_path is not None:
        size = sum(file.stat().st_size for file in spec.draft_model_path.glob("*.safetensors"))
        draft = f"; draft weights {spec.draft_model_path}, {in_mib(size)} of files"
    yield (
        f"algorithm {spec.algorithm}: num_steps {spec.num_steps}, topk {spec.topk}, "
        f"num_draft_tokens {spec.num_draft_tokens}{draft}"
    )
    of_target, *drafts = [tensor.nbytes for tensor in kv.tensors]
    yield (
        f"KV pool: {run.engine.scheduler.cache.pool.num_tokens:,} slots in pages of "
        f"{run.config.page_size}, {in_mib(of_target)} for the target"
        + (f" and {in_mib(sum(drafts))} for the draft" if drafts else "")
    )
    yield (
        f"context {kv.context_len:,} tokens, at most {run.config.max_running_requests:,} requests "
        "at a time"
    )


def times_of_start(run: Run, startup: Startup, compiled: Compilations) -> Iterator[str]:
    """Yield what the start of a run took, in lines for a log."""
    parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in startup.seconds.items())
    yield f"start: {parts}"
    if compiles_triton(run.runtime.device):
        yield (
            f"kernels: {compiled.compiled} compiled in {compiled.seconds:.2f} s, {compiled.cached} "
            f"read from {cache_folder()}"
        )
    if run.graphs.state == ON:
        recorded, seconds = run.graphs.recordings
        yield f"CUDA graphs: {recorded} recorded in {seconds:.2f} s"


def effective_config(run: Run) -> dict[str, Any]:
    """Return what a run really uses: its settings, as adjusted, and what is off and why."""
    config, spec, target = run.config, run.algorithm.config, run.runner.target
    remote = run.decode_instance
    of_speculation = attrs.asdict(spec, filter=lambda a, _: a.name != "target_config")
    return {
        **config.as_json(),
        "speculative_algorithm": spec.algorithm,
        **of_speculation,
        **run.features,
        "cuda_graph": run.graphs.state,
        "row_invariance": target.row_invariance,
        "cpu_kernels": target.cpu_kernels_state,
        "dp_attention": ON if config.dp_size > 1 else "off: not enabled",
        "mixed_chunk": ON if config.enable_mixed_chunk else "off: not enabled",
        "disaggregation": config.disaggregation or "off",
        "disaggregation_address": None if remote is None else remote.address,
        "disaggregation_key": None if config.disaggregation_key is None else "set",
        "max_total_tokens": run.engine.scheduler.cache.pool.num_tokens,
        "context_len": run.kv.context_len,
        "extensions": run.algorithm.hooks.extensions,
        "device": str(target.device),
        "num_threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
    }
