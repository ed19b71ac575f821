"""A run: the parts that serve requests, how they are made, and what they use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import attrs
import torch

from specplug.algorithm import AlgorithmInfo, SpecConfig
from specplug.config import EngineConfig
from specplug.disagg.instances import identity_of, make_decode_instance
from specplug.disagg.prefill_loop import PrefillLoop
from specplug.distributed.rank_group import RankGroup, join_ranks
from specplug.engine.core_outputs import core_outputs
from specplug.engine.cuda_graphs import CudaGraphs
from specplug.engine.engine import Engine
from specplug.engine.engine_runtime import EMBEDDED, EngineRuntime
from specplug.engine.input_processor import InputProcessor
from specplug.engine.kv_pool import KVPool
from specplug.engine.kv_transfer import KVTransfer
from specplug.engine.scheduler import Scheduler, SchedulerConfig
from specplug.engine.step import StepRunner
from specplug.engine.warm_up import WarmUp
from specplug.errors import RankError, warn_fallback
from specplug.kernels.compilations import Compilations, cache_folder
from specplug.kernels.kernel_table import compiles_triton, kernels_mode, table_lines
from specplug.model.device_memory import in_mib
from specplug.model.loading import (
    backend_of,
    load_target,
    load_tokenizer,
    resolve_speculation,
    trim_heap,
)
from specplug.model.model_runner import ModelRunner
from specplug.model.sampler import Sampler
from specplug.speculative.algorithm_start import StartedAlgorithm, start_algorithm
from specplug.speculative.draft_state import state_spec
from specplug.speculative.hook_calls import HookCalls
from specplug.startup import Startup

if TYPE_CHECKING:
    from specplug.disagg.decode_instance import DecodeInstance

ON = "on"
"""The state of a feature that is on; else it is "off: " and why."""

_REST, _INSTANCE_REST = 0.01, 0.002
"""Seconds that a rank without work waits for another to call; less where an instance may ask."""


@attrs.frozen(eq=False, kw_only=True)
class Run:
    """The parts of an ``LLM``, which ``start_run`` makes.

    Attributes:
        config: the settings.
        spec: the settings of its speculation, as the algorithm takes them.
        hooks: of its plugins.
        ranks: that step together with this one; None: it is alone.
        runner: of the target's passes.
        tokenizer: of transformers, or None.
        features: the states of "overlap", "prefix_cache" and "warm_up": ``ON``, or why not.
        graphs: the CUDA graphs.
        kv: the KV pool.
        runtime: what plugins may use.
        engine: the scheduler and the steps.
        input_processor: makes requests.
        decode_instance: has prompts prefilled by other instances; None: they are prefilled here.
        prefill_loop: of a prefill instance; None in any other role.
    """

    config: EngineConfig
    spec: SpecConfig
    hooks: HookCalls
    ranks: RankGroup | None
    runner: ModelRunner
    tokenizer: Any | None
    features: dict[str, str]
    graphs: CudaGraphs
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
        # The settings, the other ranks, and the target
        opened.callback(trim_heap)
        algorithm = _start_algorithm(config, device, startup, joined)
        spec, hooks, ranks = algorithm.config, algorithm.hooks, joined[0] if joined else None
        target = load_target(config, device, ranks, startup)
        runner = ModelRunner(target)
        opened.callback(runner.close)
        with startup.part("loading the tokenizer"):
            tokenizer = load_tokenizer(config)

        # What passes read and write, and the draft model
        features = features_of(config, algorithm.info)
        overlap, caches_prefixes = (features[name] == ON for name in ("overlap", "prefix_cache"))
        graphs = CudaGraphs(config, runner)
        features["warm_up"] = _warm_up_state(config, device, graphs)
        limits = SchedulerConfig.of_run(config, spec, overlap=overlap)
        kv = KVPool(config, limits, target, graphs=graphs.obstacle is None)
        opened.callback(kv.close)
        sampler = Sampler(kv.table.req_table_size, target.vocab_size, device)
        outputs = {each.name: each for each in core_outputs(target, backend_of(tokenizer))}
        runtime = EngineRuntime(
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
        opened.callback(runtime.close)
        with startup.part("loading the draft"):
            algorithm.create_worker(runtime)
        with startup.part("allocating the KV pool"):
            cache = kv.allocate(
                config.max_total_tokens, spec.draft_lookahead, prefix_cache=caches_prefixes
            )

        # What serves requests
        decode_instance = make_decode_instance(config, spec, target, kv, cache)
        if decode_instance is not None:
            opened.callback(decode_instance.close)
        transfer = KVTransfer(kv, state_spec(runtime.worker), cache.lookahead)
        engine = Engine(
            scheduler=Scheduler(limits, cache, kv.table),
            steps=StepRunner(runner, kv, sampler, algorithm.begin(runtime), transfer),
            runtime=runtime,
            hooks=hooks,
            overlap=overlap,
            remote=decode_instance,
            ranks=ranks,
            rest=_REST if config.disaggregation is None else _INSTANCE_REST,
        )
        inputs = InputProcessor(
            config,
            target,
            tokenizer,
            cache.pool,
            context_len=kv.context_len,
            outputs=outputs.values(),
        )
        if features["warm_up"] == ON:
            decodes = config.disaggregation != "prefill"
            with startup.part("warming up"):
                warm_up = WarmUp(engine.steps, hooks, limits, decodes=decodes, ranks=ranks)
                warm_up.run(startup.advance)
        prefill_loop = None
        if config.disaggregation == "prefill":
            identity = identity_of(target, spec, config.page_size)
            prefill_loop = PrefillLoop(config, identity, engine, inputs, ranks)
            opened.callback(prefill_loop.close)
        return Run(
            config=config,
            spec=spec,
            hooks=hooks,
            ranks=ranks,
            runner=runner,
            tokenizer=tokenizer,
            features=features,
            graphs=graphs,
            kv=kv,
            runtime=runtime,
            engine=engine,
            input_processor=inputs,
            decode_instance=decode_instance,
            prefill_loop=prefill_loop,
            opened=opened.pop_all(),
        )


@contextmanager
def _failure_told() -> Iterator[list[RankGroup]]:
    """Yield a list for the ranks that are joined: they are told if what follows fails."""
    joined: list[RankGroup] = []
    try:
        yield joined
    except BaseException as error:
        for ranks in joined:
            cause = ranks.fail(error)
            if cause is not error:
                raise cause from error
        raise


def _start_algorithm(
    config: EngineConfig, device: torch.device, startup: Startup, joined: list[RankGroup]
) -> StartedAlgorithm[HookCalls]:
    """Start the algorithm, and join the other ranks once the settings are known to be right."""

    def resolve(info: AlgorithmInfo) -> SpecConfig:
        with startup.part("reading the configuration"):
            spec = resolve_speculation(config, info)
        ranks = join_ranks(config, device, spec.target_config)
        joined.extend([ranks] if ranks is not None else [])
        return spec

    return start_algorithm(
        config.speculative_algorithm,
        resolve,
        host=EMBEDDED,
        disable_extensions=config.disable_extensions,
        calls=HookCalls,
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
    spec, target, kv = run.spec, run.runner.target, run.kv
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
    config, target, remote = run.config, run.runner.target, run.decode_instance
    of_speculation = attrs.asdict(run.spec, filter=lambda a, _: a.name != "target_config")
    return {
        **config.as_json(),
        "speculative_algorithm": run.spec.algorithm,
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
        "extensions": run.hooks.extensions,
        "device": str(target.device),
        "num_threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
    }
