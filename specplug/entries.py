"""What is installed, from the distributions' metadata alone: nothing is imported. No torch here."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import attrs
import importlib_metadata
from importlib_metadata import EntryPoint

from specplug.contract import Problem

ALGORITHMS = "specplug.algorithms"
EXTENSIONS = "specplug.extensions"
DISABLE = "SPECPLUG_DISABLE"


@attrs.frozen(kw_only=True)
class PluginEntry:
    """A plugin as its distribution's metadata shows it, and as far as it has been examined.

    Attributes:
        name: the entry point's name.
        value: the entry point's value, ``module:attribute``.
        distribution: name of the distribution that brings it.
        version: version of the distribution.
        summary: the distribution's ``Summary``.
        problems: all that is known to be wrong with it.
        examined: whether it was imported and checked.
        disabled: whether ``SPECPLUG_DISABLE`` names it.
    """

    kind: ClassVar[str] = "plugin"

    name: str
    value: str
    distribution: str = "unknown distribution"
    version: str = "?"
    summary: str = ""
    problems: tuple[Problem, ...] = ()
    examined: bool = False
    disabled: bool = False

    @property
    def status(self) -> str:
        """``installed`` (not imported), ``ok`` (imported and sound), ``disabled``, or
        ``broken: why``."""
        if self.disabled:
            return "disabled"
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if self.problems[1:] else ""
            return f"broken: {self.problems[0].what}{more}"
        return "ok" if self.examined else "installed"

    @property
    def subject(self) -> str:
        """The plugin as messages name it."""
        return f"{self.kind} {self.name} ({self.distribution} {self.version}, {self.value})"

    def problem(self, what: str, expected: str, mend: str, traceback: str = "") -> Problem:
        """A problem of this plugin."""
        return Problem(self.subject, what, expected, mend, traceback)


@attrs.frozen(kw_only=True)
class AlgorithmEntry(PluginEntry):
    """An installed algorithm (group ``specplug.algorithms``)."""

    kind: ClassVar[str] = "algorithm"


@attrs.frozen(kw_only=True)
class ExtensionEntry(PluginEntry):
    """An installed extension (group ``specplug.extensions``)."""

    kind: ClassVar[str] = "extension"


Entry = TypeVar("Entry", AlgorithmEntry, ExtensionEntry)


def installed_entry_points() -> list[EntryPoint]:
    """All entry points of the environment; of two distributions of one name, the first's."""
    try:
        return list(importlib_metadata.entry_points())
    except Exception:  # one distribution's entry_points.txt is damaged: go one by one
        return list(_one_by_one())


def installed_algorithms(entry_points: Iterable[EntryPoint]) -> list[AlgorithmEntry]:
    """The algorithms among ``entry_points``, by name."""
    disabled = disabled_names()
    return [
        attrs.evolve(entry, disabled=entry.name.upper() in disabled)
        for entry in _without_rivals(_entries(AlgorithmEntry, ALGORITHMS, entry_points))
    ]


def installed_extensions(entry_points: Iterable[EntryPoint]) -> list[ExtensionEntry]:
    """The extensions among ``entry_points``, by name."""
    return _entries(ExtensionEntry, EXTENSIONS, entry_points)


def disabled_names() -> frozenset[str]:
    """The names in ``SPECPLUG_DISABLE``, in upper case."""
    names = os.environ.get(DISABLE, "").split(",")
    return frozenset(name.strip().upper() for name in names) - {""}


def parse_value(value: str) -> tuple[str, str] | None:
    """Module and attribute (perhaps empty) of an entry point's value; None if malformed."""
    module, colon, attribute = (part.strip() for part in value.partition("[")[0].partition(":"))
    names = module.split(".") + (attribute.split(".") if colon else [])
    return (module, attribute) if all(name.isidentifier() for name in names) else None


def _one_by_one() -> Iterator[EntryPoint]:
    seen = set()
    for distribution in importlib_metadata.distributions():
        name, _, _ = _about(distribution)
        normalized = re.sub(r"[-_.]+", "-", name).lower()
        if normalized not in seen:
            seen.add(normalized)
            yield from _salvaged(distribution)


def _salvaged(distribution: Any) -> Iterator[EntryPoint]:
    """A distribution's entry points; a line without ``=`` becomes a name without a value."""
    try:
        text = distribution.read_text("entry_points.txt") or ""
    except (OSError, UnicodeError):
        return
    group = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("["):
            group = line.strip("[]")
        elif not line.startswith("#"):
            name, _, value = line.partition("=")
            point = EntryPoint(name.strip(), value.strip(), group)
            vars(point).update(dist=distribution)  # immutable by assignment
            yield point


def _about(distribution: Any) -> tuple[str, str, str]:
    """Name, version and summary of a distribution, whatever of its metadata is missing.

    Reads the headers itself: ``Distribution.metadata`` parses each file as a mail message, README
    included, which a listing would feel (``benchmarks/README.md``).
    """
    try:
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    except Exception:  # unreadable, or there is no distribution at all
        text = ""
    headers: dict[str, str] = {}
    for line in text.partition("\n\n")[0].splitlines():
        field, _, value = line.partition(":")
        headers.setdefault(field.lower(), value.strip())
    folder = os.path.basename(str(getattr(distribution, "_path", "")))
    name = headers.get("name") or folder or "unknown distribution"
    return name, headers.get("version") or "?", headers.get("summary", "")


def _entries(kind: type[Entry], group: str, entry_points: Iterable[EntryPoint]) -> list[Entry]:
    found = []
    for point in sorted((p for p in entry_points if p.group == group), key=_place):
        distribution, version, summary = _about(point.dist)
        entry = kind(
            name=point.name,
            value=point.value,
            distribution=distribution,
            version=version,
            summary=summary,
        )
        found.append(attrs.evolve(entry, problems=tuple(_metadata_problems(entry))))
    return found


def _place(point: EntryPoint) -> tuple[str, str]:
    return point.name, point.value


def _metadata_problems(entry: PluginEntry) -> Iterator[Problem]:
    """What is wrong with a plugin before anything is imported."""
    if isinstance(entry, AlgorithmEntry) and not re.fullmatch("[A-Z][A-Z0-9_]*", entry.name):
        what = f"the entry point's name {entry.name!r} is no algorithm's name"
        mend = f"rename it in the pyproject.toml of {entry.distribution}"
        yield entry.problem(what, "upper-case letters, digits and _", mend)
    if parse_value(entry.value) is None:
        what = f"malformed entry point {entry.name} = {entry.value!r}"
        mend = f"correct it in the pyproject.toml of {entry.distribution} and install that again"
        yield entry.problem(what, "'module:attribute'", mend)


def _without_rivals(entries: list[AlgorithmEntry]) -> Iterator[AlgorithmEntry]:
    """The entries; those that share a name are marked, for nobody can tell which was meant."""
    count = Counter(entry.name for entry in entries)
    for entry in entries:
        if count[entry.name] == 1:
            yield entry
            continue
        rivals = [f"{e.distribution} {e.version}" for e in entries if e.name == entry.name]
        what = f"{count[entry.name]} distributions bring {entry.name}: {' and '.join(rivals)}"
        mend = f"pip uninstall {' or '.join(rival.rpartition(' ')[0] for rival in rivals)}"
        rivalry = entry.problem(what, "one", mend)
        yield attrs.evolve(entry, problems=(rivalry, *entry.problems))
