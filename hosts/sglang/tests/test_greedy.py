"""Tokens are those of SGLang's plain decoding, in as many steps as the embedded engine takes."""

from __future__ import annotations

import pytest
from engines import running

# Steps of the embedded engine on the same prompts, float32 on the CPU, all in one batch.
RUNS = {
    "EAGLE3 chain": ("EAGLE3", {"speculative_num_steps": 5}, 213),
    "DFLASH": ("DFLASH", {}, 221),
}


@pytest.mark.parametrize("run", RUNS)
def test_sglang_algorithm_keeps_tokens_and_steps(run, prompts, plain):
    algorithm, settings, steps = RUNS[run]
    with running(algorithm, **settings) as engine:
        made = engine.generate(prompts)
        again = engine.generate(prompts)  # from the prefix cache
    assert made.tokens == plain
    assert again.tokens == plain
    assert made.steps == pytest.approx(steps, rel=0.01)
