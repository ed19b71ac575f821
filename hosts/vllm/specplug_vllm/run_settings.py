"""What a run of vLLM asks of an algorithm, and whether this host can give it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from specplug import AlgorithmInfo, HostCapabilities, Registry, SpecConfig, UsageError
from specplug_vllm.host import capabilities
from specplug_vllm.settings import ALWAYS, FASTER, KEY, Settings
from specplug_vllm.versions import WITH_RUNNER_V2, installed_version

if TYPE_CHECKING:
    from specplug.speculative.algorithm_start import StartedAlgorithm
    from specplug.speculative.hook_calls import HookCalls

MODULE = "specplug_vllm"


def start_in_vllm(
    vllm_config: Any, name: str
) -> tuple[HostCapabilities, StartedAlgorithm[HookCalls]]:
    """Start the algorithm of a run. Returns what vLLM gives it, too.

    Raises:
        SpecplugError: the version of vLLM, the algorithm or a setting does not fit.
    """
    from specplug.speculative.algorithm_start import start_algorithm
    from specplug.speculative.hook_calls import HookCalls

    host, settings = _checked(vllm_config, name)
    return host, start_algorithm(
        name,
        partial(_resolve, vllm_config, settings),
        host=host,
        disable_extensions=settings.disable_extensions,
        calls=HookCalls,
    )


def _checked(vllm_config: Any, name: str) -> tuple[HostCapabilities, Settings]:
    """Return what vLLM gives a run, and the settings as they were typed.

    Raises:
        UsageError: a setting does not fit.
    """
    host = host_of(vllm_config)
    _refuse_what_is_missing(vllm_config, name, host)
    settings = Settings.of(vllm_config.additional_config)
    if settings.draft_when == FASTER and (reason := _always_drafts(vllm_config)):
        raise UsageError(
            f"{KEY}.draft_when={FASTER!r}: {reason} drafts in every step; leave the setting out"
        )
    return host, settings


def _resolve(vllm_config: Any, settings: Settings, info: AlgorithmInfo) -> SpecConfig:
    """Return what was typed over the algorithm's defaults."""
    return settings.resolve(
        info,
        num_speculative_tokens=vllm_config.speculative_config.num_speculative_tokens,
        target=vllm_config.model_config.model,
        target_config=vllm_config.model_config.hf_text_config.to_dict(),
    )


def algorithm_of(vllm_config: Any) -> str | None:
    """Return the algorithm that vLLM's configuration names; None if it is none of ours."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "custom_class":
        return None
    module, _, name = str(speculative.model).rpartition(".")
    return name if module == MODULE else None


def lookahead_of(vllm_config: Any) -> int | None:
    """Return the slots that drafts may write after a step's tokens; None if the run is none of
    ours."""
    name = algorithm_of(vllm_config)
    if name is None:
        return None
    info = Registry().select(name).info
    typed = _resolve(vllm_config, _checked(vllm_config, name)[1], info)
    return typed.num_lookahead_slots if info.capabilities.draft_model else 0


def host_of(vllm_config: Any) -> HostCapabilities:
    """Return what the model runner that vLLM chooses for a configuration gives.

    Raises:
        UsageError: this vLLM was not tested.
    """
    if not runs_on_v2(vllm_config):
        return capabilities()
    found = capabilities(runner=2, overlap=bool(vllm_config.scheduler_config.async_scheduling))
    # In double precision vLLM draws its noise by another function, which is not computed here.
    foreseeable = not vllm_config.model_config.use_fp64_gumbel
    return attrs.evolve(found, foreseeable_noise=foreseeable)


def runs_on_v2(vllm_config: Any) -> bool:
    """Return whether vLLM chooses its model runner of version 2, and that was tested."""
    return installed_version() in WITH_RUNNER_V2 and bool(vllm_config.use_v2_model_runner)


def verifies_adaptively(vllm_config: Any) -> bool:
    """Return whether vLLM verifies as much of what is drafted as pays. Version 0.25.0 has no such
    setting."""
    return bool(getattr(vllm_config.speculative_config, "enable_adaptive_verification", False))


def pauses(vllm_config: Any) -> bool:
    """Return whether a run of ours stops drafting while that is slower: what each step drafts is
    then vLLM's scheduler's to say."""
    if algorithm_of(vllm_config) is None:
        return False
    wanted = Settings.of(vllm_config.additional_config).draft_when
    return wanted != ALWAYS and not _always_drafts(vllm_config)


def _always_drafts(vllm_config: Any) -> str:
    """Return why a run cannot stop drafting; nothing if it can."""
    if not runs_on_v2(vllm_config):
        return "model runner V1"
    if not vllm_config.scheduler_config.async_scheduling:
        # vLLM's scheduler then takes as many tokens as the runner can draft, whatever was wanted.
        return "vLLM without async_scheduling"
    if verifies_adaptively(vllm_config):
        # vLLM verifies none of what was drafted where that pays, and measures it.
        return "vLLM with enable_adaptive_verification"
    # Ranks that wait for one another all draft, or none.
    size = vllm_config.parallel_config.data_parallel_size
    return f"data_parallel_size={size}" if size > 1 else ""


def _refuse_what_is_missing(vllm_config: Any, name: str, host: HostCapabilities) -> None:
    """Refuse what this host cannot run yet, with the setting's name."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    device = vllm_config.device_config.device_type
    ranks = parallel.pipeline_parallel_size if runs_on_v2(vllm_config) else parallel.world_size
    masks = getattr(model, "return_sampling_mask", False)
    for found, expected in (
        (device not in ("cpu", "cuda"), f"device {device!r}: expected 'cuda' or 'cpu'"),
        (
            getattr(vllm_config, "watermark_config", None) is not None,
            "watermark_config: expected tokens that a seed and a position decide",
        ),
        (masks, "return_sampling_mask: expected a run that returns tokens and log-probabilities"),
        (
            ranks > 1,
            f"tensor_parallel_size={parallel.tensor_parallel_size}, pipeline_parallel_size="
            f"{parallel.pipeline_parallel_size}: expected pipeline_parallel_size 1, and on model "
            "runner V1 1 of each",
        ),
        (model.enable_prompt_embeds, "enable_prompt_embeds: expected prompts of tokens"),
    ):
        if found:
            raise UsageError(f"{expected}; {name} in {host.name} runs without")
