"""The start of an algorithm: found, checked, configured and given a worker, in one order for all
hosts::

    start_algorithm            select -> resolve -> validate_config -> the host's check
    (the host)                 loads the target, makes its runtime
    draft_verifies             supports_target_verify_for_draft
    create_worker              create_worker -> seal
    (the host)                 makes the KV pools
    begin                      create_future_map -> HookOrder
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import attrs

from specplug.algorithm import AlgorithmInfo, SpecConfig
from specplug.errors import warn_fallback
from specplug.host import HostCapabilities
from specplug.registry import Registry, build_plugin_manager
from specplug.speculative.defaults import CoreDefaults
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.hook_order import HookOrder
from specplug.speculative.runtime import Runtime

C = TypeVar("C", bound=HookCalls)


class HostRuntime(Runtime, Protocol):
    """A ``Runtime`` as its host has it; ``RuntimeBase`` has this part of it."""

    def seal(self) -> None:
        """Refuse further captures, caches, outputs and passes: the worker has been made."""


@attrs.frozen(eq=False, kw_only=True, slots=False)
class StartedAlgorithm(Generic[C]):
    """The algorithm of a run, whose settings are final.

    Attributes:
        info: what it declares.
        hooks: of all the plugins of the run.
        config: the settings, as the algorithm takes them.
    """

    info: AlgorithmInfo
    hooks: C
    config: SpecConfig

    @cached_property
    def draft_verifies(self) -> bool:
        """Whether the draft's pass has the shape of a target verify, as
        ``supports_target_verify_for_draft`` says. The hook is asked when a host that makes a worker
        reads this first: a host may start an algorithm for its settings alone."""
        return self.hooks.supports_target_verify_for_draft()

    def create_worker(self, runtime: HostRuntime) -> None:
        """Make the worker: it loads its weights, and asks ``runtime`` for captures, outputs and KV.

        Args:
            runtime: a host's ``Runtime``. It gets the worker, and refuses further wishes.

        Raises:
            SpecplugError: the algorithm refuses the settings or its checkpoint, or needs more than
                the host gives.
        """
        runtime.worker = self.hooks.create_worker(runtime)
        runtime.seal()

    def begin(self, runtime: Runtime) -> HookOrder:
        """Return the order of hooks, with the algorithm's future map. ``runtime.req_table_size`` is
        final by now."""
        return HookOrder(runtime, self.hooks, self.hooks.create_future_map(runtime))


def start_algorithm(
    algorithm: str | object,
    resolve: Callable[[AlgorithmInfo], SpecConfig],
    *,
    host: HostCapabilities,
    disable_extensions: Iterable[str] = (),
    extensions: Iterable[object] = (),
    calls: type[C],
    tell: Callable[[str], None] = warn_fallback,
) -> StartedAlgorithm[C]:
    """Find an algorithm and the run's extensions, and settle its configuration.

    Args:
        algorithm: a name as users type it, or a plugin object.
        resolve: returns what the user typed over the algorithm's defaults (``SpecConfig.resolve``).
        host: what the host gives.
        disable_extensions: names of installed extensions that take no part.
        extensions: plugin objects that take part beside the installed ones.
        calls: the class that calls the hooks, ``HookCalls`` or a host's own.
        tell: gets a line for each setting that the algorithm has adjusted.

    Raises:
        UnknownAlgorithm: nothing of that name is installed.
        PluginError: the plugin is broken.
        UsageError: the algorithm refuses a setting, or needs what the host does not give.
    """
    registry = Registry()
    selected = registry.select(algorithm)
    active = registry.extensions(disable_extensions, extensions)
    hooks = calls(build_plugin_manager(selected, active, CoreDefaults()), selected, active)
    config = hooks.validate_config(resolve(selected.info))
    host.check(selected.info, config, own_verify=not hooks.core_verifies)
    for adjustment in config.adjustments:
        tell(f"{config.algorithm}: {adjustment}")
    return StartedAlgorithm(info=selected.info, hooks=hooks, config=config)
