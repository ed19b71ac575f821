"""What a run counts of its steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specplug import LLM, SamplingParams
from specplug.engine.statistics import Statistics

SECONDS = {"propose": 0.25, "target": 1.0}


def test_nothing_yet():
    counted = Statistics().as_dict()
    assert counted["drafted_by_position"] == counted["accepted_by_position"] == []
    assert (counted["mean_accept_length"], counted["prefill_seconds"]) == (0.0, 0.0)


def test_chains():
    statistics = Statistics()
    statistics.count_decode([4, 1, 3], [3, 1, 1], depth=3, seconds=SECONDS)
    statistics.count_decode([4], [4], depth=3, seconds=SECONDS)
    assert statistics.drafted_by_position == [3, 3, 2]
    assert statistics.accepted_by_position == [2, 2, 1]
    assert statistics.drafted_by_depth == {0: 1, 2: 1, 3: 2}
    assert (statistics.drafted, statistics.verifications, statistics.decode_steps) == (8, 4, 2)
    assert statistics.mean_accept_length == 9 / 4
    assert statistics.seconds == {"propose": 0.5, "target": 2.0}


def test_trees_are_no_deeper_than_they_declare():
    statistics = Statistics()
    statistics.count_decode([12, 2], [2, 1], depth=3, seconds=SECONDS)
    assert statistics.drafted_by_position == [2, 1, 1]
    assert statistics.accepted_by_position == [1, 0, 0]


def test_an_idle_step_and_prefills():
    statistics = Statistics()
    statistics.count_decode([], [], depth=5, seconds=SECONDS)
    statistics.count_prefill({"target": 1.0, "extend": 0.5})
    counted = json.loads(json.dumps(statistics.as_dict()))
    assert (counted["decode_steps"], counted["drafted_by_position"]) == (1, [])
    assert counted["seconds"] == SECONDS
    assert counted["prefill_seconds"] == 1.5


@pytest.mark.parametrize("tree", [False, True])
def test_a_run(tiny_model: Path, reference: Any, scripted: Any, tree: bool) -> None:
    algorithm = scripted(reference.tokens(["greedy"] * 7), tree=tree, right=0.7, ragged=not tree)
    nodes = 9 if tree else 5
    with LLM(
        tiny_model,
        dtype="float64",
        speculative_algorithm=algorithm,
        speculative_num_draft_tokens=nodes,
    ) as llm:
        outputs = llm.generate(reference.prompts, SamplingParams(max_tokens=20))
        first = llm.stats()
        llm.reset_stats()
        assert llm.stats() == Statistics().as_dict()
    drafted, accepted = first["drafted_by_position"], first["accepted_by_position"]
    assert len(drafted) == 4, "a tree of 9 nodes too"
    assert drafted == sorted(drafted, reverse=True)
    assert all(a <= d <= first["verifications"] for a, d in zip(accepted, drafted, strict=True))
    assert sum(accepted) + first["verifications"] == first["accepted"]
    kept = sum(n for output in outputs for n in output.accept_lens)
    assert first["accepted"] >= kept == first["output_tokens"] - len(outputs)
    assert set(first["seconds"]) == {"propose", "target", "verify", "extend"}
    assert first["prefill_seconds"] > 0
