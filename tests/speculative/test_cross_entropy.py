import pytest
import torch
from torch import Tensor

from specplug.speculative import cross_entropy as module
from specplug.speculative.cross_entropy import cross_entropy


def by_autograd(
    logits: Tensor, places: Tensor, shares: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    values = logits.float()
    of_goal = values.gather(-1, places)
    each = values.logsumexp(-1) - (shares * of_goal).sum(-1)
    return (weights * each).sum(), of_goal[:, 0] >= values.amax(-1)


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 40, generator=generator).mul(5).to(dtype)
    logits[3:20, 0] = 40.0  # the goal's first token is the likeliest there
    places = torch.stack([torch.randperm(40, generator=generator)[:4] for _ in range(50)])
    places[3:20] = torch.tensor([0, 1, 2, 3])
    shares = torch.rand(50, 4, generator=generator).softmax(-1)
    weights = torch.rand(50, generator=generator)
    weights[::7] = 0.0
    return logits.requires_grad_(), places, shares, weights


@pytest.mark.parametrize("rows", [1, 16, 50, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_is_that_of_autograd(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS_ON_CPU", rows)
    logits, *rest = problem(dtype)
    wanted, right = by_autograd(logits, *rest)
    (3 * wanted).backward()
    gradient, logits.grad = logits.grad, None
    assert gradient is not None
    before = logits.detach().clone()
    found, found_right = cross_entropy(logits, *rest)
    (3 * found).backward()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    assert torch.equal(logits, before)
    assert torch.equal(found_right, right)
    assert 17 <= int(right.sum()) < 50
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(logits.grad, gradient)


def test_rows_that_weigh_nothing_get_no_gradient() -> None:
    logits, *rest = problem(torch.float32)
    cross_entropy(logits, *rest)[0].backward()
    assert logits.grad is not None
    assert not logits.grad[::7].any()
