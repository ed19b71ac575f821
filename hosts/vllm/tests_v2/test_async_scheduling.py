"""Scheduling a step before the last one's result is known: on, unless it is turned off."""

from __future__ import annotations

import logging

import pytest
import vllm.logger
from hosted_engines import Engines, Hosted

import specplug


def is_on(hosted: Hosted) -> bool:
    config = hosted.llm.llm_engine.vllm_config
    return bool(config.scheduler_config.async_scheduling)


def test_log_says_that_async_scheduling_is_on(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    engines()  # the first engine of a process sets the log up
    vllm.logger._print_warning_once.cache_clear()
    with caplog.at_level(logging.INFO, "vllm"):
        hosted = engines.make("NGRAM", 3)
    assert is_on(hosted)
    about = [text for text in caplog.messages if "sync" in text and "cheduling" in text]
    assert not [text for text in about if "not supported" in text]
    assert about[-1] == "Asynchronous scheduling is enabled: specplug_vllm has it."


def test_async_scheduling_that_is_turned_off_stays_off(
    engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    hosted = engines("EAGLE3", async_scheduling=False)
    assert not is_on(hosted)
    assert hosted.generate(prompts, max_tokens=32) == plain
    assert hosted.drafter.undrafted == 0
    assert hosted.drafter.decode_steps < 0.6 * 31 * len(prompts)


def test_drafts_in_every_step_without_it(engines: Engines) -> None:
    # There vLLM verifies as many tokens as ever, so a pause would never be seen to have come.
    hosted = engines("EAGLE3", settings={"draft_when": None}, async_scheduling=False)
    assert hosted.core.scheduler.dynamic_sd_lookup is None
    told = "specplug.draft_when='faster': vLLM without async_scheduling drafts in every step"
    with pytest.raises(specplug.UsageError, match=told):
        engines("EAGLE3", settings={"draft_when": "faster"}, async_scheduling=False)
