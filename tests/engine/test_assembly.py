"""The parts of a run get what its settings say."""

from __future__ import annotations

import attrs
import pytest

from specplug import AlgorithmInfo, SpecConfig
from specplug.config import EngineConfig
from specplug.engine.assembly import plan_steps
from specplug.engine.scheduler import SchedulerConfig

SPEC = SpecConfig.resolve(
    AlgorithmInfo(name="A", summary="Any", api_version=1),
    num_steps=3,
    num_draft_tokens=5,
)


@pytest.mark.parametrize("field", attrs.fields(SchedulerConfig), ids=lambda field: field.name)
def test_plan_steps_settings_all_reach_the_scheduler(field: attrs.Attribute[object]) -> None:
    """A limit that ``plan_steps`` forgets keeps its default."""
    config = EngineConfig(max_running_requests=3, chunked_prefill_size=7, enable_mixed_chunk=True)
    limits = plan_steps(config, SPEC, overlap=True)
    assert getattr(limits, field.name) != field.default
