"""An extension's hooks, each noting an answer and naming a failure."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import wraps
from typing import TYPE_CHECKING, Any

import pluggy

from specplug import hookspecs
from specplug.contract import OBSERVERS, implementations
from specplug.speculative.default_device import default_device, num_modes

if TYPE_CHECKING:
    from specplug.registry import Extension
    from specplug.speculative.plugin_guard import PluginGuard

_OPTIONS = f"{hookspecs.PROJECT}_impl"
"""Where ``hookimpl`` leaves its options."""


class ExtensionFailure(Exception):
    """What an extension raised, on its way out of pluggy."""

    def __init__(self, extension: Extension, error: BaseException) -> None:
        super().__init__(error)
        self.extension = extension
        self.error = error


class ExtensionGuard:
    """An extension's hooks, as pluggy calls them: each notes an answer, and names a failure."""

    def __init__(self, plugins: PluginGuard, extension: Extension) -> None:
        self.extension = extension
        self._plugins = plugins
        self._subject = extension.entry.subject  # put together once, not at each call
        for found in implementations(extension.plugin):
            options = dict(getattr(found.function, _OPTIONS))
            function = found.function
            if options.get("hookwrapper"):
                function = _as_wrapper(function)
                options |= {"hookwrapper": False, "wrapper": True}
            guard = self._wrapper if options.get("wrapper") else self._answer
            # pluggy reads the arguments' names from what is wrapped.
            guarded = wraps(found.function)(guard(found.hook, function))
            setattr(guarded, _OPTIONS, options)
            setattr(self, found.method, guarded)

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the extension's code, as its own."""
        plugins = self._plugins
        before, plugins.caller = plugins.caller, self._subject
        device = default_device() if num_modes() else None
        try:
            return function(*arguments)
        finally:
            if device or num_modes():
                plugins.put_back(device)
            plugins.caller = before

    def _answer(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*arguments: Any) -> Any:
            try:
                result = self._run(function, *arguments)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                return self._fail(hook, error)
            if result is not None:
                self._plugins.answered_by(self._subject)
            return result

        return answer

    def _wrapper(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(*arguments: Any) -> Generator[None, Any, Any]:
            try:
                wrapper = function(*arguments)
                if self._run(next, wrapper, self) is self:
                    raise RuntimeError("the wrapper does not yield")
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._fail(hook, error)
                return (yield)
            received, failure = None, None
            try:
                received = yield
            except BaseException as error:
                failure = error
            try:
                if failure is None:
                    self._run(wrapper.send, received)
                else:
                    self._run(wrapper.throw, failure)
                wrapper.close()
                raise RuntimeError("the wrapper yields twice")
            except StopIteration as done:
                if failure is not None or done.value is not received:
                    self._plugins.answered_by(self._subject)
                return done.value
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if error is failure:
                    failure = None  # its traceback holds this frame
                    raise
                self._fail(hook, error)
            try:
                if failure is not None:
                    raise failure
            finally:
                failure = None
            return received

        return wrap

    def _fail(self, hook: str, error: BaseException) -> None:
        """End the call by an extension's error; where it only looks on, go on without it."""
        if hook not in OBSERVERS:
            raise ExtensionFailure(self.extension, error) from error
        self._plugins.switch_off(self, hook, error)


def _as_wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a hook of pluggy's older kind (``hookwrapper=True``), which changes an outcome that it
    is given, into one that returns the result."""

    def wrap(*arguments: Any) -> Generator[None, Any, Any]:
        wrapper = function(*arguments)
        next(wrapper)
        outcome: pluggy.Result[Any] = pluggy.Result(None, None)
        try:
            outcome.force_result((yield))
        except BaseException as error:
            outcome.force_exception(error)
        try:
            wrapper.send(outcome)
        except StopIteration:
            return outcome.get_result()
        raise RuntimeError("the wrapper yields twice")

    return wrap
