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
    """An extension around one hook, which asks before it and after it."""

    guard: PluginGuard

    def __init__(self, found: list[str | None]) -> None:
        self.found = found

    @hookimpl(wrapper=True)
    def propose(self) -> Generator[None, Any, Any]:
        self.found.append(self.guard.running)
        result = yield
        self.found.append(self.guard.running)
        return result


def test_running_names_the_plugin_and_the_hook() -> None:
    plugin = Asking()
    selected = Registry().select(plugin)
    entry = ExtensionEntry(name="TRACE", value="own:it", distribution="of-trace", version="1.0")
    wrapping = Wrapping(plugin.found)
    extensions = [Extension("TRACE", wrapping, entry)]
    manager = build_plugin_manager(selected, extensions, CoreDefaults())
    plugin.guard = wrapping.guard = guard = PluginGuard(manager, selected, extensions)
    assert guard.running is None
    unused = dict.fromkeys(("runtime", "batch", "draft_input", "target_output", "future_map"))
    guard.call("build_draft_input", **unused)
    guard.call("propose", **unused)
    assert guard.running is None
    subject = selected.entry.subject
    assert plugin.found == [
        f"{subject}: A.inner()",
        f"{subject}: build_draft_input()",
        "extension TRACE (of-trace 1.0, own:it): propose()",
        f"{subject}: propose()",
        "extension TRACE (of-trace 1.0, own:it): propose()",
    ]
