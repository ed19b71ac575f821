"""Check a plugin object against the hooks, and report what is wrong. No torch here.

Each finding is a ``Problem``: one line that names the plugin, what was found, what was expected
and what to do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import pluggy

from specplug import hookspecs
from specplug.algorithm import API_VERSION, OLDEST_API_VERSION, AlgorithmInfo
from specplug.errors import Message

_NOT_THE_PLUGINS = {
    "importlib",
    "importlib._bootstrap",
    "importlib._bootstrap_external",
    "specplug.contract",
    "specplug.registry",
}


_MARK = f"{hookspecs.PROJECT}_spec"
"""Where ``hookspec`` leaves its options."""


def _hook_arguments() -> dict[str, tuple[str, ...]]:
    return {
        name: tuple(inspect.signature(function).parameters)
        for name, function in vars(hookspecs).items()
        if hasattr(function, _MARK)
    }


HOOKS = _hook_arguments()
"""Every hook's name, in the order of ``hookspecs.py``, with its arguments."""

OBSERVERS = tuple(
    name for name in HOOKS if not getattr(getattr(hookspecs, name), _MARK)["firstresult"]
)
"""Hooks that answer nothing: all implementations are called, and a run goes on if one fails."""


class PluginWarning(Message, UserWarning):
    """A plugin was left out because it is broken, or did what the engine has undone."""


@attrs.frozen
class Problem:
    """One thing that is wrong with a plugin. ``str()`` of it is the one-line message.

    Attributes:
        subject: the plugin: name, distribution, version, entry-point value.
        what: what was found; follows ``broken:`` in a listing.
        expected: what was expected.
        fix: what to do.
        traceback: of its cause, from the plugin's own code on; or empty.
    """

    subject: str
    what: str
    expected: str
    fix: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.subject}: {self.what}; expected {self.expected}; {self.fix}"


@attrs.frozen
class Implementation:
    """A method of a plugin marked ``@hookimpl``, and the hook that it is meant for."""

    hook: str
    method: str
    function: Callable[..., Any]
    optional: bool


