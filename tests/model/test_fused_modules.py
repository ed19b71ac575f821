"""What is made cheaper computes what it computed before."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specplug.model.fused_modules import FusedRMSNorm, fuse_norms, pack_weights, shorten_calls


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


def test_norms_that_agree_are_replaced_and_others_stay() -> None:
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


def test_norms_in_half_precision_stay() -> None:
    model = nn.ModuleDict({"llama": LlamaRMSNorm(24).to(torch.bfloat16)})
    assert fuse_norms(model) == 0


def test_shortened_calls_give_the_same_and_keep_hooks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    x = torch.randn(2, 4)
    before = model(x)
    shorten_calls(model, keep=[model[1]])
    seen: list[str] = []
    model[0].register_forward_pre_hook(lambda *_: seen.append("shortened"))
    model[1].register_forward_pre_hook(lambda *_: seen.append("kept"))
    assert torch.equal(model(x), before)
    assert seen == ["kept"]
    assert isinstance(model[0], nn.Linear)
    assert sum(p.numel() for p in model.parameters()) == 40


def test_packed_weights_are_the_same_and_stay_tied() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 5), "b": nn.Linear(3, 5), "c": nn.Linear(7, 2).half()})
    model["b"].weight = model["a"].weight
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pack_weights(model)
    assert model["a"].weight is model["b"].weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.data_ptr() % 64 == 0
