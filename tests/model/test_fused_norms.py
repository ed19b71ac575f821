"""Norms that are replaced compute what they computed before; others stay."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specplug.model.fused_norms import FusedRMSNorm, fuse_norms


class LlamaRMSNorm(nn.Module):
    """As transformers writes it."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )


class GemmaRMSNorm(LlamaRMSNorm):
    """Multiplies by one more than its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.weight * (1 + self.weight)


class CentredRMSNorm(LlamaRMSNorm):
    """An RMS norm by name alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


def test_fuse_norms_replaces_those_that_agree_only() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"llama": LlamaRMSNorm(24), "gemma": GemmaRMSNorm(24), "other": CentredRMSNorm(24)}
    )
    x = torch.randn(3, 24)
    before = {name: module(x) for name, module in model.items()}
    assert fuse_norms(model) == 2
    assert isinstance(model["llama"], FusedRMSNorm)
    assert isinstance(model["gemma"], FusedRMSNorm)
    assert isinstance(model["other"], CentredRMSNorm)
    for name, module in model.items():
        torch.testing.assert_close(module(x), before[name], rtol=1e-5, atol=1e-6)


def test_fuse_norms_leaves_half_precision() -> None:
    """Also where the norms' own weights are float32, as gpt-oss has them."""
    linear = nn.Linear(24, 24, dtype=torch.bfloat16)
    model = nn.ModuleDict({"norm": LlamaRMSNorm(24), "linear": linear})
    assert fuse_norms(model) == 0
    assert isinstance(model["norm"], LlamaRMSNorm)


def test_fuse_norms_leaves_random_state() -> None:
    model = nn.ModuleDict({"llama": LlamaRMSNorm(24)})
    state = torch.get_rng_state()
    assert fuse_norms(model) == 1
    assert torch.equal(torch.get_rng_state(), state)
