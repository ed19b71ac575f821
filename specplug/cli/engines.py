"""``--engine NAME``: what commands that run another engine share. No torch here."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import attrs
import click

from specplug.algorithm import SpecConfig, find_model
from specplug.cli.options import check_speculation, is_typed
from specplug.config import EngineConfig
from specplug.contract import implemented_hooks
from specplug.errors import UsageError
from specplug.host import HostPlugin, RunOptions
from specplug.registry import SelectedAlgorithm

MORE = click.Argument(["more"], nargs=-1, type=click.UNPROCESSED)
"""The other engine's own arguments, after ``--``."""

TOLD = frozenset(
    {
        "engine",
        "more",
        "model",
        "dtype",
        "speculative_draft_model_path",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
    }
)
"""The options of these commands that have a meaning in every engine."""


def check_options(ctx: click.Context, engine: str | None, told: Collection[str]) -> None:
    """Refuse options that the engine knows nothing of.

    Args:
        engine: its name; None: the embedded one, which takes no further arguments.
        told: names of options that any engine is told, besides ``TOLD``.

    Raises:
        UsageError: one was typed.
    """
    more = ctx.params["more"]
    if engine is None:
        if more:
            raise click.UsageError(f"Got unexpected extra argument ({' '.join(more)})")
        return
    refused = [
        option.opts[0]
        for option in ctx.command.params
        if option.name not in TOLD and option.name not in told and is_typed(ctx, option.name or "")
    ]
    if refused:
        raise UsageError(
            f"{', '.join(refused)}: an option of the embedded engine; expected {engine}'s own "
            f"options, after '--': specplug {ctx.info_name} --engine {engine} -- …"
        )


def check_run(host: HostPlugin, selected: SelectedAlgorithm, config: EngineConfig) -> None:
    """Refuse an algorithm or settings that an engine cannot run.

    Raises:
        UsageError: it cannot.
    """
    check_speculation(selected.info, config)
    host.describe().check(
        selected.info,
        SpecConfig(algorithm=selected.name, topk=_topk(selected, config)),
        own_verify="verify" in implemented_hooks(selected.plugin),
    )


def run_options(config: EngineConfig, algorithm: str, more: Collection[str]) -> dict[str, Any]:
    """Return the fields of ``RunOptions`` for a run with these settings."""
    draft = config.speculative_draft_model_path
    options = RunOptions(
        model=find_model(config.model),
        algorithm=algorithm,
        num_steps=config.speculative_num_steps,
        topk=config.speculative_eagle_topk,
        num_draft_tokens=config.speculative_num_draft_tokens,
        draft_model_path=None if draft is None else Path(draft).expanduser(),
        dtype=str(config.dtype),
        settings=config.speculative_settings or {},
        more=tuple(more),
    )
    return attrs.asdict(options, recurse=False)


def _topk(selected: SelectedAlgorithm, config: EngineConfig) -> int:
    typed = config.speculative_eagle_topk
    return selected.info.defaults.topk if typed is None else typed
