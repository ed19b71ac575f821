"""Find plugins by entry point, and import only the chosen one. No torch here.

``Registry`` lists what is installed from metadata alone, checks and selects algorithms, and loads
extensions and hosts. ``build_plugin_manager`` assembles the plugins of a run. A listing reports a
broken plugin; it is an error only when it is chosen, and never stops another.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs
import pluggy

from specplug import hookspecs
from specplug.algorithm import AlgorithmInfo
from specplug.algorithm_names import AUTO, is_auto, read_settings, split_names
from specplug.contract import (
    PluginWarning,
    Problem,
    error_line,
    examine_algorithm,
    examine_extension,
    implemented_hooks,
    let_ctrl_c_pass,
    nearest,
    outdated,
    plugin_traceback,
)
from specplug.entries import (
    DISABLE,
    AlgorithmEntry,
    ExtensionEntry,
    HostEntry,
    PluginEntry,
    disabled_names,
    import_failure,
    installed_algorithms,
    installed_entry_points,
    installed_extensions,
    installed_hosts,
    lost_entries,
    parse_value,
)
from specplug.errors import PluginError, UnknownAlgorithm, UsageError, shown
from specplug.host import HostPlugin

if TYPE_CHECKING:
    import click
    from importlib_metadata import EntryPoint

__all__ = [
    "AlgorithmEntry",
    "Examination",
    "Extension",
    "ExtensionEntry",
    "HostEntry",
    "PluginEntry",
    "PluginWarning",
    "Problem",
    "Registry",
    "SelectedAlgorithm",
    "build_plugin_manager",
    "register_commands",
    "register_options",
]

Entry = TypeVar("Entry", AlgorithmEntry, ExtensionEntry, HostEntry)


@attrs.frozen
class Examination(Generic[Entry]):
    """The findings of importing a plugin.

    Attributes:
        entry: with the findings; ``entry.problems`` is empty if there are none.
        plugin: the plugin object, or None if it could not be loaded.
        info: what an algorithm declares, or None.
    """

    entry: Entry
    plugin: Any = None
    info: AlgorithmInfo | None = None


@attrs.frozen
class SelectedAlgorithm:
    """The algorithm of a run: its name, plugin object, declaration and origin."""

    name: str
    plugin: Any
    info: AlgorithmInfo
    entry: AlgorithmEntry


@attrs.frozen
class Extension:
    """A working extension: its name, plugin object and origin."""

    name: str
    plugin: Any
    entry: ExtensionEntry


class Registry:
    """The plugins that are installed when the registry is made.

    Args:
        entry_points: instead of those of the environment, for tests.
    """

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None) -> None:
        found = installed_entry_points() if entry_points is None else list(entry_points)
        self.disabled = disabled_names()
        self._algorithms = installed_algorithms(found)
        self._extensions = installed_extensions(found)
        self._hosts = installed_hosts(found)

    def entries(self) -> list[AlgorithmEntry]:
        """List every installed algorithm by name; import nothing."""
        return list(self._algorithms)

    def extension_entries(self) -> list[ExtensionEntry]:
        """List every installed extension by name; import nothing."""
        return list(self._extensions)

    def host_entries(self) -> list[HostEntry]:
        """List every installed host by name; import nothing."""
        return list(self._hosts)

    def lost(self) -> list[AlgorithmEntry]:
        """List entry points meant for specplug that no listing finds, with the reason."""
        return lost_entries()

    def names(self) -> list[str]:
        """List the names of the installed algorithms, each once."""
        return list(dict.fromkeys(entry.name for entry in self._algorithms))

    def check(self, name: str) -> list[Problem]:
        """Import the algorithm ``name`` and report everything that is wrong with it.

        Raises:
            UnknownAlgorithm: there is none of that name.
        """
        return [problem for e in self._find(name) for problem in self.examine(e).entry.problems]

    def examine(self, entry: Entry) -> Examination[Entry]:
        """Import the plugin of ``entry`` and check it; report problems instead of raising."""
        place = parse_value(entry.value)
        if place is None:
            return Examination(entry)
        plugin, info, found = None, None, list(entry.problems)
        try:
            plugin, unloadable = _load(entry, *place)
            if unloadable:
                found = [known for known in found if known.what != unloadable.what]
                found.append(unloadable)
            elif isinstance(entry, ExtensionEntry):
                found += examine_extension(plugin, entry.subject)
            elif isinstance(entry, HostEntry):
                found += _examine_host(plugin, entry)
            else:
                info, wrong = examine_algorithm(plugin, entry.subject, entry.name)
                found += wrong
        except BaseException as error:
            let_ctrl_c_pass(error)
            what = f"looking at it raised {error_line(error)}"
            trace = plugin_traceback(error)
            found.append(entry.problem(what, "an object with hooks", "fix it", trace))
        return Examination(
            attrs.evolve(entry, problems=tuple(found), examined=True), plugin=plugin, info=info
        )

    def select(self, algorithm: str | object) -> SelectedAlgorithm:
        """Import the algorithm to run, and no other.

        Args:
            algorithm: a name, in upper or lower case; several joined by "+", of which the first
                proposes and the others grow its drafts; several with commas between them, or a
                sequence, of which each drafts for some requests; or a plugin object that is not
                installed.

        Raises:
            UnknownAlgorithm: none of that name is installed.
            PluginError: it is broken, disabled, or two distributions claim the name.
            UsageError: several cannot be joined so.
        """
        if isinstance(algorithm, SelectedAlgorithm):
            return algorithm
        if isinstance(algorithm, list | tuple) or (isinstance(algorithm, str) and "," in algorithm):
            return self._select_several([algorithm] if isinstance(algorithm, str) else algorithm)
        if not isinstance(algorithm, str):
            return _select_object(algorithm)
        if is_auto(algorithm):
            raise UsageError(
                f"speculative_algorithm={AUTO!r}: which algorithms these are depends on the model; "
                f"expected the name of one here (specplug info {AUTO} shows them)"
            )
        if "+" in algorithm:
            return _join("joint_algorithm", [self.select(name) for name in algorithm.split("+")])
        entry = self._find(algorithm)[0]
        if entry.disabled:
            raise PluginError(
                f"{entry.subject}: it is disabled by {DISABLE}={os.environ.get(DISABLE, '')}; "
                f"expected it not to be named there; take {entry.name} out of {DISABLE}"
            )
        if entry.problems:  # the metadata shows a problem: do not import it
            raise _plugin_error(entry.problems)
        examined = self.examine(entry)
        if examined.entry.problems or examined.info is None:
            raise _plugin_error(examined.entry.problems)
        _warn_if_outdated(examined.info, entry.subject)
        return SelectedAlgorithm(entry.name, examined.plugin, examined.info, examined.entry)

    def _select_several(self, given: Sequence[object]) -> SelectedAlgorithm:
        """Select the core's own algorithm that lets each of several draft for some requests."""
        parts: list[SelectedAlgorithm] = []
        settings: list[Mapping[str, Any]] = []
        for each in given:
            if not isinstance(each, str):
                parts.append(self.select(each))
                settings.append({})
                continue
            for name, own in split_names(each):
                parts.append(self.select(name))
                settings.append(read_settings(parts[-1].name, own))
        if not parts:
            raise UsageError(
                f"speculative_algorithm={shown(given)}: expected names of algorithms, as in A,B"
            )
        if len(parts) == 1 and not settings[0]:
            return parts[0]
        return _join("several_algorithms", parts, settings)

    def host(self, name: str) -> HostPlugin:
        """Import the host that users call ``name``.

        Raises:
            UsageError: none of that name is installed.
            PluginError: it is broken.
        """
        typed = name.strip().lower()
        entry = next((entry for entry in self._hosts if entry.name.lower() == typed), None)
        if entry is None:
            known = ", ".join(sorted({entry.name for entry in self._hosts})) or "none"
            raise UsageError(
                f"unknown engine {shown(name)}: installed are {known}; a host is a package, "
                "specplug-NAME (pip install)"
            )
        examined = self.examine(entry)
        if examined.entry.problems:
            raise _plugin_error(examined.entry.problems)
        plugin: HostPlugin = examined.plugin
        return plugin

    def check_extensions(self, names: Iterable[str]) -> frozenset[str]:
        """Check names of extensions and return them in upper case.

        Raises:
            UsageError: one is not the name of an installed extension.
        """
        listed = isinstance(names, Iterable) and not isinstance(names, str)
        found = tuple(names) if listed else ()
        if not listed or not all(isinstance(name, str) for name in found):
            raise UsageError(
                f"disable_extensions={shown(names)}: expected a list of extensions' names"
            )
        installed = {entry.name.upper(): entry.name for entry in self._extensions}
        for name in found:
            if name.strip().upper() not in installed:
                near = nearest(name.strip().upper(), installed)
                meant = f"did you mean {installed[near]}? " if near else ""
                known = ", ".join(sorted(set(installed.values()))) or "none"
                raise UsageError(f"unknown extension {shown(name)}: {meant}installed are {known}")
        return frozenset(name.strip().upper() for name in found)

    def extensions(
        self, disabled: Iterable[str] = (), objects: Iterable[object] = ()
    ) -> list[Extension]:
        """Import all extensions; leave broken ones out with a ``PluginWarning``.

        Args:
            disabled: names of extensions that are neither imported nor run.
            objects: extensions that are not installed.

        Raises:
            UsageError: one of the disabled is not installed.
            PluginError: one of the objects has a wrong hook, or none.
        """
        without = self.check_extensions(disabled)
        loaded = []
        for entry in self._extensions:
            if entry.name.upper() in without:
                continue
            examined = self.examine(entry)
            if examined.entry.problems:
                _warn(examined.entry.problems[0])
            else:
                loaded.append(Extension(entry.name, examined.plugin, examined.entry))
        return [*loaded, *map(_extension_of, objects)]

    def _find(self, name: str) -> list[AlgorithmEntry]:
        typed = name.strip()
        same = [entry for entry in self._algorithms if entry.name.upper() == typed.upper()]
        if not same:
            raise UnknownAlgorithm(self._unknown(typed))
        return sorted(same, key=lambda entry: bool(entry.problems))  # a working one first

    def _unknown(self, typed: str) -> str:
        names = self.names()
        if not names:
            return (
                f"unknown algorithm {shown(typed)}: none is installed; install a plugin "
                "(pip install)"
            )
        near = nearest(typed.upper(), names)
        meant = f"did you mean {near}? " if near else ""
        return f"unknown algorithm {shown(typed)}: {meant}installed are {', '.join(names)}"


