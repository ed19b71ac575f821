"""What one step leaves by request row is what the next one finds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from specplug import CommittedOutput, DraftInput, FutureMap
from specplug.kernels.kernel_table import kernels_used

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["torch", "triton"])
def future_map(request: pytest.FixtureRequest) -> Iterator[FutureMap]:
    """Of rows 0 (padding) to 5; its rows are copied by torch, or by the kernels."""
    with kernels_used(request.param):
        yield FutureMap(6, DEVICE)


def _rows(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=DEVICE)


def _publish(
    future_map: FutureMap, rows: Tensor, lens: Sequence[int], bonus: Sequence[int]
) -> None:
    tokens = _rows(*bonus)
    output = CommittedOutput(
        next_tokens=tokens,
        own_tokens=tokens - 1,
        last_rows=torch.arange(len(bonus), device=DEVICE),
        accept_lens=torch.ones_like(tokens),
        bonus_tokens=tokens,
    )
    future_map.publish(rows, _rows(*lens), output)


def _stash(future_map: FutureMap, rows: Tensor, **state: Tensor | None) -> None:
    there = {name: None if part is None else part.to(DEVICE) for name, part in state.items()}
    future_map.stash(rows, DraftInput(bonus_tokens=torch.zeros_like(rows), state=there))


def test_rows_are_found_in_whatever_order_they_are_asked_for(future_map: FutureMap) -> None:
    _publish(future_map, _rows(2, 5), [10, 20], [7, 8])
    _stash(future_map, _rows(2, 5), hidden=torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    _publish(future_map, _rows(1), [30], [9])
    _stash(future_map, _rows(1), hidden=torch.tensor([[5.0, 6.0]]))
    lens, draft_input = future_map.resolve(_rows(5, 1, 2))
    assert lens.tolist() == [20, 30, 10]
    assert draft_input.bonus_tokens.tolist() == [8, 9, 7]
    assert draft_input["hidden"].tolist() == [[3, 4], [5, 6], [1, 2]]


def test_a_later_step_overwrites_an_earlier_one(future_map: FutureMap) -> None:
    for length, value in ((10, 1.0), (13, 2.0)):
        _publish(future_map, _rows(3), [length], [length + 1])
        _stash(future_map, _rows(3), hidden=torch.tensor([[value]]))
    lens, draft_input = future_map.resolve(_rows(3))
    assert (lens.tolist(), draft_input.bonus_tokens.tolist()) == ([13], [14])
    assert draft_input["hidden"].tolist() == [[2.0]]


def test_nothing_stashed_is_no_state(future_map: FutureMap) -> None:
    _publish(future_map, _rows(3), [1], [2])
    _stash(future_map, _rows(3))
    assert future_map.resolve(_rows(3))[1].state == {}


@pytest.mark.parametrize("absent", [{}, {"hidden": None}], ids=["unnamed", "none"])
def test_an_absent_state_is_not_that_of_the_request_before(
    absent: dict[str, None], future_map: FutureMap
) -> None:
    _stash(future_map, _rows(3, 4), hidden=torch.tensor([[1.0], [2.0]]))
    _stash(future_map, _rows(3), **absent)
    assert future_map.resolve(_rows(3, 4))[1]["hidden"].tolist() == [[0.0], [2.0]]


def test_a_state_of_another_width_leaves_the_other_rows_theirs(future_map: FutureMap) -> None:
    _stash(future_map, _rows(3, 4), hidden=torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    _stash(future_map, _rows(5), hidden=torch.tensor([[3.0, 3.0, 3.0]]))
    _stash(future_map, _rows(4), hidden=torch.tensor([[4.0]], dtype=torch.float64))
    hidden = future_map.resolve(_rows(3, 4, 5))[1]["hidden"]
    assert hidden.tolist() == [[1, 1, 0], [4, 0, 0], [3, 3, 3]]


def test_an_empty_batch_leaves_everything_as_it_is(future_map: FutureMap) -> None:
    _publish(future_map, _rows(3), [4], [5])
    _stash(future_map, _rows(3), hidden=torch.tensor([[1.0]]))
    _publish(future_map, _rows(), [], [])
    _stash(future_map, _rows(), hidden=torch.zeros(0, 1))
    lens, draft_input = future_map.resolve(_rows(3))
    assert (lens.tolist(), draft_input.bonus_tokens.tolist()) == ([4], [5])
    assert draft_input["hidden"].tolist() == [[1.0]]
    empty_lens, empty = future_map.resolve(_rows())
    assert empty_lens.shape == (0,)
    assert empty["hidden"].shape == (0, 1)


def test_what_was_resolved_does_not_change_afterwards(future_map: FutureMap) -> None:
    _publish(future_map, _rows(3), [4], [5])
    _stash(future_map, _rows(3), hidden=torch.tensor([[1.0]]))
    lens, draft_input = future_map.resolve(_rows(3))
    _publish(future_map, _rows(3), [6], [7])
    _stash(future_map, _rows(3), hidden=torch.tensor([[2.0]]))
    assert (lens.tolist(), draft_input.bonus_tokens.tolist()) == ([4], [5])
    assert draft_input["hidden"].tolist() == [[1.0]]


STATES: dict[str, Callable[[int], Tensor | None]] = {
    "absent": lambda n: None,
    "narrow": lambda n: torch.full((n, 2), 3.0),
    "wide": lambda n: torch.full((n, 5), 4.0, dtype=torch.float64),
    "flat": lambda n: torch.full((n,), 7),
    "deep": lambda n: torch.full((n, 3, 2), 5.0),
}


def _check_part(merged: Tensor, part: Tensor | None, size: int) -> None:
    """``merged`` is ``part`` in its upper left corner, and zero elsewhere."""
    assert merged.shape[0] == size
    if part is None:
        assert not merged.any()
        return
    part = part.reshape(part.shape + (1,) * (merged.dim() - part.dim()))
    corner = tuple(slice(n) for n in part.shape)
    assert torch.equal(merged[corner], part.to(merged))
    rest = merged.clone()
    rest[corner] = 0
    assert not rest.any()


@pytest.mark.parametrize(
    ("first", "second"), itertools.product([*STATES, "unnamed"], repeat=2), ids=str
)
@pytest.mark.parametrize("sizes", [(2, 3), (0, 2), (2, 0), (0, 0)], ids=str)
def test_any_state_may_follow_any_other(
    first: str, second: str, sizes: tuple[int, int], future_map: FutureMap
) -> None:
    rows = _rows(3, 1)[: sizes[0]], _rows(5, 2, 4)[: sizes[1]]
    parts = [
        STATES.get(kind, STATES["absent"])(n)
        for kind, n in zip((first, second), sizes, strict=True)
    ]
    for kind, part, its_rows in zip((first, second), parts, rows, strict=True):
        _stash(future_map, its_rows, **({} if kind == "unnamed" else {"state": part}))
    for part, its_rows in zip(parts, rows, strict=True):
        resolved = future_map.resolve(its_rows)[1].state.get("state")
        if parts == [None, None]:
            assert resolved is None
        else:
            assert resolved is not None
            _check_part(resolved, part, len(its_rows))


def test_states_of_other_names_are_kept(future_map: FutureMap) -> None:
    _stash(future_map, _rows(3), a=torch.ones(1, 2))
    _stash(future_map, _rows(4), b=torch.ones(1, 3))
    _, both = future_map.resolve(_rows(3, 4))
    assert both["a"].tolist() == [[1, 1], [0, 0]]
    assert both["b"].tolist() == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("kind", [*STATES, "unnamed"])
def test_publish_and_stash_is_one_after_the_other(kind: str, future_map: FutureMap) -> None:
    """In one launch where kernels copy rows, of a length and a token each."""
    apart = FutureMap(6, DEVICE)
    for rows, lens in ((_rows(2, 5), _rows(9, 8)), (_rows(5, 1, 3), _rows(7, 6, 5))):
        output = CommittedOutput(
            next_tokens=lens,
            own_tokens=lens,
            last_rows=torch.arange(len(rows), device=DEVICE),
            accept_lens=torch.ones_like(rows),
            bonus_tokens=lens * 3,
        )
        part = STATES.get(kind, STATES["absent"])(len(rows))
        state = {} if kind == "unnamed" else {"state": None if part is None else part.to(DEVICE)}
        made = DraftInput(bonus_tokens=output.bonus_tokens, state=state)
        future_map.publish_and_stash(rows, lens, output, made)
        apart.publish(rows, lens, output)
        apart.stash(rows, made)
    found, expected = (each.resolve(_rows(1, 2, 3, 4, 5)) for each in (future_map, apart))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1].bonus_tokens, expected[1].bonus_tokens)
    assert found[1].state.keys() == expected[1].state.keys()
    for name in found[1].state:
        assert torch.equal(found[1][name], expected[1][name])


@kernels_used("triton")
def test_two_maps_are_resolved_in_one_launch() -> None:
    """As each by itself, in tensors of their own; torch, subclasses and odd buffers do not."""
    core, own = FutureMap(6, DEVICE), FutureMap(6, DEVICE)
    for number, each in enumerate((core, own)):
        _publish(each, _rows(2, 5, 1), [10 + number, 20, 30], [7, 8 + number, 9])
    rows = _rows(5, 2)
    assert core.resolve_with(own, rows) is None, "torch reads lengths alone as soon"
    _stash(own, _rows(2, 5), hidden=torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    both = core.resolve_with(own, rows)
    assert both is not None
    for (lens, found), each in zip(both, (core, own), strict=True):
        expected_lens, expected = each.resolve(rows)
        assert torch.equal(lens, expected_lens)
        assert torch.equal(found.bonus_tokens, expected.bonus_tokens)
        assert found.state.keys() == expected.state.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found.state)
    (first, _), (second, _) = both
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()

    class Subclass(FutureMap):
        pass

    derived = Subclass(6, DEVICE)
    derived.state = own.state
    assert core.resolve_with(derived, rows) is None
    with kernels_used("torch"):
        assert core.resolve_with(own, rows) is None
    own.state["hidden"] = own.state["hidden"][:4]
    assert core.resolve_with(own, rows) is None
