"""The target's token is argmax(log p + g), and p is what the settings say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specplug import Draft, SamplingParams
from specplug.model.sampler import Sampler, path_counts, top_logprobs, truncate
from specplug.sampling_params import Needs
from specplug.speculative.noise import gumbel

CPU = torch.device("cpu")
exactly = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def _numpy_truncate(scores: np.ndarray, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    """min-p over all tokens, then top-k, then top-p over what is left; one row."""

    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max())
        return e / e.sum()

    kept = scores.copy()
    probs = softmax(kept)
    kept[probs < min_p * probs.max() * (1 - 1e-12)] = -np.inf
    order = np.argsort(-kept, kind="stable")
    if top_k > 0:
        kept[order[top_k:]] = -np.inf
    probs, before = softmax(kept), 0.0
    for token in order:
        if before >= top_p:
            kept[token] = -np.inf
        before += probs[token]
    return kept


def _admit(
    sampler: Sampler, row: int, params: SamplingParams, prompt: Sequence[int] = (0,)
) -> None:
    sampler.admit(row, params, params.seed or 0, prompt)


def _sample(params: SamplingParams, logits: Tensor, count: int) -> Tensor:
    """``count`` tokens for one row of logits, at positions 0, 1, …"""
    sampler = Sampler(2, logits.shape[0], CPU)
    _admit(sampler, 1, params)
    rows = torch.ones(count, dtype=torch.int64)
    random = sampler.is_random(rows) if params.needs & Needs.NOISE else None
    return sampler.sample(
        logits.expand(count, -1), params.needs, random, rows, torch.arange(count), None
    )


def _column(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


@exactly
@given(
    scores=st.lists(st.floats(-6, 6).map(lambda x: round(x, 3)), min_size=2, max_size=12),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([1.0, 0.93, 0.51, 0.07, 1e-9]),
)
def test_truncation_is_that_of_a_plain_implementation(
    scores: list[float], min_p: float, top_k: int, top_p: float
) -> None:
    row = torch.tensor([scores], dtype=torch.float64)
    found = truncate(row, _column(min_p), _column(top_k), _column(top_p))[0].numpy()
    expected = _numpy_truncate(row[0].numpy(), min_p, top_k, top_p)
    np.testing.assert_array_equal(found, expected)
    assert np.isfinite(found).any()


def test_each_row_is_truncated_by_its_own_settings() -> None:
    scores = torch.randn(4, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    settings_of = [(0.0, 0, 1.0), (0.2, 0, 1.0), (0.0, 3, 1.0), (0.1, 7, 0.6)]
    columns = (
        torch.tensor(c, dtype=torch.float64).unsqueeze(1) for c in zip(*settings_of, strict=True)
    )
    found = truncate(scores, *columns)
    for row, each in enumerate(settings_of):
        np.testing.assert_array_equal(found[row], _numpy_truncate(scores[row].numpy(), *each))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"temperature": 1.0}, 8),
        ({"temperature": 0.5}, 8),
        ({"temperature": 1.7}, 8),
        ({"temperature": 1.0, "top_k": 3}, 3),
        ({"temperature": 1.0, "top_p": 0.8}, 3),
        ({"temperature": 1.3, "min_p": 0.2}, 5),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [1, -(2**40)])
def test_sampled_tokens_have_the_wanted_distribution(
    seed: int, params: dict[str, Any], kept: int
) -> None:
    count = 20_000
    logits = torch.tensor([0.3, 1.4, -1.2, 0.9, 2.0, -0.4, 0.0, -3.0], dtype=torch.float64)
    tokens = _sample(SamplingParams(seed=seed, **params), logits, count)
    scores = _numpy_truncate(
        (logits / params["temperature"]).numpy(),
        params.get("min_p", 0.0),
        params.get("top_k", 0),
        params.get("top_p", 1.0),
    )
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    assert int((probs > 0).sum()) == kept
    seen = Counter(tokens.tolist())
    assert all(probs[token] > 0 for token in seen)
    chi_square = sum(
        (seen[token] - count * p) ** 2 / (count * p) for token, p in enumerate(probs) if p > 0
    )
    freedom = kept - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_a_seed_is_a_sequence_of_its_own() -> None:
    logits = torch.zeros(50, dtype=torch.float64)
    drawn = {
        seed: _sample(SamplingParams(temperature=1.0, seed=seed), logits, 500) for seed in range(4)
    }
    again = _sample(SamplingParams(temperature=1.0, seed=2), logits, 500)
    assert torch.equal(drawn[2], again)
    for one in range(4):
        for other in range(one):
            equal = int((drawn[one] == drawn[other]).sum())
            assert equal < 30, "two seeds agree more often than one token in fifty"


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-44, 1e-300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_temperature_near_zero_is_greedy(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([3.0, -40.0, 50.0, 49.0, 0.0], dtype=dtype)
    params = SamplingParams(temperature=temperature, top_p=0.9, seed=1)
    assert _sample(params, logits, 100).tolist() == [2] * 100
    negative = -logits
    assert _sample(params, negative, 100).tolist() == [1] * 100


def test_a_banned_token_is_never_chosen() -> None:
    logits = torch.tensor([0.0, 9.0, 0.0, 0.0], dtype=torch.float64)
    params = SamplingParams(temperature=1.0, logit_bias={1: -math.inf, 2: -math.inf}, seed=3)
    assert set(_sample(params, logits, 300).tolist()) == {0, 3}
    greedy = SamplingParams(logit_bias={1: -math.inf, 3: 0.5})
    assert set(_sample(greedy, logits, 3).tolist()) == {3}


@pytest.mark.parametrize("later", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.5}], ids=str)
def test_a_row_forgets_the_settings_of_the_request_before(later: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 10, dtype=torch.float64, generator=generator)
    before = SamplingParams(
        temperature=0.3,
        top_k=2,
        top_p=0.2,
        min_p=0.5,
        repetition_penalty=2.0,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        logit_bias={3: 100.0},
        seed=9,
    )
    rows, positions = torch.tensor([1, 1, 1, 2, 2, 2]), torch.arange(6)
    params = SamplingParams(seed=4, **later)

    def tokens(used: bool) -> list[int]:
        sampler = Sampler(3, 10, CPU)
        _admit(sampler, 2, before)  # whoever else runs has everything on
        if used:
            _admit(sampler, 1, before, prompt=(1, 2, 3))
            sampler.count(torch.tensor([1]), torch.tensor([[4, 5]]), torch.tensor([[True, True]]))
        _admit(sampler, 1, params, prompt=(7,))
        needs = before.needs | params.needs
        random = sampler.is_random(rows)
        found: list[int] = sampler.sample(logits, needs, random, rows, positions, None).tolist()
        return found

    assert tokens(used=True) == tokens(used=False)


@exactly
@given(data=st.data())
def test_path_counts_are_those_of_a_plain_walk(data: st.DataObject) -> None:
    width, vocab = data.draw(st.integers(1, 8)), 6
    rows, above, widths = [], [], []
    for _ in range(data.draw(st.integers(1, 3))):
        parents, tokens = [-1], [data.draw(st.integers(0, vocab - 1))]
        for i in range(1, width):
            free = [p for p in range(i) if parents.count(p) < vocab]
            parents.append(data.draw(st.sampled_from(free)))
            siblings = {t for t, p in zip(tokens, parents, strict=False) if p == parents[-1]}
            tokens.append(data.draw(st.sampled_from(sorted(set(range(vocab)) - siblings))))
        rows.append(tokens)
        above.append(parents)
        widths.append(data.draw(st.integers(1, width)))
    draft = Draft.tree(torch.tensor(rows), torch.tensor(above), width, widths)
    found = path_counts(draft, vocab, torch.int32)
    expected = []
    for tokens, parents, count in zip(rows, above, widths, strict=True):
        for node in range(count):
            line = [0] * vocab
            while node >= 0:
                line[tokens[node]] += 1
                node = parents[node]
            expected.append(line)
    assert found.tolist() == expected


def test_top_logprobs_put_the_chosen_token_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]], dtype=torch.float64)
    found = top_logprobs(logits, torch.tensor([2]), 2)
    logprobs = logits.log_softmax(-1)[0]
    assert found["logprob_ids"].tolist() == [[2, 1, 2]]
    assert found["logprob_ranks"].tolist() == [[2, 1, 2]]
    assert torch.equal(found["logprobs"][0], logprobs[[2, 1, 2]])


def _plain_token(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> int:
    """The next token by the documented formula, one number at a time."""
    scores = logits.copy()
    counts = Counter(output)
    for token in range(len(scores)):
        scores[token] += params.logit_bias.get(token, 0.0)
        if token in counts or token in prompt:
            penalty = params.repetition_penalty
            scores[token] = (
                scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
            )
        scores[token] -= params.frequency_penalty * counts[token]
        scores[token] -= params.presence_penalty * (token in counts)
    if params.temperature > 0:
        scores = _numpy_truncate(
            scores / params.temperature, params.min_p, max(params.top_k, 0), params.top_p
        )
        position = len(prompt) + len(output)
        seed = torch.tensor([params.seed])
        scores = (
            scores + gumbel(seed, torch.tensor([position]), torch.arange(len(scores)))[0].numpy()
        )
    return int(scores.argmax())


@pytest.mark.parametrize(
    "kind", ["greedy", "seeded", "truncated", "penalized", "penalized and sampled"]
)
def test_none_generates_what_the_documented_formula_gives(
    kind: str, tiny_model: Path, reference: Any
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()
    for prompt, params, found in zip(
        reference.prompts, reference.params[kind], reference.outputs[kind], strict=True
    ):
        output: list[int] = []
        while len(output) < len(found.token_ids):
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, -1]
            output.append(_plain_token(logits.numpy(), params, prompt, output))
        assert found.token_ids == tuple(output)