def build_plugin_manager(
    selected: SelectedAlgorithm, extensions: Iterable[object] = (), defaults: object | None = None
) -> pluggy.PluginManager:
    """Register the plugins of a run: the core's defaults, the algorithm, the extensions.

    pluggy calls the last registered first, so the defaults answer only what no other does.

    Args:
        extensions: ``Extension``s, or plugin objects. A broken one is left out with a
            ``PluginWarning``.
        defaults: the core's own implementations of the hooks.
    """
    manager = _hook_manager()
    if defaults is not None:
        manager.register(defaults, name=hookspecs.PROJECT)
    manager.register(selected.plugin, name=selected.name)
    for extension in extensions:
        _register_extension(manager, extension)
    manager.check_pending()
    return manager


def register_commands(cli: click.Group, *, extension: Extension) -> None:
    """Let one extension add its commands to the command line, outside a run."""
    manager = _hook_manager()
    _register_extension(manager, extension)
    manager.hook.register_commands(cli=cli)


def register_options(command: click.Command, *, extension: Extension) -> None:
    """Let one extension add its options to a command that runs a model, outside the run."""
    manager = _hook_manager()
    _register_extension(manager, extension)
    manager.hook.register_options(command=command)


def _hook_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _register_extension(manager: pluggy.PluginManager, extension: object) -> None:
    if isinstance(extension, Extension):
        plugin, subject = extension.plugin, extension.entry.subject
    else:
        plugin, subject = extension, f"extension {type(extension).__name__} (a plugin object)"
    problems = examine_extension(plugin, subject)
    if not problems and manager.is_registered(plugin):
        what = "the same object takes part already"
        problems = [Problem(subject, what, "one object an extension", "register it once")]
    if problems:
        _warn(problems[0])
    else:
        manager.register(plugin, name=f"{subject} #{len(manager.get_plugins())}")


