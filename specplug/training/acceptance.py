"""How long the drafts of a trained network are accepted, counted by the engine itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specplug.config import EngineConfig
from specplug.llm import LLM
from specplug.sampling_params import SamplingParams

TEMPERATURES = (0.0, 1.0)

MEASURED_TOKENS = 128
"""Of each output."""


def accept_lengths(
    algorithm: str,
    draft: Path | None,
    prompts: Sequence[str | list[int]],
    *,
    model: str | None,
    device: str,
    num_steps: int | None = None,
    max_tokens: int = MEASURED_TOKENS,
    temperatures: Sequence[float] = TEMPERATURES,
) -> dict[float, float]:
    """Return the mean tokens a verification, bonus token included, by temperature.

    Args:
        draft: folder of the draft model; None: what the algorithm ships for the target.
        prompts: texts or token ids.
        num_steps: of the drafts, chains; None: the algorithm's default.
        max_tokens: of each output; its end is ignored.
    """
    config = EngineConfig(
        model=model,
        device=device,
        speculative_algorithm=algorithm,
        speculative_draft_model_path=draft,
        speculative_num_steps=num_steps,
        max_running_requests=16,
    )
    found: dict[float, float] = {}
    with LLM(config) as llm:
        for temperature in temperatures:
            params = [
                SamplingParams(
                    temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True
                )
                for seed in range(len(prompts))
            ]
            outputs = llm.generate(list(prompts), params)
            accepted = [length for each in outputs for length in each.accept_lens]
            found[temperature] = sum(accepted) / max(len(accepted), 1)
    return found
