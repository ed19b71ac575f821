"""SGLang's engines on the default model: float32 on the CPU, one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

import specplug

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # read when SGLang is imported

STANDINS = Path(__file__).parents[1] / "standins"
ASSETS = Path(specplug.__file__).parent / "assets"
MODEL = ASSETS / "tiny_code"
GREEDY = {"temperature": 0, "max_new_tokens": 64}

ON_CPU: dict[str, Any] = {
    "model_path": str(MODEL),
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.2,
    "log_level": "error",
}


@attrs.frozen
class Generated:
    """Of a list of prompts: their output, and how many verify steps it took."""

    tokens: list[list[int]]
    steps: int


class Engine:
    """One of SGLang's engines."""

    def __init__(self, sglang_engine: Any) -> None:
        self.sglang = sglang_engine

    def generate(self, prompts: Sequence[str], sampling: Any = GREEDY, **more: Any) -> Generated:
        """Generate for all prompts in one batch."""
        replies = self.sglang.generate(list(prompts), sampling, **more)
        return Generated(
            [list(reply["output_ids"]) for reply in replies],
            sum(reply["meta_info"].get("spec_verify_ct", 0) for reply in replies),
        )


@contextmanager
def running(algorithm: str | None = None, **settings: Any) -> Iterator[Engine]:
    """Run an engine, with an algorithm by its own name, or with none."""
    from sglang import Engine as SglangEngine

    if algorithm is not None:
        settings["speculative_algorithm"] = f"SPECPLUG_{algorithm}"
    engine = SglangEngine(**{**ON_CPU, **settings})
    try:
        yield Engine(engine)
    finally:
        engine.shutdown()