def _warn(problem: Problem) -> None:
    warnings.warn(f"left out: {problem}", PluginWarning, stacklevel=3)


def _select_object(plugin: object) -> SelectedAlgorithm:
    """Select an algorithm that is not installed, as in a test or a notebook."""
    entry = AlgorithmEntry(name=_kind(plugin), **_origin(plugin))
    info, problems = examine_algorithm(plugin, entry.subject, None)
    if problems or info is None:
        raise _object_error(problems)
    _warn_if_outdated(info, entry.subject)
    entry = attrs.evolve(entry, name=info.name, summary=info.summary)
    return SelectedAlgorithm(info.name, plugin, info, entry)


def _warn_if_outdated(info: AlgorithmInfo, subject: str) -> None:
    line = outdated(info, subject)
    if line is not None:
        warnings.warn(line, PluginWarning, stacklevel=3)


def _extension_of(plugin: object) -> Extension:
    """Return an extension that is not installed."""
    entry = ExtensionEntry(name=_kind(plugin), **_origin(plugin))
    problems = examine_extension(plugin, entry.subject)
    if not problems and not implemented_hooks(plugin):
        what = f"the {entry.name} object has no hook, so nothing of it would ever be called"
        problems = [
            entry.problem(what, "one method marked @specplug.hookimpl, or more", "write it")
        ]
    if problems:
        raise _object_error(problems)
    return Extension(entry.name, plugin, entry)


