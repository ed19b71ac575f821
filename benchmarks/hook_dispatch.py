"""What the dispatch of a decode step's hooks takes on the host, with extensions and without.

    python benchmarks/hook_dispatch.py [--extensions 3] [--rounds 30] [--limit-us 20]

A step calls ``propose``, ``verify``, ``build_draft_input`` and ``on_step``. They return at once
what was made before, so the time is that of the calls: pluggy's, the guard's of plugins, and the
extensions'. Each extension has ``on_step`` and ``on_request_finished`` and wraps ``propose``, as
one that traces does. Plain calls of the same functions are measured in turns with it. Times are
of the thread's processor. Exits with 1 if the median with extensions is over the limit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from measurement import in_turns, quartiles, table

from specplug import AlgorithmInfo, hookimpl
from specplug.registry import Registry, build_plugin_manager
from specplug.speculative.defaults import CoreDefaults
from specplug.speculative.plugin_guard import PluginGuard

STEPS = 2000


class Answers:
    """An algorithm whose hooks return at once."""

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(name="ANSWERS", summary="Answers at once", api_version=1)

    @hookimpl
    def create_worker(self, runtime: Any) -> object:
        return self

    @hookimpl
    def propose(self, runtime: Any, batch: Any, draft_input: Any) -> object:
        return draft_input

    @hookimpl
    def verify(self, runtime: Any, batch: Any, draft: Any, target_output: Any) -> object:
        return draft

    @hookimpl
    def build_draft_input(
        self, runtime: Any, batch: Any, target_output: Any, future_map: Any
    ) -> object:
        return target_output


class Tracer:
    """An extension that looks on, and wraps a hook."""

    @hookimpl(wrapper=True)
    def propose(self) -> Any:
        return (yield)

    @hookimpl
    def on_step(self, runtime: Any, report: Any) -> None:
        pass

    @hookimpl
    def on_request_finished(self, runtime: Any, report: Any) -> None:
        pass


def microseconds(step: Callable[[], object]) -> float:
    """Return the time of a step, the mean of many."""
    begin = time.thread_time()
    for _ in range(STEPS):
        step()
    return (time.thread_time() - begin) / STEPS * 1e6


def plain() -> Callable[[], object]:
    """Return the calls of a step without plugins."""
    own, it = Answers(), object()

    def step() -> None:
        own.propose(it, it, it)
        own.verify(it, it, it, it)
        own.build_draft_input(it, it, it, it)

    return step


def dispatched(count: int) -> Callable[[], object]:
    """Return the calls of a step with so many extensions."""
    registry = Registry()
    selected = registry.select(Answers())
    extensions = registry.extensions(
        [each.name for each in registry.extension_entries()], [Tracer() for _ in range(count)]
    )
    assert len(extensions) == count
    guard = PluginGuard(
        build_plugin_manager(selected, extensions, CoreDefaults()), selected, extensions
    )
    it = object()

    def step() -> None:
        guard.call("propose", runtime=it, batch=it, draft_input=it)
        guard.call("verify", runtime=it, batch=it, draft=it, target_output=it)
        guard.call("build_draft_input", runtime=it, batch=it, target_output=it, future_map=it)
        guard.call("on_step", runtime=it, report=it)

    return step


def main() -> int:
    """Measure in turns, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--extensions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--limit-us", type=float, default=20)
    options = parser.parse_args()
    steps = {"functions": plain(), "no extension": dispatched(0)}
    most = f"{options.extensions} extensions"
    steps[most] = dispatched(options.extensions)
    calls = {name: (lambda step=step: microseconds(step)) for name, step in steps.items()}
    found = in_turns(calls, options.rounds)
    rows = []
    for name, times in found.items():
        low, middle, high = quartiles(times)
        rows.append((name, f"{middle:.2f}", f"{low:.2f}–{high:.2f}"))
    print(table(("a step's hooks", "µs, median", "quartiles"), rows), end="")
    return int(quartiles(found[most])[1] > options.limit_us)


if __name__ == "__main__":
    raise SystemExit(main())
