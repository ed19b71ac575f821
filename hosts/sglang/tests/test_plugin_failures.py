"""A plugin that fails in a step costs its requests their drafts, and neither a token nor the
server; requests that draft nothing are counted, by reason."""

from __future__ import annotations

import asyncio
import time

import pytest
from engines import environment, running

from specplug.speculative.undrafted import FAILED, undrafted_in

GREEDY = {"temperature": 0, "max_new_tokens": 32}
FAILURES = ["propose 4", "verify 4", "build_draft_input 1", "build_draft_input 5", "resolve 4"]
"""Hooks that fail, and in which of their calls."""


@pytest.fixture
def log_file(tmp_path):
    """What the engines of a test write to our log."""
    path = tmp_path / "log"
    with environment(LOG_FILE=str(path)):
        yield path


@pytest.mark.parametrize("fails", FAILURES)
def test_failure_in_a_step_costs_drafts_and_no_token(fails, prompts, plain, tmp_path, log_file):
    folder = str(tmp_path)
    with environment(FRAGILE=fails, PROMETHEUS_MULTIPROC_DIR=folder), running("FRAGILE") as engine:
        made = engine.generate(prompts[:4])
        assert made.tokens == plain[:4]
        failed = undrafted_in(str(tmp_path))[FAILED]
        assert 1 <= failed <= 4  # those that the step had
        # Later requests are drafted for again.
        later = engine.generate(prompts[:4])
        assert later.tokens == plain[:4]
        assert later.steps < made.steps
        assert undrafted_in(str(tmp_path)) == {FAILED: failed}
    told = [line for line in log_file.read_text().splitlines() if "FRAGILE" in line]
    assert told[0].startswith("algorithm FRAGILE (specplug-echo 1.0, ")
    assert f"{fails.split()[0]}() raised ValueError: no more ideas; " in told[0]
    assert told[0].endswith(f"{failed} requests go on without drafts; their tokens are right")
    assert told[1:] == ["FRAGILE: requests decoded without drafts so far: 1 (a plugin failed)"]


@pytest.mark.parametrize("algorithm", ["FRAGILE", "FRAGILE_TREE"])
def test_requests_beside_failed_ones_are_drafted_for(algorithm, prompts, plain, tmp_path):
    """One request fails at its prefill, and runs in the same batches as those that come later."""
    folder = str(tmp_path)
    fails = "build_draft_input 1"
    with environment(FRAGILE=fails, PROMETHEUS_MULTIPROC_DIR=folder), running(algorithm) as engine:

        async def generate(prompt, started):
            stream = await engine.sglang.async_generate(
                prompt, {**GREEDY, "max_new_tokens": 64}, stream=True
            )
            async for reply in stream:  # noqa: B007  the last one
                started.set()
            return list(reply["output_ids"]), reply["meta_info"]["spec_verify_ct"]

        async def one_after_another():
            events = [asyncio.Event() for _ in range(4)]
            runs = []
            for prompt, event in zip(prompts[:4], events, strict=True):
                runs.append(asyncio.ensure_future(generate(prompt, event)))
                await event.wait()
            return await asyncio.gather(*runs)

        made = engine.sglang.loop.run_until_complete(one_after_another())
    assert [tokens for tokens, _ in made] == plain[:4]
    steps = [steps for _, steps in made]
    assert steps[0] == 63
    assert all(count < 63 for count in steps[1:])
    assert undrafted_in(str(tmp_path)) == {FAILED: 1}


def test_failure_at_a_requests_end_is_told_alone(prompts, plain, log_file):
    with environment(FRAGILE="on_request_finished 1"), running("FRAGILE") as engine:
        assert engine.generate(prompts[:2]).tokens == plain[:2]
        assert engine.generate(prompts[:2]).tokens == plain[:2]
    assert "on_request_finished() raised ValueError: no more ideas" in log_file.read_text()


def test_flush_is_told_and_a_failure_of_its_hook_alone(prompts, plain, log_file):
    with environment(FRAGILE="on_text_forgotten 1"), running("FRAGILE") as engine:
        assert engine.generate(prompts[:2]).tokens == plain[:2]
        deadline = time.monotonic() + 30
        while not engine.sglang.flush_cache().success:  # it is not idle at once
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert engine.generate(prompts[:2]).tokens == plain[:2]
    assert "on_text_forgotten() raised ValueError: no more ideas" in log_file.read_text()


def test_requests_without_drafts_are_counted_by_reason(prompts, tmp_path):
    wanted = [
        GREEDY,
        {**GREEDY, "frequency_penalty": 0.5},
        {**GREEDY, "min_new_tokens": 16},
        {**GREEDY, "regex": "[a-z ]{5,20}"},
        {**GREEDY, "repetition_penalty": 1.2},
    ]
    with environment(PROMETHEUS_MULTIPROC_DIR=str(tmp_path)), running("NGRAM") as engine:
        engine.generate(prompts[:5], wanted)
    assert undrafted_in(str(tmp_path)) == {"penalties": 2, "min_new_tokens": 1, "grammar": 1}
