"""The sampling kernels choose what the torch reference, the sampler without them, chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from specplug import Draft, SamplingParams
from specplug.grammar.masks import mask_without
from specplug.kernels import sampling
from specplug.kernels.kernel_table import kernels_used
from specplug.model.sampler import Sampler
from specplug.sampling_params import BannedTokens, Needs
from specplug.speculative.noise import gumbel

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
TREE = [[-1, 0, 0, 1, 3], [-1, 0, 1, 1, 0]]
"""Parents of two requests' nodes."""


def _logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rows + vocab)
    return (torch.randn(rows, vocab, generator=generator) * 3).to(DEVICE, dtype)


def _both(
    logits: Tensor,
    params: Sequence[SamplingParams],
    draft: Draft | None = None,
    allowed: Tensor | None = None,
    requests: Sequence[int] | None = None,
) -> tuple[list[int], list[int]]:
    """The tokens of the reference and of the kernels; request i has ``params[i]``.

    Args:
        allowed: [T, words] masks.
        requests: of each row; by turns if not given.
    """
    rows, vocab = logits.shape
    owners = [row % len(params) for row in range(rows)] if requests is None else requests
    req_indices = torch.tensor(owners, dtype=torch.int64, device=DEVICE) + 1
    positions = torch.arange(rows, device=DEVICE) + 3
    needs = Needs.NOTHING
    for each in params:
        needs |= each.needs
    found: list[list[int]] = []
    for mode in ("torch", "triton"):
        sampler = Sampler(len(params) + 1, vocab, DEVICE)
        for i, each in enumerate(params):
            banned = BannedTokens(frozenset(), frozenset((1 + i, vocab - 1)), each.min_tokens)
            sampler.admit(i + 1, each, each.seed or 0, (0, 2, 2), (2, 3), banned)
        random = sampler.is_random(req_indices) if needs & Needs.NOISE else None
        with kernels_used(mode):
            chosen = sampler.sample(logits, needs, random, req_indices, positions, draft, allowed)
        assert chosen.dtype == torch.int64
        found.append(chosen.tolist())
    return found[0], found[1]


def _same(*args: Any, **options: Any) -> list[int]:
    reference, fused = _both(*args, **options)
    assert fused == reference
    return fused


ADDED: dict[str, dict[str, Any]] = {
    "penalties": {
        "repetition_penalty": 1.7,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "bias": {"logit_bias": {3: -math.inf, 5: 4.0, 7: -2.5}},
    "grammar": {"regex": "a"},
    "min_tokens": {"min_tokens": 4},
}
HEAT: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "seed": 5},
    "truncated": {"temperature": 1.3, "seed": -6, "top_p": 0.7, "top_k": 9, "min_p": 0.01},
}


COMBINATIONS = [
    (heat, added)
    for heat in HEAT
    for added in product((False, True), repeat=4)
    if heat != "truncated" or sum(added) in (0, 4)  # what is added is applied before
]


@pytest.mark.parametrize(("heat", "added"), COMBINATIONS)
def test_every_combination_of_needs_is_the_reference(heat: str, added: tuple[bool, ...]) -> None:
    settings = dict(HEAT[heat])
    for wanted, name in zip(added, ADDED, strict=True):
        settings |= ADDED[name] if wanted else {}
    vocab, masks = 45, None
    if "regex" in settings:
        words = [mask_without(range(3 * i, 40, i + 2), vocab) for i in range(4)]
        masks = torch.stack(words).to(DEVICE)
    parents = torch.tensor(TREE, device=DEVICE)
    tokens = torch.arange(10, device=DEVICE).view(2, 5) % 7
    draft = Draft.tree(tokens, parents, 3, (3, 1)) if added[1] else None
    others = SamplingParams(**({"seed": 1} | settings | {"temperature": 0.0}))
    plain = SamplingParams(temperature=1.0, seed=9) if heat != "greedy" else SamplingParams()
    _same(
        _logits(4, vocab), [SamplingParams(**settings), others, plain], draft, masks, [0, 0, 1, 2]
    )


@pytest.mark.parametrize("heat", HEAT)
def test_logits_of_any_strides_give_the_same_tokens(heat: str) -> None:
    logits, params = _logits(4, 45), [SamplingParams(**HEAT[heat])]
    tokens = _same(logits, params)
    assert _same(logits.t().contiguous().t(), params) == tokens
    assert _same(torch.stack((logits, -logits), dim=2)[..., 0], params) == tokens