def implementations(plugin: object) -> list[Implementation]:
    """Find all ``@hookimpl`` methods of ``plugin``, also those that fit no hook."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    found = []
    for name in _methods(plugin):
        options = manager.parse_hookimpl_opts(plugin, name)
        if options is not None:
            hook = options.get("specname") or name
            optional = bool(options.get("optionalhook"))
            found.append(Implementation(hook, name, getattr(plugin, name), optional))
    return found


def implemented_hooks(plugin: object) -> list[str]:
    """List the hooks that ``plugin`` implements, in the order of ``hookspecs.py``."""
    implemented = {implementation.hook for implementation in implementations(plugin)}
    return [hook for hook in HOOKS if hook in implemented]


def examine_algorithm(
    plugin: object, subject: str, name: str | None
) -> tuple[AlgorithmInfo | None, list[Problem]]:
    """Check an algorithm: its hooks and the result of ``describe()``.

    Args:
        subject: the plugin's name in messages.
        name: the entry point's name, which ``describe()`` must have; None if there is none.

    Returns:
        What it declares, or None; and everything that is wrong with it.
    """
    if mistaken := _class_problem(plugin, subject):
        return None, mistaken
    info, described = _description(plugin, subject, name)
    if info is not None and not _takes_api(info.api_version):
        return info, described  # findings by our contract would mislead
    return info, [*_hook_problems(plugin, subject, hookspecs.REQUIRED), *described]


def examine_extension(plugin: object, subject: str) -> list[Problem]:
    """Check an extension: it needs no hook, but those that it has must fit."""
    return _class_problem(plugin, subject) or _hook_problems(plugin, subject, ())


class _NoInfoError(Exception):
    """``describe()`` did not return an ``AlgorithmInfo``; the argument is its result."""


def describe(*, function: Callable[[], object]) -> AlgorithmInfo:
    """Call a plugin's ``describe()``, before the plugin is registered anywhere.

    Args:
        function: the plugin's own.
    """
    info = function()
    if not isinstance(info, AlgorithmInfo):
        raise _NoInfoError(info)
    return info


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Find the name in ``known`` that ``name`` was probably meant to be, or None."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, list(known), n=1, cutoff=0.6)), None)


def let_ctrl_c_pass(error: BaseException) -> None:
    """Raise ``error`` again if it is Ctrl-C itself; a plugin may raise a subclass.

    Raises:
        KeyboardInterrupt: it is.
    """
    if type(error) is KeyboardInterrupt:
        raise error


def error_line(error: BaseException) -> str:
    """Format an exception as one line: its type and the first line of its message."""
    # attrs' validators append the attribute and the value to the message.
    of_attrs = type(error) in (TypeError, ValueError) and len(error.args) > 1
    try:
        said = str(error.args[0] if of_attrs else error).strip()
    except BaseException as another:
        let_ctrl_c_pass(another)
        said = ""
    return f"{type(error).__name__}: {said.splitlines()[0]}" if said else type(error).__name__


def plugin_traceback(error: BaseException) -> str:
    """Format the traceback of ``error`` without the frames of specplug and the import system."""
    import traceback

    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_globals.get("__name__") in _NOT_THE_PLUGINS:
        frame = frame.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frame)).rstrip()
    except BaseException as another:  # its __str__ may raise anything
        let_ctrl_c_pass(another)
        return "".join([*traceback.format_tb(frame), type(error).__name__])


def _methods(plugin: object) -> Iterator[str]:
    for name in dir(plugin):
        # Statically, so that no property of the plugin runs.
        if inspect.isroutine(inspect.getattr_static(plugin, name, None)):
            yield name


def _class_problem(plugin: object, subject: str) -> list[Problem]:
    """Return the problem of a plugin that is a class instead of an instance."""
    if not inspect.isclass(plugin):
        return []
    methods = (inspect.getattr_static(plugin, found.method) for found in implementations(plugin))
    if not any(inspect.isfunction(method) for method in methods):
        return []  # static and class methods need no instance
    name = plugin.__name__
    fix = f"make it an instance, {name}(); an entry point names one as well (algorithm = {name}())"
    return [Problem(subject, f"it is the class {name}", "an object", fix)]


def _hook_problems(plugin: object, subject: str, required: Iterable[str]) -> list[Problem]:
    """Find everything that is wrong with the methods of ``plugin``, the worst first."""
    marked = implementations(plugin)
    fitting = [found for found in marked if found.hook in HOOKS]
    misspelt = [found for found in marked if found.hook not in HOOKS and not found.optional]
    forgotten = [name for name in _methods(plugin) if name in HOOKS and not _is_in(name, marked)]
    told = {found.hook for found in fitting} | set(forgotten)
    told |= {nearest(found.hook, HOOKS) or "" for found in misspelt}
    missing = [hook for hook in required if hook not in told]
    problems = [
        *(_misspelt(subject, found) for found in misspelt),
        *(_forgotten(subject, name) for name in forgotten),
        *([_missing(plugin, subject, missing)] if missing else []),
        *(problem for found in fitting for problem in _argument_problems(subject, found)),
    ]
    return problems or _registration_problem(plugin, subject)


def _is_in(method: str, marked: list[Implementation]) -> bool:
    return any(found.method == method for found in marked)


def _misspelt(subject: str, found: Implementation) -> Problem:
    near = nearest(found.hook, HOOKS)
    return Problem(
        subject,
        f"{found.hook}() is marked @hookimpl, but there is no such hook",
        f"{near}()" if near else f"one of {', '.join(HOOKS)}",
        f"rename it to {near}" if near else "take a hook's name, or take the @hookimpl away",
    )


def _forgotten(subject: str, name: str) -> Problem:
    return Problem(
        subject,
        f"{name}() has a hook's name but no @hookimpl, so it would never be called",
        "@specplug.hookimpl above it",
        "add it, or rename the method if it is not meant as the hook",
    )


def _missing(plugin: object, subject: str, missing: list[str]) -> Problem:
    kind = "module" if inspect.ismodule(plugin) else f"{type(plugin).__name__} object"
    near = {name: nearest(name, missing) for name in _methods(plugin) if name[0] != "_"}
    meant = [f"rename {name}() to {hook}()" for name, hook in near.items() if hook]
    return Problem(
        subject,
        f"the {kind} lacks the required hook{'s' * (len(missing) > 1)} {', '.join(missing)}",
        f"{', '.join(hookspecs.REQUIRED)}, each marked @specplug.hookimpl",
        f"{' and '.join(meant) or 'write what is missing'} (specplug/hookspecs.py says how)",
    )


def _argument_problems(subject: str, found: Implementation) -> Iterator[Problem]:
    """Find arguments that pluggy would not pass: unknown names, defaults, keyword-only ones."""
    has = HOOKS[found.hook]
    expected = f"{found.hook}({', '.join(has)}) or fewer of these"
    for parameter in inspect.signature(found.function).parameters.values():
        name, required = parameter.name, parameter.default is parameter.empty
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name not in has and required:
            near = nearest(name, has)
            yield Problem(
                subject,
                f"{found.method}() takes {name!r}, which the hook does not have",
                expected,
                f"rename it to {near!r}" if near else "take it away",
            )
        elif name in has and (not required or parameter.kind is parameter.KEYWORD_ONLY):
            kind = "is keyword-only" if required else "has a default"
            yield Problem(
                subject,
                f"{found.method}()'s argument {name!r} {kind}, so it would never be passed",
                expected,
                f"make {name!r} a plain argument",
            )


def _registration_problem(plugin: object, subject: str) -> list[Problem]:
    """Find what else pluggy refuses, for example a wrapper that does not yield."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name=subject)
        manager.check_pending()
    except BaseException as error:
        let_ctrl_c_pass(error)
        said = str(error).strip().splitlines() or [type(error).__name__]
        return [
            Problem(subject, f"pluggy refuses it: {said[-1]}", "hooks that it accepts", "fix it")
        ]
    return []


