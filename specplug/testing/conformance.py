"""``AlgorithmTests``: the one class that a package's tests subclass. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from specplug.testing.subject import Subject

if TYPE_CHECKING:
    from specplug.testing.check import Check
    from specplug.testing.laboratory import Laboratory


class AlgorithmTests:
    """The kit's checks of an algorithm, each a test of pytest.

    A subclass says which algorithm, and what its author knows of it; see ``Subject``. Checks that
    do not apply, or are left out, are skipped, with the reason. New ones come with a new version of
    specplug.
    """

    algorithm: ClassVar[str | object | None] = None
    model: ClassVar[str | Path | None] = None
    settings: ClassVar[Mapping[str, Any]] = {}
    accept_length: ClassVar[float | None] = None
    reference: ClassVar[str | object | None] = None
    expected_failures: ClassVar[Mapping[str, str]] = {}
    seed: ClassVar[int] = 0
    quick: ClassVar[bool] = False
    host: ClassVar[str | None] = None
    host_arguments: ClassVar[Sequence[str]] = ()

    @classmethod
    def subject(cls) -> Subject:
        """Return what is checked. A subclass may make it anew, to write weights first, say."""
        return Subject(
            algorithm=cls.algorithm,
            model=cls.model,
            settings=cls.settings,
            accept_length=cls.accept_length,
            reference=cls.reference,
            expected_failures=cls.expected_failures,
            seed=cls.seed,
            quick=cls.quick,
            host=cls.host,
            host_arguments=cls.host_arguments,
        )

    def test_conforms(self, specplug_check: Check, specplug_laboratory: Laboratory) -> None:
        """Run one check of the kit."""
        import pytest

        from specplug.testing.verdict import judge

        verdict = judge(specplug_check, specplug_laboratory)
        if verdict.status in ("not applicable", "left out"):
            pytest.skip(verdict.told)
        if verdict.status == "expected":
            pytest.xfail(verdict.told)
        if verdict.is_wrong:
            pytest.fail(verdict.told, pytrace=False)
