"""Norms in half precision that are replaced give what they gave before; others stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specplug.model.exact_norms import ExactLayerNorm, ExactRMSNorm, make_norms_exact

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = 200


class CentredRMSNorm(LlamaRMSNorm):
    """An RMS norm by name alone."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


NORMS = {
    "llama": LlamaRMSNorm(SIZE),
    "gemma": Gemma2RMSNorm(SIZE),
    "gpt-oss": GptOssRMSNorm(SIZE),
    "layer": nn.LayerNorm(SIZE),
    "layer without bias": nn.LayerNorm(SIZE, bias=False),
}
OTHERS = {"centred": CentredRMSNorm(SIZE), "bare": nn.LayerNorm(SIZE, elementwise_affine=False)}


def model_of(modules: dict[str, nn.Module]) -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict(modules).to(DEVICE, torch.float16)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("name", NORMS)
def test_exact_norms_give_the_modules_results(name: str) -> None:
    model = model_of({name: NORMS[name]})
    weight = model[name].weight
    x = 3 * torch.randn(2, 40, SIZE, dtype=torch.float16, device=DEVICE)
    expected = model[name](x)
    assert make_norms_exact(model) == 1
    assert isinstance(model[name], ExactRMSNorm | ExactLayerNorm)
    assert model[name].weight is weight
    found = model[name](x)
    assert (found == expected).float().mean() > 0.98
    torch.testing.assert_close(found, expected, rtol=2**-10, atol=1e-5)
    for row in (0, 17, 39):
        assert torch.equal(model[name](x[:1, row : row + 1]), found[:1, row : row + 1])


@pytest.mark.parametrize("name", OTHERS)
def test_other_norms_stay(name: str) -> None:
    model = model_of({name: OTHERS[name], "weight": nn.Linear(1, 1)})
    assert make_norms_exact(model) == 0
    assert model[name] is OTHERS[name]


def test_kept_norms_stay() -> None:
    model = model_of({"kept": nn.Sequential(LlamaRMSNorm(8)), "other": LlamaRMSNorm(8)})
    assert make_norms_exact(model, keep=[model["kept"]]) == 1
    assert type(model["kept"][0]) is LlamaRMSNorm
