"""EAGLE passes the conformance kit."""

from __future__ import annotations

from default_completion import Completion
from drafted_tokens import check_shipped_weights
from shallow_tests import ShallowTests


class TestEagle(ShallowTests):
    algorithm = "EAGLE"


def test_shipped_weights_draft_for_the_default_model(default_completion: Completion) -> None:
    check_shipped_weights("EAGLE", default_completion)