@pytest.mark.parametrize("kind", ["chain", "ragged chain", "tree", "ragged tree", "lost node"])
def test_penalties_follow_the_path_to_each_node(kind: str) -> None:
    params = [
        SamplingParams(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.4),
        SamplingParams(frequency_penalty=-0.7),
    ]
    tokens = torch.tensor([[4, 6, 5, 6, 6], [5, 1, 5, 6, 6]], device=DEVICE)
    widths = (4, 2) if "ragged" in kind else None
    if "chain" in kind:
        draft = Draft.chain(tokens, widths)
    else:
        parents = torch.tensor(TREE, device=DEVICE)
        if kind == "lost node":
            parents[0, 3] = -1
        draft = Draft(tokens=tokens, parents=parents, widths=widths, depth=3)
    requests = [b for b, width in enumerate(widths or (5, 5)) for _ in range(width)]
    logits = _logits(len(requests), 9) / 6
    logits[:, tokens[0, 0]] = logits[:, 7:].amax(1) + 0.1
    assert len(set(_same(logits, params, draft, requests=requests))) > 1


def test_a_penalized_score_is_rounded_once() -> None:
    values = torch.linspace(1, 2, 60)
    logits = torch.full((60, 4), -9.0)
    logits[:, 2], logits[:, 1] = values, values / 3  # 2 is in the prompt; then they are equal
    assert set(_same(logits.to(DEVICE), [SamplingParams(repetition_penalty=3.0)])) == {1}


def test_enders_are_left_out_until_the_least_tokens() -> None:
    logits = torch.zeros(8, 6)
    logits[:, 1], logits[:, 5], logits[:, 4] = 3.0, 2.0, 1.0  # 1 and 5 end the output
    found = _same(logits.to(DEVICE), [SamplingParams(min_tokens=4)])
    assert found == [4] * 4 + [1] * 4


