"""A form has a place of its own for every row of the passes that it is for, and for nobody's."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specplug.model.pass_form import NOTHING, PartForm, PartSize, PassForm, PassSize
from specplug.speculative.buckets import MOST_ROWS, row_buckets

WIDTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def size_of(widths: list[int], width: int | None = None, *, masked: bool = False) -> PartSize:
    return PartSize(len(widths), sum(widths), width or max(widths, default=0), masked)


@given(st.lists(WIDTHS, min_size=1, max_size=3))
def test_places_of_a_forms_rows_are_their_own(passes: list[list[int]]) -> None:
    form = PartForm.of([size_of(widths) for widths in passes])
    assert form is not None
    for widths in (*passes, []):
        places = np.full(form.rows, -7), np.full(form.bs * form.width, -7)
        form.write_places(widths, *places)
        flat_index, padded_rows = (each.tolist() for each in places)
        expected = [b * form.width + i for b, width in enumerate(widths) for i in range(width)]
        assert flat_index[: sum(widths)] == expected
        assert len(flat_index) == len(set(flat_index)) == form.rows
        assert len(padded_rows) == form.bs * form.width
        assert [padded_rows[place] for place in flat_index] == list(range(form.rows))
        nobody = flat_index[sum(widths) :]
        assert all(place >= len(widths) * form.width for place in nobody)
        assert sum(form.widths(widths)) == form.rows
        assert len(form.widths(widths)) == form.bs


def test_form_of_a_pass_keeps_the_kernels_choice() -> None:
    """Rows up to 32 wide are read in parts, wider ones in tiles: in a form as in the pass."""
    for width in range(1, MOST_ROWS + 1):
        form = PartForm.of([size_of([width])])
        assert form is not None
        assert (form.width <= 32) == (width <= 32)
        assert width <= form.rows <= max(2 * width, 16)


def test_ranks_without_rows_fit_the_others_form() -> None:
    prefill, decode = size_of([200, 40]), size_of([1] * 8)
    form = PassForm.of([PassSize(prefill), PassSize(decode=decode), PassSize()])
    assert form is not None
    assert (form.prefill, form.decode) == (PartForm.of([prefill]), PartForm.of([decode, NOTHING]))
    assert form.rows == 256 + 8
    tree = size_of([6, 1], masked=True)
    masked = PassForm.of([PassSize(decode=tree), PassSize(decode=decode)])
    assert masked is not None
    assert masked.prefill is None
    assert masked.decode is not None
    assert masked.decode.masked


def test_pass_of_no_row_or_too_many_has_no_form() -> None:
    most = size_of([MOST_ROWS])
    assert PassForm.of([PassSize()]) is None
    assert PassForm.of([PassSize(most)]) is not None
    assert PassForm.of([PassSize(most, size_of([1]))]) is None
    nodes = size_of([20] * 20)
    assert PassForm.of([PassSize(size_of([900])), PassSize(decode=nodes)]) is None


def test_size_is_told_to_other_ranks_as_it_is() -> None:
    size = PassSize(size_of([7]), size_of([3, 1], masked=True), frozenset({"b", "a"}))
    assert PassSize.from_text(size.as_text()) == size


def test_forms_of_mixed_steps_are_few() -> None:
    """One chunk fills what eight requests leave of a budget; chunks of any width end prompts."""
    forms = {
        PassForm.of([PassSize(size_of([chunk]), size_of([1] * bs))])
        for bs in range(1, 9)
        for chunk in range(1, 505)
    }
    assert len(forms) <= 64


def test_row_buckets_have_the_forms_of_all_prompts() -> None:
    for most in (1, 2, 31, 100, MOST_ROWS, MOST_ROWS + 1):
        buckets = row_buckets(most)
        assert buckets == sorted(set(buckets))
        forms = {PartForm.of([size_of([width])]) for width in buckets}
        lengths = range(1, min(most, MOST_ROWS) + 1)
        assert {PartForm.of([size_of([width])]) for width in lengths} == forms
