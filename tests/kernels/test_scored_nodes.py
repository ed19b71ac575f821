"""The kernels of calibration count and sum what torch does, for drafts of any kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specplug import Draft, VerifyOutput, verify_tree
from specplug.kernels.cpu_kernels import load_cpu_kernels
from specplug.kernels.kernel_table import MOST_NODES, kernels_used
from specplug.speculative.calibration import BINS, Calibration, RequestKind
from specplug.speculative.draft_cuts import cut_to_budget

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 6
MODES = ("triton", "auto") if DEVICE.type == "cpu" else ("triton",)
some = settings(max_examples=60, deadline=None, derandomize=True, database=None)
SCORES = st.sampled_from(
    (0.0, -(2**-13), -0.03125, -0.25, -0.75, -1.5, -4.0, -9.0, float("-inf"), float("nan"), 2.0)
)
"""Their sums are exact, in any order."""


@attrs.frozen
class Case:
    """A scored draft as the engine verifies it, its requests' rows, and the target's tokens."""

    draft: Draft
    rows: Tensor
    predict: Tensor


def _tensor(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    """Chains and trees, of parents that may be wrong; dense, ragged, or cut over the batch."""
    bs, width = draw(st.integers(1, 4)), draw(st.sampled_from((1, 2, 5, 16, 19, 40)))
    random = draw(st.randoms(use_true_random=False))
    is_chain = draw(st.booleans())
    tokens = [[random.randrange(2) for _ in range(width)] for _ in range(bs)]
    parents, depth = None, width - 1
    if not is_chain:
        near = draw(st.sampled_from((1, 4, width)))
        parents = [
            [-1, *(random.randrange(max(0, i - near), i) for i in range(1, width))]
            for _ in range(bs)
        ]
        for _ in range(draw(st.integers(0, 2))):
            random.choice(parents)[random.randrange(width)] = random.randrange(-2, width)
        depth = draw(st.integers(0, width + 1))
    values = [draw(SCORES) for _ in range(7)]
    scores = torch.tensor([[random.choice(values) for _ in range(width + 1)] for _ in range(bs)])
    widths = draw(st.none() | st.lists(st.integers(1, width), min_size=bs, max_size=bs))
    draft = Draft(
        tokens=_tensor(tokens),
        parents=None if parents is None else _tensor(parents),
        widths=None if widths is None or set(widths) == {width} else tuple(widths),
        depth=depth,
        scores=scores.to(DEVICE)[:, :width],  # rows with gaps
    )
    with kernels_used("torch"):
        draft = draft.rooted(_tensor([0] * bs), 5)
        if draw(st.booleans()):
            draft = cut_to_budget(draft, draw(st.integers(bs, draft.total)))
    rows = draw(st.lists(st.integers(0, ROWS - 1), min_size=bs, max_size=bs))
    predict = [random.randrange(2) for _ in range(draft.total)]
    return Case(draft, _tensor(rows), _tensor(predict))


def _calibration() -> Calibration:
    """One that has seen something, of requests of every kind."""
    calibration = Calibration(ROWS, DEVICE)
    generator = torch.Generator().manual_seed(0)
    for row, kind in ((2, RequestKind.SAMPLED), (3, RequestKind.CONSTRAINED)):
        calibration.admit(row, kind)
    tables = calibration._tables
    for counts, least in ((tables.seen, 50), (tables.taken, 0)):
        more = torch.randint(least, least + 50, counts.shape, generator=generator)
        counts.add_(more.to(DEVICE))
    calibration._refresh()
    return calibration


def _observed(case: Case, accepted: VerifyOutput) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The survival of a draft's nodes, what is observed of them, and the counts after it."""
    calibration = _calibration()
    survival = calibration.survival(case.draft, case.rows)
    chances = calibration.observe(case.draft, case.rows, accepted)
    tables = calibration._tables
    return survival, chances, torch.stack((tables.seen, tables.taken))[:, :-BINS]


@pytest.mark.parametrize("mode", MODES)
@some
@given(case=cases())
def test_scores_by_the_kernels_are_those_of_torch(mode: str, case: Case) -> None:
    with kernels_used("torch"):
        accepted = verify_tree(case.draft, case.predict)
        survival, chances, counts = _observed(case, accepted)
        assert case.draft.mask.numel()  # of torch, and kept
        assert case.draft.depths.numel()
    with kernels_used(mode):
        found, signed, counted = _observed(case, accepted)
    assert torch.equal(counted, counts)
    assert survival is not None
    assert chances is not None
    assert torch.equal(found, survival)
    assert torch.equal(signed, chances)


@pytest.mark.parametrize("mode", MODES)
def test_child_survives_at_most_as_its_parent(mode: str) -> None:
    """Whatever was learnt: cuts keep a node's ancestors by it."""
    generator = torch.Generator().manual_seed(0)
    width = 40
    parents = [-1, *(int(torch.randint(i, (1,), generator=generator)) for i in range(1, width))]
    scores = -torch.rand(1, width, generator=generator)
    scores[:, 0] = 0.0
    for above in (None, _tensor([parents])):
        draft = Draft(
            tokens=_tensor([list(range(width))]),
            parents=above,
            widths=None,
            depth=width - 1,
            scores=scores.to(DEVICE),
        )
        with kernels_used(mode):
            survival = _calibration().survival(draft, _tensor([1]))
        assert survival is not None
        before = _tensor([[0, *range(width - 1)]]) if above is None else above.clamp(min=0)
        assert (survival <= survival.gather(1, before)).all()


def test_wide_drafts_are_left_to_torch() -> None:
    width = MOST_NODES + 1
    scores = torch.full((1, width), -0.5, device=DEVICE)
    scores[:, 0] = 0.0
    draft = Draft.chain(_tensor([[0] * width]), scores=scores)
    with kernels_used("torch"):
        expected = _calibration().survival(draft, _tensor([1]))
    with kernels_used("auto"):
        found = _calibration().survival(draft, _tensor([1]))
    assert torch.equal(found, expected)  # type: ignore[arg-type]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="C is for the CPU")
def test_row_outside_of_the_table_is_refused_in_c() -> None:
    assert not isinstance(load_cpu_kernels(), str)
    draft = Draft.chain(_tensor([[0, 1]]), scores=torch.tensor([[0.0, -0.5]]))
    with kernels_used("auto"):
        calibration = _calibration()
        before = calibration._tables.seen.clone()
        for row in (-1, ROWS):
            with pytest.raises(IndexError, match=f"outside of {ROWS} rows"):
                calibration.observe(draft, _tensor([row]), verify_tree(draft, _tensor([1, 2])))
    assert torch.equal(calibration._tables.seen, before)
