"""Recorded passes of draft models: padded to a few batch sizes, and replayed in later steps."""

from __future__ import annotations

import pytest
from engines import TREE, environment, running


@pytest.fixture
def traced():
    with environment(TRACED_DRAFTS="1"):
        yield


RUNS = {"chain": ({"speculative_num_steps": 5}, 213), "tree": (TREE, 177)}


@pytest.mark.parametrize("run", RUNS)
def test_recorded_passes_keep_tokens_and_steps(run, traced, prompts, plain):
    settings, steps = RUNS[run]
    with running("EAGLE3", **settings) as engine:
        made = [engine.generate(prompts) for _ in range(2)]  # then from the prefix cache
    assert [each.tokens for each in made] == [plain, plain]
    assert [each.steps for each in made] == [steps, steps]


def test_row_0_of_the_request_table_is_nobodys():
    """Recorded passes pad their batches with it."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    pool = ReqToTokenPool(size=3, max_context_len=8, device="cpu", enable_memory_saver=False)
    assert sorted(pool.free_slots) == [1, 2, 3]
