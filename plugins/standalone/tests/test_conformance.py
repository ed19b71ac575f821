"""STANDALONE passes the conformance kit."""

from __future__ import annotations

from shallow_tests import ShallowTests


class TestStandalone(ShallowTests):
    algorithm = "STANDALONE"
