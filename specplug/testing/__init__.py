"""The conformance kit: proves an algorithm, in any package. ``docs/conformance.md`` is its page.

    specplug check NAME

or, with pytest, in a package of your own::

    from specplug.testing import AlgorithmTests

    class TestMine(AlgorithmTests):
        algorithm = "MINE"

or ``pytest --specplug MINE``, without a file.
"""

from __future__ import annotations

from specplug.testing.check import KIT_VERSION, Check, Failure, NotApplicable
from specplug.testing.conformance import AlgorithmTests
from specplug.testing.kit import all_checks
from specplug.testing.subject import Subject

__all__ = [
    "KIT_VERSION",
    "AlgorithmTests",
    "Check",
    "Failure",
    "NotApplicable",
    "Subject",
    "all_checks",
]
