"""EARLY_EXIT passes the conformance kit."""

from __future__ import annotations

from shallow_tests import ShallowTests

from specplug_early_exit import algorithm


class TestEarlyExit(ShallowTests):
    algorithm = algorithm
