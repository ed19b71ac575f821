"""Our noise against vLLM's own sampler: what it chooses is the likeliest token with our noise."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from specplug.kernels.kernel_table import kernels_used
from specplug_vllm.v2.seeded_noise import SamplingRows
from specplug_vllm.versions import has_runner_v2_of_0_25

VOCABULARY = 2500  # of three blocks, the last one not full
CPU = torch.device("cpu")
TEMPERATURES = torch.tensor([1.0, 0.8, 0.0, 1.7])
SEEDS = torch.tensor([0, 7, 11, -(2**40) + 3])


@pytest.fixture
def rows() -> SamplingRows:
    """Four requests in rows 1 to 4."""
    made = SamplingRows(5, CPU)
    made.update(TEMPERATURES, SEEDS)
    return made


def test_vllm_chooses_the_likeliest_token_with_our_noise(
    rows: SamplingRows, kernel_mode: str
) -> None:
    generator = torch.Generator().manual_seed(3)
    requests = torch.tensor([3, 0, 1, 2])
    positions = torch.tensor([[1, 2, 3], [40, 41, 42], [9, 10, 11], [1000, 1001, 1002]])
    for scale in (0.0, 1.0, 4.0):  # without logits the noise alone chooses
        logits = torch.randn(12, VOCABULARY, generator=generator) * scale
        chosen = gumbel_sample(
            logits,
            requests.repeat_interleave(3).to(torch.int32),
            TEMPERATURES,
            SEEDS,
            positions.view(-1) - 1,  # of the token before
            apply_temperature=True,
            **({} if has_runner_v2_of_0_25() else {"is_drafting": False}),
        )
        noise = rows.noise(requests + 1, positions, torch.arange(VOCABULARY))
        divisors = rows.divisors(requests + 1).unsqueeze(1)
        scores = logits.view(4, 3, VOCABULARY) / divisors + noise
        assert chosen.view(4, 3).tolist() == scores.argmax(-1).tolist()


def test_noise_of_a_token_does_not_depend_on_the_others(
    rows: SamplingRows, kernel_mode: str
) -> None:
    requests, positions = torch.tensor([1, 2]), torch.tensor([[5, 6], [5, 6]])
    whole = rows.noise(requests, positions, torch.arange(VOCABULARY))
    some = torch.tensor([2400, 3, 1024, 0])
    assert torch.equal(rows.noise(requests, positions, some), whole[..., some])
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole[0, 0], whole[0, 1])


def test_noise_in_torch_has_the_bits_of_the_kernel(rows: SamplingRows) -> None:
    requests, positions = torch.arange(1, 5), torch.tensor([[1, 2**33 + 7, 3]] * 4)
    made = []
    for mode in ("triton", "torch"):
        with kernels_used(mode):
            made.append(rows.noise(requests, positions, torch.arange(VOCABULARY)))
    assert torch.equal(made[0], made[1])
    assert made[0].isfinite().all()


def test_greedy_requests_have_no_noise(rows: SamplingRows) -> None:
    noise = rows.noise(torch.tensor([3]), torch.tensor([[1, 2]]), torch.arange(VOCABULARY))
    assert not noise.any()
    assert rows.divisors(torch.tensor([1, 2, 3])).flatten().tolist() == [
        1.0,
        pytest.approx(0.8),
        1.0,
    ]
