"""Drafts of seeded requests foresee the noise by which vLLM's sampler will choose."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import vllm
from hosted_engines import Engines, Hosted

from specplug import HostCapabilities
from specplug_vllm import run_settings


def sampled(hosted: Hosted, prompts: list[str]) -> tuple[list[list[int]], int]:
    """Return 32 sampled tokens of each prompt, and how many decode steps the requests took."""
    before = hosted.drafter.decode_steps
    params = [
        vllm.SamplingParams(max_tokens=32, temperature=1.0, seed=seed) for seed in range(4, 8)
    ]
    outputs = hosted.llm.generate(prompts, params, use_tqdm=False)
    assert hosted.drafter.undrafted == 0
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, hosted.drafter.decode_steps - before


def test_foreseen_noise_saves_steps_and_changes_no_token(
    engines: Engines, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    foreseeing = engines("EAGLE3")
    given = run_settings.host_of

    def host_of(vllm_config: Any) -> HostCapabilities:
        return attrs.evolve(given(vllm_config), foreseeable_noise=False)

    monkeypatch.setattr(run_settings, "host_of", host_of)
    blind = engines.make("EAGLE3")
    with_noise, without = sampled(foreseeing, prompts), sampled(blind, prompts)
    assert with_noise[0] == without[0]
    assert with_noise[1] < 0.9 * without[1], (with_noise[1], without[1])
