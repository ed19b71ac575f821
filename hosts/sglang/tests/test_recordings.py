"""Recorded passes of draft models: padded to a few batch sizes, and replayed in later steps."""

from __future__ import annotations

import pytest
from engines import TREE, environment, running

TRACED = {"TRACED_DRAFTS": "1", "SPECPLUG_KERNELS": "torch"}
"""A trace has torch's operations alone: what a kernel in C has computed would be a constant of it.
"""


@pytest.fixture
def traced():
    with environment(**TRACED):
        yield


RUNS = {"chain": ({"speculative_num_steps": 5}, 213), "tree": (TREE, 177)}
SEEDED = [
    [{"temperature": 0.8, "max_new_tokens": 32, "sampling_seed": seed} for seed in seeds]
    for seeds in (range(6), range(6, 12))
]


@pytest.mark.parametrize("run", RUNS)
def test_recorded_passes_keep_tokens_and_steps(run, traced, prompts, plain):
    settings, steps = RUNS[run]
    with running("EAGLE3", **settings) as engine:
        made = [engine.generate(prompts) for _ in range(2)]  # then from the prefix cache
    assert [each.tokens for each in made] == [plain, plain]
    assert [each.steps for each in made] == [steps, steps]


def test_recorded_passes_foresee_the_noise_of_later_requests(prompts):
    def generate(**names):
        with environment(**names), running("EAGLE3", enable_deterministic_inference=True) as engine:
            return [engine.generate(prompts[:6], wanted) for wanted in SEEDED]

    made, eager = generate(**TRACED), generate()
    assert [each.tokens for each in made] == [each.tokens for each in eager]
    assert [each.steps for each in made] == [each.steps for each in eager]


def test_row_0_of_the_request_table_is_padding():
    """Recorded passes pad their batches with it."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    pool = ReqToTokenPool(size=3, max_context_len=8, device="cpu", enable_memory_saver=False)
    assert sorted(pool.free_slots) == [1, 2, 3]
