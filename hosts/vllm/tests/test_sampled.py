"""Sampled requests: chosen by the target's own distribution, whatever was drafted."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from hosted_engines import FORMS, Engines, Hosted

from specplug_vllm import host
from specplug_vllm.v1 import cpu_sampling

ALGORITHMS = ["EAGLE3", "NGRAM"]


REPEATING = "x = 1\ny = 2\nx = 1\ny = 2\nx ="


def continuations(hosted: Hosted, **sampling: Any) -> Counter[tuple[int, ...]]:
    """Count the three tokens after a prompt, of many requests without seeds."""
    return Counter(map(tuple, hosted.generate([REPEATING] * 600, max_tokens=3, **sampling)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 1e-9}])
def test_sampling_that_leaves_one_token_is_greedy(
    algorithm: str,
    sampling: dict[str, Any],
    engines: Engines,
    prompts: list[str],
    plain: list[list[int]],
) -> None:
    hosted = engines(algorithm, FORMS[algorithm])
    assert hosted.generate(prompts, temperature=1.0, **sampling) == plain


def test_greedy_and_sampled_requests_share_a_step(
    engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    import vllm

    hosted = engines("EAGLE3")
    params = [
        vllm.SamplingParams(max_tokens=64, temperature=0 if index % 2 else 1.0)
        for index in range(len(prompts))
    ]
    outputs = hosted.llm.generate(prompts, params, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert tokens[1::2] == plain[1::2]
    assert tokens[::2] != plain[::2]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0, "top_k": 3}, {"temperature": 1.5, "top_p": 0.6}]
)
def test_sampled_tokens_are_distributed_as_plain(
    algorithm: str, sampling: dict[str, Any], engines: Engines
) -> None:
    hosted = engines(algorithm, FORMS[algorithm])
    before = hosted.drafter.decode_steps
    plain, found = (continuations(engine, **sampling) for engine in (engines(), hosted))
    assert hosted.drafter.decode_steps - before < 1100  # 1200 without drafts
    # Half the sum of differences; two samples of plain decoding differ as much as `usual`.
    total = sum(plain.values())
    differs = sum(abs(plain[key] - found[key]) for key in plain | found) / 2 / total
    again = continuations(engines(), **sampling)
    usual = sum(abs(plain[key] - again[key]) for key in plain | again) / 2 / total
    assert differs < 1.4 * usual + 0.02, (differs, usual, len(plain))
    assert len(plain) > 5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_seeds_are_not_declared_exact_and_repeat(
    algorithm: str, engines: Engines, prompts: list[str]
) -> None:
    """vLLM's noise is drawn in the order of steps, so a seed gives other tokens with drafts than
    without; the same request alone gives the same ones again."""
    assert not host.capabilities().exact_sampling
    assert not host.capabilities().foreseeable_noise
    hosted = engines.make(algorithm, FORMS[algorithm], enable_prefix_caching=False)
    seeded = {"temperature": 1.0, "seed": 7}
    first = [hosted.generate([prompt], **seeded) for prompt in prompts[:3]]
    again = engines.make(algorithm, FORMS[algorithm], enable_prefix_caching=False)
    assert [again.generate([prompt], **seeded) for prompt in prompts[:3]] == first


def test_settings_of_sampling_reach_drafted_tokens() -> None:
    expand = partial(cpu_sampling.expand_batch_to_tokens, None)  # vLLM's own is not called
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    for dtype in (torch.float32, torch.int32, torch.int64):
        given = torch.tensor([3, 9, 0, 7], dtype=dtype)
        found = expand(given, ends, 6, replace_from=0, replace_to=1)
        assert found.dtype == dtype
        assert found.tolist() == [3, 3, 1, 1, 1, 7]
