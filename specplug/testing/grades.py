"""Keeps the grades that algorithms have earned, and tells which still hold. No torch here.

``specplug check`` writes a grade once all checks have run, to a file of JSON in the user's cache
folder; ``specplug info`` reads it. With it is kept what it was earned with. If anything of that is
another now, the grade is not known.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from specplug import __version__
from specplug.algorithm import API_VERSION
from specplug.cache_folder import cache_base
from specplug.registry import Registry
from specplug.testing.check import KIT_VERSION


@attrs.frozen(kw_only=True)
class Holder:
    """What earns a grade.

    Attributes:
        versions: by what has a version, which one: the kit, the contract's API, specplug, and the
            distribution of each algorithm whose name is joined.
        files: a digest of the files of their packages, weights included: in a package under work
            they change without a new version.
    """

    versions: Mapping[str, str]
    files: str

    @classmethod
    def of(cls, algorithm: str) -> Holder:
        """Return what is installed now.

        Raises:
            SpecplugError: an algorithm is not installed, or broken.
        """
        entries = [Registry().select(name).entry for name in algorithm.split("+")]
        versions = {"kit": str(KIT_VERSION), "API": str(API_VERSION), "specplug": __version__}
        digest = hashlib.sha256()
        for entry in entries:
            versions[entry.distribution] = entry.version
            for path in sorted(_files(entry.value)):
                digest.update(repr((path.name, path.stat().st_size)).encode())
                digest.update(path.read_bytes())
        return cls(versions=versions, files=digest.hexdigest())

    def differences(self, other: Holder) -> Iterator[str]:
        """Yield what another holder has that is not this one's, in words."""
        for name in (*self.versions, *(n for n in other.versions if n not in self.versions)):
            before, now = self.versions.get(name, "none"), other.versions.get(name, "none")
            if before != now:
                yield f"{name} was {before} and is {now}"
        if self.files != other.files and self.versions == other.versions:
            yield "its files have changed"


def _files(value: str) -> Iterator[Path]:
    """Yield the files of the package that an entry point is in; of the core itself, of none other
    than that module."""
    module = value.partition(":")[0]
    package = module.partition(".")[0]
    spec = find_spec(module if package == "specplug" else package)
    if spec is None:
        return
    for folder in spec.submodule_search_locations or ():
        yield from (
            path
            for path in Path(folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        )
    if not spec.submodule_search_locations and spec.origin:
        yield Path(spec.origin)


@attrs.frozen(kw_only=True)
class EarnedGrade:
    """What ``specplug check`` has found of an algorithm.

    Attributes:
        grade: "bronze", "silver" or "gold"; None: none.
        missed: the checks that cost it, by id, and how: "failed", or "expected", which says that
            the author declares it.
        holder: what earned it.
        left_out: the ids of checks that could not run, since what they need was not installed.
        settings: of the run, other than the defaults: "model", "draft", "accept_length",
            "reference", "seed".
    """

    grade: str | None
    missed: Mapping[str, str]
    holder: Holder
    left_out: tuple[str, ...] = attrs.field(default=(), converter=tuple[str, ...])
    settings: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def told(self) -> str:
        """The grade, what it lacks to the next one, and what it was earned without."""
        missed = ", ".join(f"{check} {_HOW.get(how, how)}" for check, how in self.missed.items())
        told = f"{self.grade or 'none'}{f', since {missed}' if missed else ''}"
        return f"{told}, without {', '.join(self.left_out)}" if self.left_out else told


_HOW = {"expected": "fails as declared", "passed unexpectedly": "passes unexpectedly"}


def keep(algorithm: str, earned: EarnedGrade) -> Path:
    """Write a grade to the user's cache folder; return the file.

    Raises:
        OSError: it cannot be written.
    """
    path = _path(algorithm)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(attrs.asdict(earned), indent=2), "utf-8")
    written.replace(path)  # atomic: others may read
    return path


def earned_by(algorithm: str) -> EarnedGrade | None:
    """Return the grade that was written last, whatever it was earned with; None: there is none
    that can be read."""
    try:
        found = json.loads(_path(algorithm).read_text("utf-8"))
        return EarnedGrade(**{**found, "holder": Holder(**found["holder"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _path(algorithm: str) -> Path:
    return cache_base() / "specplug" / "grades" / f"{algorithm}.json"


@attrs.frozen(kw_only=True)
class Standing:
    """Whether an algorithm's grade holds.

    Attributes:
        earned: the grade that was written last; None: none was.
        changed: what is another since then, in words; empty: the grade holds.
    """

    earned: EarnedGrade | None
    changed: Sequence[str] = ()

    @classmethod
    def of(cls, algorithm: str) -> Standing:
        """Return how it stands with the algorithm of a name.

        Raises:
            SpecplugError: the algorithm is not installed, or broken.
        """
        earned = earned_by(algorithm)
        if earned is None:
            return cls(earned=None)
        return cls(earned=earned, changed=tuple(earned.holder.differences(Holder.of(algorithm))))

    @property
    def status(self) -> str:
        """ "holds", "stale", or "unknown"."""
        if self.earned is None:
            return "unknown"
        return "stale" if self.changed else "holds"

    def as_mapping(self) -> dict[str, Any]:
        """Return what ``specplug info --json`` prints. ``grade`` is one that holds, or None."""
        earned = self.earned
        return {
            "status": self.status,
            "grade": earned.grade if earned and not self.changed else None,
            "changed": list(self.changed),
            "missed": dict(earned.missed) if earned else {},
            "left_out": list(earned.left_out) if earned else [],
            "versions": dict(earned.holder.versions) if earned else {},
            "settings": dict(earned.settings) if earned else {},
        }

    def line(self, algorithm: str) -> str:
        """Return it in words."""
        if self.earned is None:
            return f"not known: run specplug check {algorithm}"
        if self.changed:
            return (
                f"not known: it was {self.earned.grade or 'none'}, but {'; '.join(self.changed)}; "
                f"run specplug check {algorithm}"
            )
        versions = ", ".join(f"{n} {v}" for n, v in self.earned.holder.versions.items())
        settings = ", ".join(f"{n} {v}" for n, v in self.earned.settings.items())
        return f"{self.earned.told} ({versions}{f'; {settings}' if settings else ''})"
