"""Recording of passes, as far as it shows without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from specplug import LLM, SamplingParams
from specplug.speculative import graph_recorder
from specplug.speculative.graph_recorder import record_graph


def test_recordings_run_on_a_stream_of_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each device, whichever recorded first."""
    used: list[Any] = []
    current = [0]

    @contextmanager
    def graph(_: object, *, stream: Any = "of the first device", **__: object) -> Iterator[None]:
        used.append(stream)
        yield

    stand_ins: dict[str, Any] = {
        "current_device": lambda: current[0],
        "current_stream": lambda: "before",
        "set_stream": lambda _: None,
        "get_sync_debug_mode": lambda: 0,
        "Stream": lambda device: (device, object()),
        "CUDAGraph": object,
        "graph": graph,
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    graph_recorder._recording_stream.cache_clear()
    for device in (0, 1, 1, 0):
        current[0] = device
        record_graph(lambda: None, None, warms_up=False)
    graph_recorder._recording_stream.cache_clear()
    assert [device for device, _ in used] == [0, 1, 1, 0]
    assert used[0] is used[3]
    assert used[1] is used[2]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_engines_on_two_gpus_of_one_process_agree(tiny_model: Path) -> None:
    found = []
    for device in ("cuda:0", "cuda:1"):
        with LLM(tiny_model, device=device, dtype="bfloat16") as llm:
            outputs = llm.generate([[5, 6, 7], [8]], SamplingParams(max_tokens=16))
            found.append([output.token_ids for output in outputs])
    assert found[0] == found[1]
