"""Which plugin's code runs, as another thread would ask."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from specplug import AlgorithmInfo, Defaults, hookimpl
from specplug.entries import ExtensionEntry
from specplug.registry import Extension, Registry, build_plugin_manager
from specplug.speculative.defaults import CoreDefaults
from specplug.speculative.plugin_guard import PluginGuard


class Asking:
    """An algorithm that asks in its hook."""

    guard: PluginGuard

    def __init__(self) -> None:
        self.found: list[str | None] = []

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        defaults = Defaults(num_steps=1)
        return AlgorithmInfo(name="A", summary="Asks", api_version=1, defaults=defaults)

    @hookimpl
    def create_worker(self, runtime: Any) -> Any:
        return self

    @hookimpl
    def build_draft_input(self) -> None:
        self.guard.guard("A.inner", self._ask)
        self._ask()

    @hookimpl
    def propose(self) -> None:
        self._ask()

    def _ask(self) -> None:
        self.found.append(self.guard.running)


class Wrapping:
    """An extension around one hook."""

    @hookimpl(wrapper=True)
    def propose(self) -> Generator[None, Any, Any]:
        return (yield)


def test_running_names_the_plugin_the_hook_and_extensions() -> None:
    plugin = Asking()
    selected = Registry().select(plugin)
    entry = ExtensionEntry(name="TRACE", value="own:it", distribution="of-trace", version="1.0")
    extensions = [Extension("TRACE", Wrapping(), entry)]
    manager = build_plugin_manager(selected, extensions, CoreDefaults())
    plugin.guard = guard = PluginGuard(manager, selected, extensions)
    assert guard.running is None
    unused = dict.fromkeys(("runtime", "batch", "draft_input", "target_output", "future_map"))
    guard.call("build_draft_input", **unused)
    guard.call("propose", **unused)
    assert guard.running is None
    subject = selected.entry.subject
    assert plugin.found == [
        f"{subject}: A.inner()",
        f"{subject}: build_draft_input()",
        f"{subject}: propose(), or that of extension TRACE (of-trace 1.0, own:it)",
    ]
