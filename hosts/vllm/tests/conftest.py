"""Fixtures: engines of vLLM's, the prompts, what plain decoding gives, and a third party."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.exit("vLLM is not installed here: make test-hosts makes an environment with it", 0)

from hosted_engines import MODEL, Engines, few_engines  # noqa: F401  a fixture
from third_party import third_party  # noqa: F401  a fixture


@pytest.fixture(scope="session")
def engines() -> Engines:
    return Engines()


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Twelve pieces of held-out code."""
    lines = (MODEL.parent / "prompts" / "held_out.jsonl").read_text().splitlines()[:12]
    return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture(scope="session")
def plain(engines: Engines, prompts: list[str]) -> list[list[int]]:
    """What vLLM's own plain decoding gives: 64 tokens of each prompt."""
    return engines().generate(prompts)
