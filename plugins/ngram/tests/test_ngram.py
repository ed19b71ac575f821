"""NGRAM in the engine: the output of NONE, in fewer steps."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from shallow_target import ShallowTarget

from specplug import LLM, RequestOutput, SamplingParams, SpecConfig, UsageError
from specplug_ngram import algorithm
from specplug_ngram.compiled_drafter import CompiledDrafter, load_library
from specplug_ngram.drafter import PlainDrafter

REPETITIVE = (
    "def area(width, height):\n    return width * height\n\n\n"
    "def area(width, height):\n    return width * height\n\n\ndef area(width,",
    "names = ['a', 'b', 'c', 'd']\nfor name in names:\n    print(name)\n"
    "names = ['a', 'b', 'c', 'd']\nfor name in names:\n",
    "self.assertEqual(f(1), 2)\n        self.assertEqual(f(2), 3)\n        self.assertEqual(",
)
PROMPTS = (*REPETITIVE, "import os\n", "class Queue:\n    def __init__(self")
PARAMS = {
    "greedy": SamplingParams(max_tokens=40),
    "sampled": SamplingParams(max_tokens=40, temperature=0.3, top_p=0.95, seed=1),
    "sampled hot": SamplingParams(max_tokens=40, temperature=1.0, repetition_penalty=1.1, seed=2),
}

Outputs = tuple[tuple[int, ...], ...]


def _open(algorithm: str, **changes: Any) -> LLM:
    return LLM(dtype="float64", speculative_algorithm=algorithm, **changes)


def _generate(llm: LLM) -> dict[str, list[RequestOutput]]:
    """All prompts under each kind of sampling."""
    with llm:
        outputs = {kind: llm.generate(PROMPTS, params) for kind, params in PARAMS.items()}
        llm.check_pool()
    return outputs


def _tokens(outputs: dict[str, list[RequestOutput]]) -> dict[str, Outputs]:
    return {kind: tuple(output.token_ids for output in of) for kind, of in outputs.items()}


@pytest.fixture(scope="module")
def plain(shallow: ShallowTarget) -> dict[str, Outputs]:
    """What NONE generates for all prompts by a model with few layers, by the kind of sampling."""
    return _tokens(_generate(LLM(**shallow.options("NONE"), dtype="float64")))


def test_trees_give_the_output_of_none(shallow: ShallowTarget, plain: dict[str, Outputs]) -> None:
    outputs = _generate(
        LLM(
            **shallow.options("NGRAM"),
            dtype="float64",
            speculative_eagle_topk=4,
            page_size=3,
            chunked_prefill_size=7,
        )
    )
    assert _tokens(outputs) == plain


def test_drafts_of_what_repeats_itself_are_accepted() -> None:
    """By the default model."""
    for kind, topk in (("greedy", 1), ("sampled", 4)):
        with _open("NONE") as llm:
            expected = llm.generate(REPETITIVE, PARAMS[kind])
        with _open("NGRAM", speculative_eagle_topk=topk) as llm:
            outputs = llm.generate(REPETITIVE, PARAMS[kind])
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        lens = [n for output in outputs for n in output.accept_lens]
        assert sum(lens) / len(lens) > 1.5


def test_a_request_is_drafted_from_an_earlier_one_of_its_salt() -> None:
    salted = attrs.evolve(PARAMS["greedy"], cache_salt="ours")
    with _open("NGRAM") as llm:
        first = llm.generate(PROMPTS[4], salted)[0]
        others = llm.generate(PROMPTS[4], attrs.evolve(salted, cache_salt="theirs"))[0]
        again = llm.generate(PROMPTS[4], salted)[0]
    assert first.token_ids == again.token_ids == others.token_ids
    assert first.accept_lens == others.accept_lens
    # But for the first steps, whose match is too short to be sure of, all drafts are right.
    assert len(again.accept_lens) <= -(-39 // 8) + 3 < len(first.accept_lens)


def test_aborted_and_short_requests_leave_no_history() -> None:
    with _open("NGRAM", max_running_requests=2) as llm:
        stream = llm.stream(PROMPTS, SamplingParams(max_tokens=30))
        for number, output in enumerate(stream):
            if number == 6:
                llm.abort(output.request_id)
            if number == 12:
                break
        stream.close()
        llm.generate(PROMPTS, SamplingParams(max_tokens=1))
        llm.check_pool()
        worker = llm.engine.runtime.worker
        assert worker.requests == {}
        assert len(worker.index) == 0


@pytest.mark.parametrize(
    ("typed", "shape", "adjustments"),
    [
        ((3, 1, 9), (3, 1, 4), ("num_draft_tokens 9 -> 4: a chain of 3 steps",)),
        ((3, 1, None), (3, 1, 4), ()),
        ((7, 1, 4), (3, 1, 4), ("num_steps 7 -> 3: num_draft_tokens is 4, with the root",)),
        ((4, 4, 1), (1, 4, 1), ("num_steps 4 -> 1: num_draft_tokens is 1, with the root",)),
        ((1, 1, 1), (1, 1, 1), ()),
        ((2, 4, 50), (2, 4, 21), ("num_draft_tokens 50 -> 21: topk 4, 2 steps deep",)),
        ((2, 4, 21), (2, 4, 21), ()),
        ((4, 4, None), (4, 4, 17), ()),
        ((900, 9, 1000), (900, 9, 1000), ()),
    ],
)
def test_numbers_that_no_tree_can_have_are_adjusted_and_told(
    typed: tuple[int, int, int | None], shape: tuple[int, int, int], adjustments: tuple[str, ...]
) -> None:
    steps, topk, nodes = typed
    config = SpecConfig.resolve(
        algorithm.describe(), num_steps=steps, topk=topk, num_draft_tokens=nodes
    )
    adjusted = algorithm.validate_config(config)
    assert (adjusted.num_steps, adjusted.topk, adjusted.num_draft_tokens) == shape
    assert adjusted.adjustments == adjustments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculative_num_steps": 0}, "num_steps=0: expected an integer of at least 1"),
        ({"speculative_num_draft_tokens": -1}, "num_draft_tokens=-1: expected an integer of at"),
        ({"speculative_eagle_topk": 0}, "topk=0: expected an integer of at least 1"),
    ],
)
def test_bad_numbers_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _open("NGRAM", **changes)


def test_the_defaults_are_a_chain_of_seven_steps() -> None:
    with _open("NGRAM") as llm:
        config = attrs.asdict(llm.spec_config)
    assert (config["num_steps"], config["topk"], config["num_draft_tokens"]) == (7, 1, 8)


def test_a_warm_up_leaves_no_history(shallow: ShallowTarget) -> None:
    own = {"ngram_index_scope": "engine"}
    with LLM(**shallow.options("NGRAM"), warm_up="on", speculative_settings=own) as llm:
        worker = llm.engine.runtime.worker
        assert (worker.index.num_tokens, worker.requests) == (0, {})
        llm.generate(PROMPTS[:1], PARAMS["greedy"])
        assert worker.index.num_tokens


@pytest.mark.parametrize("disabled", [False, True])
def test_drafter_is_compiled_unless_that_is_declined(
    disabled: bool, shallow: ShallowTarget, plain: dict[str, Outputs]
) -> None:
    if load_library() is None:
        pytest.skip("there is no C compiler")
    options = shallow.options("NGRAM")
    with LLM(**options, dtype="float64", disable_cpu_kernels=disabled) as llm:
        drafter = llm.engine.runtime.worker._drafter
        assert isinstance(drafter, PlainDrafter if disabled else CompiledDrafter)
        outputs = llm.generate(PROMPTS, PARAMS["greedy"])
    assert tuple(output.token_ids for output in outputs) == plain["greedy"]
