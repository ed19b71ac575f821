"""The runtime as hooks get it: what ``Runtime`` names, to use and not to change."""

from __future__ import annotations

from operator import attrgetter
from typing import NoReturn

from specplug.errors import PluginError
from specplug.speculative.output_kind import AddedOutput, PerTokenOutput
from specplug.speculative.plugin_guard import PluginGuard
from specplug.speculative.runtime import Runtime

MEMBERS = frozenset(
    {*Runtime.__annotations__, *(name for name in vars(Runtime) if not name.startswith("_"))}
)
"""Names of all that ``Runtime`` promises."""


class LentRuntime:
    """A host's runtime, as every host lends it: its members are those of ``Runtime``, and nothing
    can be set. So what the host itself reads of its runtime is what it has put there.

    Args:
        runtime: the host's own.
        plugins: of the run.
    """

    __slots__ = ("__weakref__", "_plugins", "_runtime")

    _plugins: PluginGuard
    _runtime: Runtime

    def __init__(self, runtime: Runtime, plugins: PluginGuard) -> None:
        object.__setattr__(self, "_runtime", runtime)
        object.__setattr__(self, "_plugins", plugins)

    def add_output(self, output: PerTokenOutput) -> None:
        """Add an output as that of the plugin which runs now; see ``Runtime``."""
        if isinstance(output, PerTokenOutput):  # the host refuses anything else
            output = AddedOutput.of(output, self._plugins.caller, self._plugins.bound())
        self._runtime.add_output(output)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        _refuse("set", name)

    def __delattr__(self, name: str) -> NoReturn:
        _refuse("deleted", name)


def _refuse(what: str, name: str) -> NoReturn:
    raise PluginError(
        f"runtime.{name} was {what}; expected the runtime to be read alone; keep what is the "
        "plugin's in its worker, and change the run's settings in validate_config()"
    )


for _member in MEMBERS - vars(LentRuntime).keys():
    setattr(LentRuntime, _member, property(attrgetter(f"_runtime.{_member}")))
