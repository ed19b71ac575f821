"""The noise is a function of seed, position and token alone, and is Gumbel's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specplug.speculative.noise import gumbel

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
EXTREMES = (0, 1, -1, 2**63 - 1, -(2**63), 12345678901)


def _mix(x: int) -> int:
    """SplitMix64's finalizer, with Python's own integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def _key(seed: int, position: int) -> int:
    return _mix((_mix((seed * GOLDEN + 1) & MASK) + position * GOLDEN) & MASK)


def _plain(seed: int, position: int, token: int) -> float:
    bits = _mix((_key(seed, position) + token * GOLDEN) & MASK)
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


def _signed(x: int) -> int:
    x &= MASK
    return x - (1 << 64) if x >> 63 else x


def _unshift(x: int, bits: int) -> int:
    """The y whose ``y ^ (y >> bits)`` is x."""
    y = x
    for _ in range(64 // bits):
        y = x ^ (y >> bits)
    return y


def _unmix(x: int) -> int:
    x = _unshift(x, 31)
    x = _unshift((x * pow(0x94D049BB133111EB, -1, 1 << 64)) & MASK, 27)
    return _unshift((x * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & MASK, 30)


def _column(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("seed", EXTREMES)
@pytest.mark.parametrize("position", [0, 1, 4095, 10**9])
def test_it_is_the_documented_function(seed: int, position: int) -> None:
    tokens = [0, 1, 2, 95, 151_936]
    found = gumbel(_column(seed), _column(position), _column(*tokens))
    assert found.dtype == torch.float64
    assert found[0].tolist() == pytest.approx([_plain(seed, position, t) for t in tokens], rel=1e-9)


@pytest.mark.parametrize("hashed", [0, 1, MASK, MASK - 1, MASK >> 1, 1 << 63])
def test_no_hash_makes_it_infinite(hashed: int) -> None:
    token = _signed((_unmix(hashed) - _key(7, 11)) * pow(GOLDEN, -1, 1 << 64))
    assert _mix((_key(7, 11) + token * GOLDEN) & MASK) == hashed
    noise = gumbel(_column(7), _column(11), _column(token))
    assert bool(noise.isfinite().all())
    assert -4 < float(noise) < 40


def test_a_row_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**62), 2**62, (50,), generator=generator)
    positions = torch.randint(0, 4096, (50,), generator=generator)
    tokens = torch.arange(97)
    whole = gumbel(seeds, positions, tokens)
    for keep in (slice(3, 4), slice(10, 30), slice(None, None, 7)):
        assert torch.equal(gumbel(seeds[keep], positions[keep], tokens), whole[keep])
    order = torch.randperm(50, generator=generator)
    assert torch.equal(gumbel(seeds[order], positions[order], tokens), whole[order])


def test_a_token_does_not_depend_on_the_vocabulary() -> None:
    seeds, positions = _column(3, 4), _column(8, 9)
    whole = gumbel(seeds, positions, torch.arange(500))
    some = _column(499, 3, 77, 3)
    assert torch.equal(gumbel(seeds, positions, some), whole[:, some])
    of_each = torch.stack((some, some.flip(0)))
    assert torch.equal(gumbel(seeds, positions, of_each), whole.gather(1, of_each))


SAMPLES = 40_000
DRAWS = {
    "tokens": lambda n: gumbel(_column(5), _column(6), torch.arange(n)),
    "positions": lambda n: gumbel(torch.full((n,), 5), torch.arange(n), _column(6)),
    "seeds": lambda n: gumbel(torch.arange(n), torch.full((n,), 5), _column(6)),
    "all at once": lambda n: gumbel(
        torch.arange(n // 100), torch.arange(n // 100), torch.arange(100)
    ),
}


@pytest.mark.parametrize("axis", DRAWS)
def test_it_is_gumbel_distributed_and_uncorrelated(axis: str) -> None:
    noise = DRAWS[axis](SAMPLES).flatten()
    # Gumbel's distribution function makes it uniform; Kolmogorov-Smirnov at 1 in 1000.
    uniform = torch.exp(-torch.exp(-noise)).sort().values
    steps = torch.arange(SAMPLES + 1, dtype=torch.float64) / SAMPLES
    distance = max(
        float((steps[1:] - uniform).abs().max()), float((uniform - steps[:-1]).abs().max())
    )
    assert distance < 1.95 / math.sqrt(SAMPLES)
    flat = torch.exp(-torch.exp(-noise)) - 0.5
    for lag in (1, 2, 64, 100):
        correlation = float((flat[lag:] * flat[:-lag]).mean()) * 12
        assert abs(correlation) < 4 / math.sqrt(SAMPLES)


def test_neighbours_in_each_argument_differ() -> None:
    base = gumbel(_column(5), _column(6), torch.arange(1000))
    for other in (
        gumbel(_column(6), _column(6), torch.arange(1000)),
        gumbel(_column(5), _column(7), torch.arange(1000)),
        gumbel(_column(6), _column(5), torch.arange(1000)),
    ):
        assert not torch.isin(other, base).any()
