"""Whatever is computed again, in whatever pieces, each token has its value once, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import SamplingParams
from specplug.engine.collected_output import CollectedOutput
from specplug.speculative.output_kind import OutputKind, TensorSpec


class Positions(OutputKind):
    """The position of the row that gave it."""

    def __init__(self, *, every_position: bool, streams: bool) -> None:
        self.name = "positions"
        self.every_position = every_position
        self.streams = streams

    def asked(self, params: SamplingParams) -> bool:
        return True

    def tensor_specs(self, want: Any) -> Mapping[str, TensorSpec]:
        return {self.name: ((), torch.int64)}

    def entries(self, want: Any, tensors: Mapping[str, torch.Tensor]) -> list[Any]:
        found: list[int] = tensors[self.name].tolist()
        return found


@pytest.mark.parametrize("streams", [True, False], ids=["streams", "at the end"])
@pytest.mark.parametrize("every_position", [True, False], ids=["every", "generated"])
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data(), prompt=st.integers(1, 9))
def test_each_token_has_its_value_once(
    data: st.DataObject, prompt: int, every_position: bool, streams: bool
) -> None:
    kind = Positions(every_position=every_position, streams=streams)
    collected = CollectedOutput(output=kind, want=True, points=(), num_prompt_tokens=prompt)
    known, output = prompt, 0
    for _ in range(data.draw(st.integers(1, 3), "prefills")):
        start = data.draw(st.integers(0, min(known - 1, collected.num_reusable)), "cached")
        while start < known:
            end = data.draw(st.integers(start + 1, known), "chunk")
            collected.take(start, {"positions": torch.arange(start, end)})
            start = end
        known, output = known + 1, output + 1
        for accepted in data.draw(st.lists(st.integers(1, 4), max_size=3), "decode steps"):
            root = known - 1
            collected.take(root, {"positions": torch.arange(root, root + accepted)})
            known, output = known + accepted, output + accepted
            if streams:
                collected.hand_out(output, finished=False)
    first = 0 if every_position else prompt - 1
    taken = data.draw(st.integers(1, output), "tokens it took before it ended")
    found = collected.hand_out(taken, finished=True)
    expected = list(range(first, prompt - 1 + taken))
    if streams:
        assert found == tuple(expected[:taken])
    else:
        assert found.tolist() == expected
        assert collected.hand_out(taken, finished=False) is None
    assert collected.tensors()["positions"].tolist() == list(range(first, known - 1))


def test_a_gap_is_never_taken() -> None:
    kind = Positions(every_position=True, streams=False)
    collected = CollectedOutput(output=kind, want=True, points=(), num_prompt_tokens=4)
    with pytest.raises(AssertionError):
        collected.take(1, {"positions": torch.arange(1, 4)})
