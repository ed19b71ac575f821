"""Find installed plugins by the distributions' metadata; import nothing. No torch here."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import attrs
import importlib_metadata
from importlib_metadata import EntryPoint

from specplug import hookspecs
from specplug.algorithm_names import is_auto
from specplug.contract import Problem, error_line, nearest

ALGORITHMS = "specplug.algorithms"
EXTENSIONS = "specplug.extensions"
HOSTS = "specplug.hosts"
DISABLE = "SPECPLUG_DISABLE"


@attrs.frozen(kw_only=True)
class PluginEntry:
    """A plugin as its distribution's metadata describes it, with the findings so far.

    Attributes:
        name: the entry point's name.
        value: the entry point's value, ``module:attribute``.
        distribution: name of its distribution.
        version: of the distribution.
        summary: the distribution's ``Summary``.
        problems: everything found wrong with it so far.
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
        """The plugin's name in messages."""
        origin = " ".join(filter(None, (self.distribution, self.version)))
        return f"{self.kind} {self.name} ({origin}, {self.value})"

    def problem(self, what: str, expected: str, fix: str, traceback: str = "") -> Problem:
        """Make a problem of this plugin."""
        return Problem(self.subject, what, expected, fix, traceback)


@attrs.frozen(kw_only=True)
class AlgorithmEntry(PluginEntry):
    """An installed algorithm (group ``specplug.algorithms``)."""

    kind: ClassVar[str] = "algorithm"


@attrs.frozen(kw_only=True)
class ExtensionEntry(PluginEntry):
    """An installed extension (group ``specplug.extensions``)."""

    kind: ClassVar[str] = "extension"


@attrs.frozen(kw_only=True)
class HostEntry(PluginEntry):
    """An installed host (group ``specplug.hosts``): another engine that runs algorithms."""

    kind: ClassVar[str] = "host"


Entry = TypeVar("Entry", AlgorithmEntry, ExtensionEntry, HostEntry)

_known: tuple[tuple[object, ...], tuple[EntryPoint, ...]] | None = None
"""The entry points that were read last, with the state of the path then."""


def installed_entry_points() -> list[EntryPoint]:
    """Read all entry points; of two distributions with one name, the first's.

    What was read is kept for as long as nothing is installed or removed, because each run of a
    process asks for it. A file that is edited in place is not read again.
    """
    global _known
    state = _state_of_path()
    if _known is None or _known[0] != state:
        _known = state, tuple(_read_entry_points())
    return list(_known[1])


def _state_of_path() -> tuple[object, ...]:
    """Return what changes when a distribution is installed or removed: where distributions are
    looked for, and when each of these folders got or lost a file."""
    return (*map(id, sys.meta_path), *((folder, _changed(folder)) for folder in sys.path))


def _changed(folder: str) -> int:
    """Return the nanosecond at which a folder last changed; 0 if there is none."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except (OSError, ValueError, TypeError):
        return 0


def _read_entry_points() -> list[EntryPoint]:
    try:
        return list(importlib_metadata.entry_points())
    except Exception:  # an entry_points.txt is damaged: read them one by one
        return list(_one_by_one())


def installed_algorithms(entry_points: Iterable[EntryPoint]) -> list[AlgorithmEntry]:
    """Return the algorithms among ``entry_points``, by name."""
    disabled = disabled_names()
    return [
        attrs.evolve(entry, disabled=entry.name.upper() in disabled)
        for entry in _without_rivals(_entries(AlgorithmEntry, ALGORITHMS, entry_points))
    ]


def installed_extensions(entry_points: Iterable[EntryPoint]) -> list[ExtensionEntry]:
    """Return the extensions among ``entry_points``, by name."""
    return _entries(ExtensionEntry, EXTENSIONS, entry_points)


def installed_hosts(entry_points: Iterable[EntryPoint]) -> list[HostEntry]:
    """Return the hosts among ``entry_points``, by name."""
    return _entries(HostEntry, HOSTS, entry_points)


def disabled_names() -> frozenset[str]:
    """Return the names in ``SPECPLUG_DISABLE``, in upper case."""
    names = os.environ.get(DISABLE, "").split(",")
    return frozenset(name.strip().upper() for name in names) - {""}


def parse_value(value: str) -> tuple[str, str] | None:
    """Split an entry point's value into module and attribute (or empty); None if malformed."""
    module, colon, attribute = (part.strip() for part in value.partition("[")[0].partition(":"))
    names = module.split(".") + (attribute.split(".") if colon else [])
    return (module, attribute) if all(name.isidentifier() for name in names) else None


def import_failure(
    entry: PluginEntry, module: str, error: BaseException, traceback: str = ""
) -> Problem:
    """Make the problem of a plugin whose ``module`` raises ``error`` at import."""
    fix = "specplug doctor shows the traceback; fix the plugin or tell its author"
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        fix = f"install what it needs: {error.name.partition('.')[0]}"
        if f"{module}.".startswith(f"{error.name}."):
            fix = f"install it again (pip install --force-reinstall {entry.distribution})"
    what = f"import failed: {error_line(error)}"
    return entry.problem(what, f"module {module} to import", fix, traceback)


def lost_entries() -> list[AlgorithmEntry]:
    """Find entry points that no listing finds: in no section, or in one with a misspelt name.

    Only distributions that concern specplug are examined.
    """
    return [lost for distribution in _each_distribution() for lost in _lost(distribution)]


def _one_by_one() -> Iterator[EntryPoint]:
    for distribution in _each_distribution():
        yield from _salvaged(distribution)


