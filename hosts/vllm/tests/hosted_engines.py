"""Real vLLM engines of the default model, in float32 on the CPU, and what plain decoding gives."""

from __future__ import annotations

import os

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine runs in this process, where tests look inside
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="WARNING",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    SPECPLUG_DEBUG="1",  # results of hooks are checked by value
)

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import vllm
from vllm.distributed import cleanup_dist_env_and_memory

import specplug
from specplug_vllm import vllm_names

MODEL = Path(specplug.__file__).parent / "assets" / "tiny_code"
FORMS = {
    "EAGLE3": 5,
    "EAGLE": 5,
    "MULTI_LAYER_EAGLE": 7,
    "DFLASH": 7,
    "DSPARK": 7,
    "PEAGLE": 7,
    "STANDALONE": 5,
    "NGRAM": 7,
}
"""The built-in algorithms, with the tokens that each drafts in a step."""


@attrs.define
class Counts:
    """What an engine has counted so far: a stat logger of its own, as vLLM's metrics know only the
    engine that was made last in a process.

    Attributes:
        prefix_hits: tokens that were found in the prefix cache.
        preemptions: of requests.
    """

    prefix_hits: int = 0
    preemptions: int = 0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.prefix_hits += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log(self) -> None:
        """Write nothing."""


@attrs.frozen
class Hosted:
    """An engine of vLLM's, with ways to look inside."""

    llm: vllm.LLM
    counts: Counts = attrs.field(factory=Counts)

    def __attrs_post_init__(self) -> None:
        vllm_names.add_stat_logger(self.llm, self.counts)

    def generate(
        self, prompts: Sequence[Any], max_tokens: int = 64, **sampling: Any
    ) -> list[list[int]]:
        """Return the tokens of each prompt, greedy unless said otherwise."""
        params = vllm.SamplingParams(max_tokens=max_tokens, **{"temperature": 0, **sampling})
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def drafter(self) -> Any:
        """What makes the drafts in the runner, of either version."""
        return getattr(self.runner, "speculator", None) or self.runner.drafter


class Engines:
    """Makes engines, each once. They are freed together: vLLM takes the process groups, which its
    engines in one process share, down with the first that is freed."""

    defaults: ClassVar[dict[str, Any]] = {
        "model": str(MODEL),
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "num_gpu_blocks_override": 48,  # of 128 tokens
    }

    def __init__(self) -> None:
        self._shared: dict[str, Hosted] = {}
        self._all: list[Hosted] = []

    def __len__(self) -> int:
        return len(self._all)

    def close(self) -> None:
        """Free all of them."""
        for hosted in self._all:
            hosted.llm.llm_engine.engine_core.shutdown()
        self._all.clear()
        self._shared.clear()
        gc.collect()
        cleanup_dist_env_and_memory()

    def __call__(
        self,
        algorithm: str | None = None,
        tokens: int = 5,
        settings: dict[str, Any] | None = None,
        **more: Any,
    ) -> Hosted:
        """Return an engine.

        Args:
            algorithm: of specplug; None: vLLM's plain decoding.
            tokens: ``num_speculative_tokens``.
            settings: of specplug.
            more: arguments of ``vllm.LLM``.
        """
        key = json.dumps([algorithm, tokens, settings, more], sort_keys=True)
        if key not in self._shared:
            self._shared[key] = self.make(algorithm, tokens, settings, **more)
        return self._shared[key]

    def make(
        self,
        algorithm: str | None = None,
        tokens: int = 5,
        settings: dict[str, Any] | None = None,
        *,
        schedule: list[list[int]] | None = None,
        adaptive: bool = False,
        **more: Any,
    ) -> Hosted:
        """Make an engine that nobody shares.

        Args:
            schedule: vLLM's own, of how much to draft by the number of requests.
            adaptive: whether vLLM verifies only as much of what is drafted as pays.
        """
        speculative = None
        if algorithm is not None:
            speculative = {
                "model": f"specplug_vllm.{algorithm}",
                "num_speculative_tokens": tokens,
                **({} if schedule is None else {"num_speculative_tokens_per_batch_size": schedule}),
                **({"enable_adaptive_verification": True} if adaptive else {}),
            }
        made = Hosted(
            vllm.LLM(
                dtype="float32",
                speculative_config=speculative,
                additional_config={} if settings is None else {"specplug": settings},
                disable_log_stats=False,
                **{**self.defaults, **more},
            )
        )
        self._all.append(made)
        return made


@pytest.fixture(autouse=True)
def few_engines(engines: Engines) -> None:
    """Frees the engines of earlier tests before a test, if there are many: each has 0.3 GB."""
    if len(engines) >= 8:
        engines.close()
