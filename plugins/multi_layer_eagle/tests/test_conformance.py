"""MULTI_LAYER_EAGLE passes the conformance kit."""

from __future__ import annotations

from default_completion import Completion
from drafted_tokens import check_shipped_weights
from shallow_tests import ShallowTests


class TestMultiLayerEagle(ShallowTests):
    algorithm = "MULTI_LAYER_EAGLE"


def test_shipped_weights_draft_for_the_default_model(default_completion: Completion) -> None:
    check_shipped_weights("MULTI_LAYER_EAGLE", default_completion)
