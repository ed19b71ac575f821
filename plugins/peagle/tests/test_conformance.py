"""PEAGLE passes the conformance kit."""

from __future__ import annotations

from shallow_tests import ShallowTests


class TestPeagle(ShallowTests):
    algorithm = "PEAGLE"
