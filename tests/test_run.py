"""A run's parts get what its settings say, and it says what is on and why the rest is not."""

from __future__ import annotations

import warnings

import attrs
import pytest

from specplug import AlgorithmInfo, Capabilities, SpecConfig
from specplug.config import EngineConfig
from specplug.engine.scheduler import SchedulerConfig
from specplug.errors import FallbackWarning
from specplug.run import features_of

INFO = AlgorithmInfo(name="A", summary="Any", api_version=1)
SPEC = SpecConfig.resolve(INFO, num_steps=3, num_draft_tokens=5)


@pytest.mark.parametrize("field", attrs.fields(SchedulerConfig), ids=lambda field: field.name)
def test_settings_all_reach_the_scheduler(field: attrs.Attribute[object]) -> None:
    """A limit that ``of_run`` forgets keeps its default."""
    config = EngineConfig(max_running_requests=3, chunked_prefill_size=7, enable_mixed_chunk=True)
    limits = SchedulerConfig.of_run(config, SPEC, overlap=True)
    assert getattr(limits, field.name) != field.default


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
