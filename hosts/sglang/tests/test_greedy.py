"""Tokens are those of SGLang's plain decoding, in as many steps as the embedded engine takes."""

from __future__ import annotations

import pytest
from engines import TREE, running

# Steps of the embedded engine for the same prompts in one batch, float32 on the CPU, and how far
# SGLang's may differ: NGRAM's history of other requests depends on the batches.
RUNS = {
    "EAGLE3 chain": ("EAGLE3", {"speculative_num_steps": 5}, 213, 0),
    "EAGLE3 tree": ("EAGLE3", TREE, 177, 0),
    "EAGLE": ("EAGLE", {}, 213, 0),
    "MULTI_LAYER_EAGLE": ("MULTI_LAYER_EAGLE", {}, 204, 0),
    "MULTI_LAYER_EAGLE tree": ("MULTI_LAYER_EAGLE", TREE, 177, 0),
    "DFLASH": ("DFLASH", {}, 221, 0),
    "DFLASH tree": ("DFLASH", TREE, 190, 0),
    "DSPARK": ("DSPARK", {}, 189, 0),
    "PEAGLE": ("PEAGLE", {}, 225, 0),
    "PEAGLE tree": ("PEAGLE", TREE, 205, 0),
    "STANDALONE": ("STANDALONE", {}, 205, 0),
    "STANDALONE tree": ("STANDALONE", TREE, 154, 0),
    "NGRAM": ("NGRAM", {}, 309, 0.03),
}


@pytest.mark.parametrize("run", RUNS)
def test_algorithm_keeps_tokens_and_steps(run, prompts, plain):
    algorithm, settings, steps, differ = RUNS[run]
    with running(algorithm, **settings) as engine:
        made = engine.generate(prompts)
        again = engine.generate(prompts)  # their prompts are in the prefix cache
        started = {(start > 0, first) for _, start, _, first, _ in engine.chunks}
    assert made.tokens == plain
    assert again.tokens == plain
    assert made.steps == pytest.approx(steps, rel=differ, abs=0)
    assert started == {(False, True), (True, True)}


def test_third_party_algorithm_keeps_tokens(prompts, plain):
    with running("ECHO") as engine:
        made = engine.generate(prompts)
        ended = engine.seen("finished")
    assert made.tokens == plain
    assert 0 < made.steps < 12 * 63
    assert sorted(ended) == sorted(about["id"] for about in made.about)
