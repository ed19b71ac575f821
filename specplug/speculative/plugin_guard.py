"""Calls the code of plugins: what it raises becomes an error that names the plugin."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

import pluggy
import torch

from specplug import hookspecs
from specplug.contract import HOOKS, PluginWarning, error_line
from specplug.errors import InstanceError, PluginError, SpecplugError
from specplug.registry import Extension, SelectedAlgorithm
from specplug.speculative.default_device import default_device, num_modes
from specplug.speculative.extension_guard import ExtensionFailure, ExtensionGuard

Result = TypeVar("Result")

_BEFORE_THE_RUN = ("validate_config", "create_worker", "create_future_map", "create_trainer")
"""Hooks that may refuse the user's settings or files, by specplug's own errors."""

_FIX = "fix the plugin, or tell its author (SPECPLUG_DEBUG=1 shows the traceback)"


class PluginGuard:
    """The plugins of one run.

    Args:
        manager: the run's plugins; see ``specplug.registry.build_plugin_manager``. Its extensions
            are registered anew, so that their failures bear their names.
        algorithm: of the run.
        extensions: those that the manager was built with.

    Attributes:
        core_alone: hooks that only the core's defaults implement.
        caller: the plugin whose code runs while a hook is called, as messages name it: the
            algorithm, unless an extension's own runs.
    """

    def __init__(
        self,
        manager: pluggy.PluginManager,
        algorithm: SelectedAlgorithm,
        extensions: Iterable[Extension],
    ) -> None:
        self._manager = manager
        self._hooks = manager.hook
        self._subject = self.caller = algorithm.entry.subject
        self._answered: str | None = None
        self._running: str | None = None
        """The hook or method that is called now."""
        self._states: dict[str, tuple[Extension, str]] = {}
        for extension in extensions:
            name = manager.get_name(extension.plugin)
            if name is not None:  # else it was left out
                manager.unregister(extension.plugin)
                manager.register(ExtensionGuard(self, extension), name=name)
                self._states[name] = extension, "on"
        self.core_alone = self._find_core_alone()

    @property
    def extensions(self) -> list[dict[str, str]]:
        """The extensions of the run: name, distribution, version, and "state", which is "on", or
        "off: " and why."""
        return [
            {
                "name": extension.name,
                "distribution": extension.entry.distribution,
                "version": extension.entry.version,
                "state": state,
            }
            for extension, state in self._states.values()
        ]

    @property
    def running(self) -> str | None:
        """The plugin and the hook or method of it that is called now, as messages name them; None
        if there is none. May be asked by another thread."""
        what = self._running
        if what is None or what in self.core_alone:
            return None
        return f"{self.caller}: {what}()"

    def _find_core_alone(self) -> frozenset[str]:
        core = self._manager.get_plugin(hookspecs.PROJECT)
        callers = {hook: getattr(self._hooks, hook).get_hookimpls() for hook in HOOKS}
        return frozenset(h for h, found in callers.items() if all(i.plugin is core for i in found))

    def only_caller(self, hook: str) -> object | None:
        """Return the plugin that alone implements a hook, but for the core's default; None: there
        is none, there are several, or it is a wrapper."""
        core = self._manager.get_plugin(hookspecs.PROJECT)
        found = [i for i in getattr(self._hooks, hook).get_hookimpls() if i.plugin is not core]
        if len(found) != 1 or found[0].wrapper or found[0].hookwrapper:
            return None
        plugin: object = found[0].plugin
        return plugin.extension.plugin if isinstance(plugin, ExtensionGuard) else plugin

    def takes(self, argument: str) -> bool:
        """Return whether a plugin takes an argument of this name in any hook."""
        core = self._manager.get_plugin(hookspecs.PROJECT)
        callers = (impl for hook in HOOKS for impl in getattr(self._hooks, hook).get_hookimpls())
        return any(argument in impl.argnames for impl in callers if impl.plugin is not core)

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call a hook of all plugins.

        Raises:
            PluginError: a plugin raised; or what it raised, where the hook may refuse settings.
        """
        self._answered = None
        return self.guard(hook, getattr(self._hooks, hook), **arguments)

    def guard(
        self, what: str, function: Callable[..., Result], *positional: Any, **named: Any
    ) -> Result:
        """Call a plugin's code. Whatever it raises but Ctrl-C becomes a ``PluginError``: its
        SystemExit must not pass for the end of a process that did all it had to.

        Args:
            what: the hook or method that is called, for the message.
        """
        before, self._running = self._running, what
        device = default_device() if num_modes() else None
        try:
            return function(*positional, **named)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:
            # No name here may hold the error, whose traceback holds this frame: what a failed
            # step has used is freed with it, without the garbage collector.
            if isinstance(raised, ExtensionFailure):
                if _is_told(what, raised.error):
                    raise raised.error from None
                raise PluginError(self._told(what, raised)) from raised.error
            if _is_told(what, raised):
                raise
            raise PluginError(self._told(what, raised)) from raised
        finally:
            if device or num_modes():
                self.put_back(device)
            self._running = before

    def put_back(self, device: torch.device | None) -> None:
        """Make this torch's default device again, if the plugin that runs has changed it, and tell
        so."""
        found = default_device()
        if found == device:
            return
        torch.set_default_device(device)
        warnings.warn(
            f"{self.caller}: {self._running}() set torch's default device to {found}; expected it "
            "unchanged, and it is put back; give device= where a tensor is made",
            PluginWarning,
            stacklevel=3,
        )

    def bound(self) -> Callable[..., Any]:
        """Return ``guard`` for code of the plugin that runs now, which is called later."""
        caller = self.caller

        def guard(what: str, function: Callable[..., Result], *positional: Any) -> Result:
            before, self.caller = self.caller, caller
            try:
                return self.guard(what, function, *positional)
            finally:
                self.caller = before

        return guard

    def _told(self, what: str, raised: BaseException) -> str:
        if isinstance(raised, ExtensionFailure):
            return _failure(raised.extension.entry.subject, what, raised.error)
        return _failure(self.caller, what, raised)

    def refuse(
        self, what: str, found: str, expected: str = "", fix: str = "fix the plugin"
    ) -> NoReturn:
        """Raise a ``PluginError``: the plugin that answered last returned what it must not."""
        subject = self._answered or self._subject
        expectation = f"; expected {expected}" if expected else ""
        raise PluginError(f"{subject}: {what}() {found}{expectation}; {fix}")

    def answered_by(self, subject: str) -> None:
        """Note that an extension, as messages name it, has answered a hook, or changed the
        answer."""
        self._answered = subject

    def switch_off(self, guard: ExtensionGuard, hook: str, error: BaseException) -> None:
        """Go on without an extension that failed to look on."""
        name = self._manager.get_name(guard)
        if name is None:
            return  # it has failed before in the same call
        self._manager.unregister(guard)
        self.core_alone = self._find_core_alone()
        extension = guard.extension
        self._states[name] = extension, f"off: {hook}() raised {error_line(error)}"
        told = _failure(extension.entry.subject, hook, error)
        warnings.warn(f"switched off: {told}", PluginWarning, stacklevel=2)


def _is_told(what: str, error: BaseException) -> bool:
    """Return whether an error is not the plugin's own failure, and is told as it is."""
    refuses = isinstance(error, SpecplugError) and not isinstance(error, PluginError)
    return isinstance(error, InstanceError) or (refuses and what in _BEFORE_THE_RUN)


def _failure(subject: str, what: str, error: BaseException) -> str:
    if isinstance(error, PluginError) and str(error).startswith(f"{subject}: "):
        return str(error)
    if isinstance(error, PluginError):  # of the runtime, which knows no names
        return f"{subject}: {what}(): {error}"
    return f"{subject}: {what}() raised {error_line(error)}; expected it to return; {_FIX}"
