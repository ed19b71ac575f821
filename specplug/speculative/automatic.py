"""``auto``: which of the installed algorithms run together, by what they declare. No torch here.

All that need no draft model take part, since they cost little where they do not draft; but none
that drafts with the target's own layers, whose passes pay in long contexts alone. Each draft model
takes memory, and is fed what it has missed before it drafts; so only one takes part, the one with
the greatest speed-up that is declared for the target (``AlgorithmInfo.speed_ups``).
docs/choice.md has the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from specplug.algorithm import SpecConfig, find_model, shipped_name
from specplug.algorithm_names import AUTO, is_auto
from specplug.config import EngineConfig
from specplug.contract import implemented_hooks
from specplug.errors import SpecplugError, UsageError, shown
from specplug.hookspecs import PROJECT
from specplug.host import HostCapabilities
from specplug.registry import AlgorithmEntry, Registry, SelectedAlgorithm
from specplug.speculative.held_parts import validated_part

_SHAPES = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_draft_model_path",
)


@attrs.frozen
class AutomaticChoice:
    """What ``auto`` stands for in a run.

    Attributes:
        chosen: those that take part, one with a draft model the last.
        left_out: why the others do not, by name.
    """

    chosen: tuple[SelectedAlgorithm, ...]
    left_out: Mapping[str, str]

    @property
    def line(self) -> str:
        """What was chosen, and why the others were not."""
        names = ",".join(each.name for each in self.chosen) or "no algorithm"
        others = "; ".join(f"{name}: {why}" for name, why in self.left_out.items())
        return f"{AUTO} is {names}" + (f"; left out are {others}" if others else "")

    def selected(self, registry: Registry) -> SelectedAlgorithm:
        """Return them as one algorithm; the core's own, which drafts nothing, if there are none."""
        if self.chosen:
            return registry.select(self.chosen)
        return registry.select(next(e.name for e in registry.entries() if _is_of_core(e)))


def select_algorithm(
    registry: Registry,
    config: EngineConfig,
    target_config: Mapping[str, Any] | None = None,
    host: HostCapabilities | None = None,
) -> tuple[SelectedAlgorithm, AutomaticChoice | None]:
    """Return the algorithm of a run with these settings, and what ``auto`` stands for, if it is
    that.

    Args:
        target_config: the target's ``config.json``; None: algorithms are judged without it.
        host: what the engine gives; None: the embedded one, which gives all.

    Raises:
        UnknownAlgorithm: none of that name is installed.
        PluginError: it is broken.
        UsageError: it cannot run with these settings.
    """
    if not is_auto(config.speculative_algorithm):
        return registry.select(config.speculative_algorithm), None
    if host is not None and not host.parts:
        raise UsageError(
            f"speculative_algorithm={AUTO!r}: {host.name} runs one algorithm alone; expected the "
            f"name of one (specplug info {AUTO} shows which promises most)"
        )
    for name in _SHAPES:
        value = getattr(config, name)
        if value is not None:
            raise UsageError(
                f"{name}={shown(value)}: {AUTO} chooses the algorithms and their settings; "
                "expected it by name, as in A,B:steps=5,draft=FOLDER"
            )
    choice = choose_algorithms(
        registry,
        config.model,
        target_config=target_config,
        settings=config.speculative_settings,
        host=host,
    )
    return choice.selected(registry), choice


def choose_algorithms(
    registry: Registry,
    model: str | Path | None,
    *,
    target_config: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    host: HostCapabilities | None = None,
) -> AutomaticChoice:
    """Return what ``auto`` stands for.

    Args:
        model: the target's name or folder; None: the default model.
        target_config: its ``config.json``.
        settings: the algorithms' own, by name.
        host: what the engine gives; None: the embedded one, which gives all.
    """
    path = find_model(model)
    able: list[SelectedAlgorithm] = []
    left_out: dict[str, str] = {}
    for entry in registry.entries():
        if _is_of_core(entry):
            continue
        try:
            selected = _working(registry, entry)
            _check_shares_a_run(selected, path, host)
            given = {k: v for k, v in (settings or {}).items() if k in selected.info.setting_names}
            validated_part(
                selected,
                SpecConfig.resolve(
                    selected.info, model_name=path, target_config=target_config, settings=given
                ),
            )
        except SpecplugError as error:
            left_out[entry.name] = str(error)
        else:
            able.append(selected)
    name = shipped_name(path)
    drafting = [each for each in able if each.info.capabilities.draft_model]
    drafting.sort(key=lambda each: each.info.speed_ups.get(name, 0.0), reverse=True)
    for each in drafting[1:]:
        left_out[each.name] = _told(each, drafting[0], name)
    light = [each for each in able if not each.info.capabilities.draft_model]
    return AutomaticChoice((*light, *drafting[:1]), dict(sorted(left_out.items())))


def _working(registry: Registry, entry: AlgorithmEntry) -> SelectedAlgorithm:
    """Return an installed algorithm.

    Raises:
        UsageError: it is disabled or broken.
    """
    status = entry.status if entry.disabled or entry.problems else ""
    if not status:
        examined = registry.examine(entry)
        if examined.info is not None and not examined.entry.problems:
            return SelectedAlgorithm(entry.name, examined.plugin, examined.info, examined.entry)
        status = examined.entry.status
    raise UsageError(status)


def _check_shares_a_run(
    selected: SelectedAlgorithm, path: str, host: HostCapabilities | None
) -> None:
    """Refuse an algorithm that cannot run beside others, or has no weights.

    Raises:
        UsageError: it is one.
    """
    info, able = selected.info, selected.info.capabilities
    if able.draft_model:
        weights = info.weights.get(shipped_name(path))
        if weights is None or not Path(weights).is_dir():
            raise UsageError(f"no draft weights for {shipped_name(path)}")
    if "verify" in implemented_hooks(selected.plugin):
        raise UsageError("it has a verify() of its own, so it runs alone")
    if able.target_drafts:
        raise UsageError("it drafts with the target's own layers, which pays in long contexts")
    for feature in ("overlap", "prefix_cache"):
        if not getattr(able, feature):
            raise UsageError(f"it would turn {feature} off for the others")
    for obstacle in () if host is None else host.obstacles(info):
        raise UsageError(obstacle)


def _told(one: SelectedAlgorithm, best: SelectedAlgorithm, model: str) -> str:
    """Say why another draft model than this one takes part."""
    own, other = (each.info.speed_ups.get(model) for each in (one, best))
    if own is None:
        return f"it declares no speed-up for {model}, and one draft model is enough: {best.name}"
    return f"its speed-up of {own:.2f} is not more than the {other:.2f} of {best.name}"


def _is_of_core(entry: AlgorithmEntry) -> bool:
    return entry.distribution == PROJECT