@pytest.mark.parametrize("tiles", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_row_is_the_same_however_it_is_split(
    tiles: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = 2 * 1024 + 7
    parts = triton.cdiv(3, tiles)
    monkeypatch.setattr(sampling, "_split", lambda *_: (parts, tiles * 1024))
    params = [SamplingParams(temperature=1.5, seed=2), SamplingParams()]
    _same(_logits(2, vocab, dtype), params)
    if dtype == torch.float32:
        _same(_logits(2, vocab), [SamplingParams(temperature=2.0, top_p=0.95, seed=4)])
        equal = torch.zeros(1, vocab, device=DEVICE)
        assert _same(equal, [SamplingParams()]) == [0]
        sampled = SamplingParams(temperature=1.0, top_k=1500, seed=4)
        assert _same(equal.expand(2, -1), [SamplingParams(), sampled])[0] == 0


def test_rows_of_a_wider_tensor_are_read_where_they_stand() -> None:
    logits = torch.full((3, 64), math.nan, device=DEVICE)
    logits[:, :37] = _logits(3, 37)
    _same(logits[:, :37], [SamplingParams()])
    _same(logits[1:, :37], [SamplingParams(temperature=1.0, seed=1, top_k=3)])


SAMPLED = {"temperature": 1.0, "seed": 3}
EXTREMES: list[dict[str, Any]] = [
    {},
    SAMPLED,
    {**SAMPLED, "top_k": 1},
    {**SAMPLED, "top_k": 4},
    {**SAMPLED, "top_k": 10**6, "top_p": 0.999},
    {**SAMPLED, "top_p": 1e-30},
    {**SAMPLED, "min_p": 1.0},
    {"temperature": 1e-30, "seed": 3},
    {"temperature": 1e6, "seed": 3, "top_p": 0.5, "top_k": 7},
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
def test_extreme_rows_are_the_reference() -> None:
    vocab, inf = 40, math.inf
    base = torch.zeros(vocab)
    equal, one = base.clone(), torch.full((vocab,), -inf)
    one[31] = -5.0
    none = torch.full((vocab,), -inf)
    some = torch.where(torch.arange(vocab) % 3 == 0, torch.randn(vocab), -inf)
    infinite = base.clone()
    infinite[[6, 9]] = inf
    signed = torch.where(torch.arange(vocab) % 2 == 0, -0.0, 0.0)
    rows = torch.stack((equal, one, none, some, infinite, signed, equal - 3e38, one + 3e38))
    logits = rows.to(DEVICE).repeat_interleave(len(EXTREMES), 0)
    _same(logits, [SamplingParams(**each) for each in EXTREMES])


@pytest.mark.parametrize("settings", EXTREMES[::3], ids=str)
def test_nan_chooses_a_token_of_the_vocabulary(settings: dict[str, Any]) -> None:
    logits = torch.full((3, 21), math.nan, device=DEVICE)
    logits[1:] = 0.0
    logits[1, 4] = math.nan
    logits[2, 20] = math.nan
    _, found = _both(logits, [SamplingParams(**settings)])
    assert all(0 <= token < 21 for token in found)
    if not settings:
        assert found == [0, 4, 20]


def _kept(logits: Tensor, params: Sequence[SamplingParams]) -> list[set[int]]:
    """The tokens that each row keeps; its request is the one of its number."""

    def column(name: str) -> Tensor:
        return torch.tensor([float(getattr(each, name)) for each in params], device=DEVICE)

    rows = torch.arange(len(params), device=DEVICE)
    one = torch.ones(len(params), device=DEVICE)
    temperature = column("temperature")
    settings = sampling.Settings(rows, temperature, one, one, one, 1)
    cuts = sampling.Cuts(column("top_k"), column("top_p"), 1, column("min_p").log(), 1)
    of_rows = sampling._rows(settings, rows, rows, rows >= 0)
    scores, last = sampling.truncate_rows(logits, settings, cuts, of_rows)
    assert torch.equal(scores, logits / temperature.unsqueeze(1))
    kept = sampling.order_reference(scores) <= last.unsqueeze(1)
    return [set(row.nonzero().flatten().tolist()) for row in kept]


def _expected(scores: Tensor, params: SamplingParams) -> tuple[set[int], float]:
    """The tokens kept by the definition in float64, and how near top_p a sum comes."""
    kept = (scores / params.temperature).double()
    floor = kept.max() + (math.log(params.min_p) if params.min_p else -math.inf)
    order = [i for i in sorted(range(len(kept)), key=lambda i: (-kept[i], i)) if kept[i] >= floor]
    order = order[: params.top_k or None]
    probs = torch.softmax(kept[order], 0).tolist()
    before, held, near = 0.0, set(), 1.0
    for token, p in zip(order, probs, strict=True):
        if before >= params.top_p and params.top_p < 1:
            break
        held.add(token)
        before += p
        near = min(near, abs(before - params.top_p))
    return held, near


def test_truncation_keeps_what_its_definition_says() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, params = [], []
    for spread, (min_p, top_k, top_p) in product(
        (0.01, 1.0, 6.0), [(0.0, 0, 0.9), (0.0, 17, 1.0), (0.05, 0, 1.0), (0.01, 30, 0.6)]
    ):
        scores = torch.randn(301, generator=generator) * spread
        logits.append(scores.bfloat16().float() if min_p or top_k else scores)
        params.append(SamplingParams(temperature=0.7, min_p=min_p, top_k=top_k, top_p=top_p))
    for found, scores, each in zip(
        _kept(torch.stack(logits).to(DEVICE), params), logits, params, strict=True
    ):
        expected, near = _expected(scores, each)
        assert each.top_p == 1 or near > 1e-7, "too near to tell"
        assert found == expected


@triton.jit
def _bounds(bits, noise, bound, N: tl.constexpr):
    at = tl.arange(0, N)
    random = tl.load(bits + at).to(tl.uint64, bitcast=True)
    tl.store(noise + at, sampling._gumbel(random))
    tl.store(bound + at, sampling._gumbel_bound(random))


def test_the_bound_is_above_the_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**63), 2**63 - 1, (4096,), generator=generator)
    ends = torch.tensor([0, 1, -1, -2, -(2**63), 2**63 - 1, -(2**12), -(2**32), -(2**40) + 1])
    bits[: len(ends)] = ends
    bits[64:128] = -(2 ** torch.arange(64))
    bits[128:192] = 2 ** torch.arange(64) - 1
    noise = torch.empty(4096, dtype=torch.float64, device=DEVICE)
    bound = torch.empty(4096, device=DEVICE)
    _bounds[(1,)](bits.to(DEVICE), noise, bound, N=4096)
    assert bool(noise.isfinite().all())
    assert bool((bound > noise).all())
    high = noise > 2
    assert float((bound - noise)[high].median()) < 0.2  # near enough to leave most tokens out


def test_noise_is_the_reference_in_float32() -> None:
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 7], device=DEVICE)
    positions = torch.tensor([0, 4095, 10**9, 3, 7], device=DEVICE)
    random = torch.tensor([True, True, True, True, False], device=DEVICE)
    token_ids = torch.tensor([0, 151_936, 5, 5, 17], device=DEVICE)
    found = sampling.gumbel_noise(seeds, random, positions, token_ids)
    expected = gumbel(seeds, positions, token_ids).masked_fill_(~random.unsqueeze(1), 0.0).float()
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)
    assert sampling.gumbel_noise(seeds[:0], random[:0], positions[:0], token_ids).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_greatest_of_a_row_is_torchs_argmax(rows: int, dtype: torch.dtype) -> None:
    scores = _logits(rows, 5000, dtype).mul(2).round()  # with many greatest ones
    scores[0, :4000] = scores[-1, 4999] = float("-inf")
    for each in (scores, scores[:, 7:], torch.full_like(scores, float("-inf"))):
        assert sampling.find_greatest(each).tolist() == each.argmax(-1).tolist()
        ids = torch.randperm(2 * each.shape[1]).to(each.device)[: each.shape[1]]
        found = sampling.find_greatest(each, ids)
        assert found.tolist() == ids[each.argmax(-1)].tolist()
    assert sampling.find_greatest(scores[:0]).tolist() == []
    assert [found.shape for found in sampling.find_likeliest(scores[:0])] == [(0,), (0,)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 40])  # split into parts, and whole
