"""A form that seldom comes is padded to a recorded one that has room, and is recorded if it often
comes."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specplug.model.pass_form import PartForm, PartSize, PassForm, PassSize
from specplug.model.recorded_forms import RecordedForms
from specplug.speculative.buckets import MOST_IN_PARTS

WIDTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def size_of(*widths: int, masked: bool = False) -> PartSize:
    return PartSize(len(widths), sum(widths), max(widths), masked)


@attrs.define
class Runner:
    """Records a bucket in its second pass.

    Attributes:
        failure: why nothing is recorded any more.
        most: buckets at most.
    """

    failure: str | None = None
    most: int = 100
    passes: dict[PassForm, int] = attrs.Factory(dict)
    num_cold: int = 0

    @property
    def recorder(self) -> Runner:
        return self

    @property
    def recorded(self) -> list[PassForm]:
        return [form for form, times in self.passes.items() if times > 1]

    def is_recorded(self, form: PassForm) -> bool:
        return form in self.recorded

    def takes(self, form: PassForm) -> bool:
        return self.failure is None and (form in self.passes or len(self.passes) < self.most)

    def run(self, form: PassForm | None, times: int = 1) -> None:
        if form is not None:
            self.passes[form] = self.passes.get(form, 0) + times


def own(size: PassSize) -> PassForm:
    form = PassForm.of([size])
    assert form is not None
    return form


def forms_of(runner: Any) -> RecordedForms:
    return RecordedForms(runner)


def asked(forms: RecordedForms, runner: Runner, size: PassSize, times: int) -> list[Any]:
    """Return the form of each of so many passes, which run."""
    found = []
    for _ in range(times):
        found.append(forms.of([size]))
        runner.run(found[-1])
    return found


LARGE = PassSize(decode=size_of(*(7,) * 48))
SMALL = PassSize(decode=size_of(*(5,) * 39))


def test_recorded_form_stands_in_until_its_own_pays() -> None:
    """256 rows take a quarter less than 384, so 40 passes lose ten."""
    runner = Runner()
    forms = forms_of(runner)
    runner.run(own(LARGE), 2)
    assert (own(SMALL).rows, own(LARGE).rows) == (256, 384)
    assert asked(forms, runner, SMALL, 44) == [own(LARGE)] * 41 + [own(SMALL)] * 3
    assert runner.is_recorded(own(SMALL))
    assert runner.num_cold == 41
    assert forms.of([LARGE]) == own(LARGE)


def test_some_more_rows_of_few_stand_in_for_long() -> None:
    """Of so few the weights take as long to read: 16 take a thirtieth longer than 8."""
    runner = Runner()
    forms = forms_of(runner)
    runner.run(own(PassSize(decode=size_of(*(1,) * 16))), 2)
    few = PassSize(decode=size_of(*(1,) * 8))
    assert own(few) not in asked(forms, runner, few, 300)
    assert own(few) in asked(forms, runner, few, 60)
    assert runner.num_cold == 0


def test_form_of_as_many_rows_stands_in_for_ever() -> None:
    runner = Runner()
    forms = forms_of(runner)
    runner.run(own(LARGE), 2)
    alike = PassSize(decode=size_of(*(8,) * 46))  # as many rows, and requests, in fewer places
    assert own(alike) != own(LARGE)
    assert own(alike).rows == own(LARGE).rows
    assert set(asked(forms, runner, alike, 2000)) == {own(LARGE)}
    assert runner.num_cold == 0


def test_wider_form_of_as_many_rows_stands_in_for_some_time() -> None:
    """64 requests that are 8 wider take 512 of 6,000 places longer, 0.034 of 384 rows: so 293 lose
    ten passes."""
    runner = Runner()
    forms = forms_of(runner)
    wide, narrow = (PassSize(decode=size_of(most, *(7,) * 46)) for most in (16, 8))
    assert own(wide).rows == own(narrow).rows
    runner.run(own(wide), 2)
    assert asked(forms, runner, narrow, 300) == [own(wide)] * 293 + [own(narrow)] * 7
    assert runner.num_cold == 0


def test_recorded_form_of_fewer_rows_takes_equal_widths() -> None:
    """34 requests of 3 nodes are padded to 48, 144 rows: their form has 128."""
    runner = Runner()
    forms, size = forms_of(runner), PassSize(decode=size_of(*(3,) * 34))
    assert forms.of_fewer_rows(size, 144) is None, "it is not recorded"
    runner.run(own(size), 2)
    assert forms.of_fewer_rows(size, 144) == own(size)
    assert forms.of_fewer_rows(size, own(size).rows) is None
    forms.stands_in = False
    assert forms.of_fewer_rows(size, 144) is None, "passes of equal widths are to be recorded, too"
    few = PassSize(decode=size_of(*(5,) * 9))
    runner.run(own(few), 2)
    assert forms_of(runner).of_fewer_rows(few, 64) is None, "64 rows take no longer than 48"


def test_form_of_far_more_tiles_is_one_of_more_rows() -> None:
    runner = Runner()
    forms = forms_of(runner)
    many = PassSize(prefill=size_of(257, *(1,) * 255))
    few = PassSize(prefill=size_of(*(64,) * 8))
    assert own(few).rows == own(many).rows
    runner.run(own(many), 2)
    assert asked(forms, runner, few, 10) == [own(many)] * 8 + [own(few)] * 2
    assert runner.num_cold == 8


def test_form_is_its_own_where_no_recorded_one_has_room() -> None:
    runner = Runner()
    forms = forms_of(runner)
    assert forms.of([SMALL]) == own(SMALL)
    runner.run(own(SMALL), 2)
    for size in (
        LARGE,  # more rows
        PassSize(decode=size_of(*(1,) * 60)),  # more requests
        PassSize(decode=size_of(30, 1)),  # wider
        PassSize(decode=size_of(4, 3, masked=True)),
        PassSize(prefill=size_of(5, 4)),
        PassSize(prefill=size_of(5, 4), decode=size_of(5, 4)),
        PassSize(decode=size_of(*(5,) * 39), kinds=frozenset({"hidden"})),
    ):
        assert forms.of([size]) == own(size)


def test_far_larger_form_does_not_stand_in() -> None:
    runner = Runner()
    forms = forms_of(runner)
    runner.run(own(LARGE), 2)
    assert forms.of([PassSize(decode=size_of(*(3,) * 30))]) != own(LARGE)  # 96 rows, of 384
    wide = own(PassSize(prefill=size_of(40, 20)))
    runner.run(wide, 2)
    few = PassSize(prefill=size_of(33, 1))
    assert forms.of([few]) == wide  # of so few rows none takes longer


def test_forms_are_their_own_while_they_are_to_be_recorded() -> None:
    runner = Runner()
    forms = forms_of(runner)
    runner.run(own(LARGE), 2)
    forms.stands_in = False
    assert forms.of([SMALL]) == own(SMALL)


def test_recorded_form_stands_in_where_no_more_are_recorded() -> None:
    runner = Runner(most=1)
    forms = forms_of(runner)
    runner.run(own(LARGE), 2)
    assert {forms.of([SMALL]) for _ in range(60)} == {own(LARGE)}
    assert runner.num_cold == 0, "later ones take as long"
    assert forms.of([PassSize(decode=size_of(30, 1))]) is None
    runner.failure = "no memory"
    assert forms.of([SMALL]) is forms.of([LARGE]) is None


@given(WIDTHS, WIDTHS)
def test_form_has_a_place_for_each_row_that_it_holds(one: list[int], two: list[int]) -> None:
    form, other = PartForm.of([size_of(*one)]), PartForm.of([size_of(*two)])
    assert form is not None
    assert other is not None
    assert form.holds(form, [size_of(*one)])
    if form.holds(other, [size_of(*two)]):
        flat_index = np.zeros(form.rows, dtype=np.int64)
        form.write_places(two, flat_index, np.zeros(form.bs * form.width, dtype=np.int64))
        assert len(set(flat_index.tolist())) == form.rows
        assert max(flat_index) < form.bs * form.width
        assert sum(form.widths(two)) == form.rows
        assert (max(two) > MOST_IN_PARTS) == (form.width > MOST_IN_PARTS)
