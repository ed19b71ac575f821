"""vLLM's scheduling: chunks, prefix hits, preemptions, aborts, ends, and engines side by side."""

from __future__ import annotations

from typing import Any

import pytest
import vllm
from hosted_engines import FORMS, Engines, Hosted

SMALL_BLOCKS = {"block_size": 32, "max_num_seqs": 12, "num_gpu_blocks_override": 128}
GREEDY = {"temperature": 0.0}


def decoded(hosted: Hosted, prompts: list[Any], **sampling: Any) -> tuple[list[list[int]], int]:
    """Generate; return the tokens, and how many decode steps the requests took."""
    before = hosted.drafter.decode_steps
    tokens = hosted.generate(prompts, **sampling)
    assert hosted.drafter.undrafted == 0
    return tokens, hosted.drafter.decode_steps - before


def drain(hosted: Hosted) -> dict[str, list[int]]:
    """Step until all requests have ended; return their tokens."""
    engine, tokens = hosted.llm.llm_engine, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return tokens


@pytest.fixture(scope="session")
def long_prompts(prompts: list[str]) -> list[str]:
    """Six prompts of some hundred tokens, each of two pieces, of which all share the first."""
    return [prompts[0] * 2 + prompt for prompt in prompts[:6]]


@pytest.mark.parametrize("algorithm", FORMS)
def test_chunked_prefill_keeps_tokens_and_steps(
    algorithm: str, engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    tokens = FORMS[algorithm]
    # NGRAM remembers what others have asked of its engine.
    make = engines.make if algorithm == "NGRAM" else engines
    whole = decoded(make(algorithm, tokens), prompts)
    assert whole[0] == plain
    chunked = decoded(
        engines(algorithm, tokens, max_num_batched_tokens=48, max_num_seqs=8), prompts
    )
    assert chunked[0] == plain
    # How NGRAM's requests learn from one another depends on when each starts.
    assert chunked[1] == pytest.approx(whole[1], rel=0.03 if algorithm == "NGRAM" else 0.01)


@pytest.mark.parametrize("algorithm", FORMS)
def test_prefix_hits_keep_tokens_and_steps(
    algorithm: str, engines: Engines, long_prompts: list[str]
) -> None:
    plain = engines(**SMALL_BLOCKS).generate(long_prompts)
    hosted = engines(algorithm, FORMS[algorithm], **SMALL_BLOCKS)
    first = decoded(hosted, long_prompts)
    hits = hosted.counts.prefix_hits
    second = decoded(hosted, long_prompts)
    assert hosted.counts.prefix_hits - hits > 500
    assert first[0] == second[0] == plain
    if algorithm != "NGRAM":  # which knows the answers by now
        assert second[1] == pytest.approx(first[1], rel=0.02)


@pytest.mark.parametrize("algorithm", FORMS)
def test_cached_prompt_but_its_last_token_is_drafted_for(
    algorithm: str, engines: Engines, long_prompts: list[str]
) -> None:
    """vLLM pads a first step with one token to compute by as many drafts as it takes: -1 each."""
    blocks = SMALL_BLOCKS["block_size"]
    tokenizer = engines(**SMALL_BLOCKS).llm.get_tokenizer()
    known = [tokenizer(prompt)["input_ids"] for prompt in long_prompts]
    asked = [
        {"prompt_token_ids": tokens[-(1 + blocks * (1 + index)) :]}
        for index, tokens in enumerate(known[:3])
    ]
    plain = engines(**SMALL_BLOCKS).generate(asked)
    make = engines.make if algorithm == "NGRAM" else engines
    hosted = make(algorithm, FORMS[algorithm], **SMALL_BLOCKS)
    first = decoded(hosted, asked)
    hits = hosted.counts.prefix_hits
    second = decoded(hosted, asked)
    assert hosted.counts.prefix_hits - hits == blocks * (1 + 2 + 3)
    assert first[0] == second[0] == plain
    if algorithm != "NGRAM":  # which knows the answers by now
        assert second[1] == first[1]


@pytest.mark.parametrize("algorithm", FORMS)
def test_prompt_of_one_token_beside_others_is_drafted_for(
    algorithm: str, engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    hosted = engines(algorithm, FORMS[algorithm])
    engine, short = hosted.llm.llm_engine, {"prompt_token_ids": [plain[0][0]]}
    params = vllm.SamplingParams(max_tokens=64, **GREEDY)
    for index, prompt in enumerate(prompts[:3]):
        engine.add_request(str(index), prompt, params)
    for _ in range(3):
        engine.step()
    before = hosted.drafter.decode_steps
    engine.add_request("short", short, params)
    tokens = drain(hosted)
    assert [tokens[str(index)] for index in range(3)] == plain[:3]
    assert [tokens["short"]] == engines().generate([short])
    assert hosted.drafter.undrafted == 0
    assert hosted.drafter.decode_steps - before < 64 * 4


@pytest.mark.parametrize("algorithm", FORMS)
def test_preempted_requests_keep_their_tokens(
    algorithm: str, engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    few = {**SMALL_BLOCKS, "num_gpu_blocks_override": 24, "max_model_len": 512}
    hosted = engines(algorithm, FORMS[algorithm], **few)
    assert hosted.generate(prompts) == plain
    assert hosted.counts.preemptions > 0
    assert decoded(hosted, prompts)[0] == plain


@pytest.mark.parametrize("algorithm", ["EAGLE3", "MULTI_LAYER_EAGLE", "NGRAM"])
def test_aborted_requests_leave_others_alone(
    algorithm: str, engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    hosted = engines(algorithm, FORMS[algorithm])
    engine = hosted.llm.llm_engine
    params = vllm.SamplingParams(max_tokens=64, **GREEDY)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"request {index}", prompt, params)
    aborted = set()
    for step, index in enumerate((0, 3, 4, 11)):
        for _ in range(step):
            engine.step()
        engine.abort_request([f"request {index}"])
        aborted.add(index)
    # An id that was aborted is used again, with another prompt.
    engine.add_request("request 3", prompts[5], params)
    tokens = drain(hosted)
    for index in set(range(len(prompts))) - aborted:
        assert tokens[f"request {index}"] == plain[index]
    assert tokens["request 3"] == plain[5]


@pytest.mark.parametrize("algorithm", FORMS)
def test_requests_at_the_end_of_the_context_are_plain(
    algorithm: str, engines: Engines, prompts: list[str]
) -> None:
    plain = engines(max_model_len=176).generate(prompts, max_tokens=150)
    hosted = engines(algorithm, FORMS[algorithm], max_model_len=176)
    assert decoded(hosted, prompts, max_tokens=150)[0] == plain
    assert len({len(tokens) for tokens in plain}) > 5  # the context ended them


def test_requests_that_end_inside_a_step_are_plain(engines: Engines, prompts: list[str]) -> None:
    hosted, plain = engines("EAGLE3"), engines()
    for sampling in ({"max_tokens": 7}, {"max_tokens": 1}, {"stop": ["\n"]}):
        assert hosted.generate(prompts, **sampling) == plain.generate(prompts, **sampling)


@pytest.mark.parametrize("algorithm", ["MULTI_LAYER_EAGLE", "NGRAM"])
def test_least_tokens_are_kept_and_no_more(
    algorithm: str, engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    hosted = engines(algorithm, FORMS[algorithm])
    for index in (5, 11):
        for least in range(index - 3, index + 3):
            asked = {"stop_token_ids": [tokens[index] for tokens in plain], "min_tokens": least}
            assert hosted.generate(prompts, **asked) == engines().generate(prompts, **asked)


def test_ended_requests_are_told_once(
    engines: Engines, third_party: Any, prompts: list[str]
) -> None:
    hosted = engines("ECHO", 3)
    hosted.generate(prompts)
    hosted.core.step_fn()  # an empty step tells of the last
    third_party.finished.clear()
    hosted.generate(prompts[:3])
    hosted.core.step_fn()
    assert len(third_party.finished) == len(set(third_party.finished)) == 3


def test_plain_engine_after_a_hosted_one_is_plain(
    engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    hosted, after = engines("EAGLE3"), engines.make()
    assert after.generate(prompts) == plain
    assert hosted.generate(prompts) == plain
    assert after.llm.llm_engine.vllm_config.num_lookahead_tokens == 0
    assert hosted.llm.llm_engine.vllm_config.num_lookahead_tokens > 0


def test_two_engines_take_turns(
    engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    pair = engines("EAGLE3"), engines("NGRAM", 7)
    params = vllm.SamplingParams(max_tokens=64, **GREEDY)
    for hosted in pair:
        for index, prompt in enumerate(prompts[:4]):
            hosted.llm.llm_engine.add_request(str(index), prompt, params)
    found: list[dict[str, list[int]]] = [{}, {}]
    while any(hosted.llm.llm_engine.has_unfinished_requests() for hosted in pair):
        for hosted, tokens in zip(pair, found, strict=True):
            for output in hosted.llm.llm_engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
    expected = {str(index): tokens for index, tokens in enumerate(plain[:4])}
    assert found == [expected, expected]
