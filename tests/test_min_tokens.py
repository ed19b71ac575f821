"""``min_tokens``: no end before so many tokens, under every algorithm the same as under NONE."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from shallow_target import ShallowTarget, loops_of_chains_and_trees

from specplug import LLM, RequestOutput, SamplingParams, UsageError

PROMPTS = ("def mean(values):\n    ", "import ", "class Stack:\n    ", "x = [1, 2", "for i in ")
MAX_TOKENS = 18
KINDS = ((6, 0.0), (14, 0.9))
"""Minimum and temperature."""

PRESSED = {"page_size": 3, "chunked_prefill_size": 6, "max_total_tokens": 42}
"""A pool that retracts requests in the midst of their first tokens, and prefills in chunks."""


def cases(eos: int) -> list[tuple[str, SamplingParams]]:
    """Requests that would end soon, each in another way, and their prompts."""
    ways: list[dict[str, Any]] = [
        {"logit_bias": {eos: 30.0}},  # the model says it all the time
        {"stop_token_ids": range(0, 600, 3), "ignore_eos": True},
        {"stop": ["e", "\n", " "]},
        {"regex": "[a-z ]+", "logit_bias": {eos: 30.0}},
        {"stop_token_ids": range(1, 4000, 2), "stop": ["a", "("], "logit_bias": {eos: 5.0}},
    ]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, min_tokens=m, temperature=t, seed=9 + i, **way)
        for i, way in enumerate(ways)
        for m, t in KINDS
    ]
    edges = [attrs.evolve(params[0], min_tokens=least) for least in (0, 1, MAX_TOKENS)]
    return [(PROMPTS[i % len(PROMPTS)], each) for i, each in enumerate([*params, *edges])]


@pytest.fixture(scope="module")
def none(shallow: ShallowTarget) -> Iterator[LLM]:
    with LLM(**shallow.options("NONE"), dtype="float64", disable_overlap_schedule=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def eos(none: LLM) -> int:
    (token,) = none.engine.steps.runner.target.eos_token_ids
    return token


@pytest.fixture(scope="module")
def expected(none: LLM, eos: int) -> list[RequestOutput]:
    return [none.generate(prompt, params)[0] for prompt, params in cases(eos)]


def naive(llm: LLM, eos: int, prompt: str, params: SamplingParams) -> tuple[int, ...]:
    """The first tokens by a request that bans every end, the others by one that goes on there.
    Noise follows the position, so the second is what the whole would be."""
    least, tokenizer = params.min_tokens, llm.tokenizer
    ids = tuple(tokenizer(prompt)["input_ids"])
    bans = dict.fromkeys((eos, *params.stop_token_ids), -math.inf)
    plain = attrs.evolve(params, min_tokens=0, stop=())
    first: tuple[int, ...] = ()
    if least:
        begun = attrs.evolve(
            plain, max_tokens=least, stop_token_ids=(), logit_bias={**params.logit_bias, **bans}
        )
        first = llm.generate(ids, begun)[0].token_ids
    rest: tuple[int, ...] = ()
    if least < MAX_TOKENS:
        goes_on = attrs.evolve(plain, max_tokens=MAX_TOKENS - least)
        rest = llm.generate((*ids, *first), goes_on)[0].token_ids
    tokens, sure = (*first, *rest), len(tokenizer.decode(first, skip_special_tokens=True))
    for count in range(least + 1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=True)
        if any(match.end() > sure for stop in params.stop for match in _all(stop, text)):
            return tokens[:count]
    return tokens


def _all(stop: str, text: str) -> Iterator[re.Match[str]]:
    return re.finditer(re.escape(stop), text)


def test_output_is_that_of_a_naive_reference(
    none: LLM, eos: int, expected: list[RequestOutput]
) -> None:
    lengths = set()
    for (prompt, params), output in zip(cases(eos), expected, strict=True):
        if params.regex is None:  # a grammar starts anew with a request
            assert output.token_ids == naive(none, eos, prompt, params)
        assert len(output.token_ids) >= params.min_tokens
        ends = {eos, *params.stop_token_ids}
        assert not ends & {*output.token_ids[: params.min_tokens]}
        lengths.add((params.min_tokens, len(output.token_ids)))
    assert {(0, 1), (1, 2), (6, 7), (14, 15)} <= lengths, "they end as soon as they may"


@pytest.mark.parametrize(("name", "topk", "overlap"), loops_of_chains_and_trees())
def test_tokens_are_those_of_none(
    name: str,
    topk: int | None,
    overlap: bool,
    shallow: ShallowTarget,
    eos: int,
    expected: list[RequestOutput],
) -> None:
    with LLM(
        **shallow.options(name),
        dtype="float64",
        speculative_eagle_topk=topk,
        disable_overlap_schedule=not overlap,
        enable_mixed_chunk=overlap,
        max_running_requests=6,
        **PRESSED,
    ) as llm:
        prompts, params = zip(*cases(eos), strict=True)
        outputs = llm.generate(prompts, params)
        for output, plain in zip(outputs, expected, strict=True):
            assert output.token_ids == plain.token_ids
            assert (output.text, output.finish_reason) == (plain.text, plain.finish_reason)
            assert output.stop_reason == plain.stop_reason
        assert llm.stats()["retractions"] > 0 or name != "NONE", "the pool is too large"
        llm.check_pool()


def test_instances_of_a_pair_wait_as_one_does(
    shallow: ShallowTarget, eos: int, expected: list[RequestOutput]
) -> None:
    with LLM(
        **shallow.options("NGRAM"), dtype="float64", disaggregation="both", chunked_prefill_size=4
    ) as llm:
        prompts, params = zip(*cases(eos), strict=True)
        found = [output.token_ids for output in llm.generate(prompts, params)]
        assert found == [output.token_ids for output in expected]


@pytest.mark.parametrize("name", ["NONE", "NGRAM"])
def test_complete_match_of_a_grammar_ends_before(name: str, shallow: ShallowTarget) -> None:
    params = SamplingParams(max_tokens=20, min_tokens=20, regex="(ab){3}")
    with LLM(**shallow.options(name), dtype="float64") as llm:
        outputs = llm.generate(["ababab", "x", "ab ab"], params)
        assert [(output.text, output.finish_reason) for output in outputs] == [
            ("ababab", "stop")
        ] * 3
        llm.check_pool()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_tokens": -1}, "min_tokens=-1: expected an integer from 0 to "),
        ({"min_tokens": 1.5}, "min_tokens=1.5: expected an integer from 0 to "),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 and max_tokens=8: expected at most "),
    ],
)
def test_minimum_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
        SamplingParams(**settings)


def test_request_that_could_choose_no_token_is_refused(none: LLM, eos: int) -> None:
    others = {t: -math.inf for t in range(none.engine.steps.runner.target.vocab_size) if t != eos}
    with pytest.raises(UsageError, match=r"^min_tokens with logit_bias bans all \d+ tokens"):
        none.generate("x", SamplingParams(min_tokens=1, logit_bias=others))
    assert none.generate("x", SamplingParams(logit_bias=others))[0].token_ids == (eos,)
