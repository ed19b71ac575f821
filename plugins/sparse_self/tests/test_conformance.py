"""SPARSE_SELF passes the conformance kit."""

from __future__ import annotations

from shallow_tests import ShallowTests


class TestSparseSelf(ShallowTests):
    algorithm = "SPARSE_SELF"
