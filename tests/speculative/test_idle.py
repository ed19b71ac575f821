"""An idle draft input is as the worker says, however often it is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specplug import DraftInput, FutureMap, StateTensor
from specplug.speculative.defaults import CoreDefaults

MODEL_WIDTH, WORKER_WIDTH = 8, 24


class _Worker:
    def state_spec(self) -> dict[str, StateTensor]:
        return {"hidden_states": StateTensor((WORKER_WIDTH,), torch.bfloat16)}


def _runtime(worker: object) -> Any:
    return SimpleNamespace(worker=worker, device=torch.device("cpu"), hidden_size=MODEL_WIDTH)


def _fix(worker: object, draft_input: DraftInput) -> DraftInput:
    return CoreDefaults().fixup_idle(_runtime(worker), draft_input)


STATES = {
    "none at all": {},
    "absent": {"hidden_states": None},
    "of the model's width": {"hidden_states": torch.ones(3, MODEL_WIDTH)},
    "of the worker's width": {"hidden_states": torch.ones(3, WORKER_WIDTH)},
    "with others": {"hidden_states": None, "scores": torch.ones(3, 2), "tokens": None},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.parametrize("size", [0, 3])
def test_hidden_states_are_as_wide_as_the_worker_says(size: int, state: dict[str, Any]) -> None:
    cut = {name: None if t is None else t[:size] for name, t in state.items()}
    before = DraftInput(bonus_tokens=torch.arange(size), state=cut)
    idle = _fix(_Worker(), before)
    assert idle.bonus_tokens.shape == (0,)
    assert idle["hidden_states"].shape == (0, WORKER_WIDTH)
    assert idle["hidden_states"].dtype == torch.bfloat16
    assert set(idle.state) == {*state, "hidden_states"}
    if "scores" in state:
        assert idle["scores"].shape == (0, 2)
        assert idle.state["tokens"] is None


def test_it_is_idempotent() -> None:
    before = DraftInput(bonus_tokens=torch.arange(3), state={"scores": torch.ones(3, 2)})
    once = _fix(_Worker(), before)
    twice = _fix(_Worker(), once)
    assert once.state.keys() == twice.state.keys()
    for name in once.state:
        assert once[name].shape == twice[name].shape
        assert once[name].dtype == twice[name].dtype
    assert twice.bonus_tokens.shape == (0,)


def test_a_worker_that_declares_nothing_gets_no_more() -> None:
    before = DraftInput(bonus_tokens=torch.arange(3), state={"scores": torch.ones(3, 2)})
    assert _fix(object(), before).state.keys() == {"scores"}


@pytest.mark.parametrize("idle_first", [True, False])
def test_an_idle_input_is_stashed_beside_an_active_one(idle_first: bool) -> None:
    idle = _fix(_Worker(), DraftInput(bonus_tokens=torch.arange(0)))
    hidden = torch.ones(1, WORKER_WIDTH, dtype=torch.bfloat16)
    active = DraftInput(bonus_tokens=torch.tensor([5]), state={"hidden_states": hidden})
    future_map, row = FutureMap(3, torch.device("cpu")), torch.tensor([2])
    for made in (idle, active) if idle_first else (active, idle):
        future_map.stash(row[: len(made.bonus_tokens)], made)
    assert torch.equal(future_map.resolve(row)[1]["hidden_states"], hidden)
