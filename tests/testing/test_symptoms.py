"""The likely cause that a failure is told with."""

from __future__ import annotations

from specplug.testing import Subject
from specplug.testing.laboratory import Laboratory
from specplug.testing.symptoms import unread_weights


def test_unread_weights_of_a_right_worker_are_none() -> None:
    laboratory = Laboratory(Subject(algorithm="EAGLE"))
    assert unread_weights(laboratory, laboratory.standard_prompts()[2:3]) == []


def test_weights_are_not_unread_where_nothing_is_drafted() -> None:
    laboratory = Laboratory(Subject(algorithm="EAGLE"))
    assert unread_weights(laboratory, []) == []
