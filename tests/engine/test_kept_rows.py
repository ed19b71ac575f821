"""The rows of decode steps go to the device when they change, and plugins get copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specplug import LLM, FutureMap, SamplingParams, hookimpl
from specplug.engine.step import KeptRows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_rows_of_the_same_requests_are_kept() -> None:
    rows, places, lent = KeptRows(DEVICE), set(), []
    for _ in range(70):
        own, *copies = rows.take([3, 1, 2])
        assert own.tolist() == [3, 1, 2]
        assert [copy.tolist() for copy in copies] == [[3, 1, 2]] * 2
        places.add(own.data_ptr())
        for copy in copies:
            copy.fill_(-1)
        lent += copies
    assert len(places) == 1
    assert len({copy.data_ptr() for copy in lent}) == len(lent)
    assert all(copy.data_ptr() % 16 == 0 for copy in lent)
    own, *copies = rows.take([1, 3])
    assert [each.tolist() for each in (own, *copies)] == [[1, 3]] * 3


def test_plugins_that_write_to_rows_change_no_token(tiny_model: Path, successors: Any) -> None:
    """Into those of a batch, and those that the future map gets."""

    class Writing(FutureMap):
        def stash(self, req_indices: Any, draft_input: Any) -> None:
            super().stash(req_indices, draft_input)
            if len(req_indices):
                req_indices.fill_(0)

    class Hostile(successors):  # type: ignore[misc]
        @hookimpl
        def create_future_map(self, runtime: Any) -> FutureMap:
            return Writing(runtime.req_table_size, runtime.device)

        @hookimpl
        def propose(self, runtime: Any, batch: Any, draft_input: Any) -> Any:
            drafted = super().propose(runtime, batch, draft_input)
            batch.req_indices.fill_(0)
            return drafted

    prompts, params = [[1, 2, 3], [7, 8], [9] * 5], SamplingParams(max_tokens=12, ignore_eos=True)
    found = []
    for algorithm in ("NONE", Hostile()):
        with LLM(tiny_model, dtype="float64", speculative_algorithm=algorithm) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, params)])
    assert found[0] == found[1]
