"""vLLM's scheduling with model runner V2: chunks, prefix hits, preemptions and aborts."""

from __future__ import annotations

from typing import Any

import pytest
import vllm
from hosted_engines import FORMS, Engines, Hosted

SMALL_BLOCKS = {"block_size": 32, "enable_prefix_caching": True, "num_gpu_blocks_override": 96}


def decoded(hosted: Any, prompts: list[Any]) -> tuple[list[list[int]], int]:
    """Generate; return the tokens, and how many decode steps the requests took."""
    before = hosted.drafter.decode_steps
    tokens = hosted.generate(prompts, max_tokens=32)
    assert hosted.drafter.undrafted == 0
    return tokens, hosted.drafter.decode_steps - before


def generated_with_hits(hosted: Hosted, prompts: list[str]) -> tuple[list[list[int]], list[int]]:
    """Return the tokens, and how many of each prompt's were found in the prefix cache."""
    params = vllm.SamplingParams(max_tokens=32, temperature=0)
    outputs = hosted.llm.generate(prompts, params, use_tqdm=False)
    hits = [output.num_cached_tokens or 0 for output in outputs]
    return [list(output.outputs[0].token_ids) for output in outputs], hits


@pytest.mark.parametrize("algorithm", FORMS)
def test_chunked_prefill_keeps_tokens_and_steps(
    algorithm: str, engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    tokens = FORMS[algorithm]
    chunked = decoded(engines(algorithm, tokens, max_num_batched_tokens=48), prompts)
    assert chunked[0] == plain
    if algorithm != "NGRAM":  # which remembers what others have asked of its engine
        whole = decoded(engines(algorithm, tokens), prompts)
        assert chunked[1] == pytest.approx(whole[1], rel=0.05)


@pytest.mark.parametrize("algorithm", FORMS)
def test_prefix_hits_are_those_of_plain_decoding(
    algorithm: str, engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    found, steps = {}, []
    for name in (None, algorithm):
        hosted = engines(name, FORMS[algorithm] if name else 5, **SMALL_BLOCKS)
        hosted.llm.reset_prefix_cache()
        found[name] = []
        for order in (1, -1):
            before = hosted.drafter.decode_steps if name else 0
            tokens, hits = generated_with_hits(hosted, prompts[::order])
            assert tokens == plain[::order]
            found[name].append(hits)
            steps.append(hosted.drafter.decode_steps - before if name else 0)
    # vLLM's counter of hits misses some: `LLM` drops what was counted in a step without output. But
    # a request says what was found of its prompt.
    assert found[algorithm] == found[None]
    lengths = [len(hosted.llm.get_tokenizer().encode(prompt)) for prompt in prompts[::-1]]
    assert found[algorithm] == [[0] * 4, [(length - 1) // 32 * 32 for length in lengths]]
    if algorithm != "NGRAM":  # which knows the answers by now
        assert steps[3] == pytest.approx(steps[2], rel=0.05)


@pytest.mark.parametrize("algorithm", FORMS)
def test_preempted_requests_keep_their_tokens(
    algorithm: str, engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    longest = max(len(engines().llm.get_tokenizer().encode(prompt)) for prompt in prompts)
    blocks = -(-(longest + 48) // 32) + 3  # one request fits, and not all four
    few = {**SMALL_BLOCKS, "num_gpu_blocks_override": blocks, "max_model_len": 32 * (blocks - 1)}
    hosted = engines(algorithm, FORMS[algorithm], **few)
    tokens, steps = decoded(hosted, prompts)
    assert hosted.counts.preemptions > 0
    assert tokens == plain
    if algorithm != "NGRAM":  # which remembers what others have asked of its engine
        assert steps == pytest.approx(
            decoded(engines(algorithm, FORMS[algorithm]), prompts)[1], rel=0.1
        )


@pytest.mark.parametrize("algorithm", FORMS)
def test_aborted_requests_leave_others_alone(
    algorithm: str, engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    hosted = engines(algorithm, FORMS[algorithm])
    before = hosted.drafter.decode_steps
    engine = hosted.llm.llm_engine
    params = vllm.SamplingParams(max_tokens=32, temperature=0)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"request {index}", prompt, params)
    for _ in range(3):
        engine.step()
    engine.abort_request(["request 1"])
    # The id is used again, with another prompt.
    engine.add_request("request 1", prompts[0], params)
    engine.abort_request(["request 3"])
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    assert tokens == {"request 0": plain[0], "request 1": plain[0], "request 2": plain[2]}
    assert hosted.drafter.undrafted == 0
    assert hosted.drafter.decode_steps - before < 0.6 * 31 * 3
