"""What a scheduler does to requests changes no token: chunks, pages, retraction, aborts."""

from __future__ import annotations

import asyncio

import pytest
from engines import TREE, environment, running

from specplug.speculative.undrafted import undrafted_in


@pytest.fixture(scope="module")
def paged():
    """Trees, pages of 16 tokens, prompts in chunks of 32."""
    with running("EAGLE3", page_size=16, chunked_prefill_size=32, **TREE) as engine:
        yield engine


def test_chunked_prefill_keeps_tokens(paged, prompts, plain):
    made = paged.generate(prompts)
    assert made.tokens == plain
    assert any(not last for *_, last in paged.chunks)
    assert any(not first for *_, first, _ in paged.chunks)


def test_second_batch_after_the_first_keeps_tokens(paged, prompts, plain):
    assert paged.generate(prompts[6:]).tokens == plain[6:]
    assert paged.generate(prompts[:6]).tokens == plain[:6]
    assert any(first and start >= 16 for _, start, _, first, _ in paged.chunks)


def test_aborted_request_leaves_others_alone(paged, prompts, plain):
    wanted = {"temperature": 0, "max_new_tokens": 64}
    manager = paged.sglang.tokenizer_manager

    async def generate(prompt, aborted):
        stream = await paged.sglang.async_generate(prompt, wanted, stream=True)
        async for reply in stream:
            about = reply["meta_info"]
            if aborted and about["completion_tokens"] > 8:
                manager.abort_request(rid=about["id"])
                aborted = False
        return list(reply["output_ids"]), about

    async def generate_all():
        runs = (generate(prompt, number == 2) for number, prompt in enumerate(prompts[:6]))
        return await asyncio.gather(*runs)

    made = paged.sglang.loop.run_until_complete(generate_all())
    tokens, about = made.pop(2)
    assert about["finish_reason"]["type"] == "abort"
    assert [each for each, _ in made] == plain[:2] + plain[3:6]
    assert paged.generate(prompts[2:3]).tokens == plain[2:3]
    assert about["id"] in paged.seen("finished")
    assert tokens == plain[2][: len(tokens)]


def test_retracted_requests_keep_tokens(prompts, plain):
    with (
        environment(SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="5"),
        running("EAGLE3", **TREE) as engine,
    ):
        made = engine.generate(prompts)
    assert made.tokens == plain
    assert sum(about["num_retractions"] for about in made.about) > 0


def test_tiny_pool_without_overlap_keeps_tokens(prompts, plain):
    settings = {
        "max_total_tokens": 320,
        "schedule_conservativeness": 0.1,
        "disable_overlap_schedule": True,
    }
    with running("NGRAM", **settings) as engine:
        made = engine.generate(prompts)
    assert made.tokens == plain
    assert sum(about["num_retractions"] for about in made.about) > 0


def test_request_that_ended_before_a_planned_step_is_told_once(prompts, plain, tmp_path):
    """Beside a grammar SGLang processes a step after it has planned the next one, and before it
    runs that. FRAGILE fails if it gets a request whose end it was told."""
    greedy = {"temperature": 0, "max_new_tokens": 64}
    wanted = [
        {**greedy, "max_new_tokens": 8},
        {**greedy, "max_new_tokens": 16},
        {**greedy, "regex": "[a-z ]{40}"},
    ]
    with environment(PROMETHEUS_MULTIPROC_DIR=str(tmp_path)), running("FRAGILE") as engine:
        made = engine.generate(prompts[:3], wanted)
        later = engine.generate(prompts[3:4])
        told = engine.seen("finished")
    assert [*made.tokens[:2], *later.tokens] == [plain[0][:8], plain[1][:16], plain[3]]
    assert sorted(told) == sorted(about["id"] for about in (*made.about, *later.about))
    assert undrafted_in(str(tmp_path)) == {"grammar": 1}
