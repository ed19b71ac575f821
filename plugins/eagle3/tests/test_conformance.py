"""EAGLE3 passes the conformance kit."""

from __future__ import annotations

from shallow_tests import ShallowTests


class TestEagle3(ShallowTests):
    algorithm = "EAGLE3"