def _description(
    plugin: object, subject: str, name: str | None
) -> tuple[AlgorithmInfo | None, list[Problem]]:
    """Call ``describe()`` if it can be called, and check what it says."""
    found = next((found for found in implementations(plugin) if found.hook == "describe"), None)
    if found is None or any(_argument_problems(subject, found)):
        return None, []  # the checks of the hooks report it
    try:
        info = describe(function=found.function)
    except _NoInfoError as error:
        what = f"describe() returned {_shortened(error.args[0])}"
        fix = "return specplug.AlgorithmInfo(name=…, summary=…, api_version=…)"
        return None, [Problem(subject, what, "a specplug.AlgorithmInfo", fix)]
    except BaseException as error:
        let_ctrl_c_pass(error)
        what = f"describe() raised {error_line(error)}"
        fix = "fix describe(); specplug doctor shows the traceback of an installed plugin"
        return None, [
            Problem(subject, what, "a specplug.AlgorithmInfo", fix, plugin_traceback(error))
        ]
    return info, list(_declaration_problems(info, subject, name))


def _takes_api(version: object) -> bool:
    """Return whether plugins of this API version run."""
    return isinstance(version, int) and OLDEST_API_VERSION <= version <= API_VERSION


def outdated(info: AlgorithmInfo, subject: str) -> str | None:
    """Return a line about a plugin that runs, though it was built for an older API version; None
    if it was not."""
    if not _takes_api(info.api_version) or info.api_version == API_VERSION:
        return None
    return (
        f"{subject} was built for API version {info.api_version}, which a later specplug will not "
        f"take; expected {API_VERSION}; upgrade the plugin (pip install --upgrade …)"
    )


def _shortened(value: object) -> str:
    said = " ".join(repr(value).split())
    return f"{type(value).__name__} {said[:57] + '…' if len(said) > 60 else said}"


def _declaration_problems(info: AlgorithmInfo, subject: str, name: str | None) -> Iterator[Problem]:
    if not _takes_api(info.api_version):
        oldest, newest = OLDEST_API_VERSION, API_VERSION
        newer = isinstance(info.api_version, int) and info.api_version > newest
        yield Problem(
            subject,
            f"it was built for API version {info.api_version!r}",
            f"API version {newest}, which this specplug has"
            if oldest == newest
            else f"API version {oldest} to {newest}, which this specplug takes",
            f"upgrade {'specplug' if newer else 'the plugin'} (pip install --upgrade …)"
            + (f", or declare api_version={newest} in describe()" if name is None else ""),
        )
    if name is not None and info.name != name:
        yield Problem(
            subject,
            f"describe() gives the name {info.name!r}",
            f"{name!r}, the entry point's name",
            "make the two equal in the plugin's describe() and pyproject.toml",
        )
