"""The pytest plugin: ``pytest --specplug NAME``, and the fixtures of ``AlgorithmTests``.

pytest imports this in every session of an environment that has specplug: nothing else is imported
before a class of the kit is collected.
"""

from __future__ import annotations

import re
import shlex
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from specplug.testing.laboratory import Laboratory


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--specplug`` and what goes with it."""
    group = parser.getgroup("specplug", "conformance of speculative-decoding algorithms")
    group.addoption(
        "--specplug",
        action="append",
        default=[],
        metavar="NAME",
        help="check this algorithm by the conformance kit; may be given many times",
    )
    group.addoption(
        "--specplug-check",
        action="append",
        default=[],
        metavar="ID",
        help="run these checks of the kit alone",
    )
    group.addoption(
        "--specplug-seed",
        type=int,
        metavar="N",
        help="choose texts, budgets and what is sampled by this seed",
    )
    group.addoption(
        "--specplug-host",
        metavar="NAME",
        help="check in another engine, whose package specplug-NAME is installed",
    )
    group.addoption(
        "--specplug-host-arguments",
        default="",
        metavar="ARGUMENTS",
        help="that engine's own arguments, in one text",
    )


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the tests of the algorithms that are named. They are no file's: so none of the files
    around the kit's own, such as a ``conftest.py``, is taken for the user's."""
    names: list[str] = config.getoption("--specplug")
    if names:
        path = config.rootpath / "specplug"
        module = _NamedAlgorithms.from_parent(session, path=path, names=names)
        items.extend(session.genitems(module))


class _NamedAlgorithms(pytest.Module):
    """A module of a class of tests for each algorithm that is named.

    Args:
        names: of the algorithms.
    """

    def __init__(self, *, names: list[str], **given: Any) -> None:
        super().__init__(**given)
        self._names = names

    def _getobj(self) -> ModuleType:
        from specplug.testing.conformance import AlgorithmTests

        module = ModuleType("specplug.testing.named_algorithms")
        for name in self._names:
            label = f"Test_{re.sub(r'[^A-Z0-9]', '_', name.upper())}"
            setattr(module, label, type(label, (AlgorithmTests,), {"algorithm": name}))
        return module


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each check."""
    if "specplug_check" not in metafunc.fixturenames:
        return
    from specplug.testing.kit import all_checks, checks_named

    names = metafunc.config.getoption("--specplug-check")
    checks = checks_named(names) if names else all_checks()
    metafunc.parametrize("specplug_check", checks, ids=[each.id for each in checks])


@pytest.fixture(scope="class")
def specplug_laboratory(request: pytest.FixtureRequest) -> Laboratory:
    """What runs the engines of a class's algorithm; its runs are shared by the checks."""
    import attrs

    from specplug.testing.kit import refuse_unknown
    from specplug.testing.laboratory import Laboratory

    kind: Any = request.cls
    subject = kind.subject()
    seed = request.config.getoption("--specplug-seed")
    if seed is not None:
        subject = attrs.evolve(subject, seed=seed)
    host = request.config.getoption("--specplug-host")
    if host is not None:
        given = shlex.split(request.config.getoption("--specplug-host-arguments"))
        subject = attrs.evolve(subject, host=host, host_arguments=given)
    refuse_unknown(subject.known_failures)
    return Laboratory(subject)