def _kind(plugin: object) -> str:
    """Return the name of the class of a plugin object, or of a class that is given as one."""
    return plugin.__name__ if isinstance(plugin, type) else type(plugin).__name__


def _origin(plugin: object) -> dict[str, Any]:
    """Return what an entry says of a plugin object that no distribution has."""
    module = (plugin if isinstance(plugin, type) else type(plugin)).__module__
    place = f"{module}:{_kind(plugin)}"
    return {"value": place, "distribution": "a plugin object", "version": "", "examined": True}


_HOLDERS = {"joint_algorithm": "JointAlgorithm", "several_algorithms": "SeveralAlgorithms"}
"""The core's own algorithms that hold others, by their modules."""


def _join(module: str, *parts: Sequence[Any]) -> SelectedAlgorithm:
    """Select the core's own algorithm that holds others."""
    from specplug import __version__

    place = f"specplug.speculative.{module}", _HOLDERS[module]
    plugin = getattr(import_module(place[0]), place[1])(*parts)
    info: AlgorithmInfo = plugin.describe()
    entry = AlgorithmEntry(
        name=info.name,
        value=":".join(place),
        distribution=hookspecs.PROJECT,
        version=__version__,
        summary=info.summary,
        examined=True,
    )
    return SelectedAlgorithm(info.name, plugin, info, entry)


def _examine_host(plugin: object, entry: HostEntry) -> Iterator[Problem]:
    """Find what a host's object lacks of ``HostPlugin``."""
    methods = [name for name in vars(HostPlugin) if not name.startswith("_")]
    missing = [name for name in methods if not callable(getattr(plugin, name, None))]
    if isinstance(plugin, type) or missing:
        what = f"it has no {', '.join(missing)}()" if missing else "it is a class"
        fix = f"fix it, or tell the author of {entry.distribution}"
        yield entry.problem(what, "an object with the methods of specplug.host.HostPlugin", fix)


def _plugin_error(problems: Iterable[Problem]) -> PluginError:
    first, *more = problems
    count = f" (and {len(more)} more: specplug doctor)" if more else ""
    return PluginError(f"{first}{count}")


def _object_error(problems: Sequence[Problem]) -> PluginError:
    """Return the error of a plugin object: with all that is wrong, since no other command shows
    the rest."""
    first, *more = problems
    return PluginError("; also: ".join([str(first), *(problem.what for problem in more)]))


def _load(entry: PluginEntry, module_name: str, attribute: str) -> tuple[Any, Problem | None]:
    """Import a plugin; return the object or the problem."""
    try:
        plugin: Any = import_module(module_name)
    except BaseException as error:
        let_ctrl_c_pass(error)
        return None, import_failure(entry, module_name, error, plugin_traceback(error))
    for name in filter(None, attribute.split(".")):
        if not hasattr(plugin, name):
            near = nearest(name, vars(plugin)) if hasattr(plugin, "__dict__") else None
            what = f"{getattr(plugin, '__name__', module_name)} has no attribute {name!r}"
            where = f"in the pyproject.toml of {entry.distribution} and install that again"
            fix = f"name {near!r} instead {where}" if near else f"correct the entry point {where}"
            return None, entry.problem(what, f"the plugin object {attribute!r}", fix)
        plugin = getattr(plugin, name)
    return plugin, None
