"""Random engines and requests: what each request gets is what plain vLLM gives it."""

from __future__ import annotations

import os
import random
from typing import Any

import attrs
import pytest
import vllm
from hosted_engines import FORMS, Engines, Hosted

SEEDS = range(*map(int, os.environ.get("SPECPLUG_VLLM_RUNS", "0:4").split(":")))
STOPS = ["\n", "self", "return", " =", "):", "zz"]


@attrs.frozen
class Asked:
    """A request, when it comes (a step of the engine), and when it is aborted, if it is."""

    prompt: list[int]
    sampling: dict[str, Any]
    comes: int
    aborted: int | None

    @property
    def params(self) -> vllm.SamplingParams:
        return vllm.SamplingParams(temperature=0, **self.sampling)


def random_engine(rng: random.Random) -> dict[str, Any]:
    """Choose what both engines have."""
    block = rng.choice([32, 64, 128])
    length = rng.choice([160, 256, 512])
    seqs = rng.choice([1, 2, 3, 5, 8, 12])
    enough = -(-(length + 16) // block) + 1
    return {
        "block_size": block,
        "max_model_len": length,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": max(length, 64 + seqs * 10)
        if rng.random() < 0.3
        else seqs * 10 + rng.choice([16, 40, 100]),
        "num_gpu_blocks_override": enough + rng.choice([1, 2, 8, 40]),
        "enable_prefix_caching": rng.random() < 0.7,
    }


def random_speculation(rng: random.Random) -> tuple[str, int, dict[str, Any]]:
    """Choose an algorithm, ``num_speculative_tokens`` and its settings."""
    algorithm = rng.choice([*FORMS, "NGRAM", "EAGLE3", "ECHO"])
    tokens = rng.choice([1, 2, 3, 5, 6, 7] if algorithm != "NGRAM" else [1, 3, 8, 12])
    settings: dict[str, Any] = {}
    if algorithm not in ("DFLASH", "MULTI_LAYER_EAGLE") and rng.random() < 0.4:
        settings["num_steps"] = rng.randint(1, tokens)
        settings["num_draft_tokens"] = settings["num_steps"] + 1
    return algorithm, tokens, settings


def random_request(rng: random.Random, texts: list[list[int]], length: int) -> Asked:
    text = rng.choice(texts)
    start = rng.choice([0, 0, rng.randrange(len(text) - 1)])
    most = rng.choice([2, 8, 60, length - 2])
    prompt = (text[start:] * 8)[: max(1, min(most, length - 2))]
    sampling: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 7, 30, 64, 200])}
    for chance, name, value in (
        (0.3, "stop", rng.sample(STOPS, 2)),
        (0.1, "stop_token_ids", rng.sample(range(300), 40)),
        (0.2, "ignore_eos", True),
        (0.15, "logprobs", 2),
        (0.15, "repetition_penalty", 1.3),
        (0.1, "presence_penalty", 0.7),
        (0.1, "frequency_penalty", 0.5),
        (0.1, "bad_words", ["self"]),
        (0.15, "min_tokens", sampling["max_tokens"] // 2),
        (0.1, "allowed_token_ids", list(range(200, 1500))),
        (0.1, "skip_special_tokens", False),
    ):
        if rng.random() < chance:
            sampling[name] = value
    aborted = rng.randrange(40) if rng.random() < 0.2 else None
    return Asked(prompt, sampling, rng.choice([0, 0, rng.randrange(30)]), aborted)


def run(hosted: Hosted, asked: list[Asked]) -> dict[int, tuple[list[int], str | None]]:
    """Run requests as they come; return the tokens of each and how it ended."""
    engine = hosted.llm.llm_engine
    found: dict[int, tuple[list[int], str | None]] = {}
    step = 0
    while step <= 41 or engine.has_unfinished_requests():
        for number, request in enumerate(asked):
            if request.comes == step:
                engine.add_request(
                    str(number), {"prompt_token_ids": request.prompt}, request.params
                )
            if request.aborted == step and request.comes < step:
                engine.abort_request([str(number)])
        for output in engine.step():
            given = output.outputs[0]
            found[int(output.request_id)] = list(given.token_ids), given.finish_reason
        step += 1
        assert step < 6000
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_random_run_gives_plain_tokens(
    seed: int, engines: Engines, prompts: list[str], third_party: Any
) -> None:
    rng = random.Random(seed)
    both, (algorithm, tokens, settings) = random_engine(rng), random_speculation(rng)
    tokenizer = engines().llm.get_tokenizer()
    texts = [tokenizer.encode(prompt) for prompt in prompts]
    asked = [random_request(rng, texts, both["max_model_len"]) for _ in range(24)]
    told = f"seed {seed}: {algorithm} {tokens} {settings} {both}"
    plain = run(engines.make(**both), asked)
    hosted = engines.make(algorithm, tokens, settings or None, **both)
    found = run(hosted, asked)
    assert hosted.drafter.undrafted == 0, told
    for number, request in enumerate(asked):
        expected, got = plain.get(number, ([], None)), found.get(number, ([], None))
        if request.aborted is None:
            assert got == expected, f"{told}; request {number}: {request}"
        else:  # it got as far as it got
            shorter = min(len(got[0]), len(expected[0]))
            assert got[0][:shorter] == expected[0][:shorter], f"{told}; request {number}"
