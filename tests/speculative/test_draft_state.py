"""A draft state is as the worker declares it: of received requests, and of no request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specplug import DraftInput, FutureMap, PluginError, StateTensor, received_state
from specplug.speculative.defaults import CoreDefaults
from specplug.speculative.draft_state import state_spec
from specplug.speculative.hook_results import check_state

SPEC = {
    "hidden": StateTensor((4,), torch.float32),
    "tokens": StateTensor((2,), torch.int64, kept="first"),
    "places": StateTensor((3, 2), torch.float32, kept="last"),
    "length": StateTensor((), torch.int64),
}


def batch(*states: dict[str, Tensor]) -> Any:
    requests = [SimpleNamespace(draft_state=state) for state in states]
    return SimpleNamespace(requests=requests, req_indices=torch.arange(len(states)))


def whole(value: int) -> dict[str, Tensor]:
    return {
        "hidden": torch.full((4,), float(value)),
        "tokens": torch.tensor([value, value + 1]),
        "places": torch.full((3, 2), float(value)),
        "length": torch.tensor(value),
    }


def test_one_that_lacks_a_tensor_keeps_its_others() -> None:
    part = whole(7)
    del part["hidden"]
    for states in ((part, whole(5)), (whole(5), part), ({}, whole(5), part)):
        received = received_state(batch(*states), SPEC)
        for i, state in enumerate(states):
            for name, tensor in received.tensors.items():
                expected = state.get(name, torch.zeros_like(tensor[i]))
                assert torch.equal(tensor[i], expected), (name, i)
        assert received.lacking("hidden") == [i for i, s in enumerate(states) if "hidden" not in s]
        assert received.lacking("length") == [i for i, s in enumerate(states) if not s]


def test_what_another_instance_has_more_of_is_left_out() -> None:
    sent = {"tokens": torch.arange(5), "places": torch.arange(10.0).view(5, 2)}
    received = received_state(batch(sent), SPEC)
    assert received.tensors["tokens"].tolist() == [[0, 1]]
    assert received.tensors["places"].tolist() == [[[4, 5], [6, 7], [8, 9]]]
    assert received.counts["tokens"] == [2]
    assert received.counts["places"] == [3]


def test_what_another_instance_has_fewer_of_leaves_zeros() -> None:
    sent = {"tokens": torch.tensor([9]), "places": torch.tensor([[1.0, 2.0]])}
    received = received_state(batch(sent, {}), SPEC)
    assert received.tensors["tokens"].tolist() == [[9, 0], [0, 0]]
    assert received.tensors["places"][0].tolist() == [[0, 0], [0, 0], [1, 2]]
    assert received.counts["tokens"] == received.counts["places"] == [1, 0]
    assert received.lacking("tokens") == [0, 1]


@pytest.mark.parametrize(
    "sent",
    [
        {"hidden": torch.zeros(5)},
        {"hidden": torch.zeros(4, dtype=torch.float64)},
        {"tokens": torch.zeros(2, 1, dtype=torch.int64)},
        {"places": torch.zeros(3, 3)},
        {"length": torch.zeros(1, dtype=torch.int64)},
    ],
)
def test_what_is_of_another_form_is_zeros(sent: dict[str, Tensor]) -> None:
    received = received_state(batch({n: t + 1 for n, t in sent.items()}), SPEC)
    for name, tensor in received.tensors.items():
        assert tensor.shape == (1, *SPEC[name].shape)
        assert not tensor.any()
        assert received.counts[name] == [0]


def test_the_default_gives_zeros_where_nothing_came() -> None:
    runtime: Any = SimpleNamespace(worker=SimpleNamespace(state_spec=lambda: SPEC))
    for size in (0, 2):
        last_tokens = torch.arange(size)
        made = CoreDefaults().build_disagg_draft_input(runtime, batch(*[{}] * size), last_tokens)
        assert made.bonus_tokens is last_tokens
        for name, declared in SPEC.items():
            assert made[name].shape == (size, *declared.shape)
            assert made[name].dtype == declared.dtype
            assert not made[name].any()


@pytest.mark.parametrize("spec", [None, ["hidden"], {"hidden": 4}, {3: SPEC["hidden"]}])
def test_a_declaration_that_is_none_is_told(spec: Any) -> None:
    with pytest.raises(PluginError, match=r"state_spec\(\) returned .*; expected"):
        state_spec(SimpleNamespace(state_spec=lambda: spec))


def test_a_worker_with_the_former_methods_is_told() -> None:
    with pytest.raises(PluginError, match=r"hidden_size_for\(\).*; expected state_spec\(\)"):
        state_spec(SimpleNamespace(hidden_size_for=lambda: 4))


@pytest.mark.parametrize(
    ("shape", "dtype", "kept"),
    [
        ([4], torch.int64, None),
        ((-1,), torch.int64, None),
        ((2,), "int64", None),
        ((2,), torch.int64, "best"),
        ((), torch.int64, "last"),
    ],
)
def test_a_state_tensor_that_cannot_be_is_told(shape: Any, dtype: Any, kept: Any) -> None:
    with pytest.raises(PluginError, match=r"StateTensor: .*; expected"):
        StateTensor(shape, dtype, kept=kept)


def test_a_draft_input_unlike_its_declaration_is_told() -> None:
    sound = {name: torch.zeros(2, *t.shape, dtype=t.dtype) for name, t in SPEC.items()}
    bonus = torch.arange(2)
    free = {"hidden": None, "own": torch.zeros(2, 9)}
    check_state(SPEC, DraftInput(bonus_tokens=bonus, state={**sound, **free}))
    for wrong in (torch.zeros(2, 5), torch.zeros(1, 4), torch.zeros(2, 4, dtype=torch.float64)):
        with pytest.raises(PluginError, match=r"'hidden' is .*; expected \(2, 4\) torch.float32"):
            check_state(SPEC, DraftInput(bonus_tokens=bonus, state={**sound, "hidden": wrong}))


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


def test_idle_draft_input_is_idempotent() -> None:
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
