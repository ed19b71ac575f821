"""Puts the engine of a run together, and says what the run then uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from specplug.algorithm import SpecConfig
from specplug.config import EngineConfig
from specplug.distributed.rank_group import RankGroup
from specplug.engine.cuda_graphs import CudaGraphs
from specplug.engine.engine import Engine, RemotePrefill
from specplug.engine.engine_runtime import EngineRuntime
from specplug.engine.kv_pool import KVPool
from specplug.engine.kv_transfer import KVTransfer
from specplug.engine.scheduler import Scheduler, SchedulerConfig
from specplug.engine.step import StepRunner
from specplug.kernels.compilations import Compilations, cache_folder
from specplug.kernels.kernel_table import compiles_triton, kernels_mode, table_lines
from specplug.model.device_memory import in_mib
from specplug.model.model_runner import ModelRunner
from specplug.model.sampler import Sampler
from specplug.model.target import Target
from specplug.speculative.algorithm_start import StartedAlgorithm
from specplug.speculative.draft_state import state_spec
from specplug.speculative.hook_calls import HookCalls
from specplug.startup import Startup

_REST, _INSTANCE_REST = 0.01, 0.002
"""Seconds that a rank without work waits for another to call; less where an instance may ask."""


def plan_steps(config: EngineConfig, spec: SpecConfig, *, overlap: bool) -> SchedulerConfig:
    """Return the limits of a run's steps.

    Args:
        config: of the run.
        spec: of its speculation.
        overlap: whether a step is launched before the last one's results are processed.
    """
    return SchedulerConfig(
        max_running_requests=config.max_running_requests,
        chunked_prefill_size=config.chunked_prefill_size,
        mixed_chunk=config.enable_mixed_chunk,
        columns=spec.num_steps + 1,
        num_draft_tokens=spec.num_draft_tokens,
        num_lookahead_slots=spec.num_lookahead_slots,
        steps_in_flight=2 if overlap else 1,
    )


def make_engine(
    config: EngineConfig,
    runtime: EngineRuntime,
    runner: ModelRunner,
    kv: KVPool,
    sampler: Sampler,
    algorithm: StartedAlgorithm[HookCalls],
    scheduler: Scheduler,
    *,
    remote: RemotePrefill | None,
    ranks: RankGroup | None,
) -> Engine:
    """Make the engine of a run.

    Args:
        config: of the run.
        runtime: of the run.
        runner: of the target.
        kv: of the run.
        sampler: of the target's tokens.
        algorithm: of the run, with its worker.
        scheduler: over the same pool.
        remote: has requests prefilled by other instances; None: they are prefilled here.
        ranks: that step together with this one; None: it is alone.
    """
    transfer = KVTransfer(kv, state_spec(runtime.worker), scheduler.cache.lookahead)
    return Engine(
        scheduler=scheduler,
        steps=StepRunner(runner, kv, sampler, algorithm.begin(runtime), transfer),
        runtime=runtime,
        hooks=algorithm.hooks,
        overlap=runtime.overlap,
        remote=remote,
        ranks=ranks,
        rest=_REST if config.disaggregation is None else _INSTANCE_REST,
    )


def warm_up_state(config: EngineConfig, graphs: CudaGraphs, device: torch.device) -> str:
    """Return whether a run is warmed up: "on", or "off: " and why."""
    if config.warm_up == "auto":
        return (
            "on"
            if graphs.obstacle is None or compiles_triton(device)
            else "off: no step compiles or records here"
        )
    return "on" if config.warm_up == "on" else "off: warm_up='off'"


def startup_lines(
    config: EngineConfig, runtime: EngineRuntime, target: Target, kv: KVPool, slots: int
) -> Iterator[str]:
    """Yield what a run has loaded, and what memory it takes, in lines for a log.

    Args:
        config: of the run.
        runtime: of the run, with the KV pool.
        target: of the run.
        slots: of the KV pool.
    """
    spec, dtype = runtime.config, str(runtime.dtype).removeprefix("torch.")
    yield (
        f"model {config.model}: {type(target.model).__name__}, {target.num_parameters:,} "
        f"parameters, {in_mib(target.num_bytes)} of weights in {dtype} on {runtime.device}"
    )
    for line in table_lines(runtime.device, runtime.dtype):
        yield f"SPECPLUG_KERNELS={kernels_mode()}: {line}"
    if target.kernels is not None:
        yield (
            f"kernels: {target.num_fused_layers} of {target.num_layers} layers are fused; row "
            f"invariance {target.row_invariance}"
        )
    if runtime.device.type == "cpu":
        yield f"the CPU's kernels: {target.cpu_kernels_state}"
    draft = ""
    if spec.draft_model_path is not None:
        size = sum(file.stat().st_size for file in spec.draft_model_path.glob("*.safetensors"))
        draft = f"; draft weights {spec.draft_model_path}, {in_mib(size)} of files"
    yield (
        f"algorithm {spec.algorithm}: num_steps {spec.num_steps}, topk {spec.topk}, "
        f"num_draft_tokens {spec.num_draft_tokens}{draft}"
    )
    of_target, *drafts = [pool.nbytes for pool in kv.tensors]
    yield (
        f"KV pool: {slots:,} slots in pages of {runtime.page_size}, {in_mib(of_target)} for the "
        f"target" + (f" and {in_mib(sum(drafts))} for the draft" if drafts else "")
    )
    yield (
        f"context {runtime.context_len:,} tokens, at most {runtime.max_running_requests:,} "
        "requests at a time"
    )


def times_of_start(
    startup: Startup, graphs: CudaGraphs, device: torch.device, compiled: Compilations
) -> Iterator[str]:
    """Yield what the start of a run took, in lines for a log."""
    parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in startup.seconds.items())
    yield f"start: {parts}"
    if compiles_triton(device):
        yield (
            f"kernels: {compiled.compiled} compiled in {compiled.seconds:.2f} s, {compiled.cached} "
            f"read from {cache_folder()}"
        )
    if graphs.state == "on":
        recorded, seconds = graphs.recordings
        yield f"CUDA graphs: {recorded} recorded in {seconds:.2f} s"


def effective_config(
    config: EngineConfig,
    runtime: EngineRuntime,
    engine: Engine,
    graphs: CudaGraphs,
    *,
    features: Mapping[str, str],
    extensions: Sequence[Mapping[str, str]],
    disaggregation_address: str | None,
) -> dict[str, Any]:
    """Return what a run really uses: its settings, as adjusted, and what is off and why.

    Args:
        config: of the run.
        runtime: of the run.
        engine: of the run.
        features: by name "on", or "off: " and why.
        extensions: of the run.
        disaggregation_address: where the engine waits for prefill instances, or None.
    """
    of_speculation = attrs.asdict(runtime.config, filter=lambda a, _: a.name != "target_config")
    return {
        **config.as_json(),
        "speculative_algorithm": runtime.config.algorithm,
        **of_speculation,
        **features,
        "cuda_graph": graphs.state,
        "row_invariance": engine.steps.runner.target.row_invariance,
        "warm_up": warm_up_state(config, graphs, runtime.device),
        "cpu_kernels": engine.steps.runner.target.cpu_kernels_state,
        "dp_attention": "on" if config.dp_size > 1 else "off: not enabled",
        "mixed_chunk": "on" if config.enable_mixed_chunk else "off: not enabled",
        "disaggregation": config.disaggregation or "off",
        "disaggregation_address": disaggregation_address,
        "disaggregation_key": None if config.disaggregation_key is None else "set",
        "max_total_tokens": engine.scheduler.cache.pool.num_tokens,
        "context_len": runtime.context_len,
        "extensions": list(extensions),
        "device": str(runtime.device),
        "num_threads": torch.get_num_threads(),
        "dtype": str(runtime.dtype).removeprefix("torch."),
    }