def test_the_likeliest_of_a_row_has_torchs_log_probability(rows: int, dtype: torch.dtype) -> None:
    logits = _logits(rows, 5000, dtype)
    logits[-1, :4000] = float("-inf")
    ids = torch.randperm(5000).to(DEVICE)
    for each in (logits, logits[:, 7:], logits * 30):
        tokens, scores = sampling.find_likeliest(each, ids[: each.shape[1]])
        assert tokens.tolist() == ids[each.argmax(-1)].tolist()
        assert scores.dtype == torch.float32
        expected = each.float().log_softmax(-1).amax(-1)
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter's numpy
@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_row_without_a_softmax_has_the_least_score(value: float | None) -> None:
    logits = _logits(2, 3000)
    if value is None:
        logits[0] = float("-inf")
    else:
        logits[0, 2500] = value
    tokens, scores = sampling.find_likeliest(logits)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert scores[0] == float("-inf")
    assert scores[1] > -20


def test_no_rows_are_no_tokens() -> None:
    assert _same(_logits(0, 12), [SamplingParams(temperature=1.0, top_k=2)]) == []


def _large(rows: int, spread: float) -> tuple[Tensor, list[SamplingParams]]:
    generator = torch.Generator(DEVICE).manual_seed(rows)
    logits = torch.randn(rows, 128_256, generator=generator, device=DEVICE) * spread
    kinds = ADDED["penalties"] | ADDED["bias"], {"top_k": 50}, {"min_p": 0.02}, {}
    params = [SamplingParams(temperature=0.8, seed=i, **kind) for i, kind in enumerate(kinds)]
    return logits.bfloat16(), [SamplingParams(), *params]


@needs_gpu
@pytest.mark.parametrize("rows", [1, 16, 192])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_a_large_vocabulary_is_the_reference(rows: int, spread: float) -> None:
    logits, params = _large(rows, spread)
    for kinds in (params[:1], params[2:3], params[4:], params):
        _same(logits, kinds)


@needs_gpu
def test_rows_of_a_large_vocabulary_do_not_depend_on_others() -> None:
    logits, _ = _large(192, 3.0)
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=4)]
    _, whole = _both(logits, params)
    for rows in (1, 16, 100):
        _, some = _both(logits[:rows], params)
        assert some == whole[:rows]


@needs_gpu
def test_a_recorded_graph_samples_what_is_written_to_its_inputs() -> None:
    logits, params = _large(16, 3.0)
    sampler = Sampler(len(params) + 1, logits.shape[1], DEVICE)
    needs = Needs.NOTHING
    for i, each in enumerate(params):
        sampler.admit(i + 1, each, i, (1, 2), (3,))
        needs |= each.needs
    rows = torch.arange(16, device=DEVICE) % len(params) + 1
    positions = torch.arange(16, device=DEVICE)

    def sample() -> Tensor:
        return sampler.sample(logits, needs, sampler.is_random(rows), rows, positions, None)

    sample()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = sample()
    for turn in range(3):
        positions += turn
        logits.copy_(logits.roll(turn, 1))
        graph.replay()
        assert torch.equal(chosen, sample())
