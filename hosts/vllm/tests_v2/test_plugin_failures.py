"""A plugin that fails costs its requests their drafts, and no token; other requests keep theirs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import vllm
from hosted_engines import Engines

from specplug import PluginError

GREEDY = vllm.SamplingParams(max_tokens=32, temperature=0)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the errors in the log."""
    errors = {record for record in caplog.records if record.levelno == logging.ERROR}
    return [record.getMessage() for record in errors]


@pytest.mark.parametrize("hook", ["propose", "build_draft_input"])
def test_failure_in_a_step_costs_drafts_and_no_token(
    hook: str,
    engines: Engines,
    third_party: Any,
    prompts: list[str],
    plain: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    hosted = engines.make("ECHO", 3)
    third_party.fail(hook, 4)  # where all four requests decode
    assert hosted.generate(prompts, max_tokens=32) == plain
    (error,) = told(caplog)
    assert error.startswith("algorithm ECHO (specplug-echo 1.0, ")
    assert f"{hook}() raised ValueError: no more ideas" in error
    assert error.endswith("Requests of that step go on without drafts; their tokens are right.")
    assert hosted.drafter.undrafted == len(prompts)
    # Later requests, which get the same rows, are drafted for again.
    third_party.drafted.clear()
    assert hosted.generate(prompts, max_tokens=32) == plain
    assert hosted.drafter.undrafted == 0
    assert len(set(third_party.drafted)) == len(prompts)


def test_failure_with_one_request_leaves_others_drafts(
    engines: Engines, third_party: Any, prompts: list[str], plain: list[list[int]]
) -> None:
    hosted = engines("ECHO", 3)
    engine, tokens = hosted.llm.llm_engine, {}
    engine.add_request("before", prompts[0], GREEDY)
    for _ in range(4):
        engine.step()
    third_party.fail("build_draft_input", 1)
    engine.add_request("failing", prompts[1], GREEDY)
    engine.step()
    third_party.drafted.clear()
    engine.add_request("after", prompts[2], GREEDY)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    assert tokens == {"before": plain[0], "failing": plain[1], "after": plain[2]}
    assert hosted.drafter.undrafted == 1
    assert {each.partition("-")[0] for each in third_party.drafted} == {"before", "after"}


def test_failure_in_create_worker_ends_its_engine_alone(
    engines: Engines, third_party: Any, prompts: list[str], plain: list[list[int]]
) -> None:
    before = engines("ECHO", 3)
    third_party.fail("create_worker", 1)
    with pytest.raises(PluginError) as raised:
        engines.make("ECHO", 3)
    assert str(raised.value).startswith("algorithm ECHO (specplug-echo 1.0, ")
    assert "create_worker() raised ValueError: no more ideas" in str(raised.value)
    third_party.drafted.clear()
    assert before.generate(prompts, max_tokens=32) == plain
    assert third_party.drafted