def _each_distribution() -> Iterator[Any]:
    """Yield all distributions; of two with one name, the first."""
    seen = set()
    for distribution in importlib_metadata.distributions():
        name, _, _ = _about(distribution)
        normalized = re.sub(r"[-_.]+", "-", name).lower()
        if normalized not in seen:
            seen.add(normalized)
            yield distribution


def _salvaged(distribution: Any) -> Iterator[EntryPoint]:
    """Read a distribution's entry points; a line without ``=`` is a name without a value."""
    text, damage = _entry_points_text(distribution)
    group = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("[") and line.endswith("]"):
            group = line.strip("[]")
        elif not line.startswith("#"):
            name, _, value = line.partition("=")
            point = EntryPoint(name.strip(), value.strip(), group)
            vars(point).update(dist=distribution, damage=damage)  # it refuses assignment
            yield point


def _entry_points_text(distribution: Any) -> tuple[str, str]:
    """Read ``entry_points.txt`` as far as possible; return it and what is wrong with it."""
    try:
        return distribution.read_text("entry_points.txt") or "", ""
    except UnicodeDecodeError as error:
        text = bytes(error.object).decode("utf-8", "replace")
        return text, f"its entry_points.txt is not UTF-8 (byte {error.start})"
    except Exception:  # unreadable, or not a real distribution
        return "", ""


def _lost(distribution: Any) -> Iterator[AlgorithmEntry]:
    groups = ALGORITHMS, EXTENSIONS, HOSTS
    points = list(_salvaged(distribution))
    if all(point.group in groups for point in points):
        return
    name, version, summary = _about(distribution)
    ours = hookspecs.PROJECT in name or _needs_core(distribution)
    for point in points:
        meant = nearest(point.group, groups)
        if point.group in groups or not (meant if point.group else ours):
            continue
        entry = AlgorithmEntry(
            name=point.name,
            value=point.value,
            distribution=name,
            version=version,
            summary=summary,
        )
        section = f"in section [{point.group}], which nothing reads" if meant else "in no section"
        what = f"the entry point {point.name} stands {section}"
        fix = f"correct the pyproject.toml of {name} and install that again"
        problem = entry.problem(what, f"[{meant or ALGORITHMS}] above it", fix)
        yield attrs.evolve(entry, problems=(problem,))


def _needs_core(distribution: Any) -> bool:
    """Whether a distribution requires specplug."""
    try:
        text = distribution.read_text("METADATA") or ""
    except Exception:
        return False
    return re.search(rf"^Requires-Dist: *{hookspecs.PROJECT}\b", text, re.M | re.I) is not None


def _about(distribution: Any) -> tuple[str, str, str]:
    """Read a distribution's name, version and summary, whichever of them are missing.

    It reads the headers itself. ``Distribution.metadata`` parses each file as a mail message, with
    its README, which would slow a listing down (``benchmarks/README.md``).
    """
    try:
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    except Exception:  # unreadable, or no distribution
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
        damage = vars(point).get("damage")
        found.append(attrs.evolve(entry, problems=tuple(_metadata_problems(entry, damage))))
    return found


def _place(point: EntryPoint) -> tuple[str, str]:
    return point.name, point.value


def _metadata_problems(entry: PluginEntry, damage: str | None) -> Iterator[Problem]:
    """Find what is wrong with a plugin before anything is imported.

    Args:
        damage: what is wrong with the file that names it, if anything is.
    """
    if damage:
        fix = f"save it as UTF-8: build and install {entry.distribution} again"
        yield entry.problem(damage, "UTF-8 text", fix)
    if isinstance(entry, AlgorithmEntry) and not re.fullmatch("[A-Z][A-Z0-9_]*", entry.name):
        what = f"the entry point's name {entry.name!r} is no algorithm's name"
        fix = f"rename it in the pyproject.toml of {entry.distribution}"
        yield entry.problem(what, "upper-case letters, digits and _", fix)
    if isinstance(entry, AlgorithmEntry) and is_auto(entry.name):
        what = f"{entry.name} is what users type for every algorithm that suits the model"
        fix = f"rename it in the pyproject.toml of {entry.distribution}"
        yield entry.problem(what, "another name", fix)
    if parse_value(entry.value) is None:
        what = f"malformed entry point {entry.name} = {entry.value!r}"
        fix = f"correct it in the pyproject.toml of {entry.distribution} and install that again"
        yield entry.problem(what, "'module:attribute'", fix)


def _is_of_core(entry: PluginEntry) -> bool:
    return entry.value.partition(".")[0] == hookspecs.PROJECT


def _without_rivals(entries: list[AlgorithmEntry]) -> Iterator[AlgorithmEntry]:
    """Return the entries; mark those that share a name, because either could be meant.

    The core's own names belong to the core.
    """
    own = {entry.name for entry in entries if _is_of_core(entry)}
    count = Counter(entry.name for entry in entries)
    for entry in entries:
        if count[entry.name] == 1 or _is_of_core(entry):
            yield entry
            continue
        if entry.name in own:
            what = f"{entry.name} is the core's own algorithm"
            fix = f"rename it in the pyproject.toml of {entry.distribution}"
            claim = entry.problem(what, "a name that the core does not bring", fix)
            yield attrs.evolve(entry, problems=(claim, *entry.problems))
            continue
        rivals = [f"{e.distribution} {e.version}" for e in entries if e.name == entry.name]
        what = f"{count[entry.name]} distributions bring {entry.name}: {' and '.join(rivals)}"
        fix = f"pip uninstall {' or '.join(rival.rpartition(' ')[0] for rival in rivals)}"
        rivalry = entry.problem(what, "one", fix)
        yield attrs.evolve(entry, problems=(rivalry, *entry.problems))
