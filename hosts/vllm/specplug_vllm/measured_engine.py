"""An engine of vLLM as ``specplug bench --engine vllm`` measures it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import attrs

from specplug import Completion, EngineOptions, SamplingParams, UsageError
from specplug_vllm import vllm_names, worker_extension

_SAME = (
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop",
    "stop_token_ids", "ignore_eos", "skip_special_tokens",
)  # fmt: skip
"""Sampling settings that vLLM has under the same names, with the same meaning."""


class DraftCounts:
    """Counts drafts: a stat logger of vLLM's, which is given each step's statistics.

    vLLM's metrics know no engine but the one that was made last, and a benchmark has several.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._drafts = self._taken = 0
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        step = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
        if step is not None:
            self._drafts += step.num_drafts
            self._taken += step.num_accepted_tokens
            self._drafted = _added(self._drafted, step.num_draft_tokens_per_pos)
            self._accepted = _added(self._accepted, step.num_accepted_tokens_per_pos)

    def log(self) -> None:
        """Write nothing."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Do nothing."""

    def as_stats(self) -> dict[str, Any]:
        """Return what ``MeasuredEngine.stats`` does."""
        return {
            "accepted": self._drafts + self._taken,  # each verification gives a bonus token, too
            "verifications": self._drafts,
            "drafted_by_position": self._drafted,
            "accepted_by_position": self._accepted,
            "seconds": {},
            "prefill_seconds": 0.0,
        }


class VllmEngine:
    """Implements ``MeasuredEngine``: an engine in a process of its own, as vLLM starts it.

    Args:
        options: what is asked of it.
        speculative: vLLM's ``speculative_config``; None: plain decoding.
        additional: vLLM's ``additional_config``.

    Raises:
        UsageError: vLLM does not know an argument, or takes no such value.
    """

    def __init__(
        self,
        options: EngineOptions,
        speculative: Mapping[str, Any] | None,
        additional: Mapping[str, Any],
    ) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm

        given = {
            "model": options.model,
            "dtype": options.dtype,
            "seed": options.seed,
            "max_num_seqs": options.max_running_requests,
            "speculative_config": None if speculative is None else dict(speculative),
            "additional_config": dict(additional),
            "disable_log_stats": False,
            "use_tqdm_on_load": False,
        }
        self._is_ours = speculative is not None
        if self._is_ours:
            given["worker_extension_cls"] = worker_extension.NAME
        self._llm = vllm.LLM(**{**_own_arguments(options.more), **given})
        self._params = vllm.SamplingParams
        self._counts = DraftCounts()
        self._undrafted_before = self._undrafted()
        vllm_names.add_stat_logger(self._llm, self._counts)

    @property
    def effective_config(self) -> dict[str, Any]:
        config = self._llm.llm_engine.vllm_config
        model, speculative = config.model_config, config.speculative_config
        drafted = 0 if speculative is None else speculative.num_speculative_tokens
        return {
            "model": model.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(config.device_config.device),
            "max_running_requests": config.scheduler_config.max_num_seqs,
            "context_len": model.max_model_len,
            "page_size": config.cache_config.block_size,
            "seed": model.seed,
            "num_steps": drafted,
            "topk": 1,
            "num_draft_tokens": drafted + 1,
        }

    @property
    def tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    @property
    def context_len(self) -> int:
        length: int = self._llm.llm_engine.vllm_config.model_config.max_model_len
        return length

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        *,
        on_finished: Callable[[Any], None] | None = None,
    ) -> list[Completion]:
        asked = [p if isinstance(p, str) else {"prompt_token_ids": list(p)} for p in prompts]
        each = [sampling_params] if isinstance(sampling_params, SamplingParams) else sampling_params
        wanted = [self._params(**_as_vllm_has_them(params)) for params in each]
        params = wanted[0] if isinstance(sampling_params, SamplingParams) else wanted
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    def stats(self) -> dict[str, Any]:
        undrafted = self._undrafted() - self._undrafted_before
        return {**self._counts.as_stats(), "undrafted": dict(undrafted)}

    def reset_stats(self) -> None:
        self._counts.reset()
        self._undrafted_before = self._undrafted()

    def _undrafted(self) -> Counter[str]:
        """Return how many requests so far went on without drafts, by reason."""
        if not self._is_ours:
            return Counter()
        of_ranks = self._llm.collective_rpc("specplug_undrafted")
        return Counter(of_ranks[0])  # all ranks of a group have the same requests

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _added(counts: Sequence[int], more: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(counts, more, fillvalue=0)]


def _own_arguments(typed: Sequence[str]) -> dict[str, Any]:
    """Read vLLM's own command line arguments."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    usual = vars(parser.parse_args([]))
    try:
        given, unknown = parser.parse_known_args(list(typed))
    except Exception as error:  # of argparse, or of the type of an argument
        raise UsageError(f"vLLM's arguments {' '.join(typed)}: {error}") from error
    if unknown:
        raise UsageError(f"vLLM's arguments: unknown {' '.join(unknown)}; see vllm serve --help")
    return {name: value for name, value in vars(given).items() if value != usual[name]}


def _as_vllm_has_them(params: SamplingParams) -> dict[str, Any]:
    """Return sampling settings by vLLM's names."""
    fields = attrs.fields_dict(SamplingParams)
    usual = SamplingParams()
    other = [n for n in fields if n not in _SAME and getattr(params, n) != getattr(usual, n)]
    if other:
        raise UsageError(f"{', '.join(other)}: not measured in vLLM; leave it out")
    found = {name: getattr(params, name) for name in _SAME}
    return {**found, "stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}
