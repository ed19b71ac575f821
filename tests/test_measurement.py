"""What all benchmarks share: turns, ratios, tables, and engines in processes of their own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from engine_process import EngineProcess
from measurement import in_turns, quartiles, ratio, table

from specplug.algorithm import ASSETS


def test_in_turns_each_begins_and_warm_ups_are_dropped() -> None:
    order: list[str] = []

    def call(name: str) -> int:
        order.append(name)
        return len(order)

    found = in_turns({name: partial(call, name) for name in "abc"}, 3)
    assert "".join(order) == "cab" + "abc" + "bca" + "cab"
    assert found == {"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]}


def test_ratio_is_the_median_of_the_rounds() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]) == "2.00 (1.50–2.50)"


def test_table_without_rows_is_empty() -> None:
    assert table(["a", "b"], []) == ""
    assert table(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |\n"


def test_engine_processes_agree_and_count(tmp_path: Path) -> None:
    model = str(ASSETS / "tiny_code")
    ours = {"speculative_algorithm": "NGRAM", "device": "cpu", "dtype": "float32"}
    theirs = {"pretrained_model_name_or_path": model, "dtype": "float32"}
    engines = [
        EngineProcess("specplug", ours, tmp_path / "ours.log"),
        EngineProcess("transformers", theirs, tmp_path / "theirs.log"),
    ]
    try:
        assert all(engine.wait()["version"] for engine in engines)
        prompts = [[1, 2, 3, 1, 2, 3, 1], [9, 8, 7]]
        found = [engine.generate(prompts, {"max_tokens": 8}, at_once=1) for engine in engines]
    finally:
        for engine in engines:
            engine.close()
    assert found[0].tokens == found[1].tokens
    assert [len(tokens) for tokens in found[0].tokens] == [8, 8]
    assert found[0].steps
    assert found[0].drafts > 0
    assert found[1].accept_length is None


def test_engine_process_that_fails_says_why(tmp_path: Path) -> None:
    engine = EngineProcess("specplug", {"device": "nowhere"}, tmp_path / "log.txt")
    with pytest.raises(RuntimeError, match=r"ended with 1: .*nowhere.*log\.txt"):
        engine.wait()
    engine.close()
