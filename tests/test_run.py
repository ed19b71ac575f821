"""A run's parts get what its settings say, and it says what is on and why the rest is not."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

import specplug
from specplug import LLM, AlgorithmInfo, Capabilities, SpecConfig
from specplug.config import EngineConfig
from specplug.distributed.rank_group import join_ranks
from specplug.engine.cuda_graphs import CudaGraphs
from specplug.engine.scheduler import SchedulerConfig
from specplug.errors import FallbackWarning
from specplug.model.checkpoint import read_config
from specplug.run import features_of

PACKAGE = Path(specplug.__file__).parent
INFO = AlgorithmInfo(name="A", summary="Any", api_version=1)
SPEC = SpecConfig.resolve(INFO, num_steps=3, num_draft_tokens=5)


CHECKED_ALONE = {"enable_dp_attention"}
"""Settings that say what others may be, and no more."""


class NotedConfig(EngineConfig):
    """Notes the settings that the product reads, besides the checks of ``EngineConfig`` itself."""

    reads: set[str]

    def __getattribute__(self, name: str) -> Any:
        file = Path(sys._getframe(1).f_code.co_filename)
        if file.is_relative_to(PACKAGE) and file.name not in ("config.py", "settings.py"):
            NotedConfig.reads.add(name)
        return super().__getattribute__(name)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The settings that the product has read."""
    found: set[str] = set()
    monkeypatch.setattr(NotedConfig, "reads", found, raising=False)
    return found


def test_settings_are_all_handed_to_a_part(
    reads: set[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start reads each of them: of one engine, of two instances, of a rank, and on a GPU."""
    given: dict[str, Any] = {"model": tiny_model, "device": "cpu", "draft_choice": "measured"}
    for disaggregation in (None, "both"):
        LLM(NotedConfig(**given, disaggregation=disaggregation)).close()
    monkeypatch.setattr("specplug.distributed.rank_group.RankGroup", lambda *_, **__: None)
    address = {"dp_address": "127.0.0.1:1", "enable_dp_attention": True}
    join_ranks(NotedConfig(dp_size=2, **address), torch.device("cpu"), {})
    runner: Any = SimpleNamespace(target=SimpleNamespace(device=torch.device("cuda")))
    CudaGraphs(NotedConfig(disable_cuda_graph=True), runner)
    assert attrs.fields_dict(EngineConfig).keys() - reads == CHECKED_ALONE


@pytest.mark.parametrize("algorithm", ["NONE", "auto"])
def test_start_reads_the_targets_configuration_once(
    algorithm: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(path: str) -> Any:
        read.append(path)
        return read_config(path)

    monkeypatch.setattr("specplug.model.loading.read_config", counted)
    LLM(tiny_model, device="cpu", speculative_algorithm=algorithm).close()
    assert read == [str(tiny_model)]


def test_limits_all_reach_the_scheduler() -> None:
    """A limit that ``of_run`` forgets would keep its default."""
    given: Any = SchedulerConfig.of_run.__func__(dict, EngineConfig(), SPEC, overlap=True)
    assert given.keys() == attrs.fields_dict(SchedulerConfig).keys()


def test_what_nothing_turns_off_is_on() -> None:
    assert features_of(EngineConfig(), INFO) == {"overlap": "on", "prefix_cache": "on"}


@pytest.mark.parametrize("able", [True, False])
@pytest.mark.parametrize(
    ("setting", "name"),
    [("disable_overlap_schedule", "overlap"), ("disable_radix_cache", "prefix_cache")],
)
def test_what_a_setting_turns_off_is_not_warned_of(setting: str, name: str, able: bool) -> None:
    info = attrs.evolve(INFO, capabilities=Capabilities(**{name: able}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        features = features_of(EngineConfig(**{setting: True}), info)
    other = ({"overlap", "prefix_cache"} - {name}).pop()
    assert features == {name: f"off: {setting}", other: "on"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("overlap", "A drafts from what the host has read"),
        ("prefix_cache", "A must itself see every token that it drafts after"),
    ],
)
def test_what_an_algorithm_turns_off_is_warned_of(name: str, reason: str) -> None:
    info = attrs.evolve(INFO, capabilities=Capabilities(**{name: False}))
    with pytest.warns(FallbackWarning) as caught:
        features = features_of(EngineConfig(), info)
    assert features[name] == f"off: {reason}"
    assert [str(warning.message) for warning in caught] == [f"{name} is off: {reason}"]
