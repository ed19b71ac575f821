"""What the tests compare with: SGLang's own output."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("sglang") is None:
    pytest.exit("SGLang is not installed here: make test-sglang makes an environment with it", 0)

from engines import ASSETS, MODEL, running


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    lines = (ASSETS / "prompts" / "held_out.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines[:12]]


@pytest.fixture(scope="session")
def plain(prompts: list[str]) -> list[list[int]]:
    """SGLang's own output of the prompts, without speculation."""
    with running() as engine:
        return engine.generate(prompts).tokens


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)
