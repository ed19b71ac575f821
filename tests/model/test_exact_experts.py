"""Experts and routers of transformers compute by our kernels, as their own modules do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from specplug.kernels.float_linear import float_linear
from specplug.model import exact_experts
from specplug.model.attention import IMPLEMENTATION, register
from specplug.model.exact_experts import (
    EXPERTS,
    experts_forward,
    find_experts_variance,
    make_experts_exact,
    make_routers_exact,
)
from specplug.model.exact_linear import make_linears_exact

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
DEEPSEEK = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
            "head_dim": 8}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3MoeConfig": {},
    "MixtralConfig": {},  # weights of float32
    "DeepseekV3Config": DEEPSEEK,  # a router in float32
    "GptOssConfig": {},  # transposed, interleaved, with biases and an activation of its own
    "AfmoeConfig": {"num_dense_layers": 0, "num_shared_experts": 1},
}


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_experts, "_PAIRS_OF_EXPERT", (2,))


def build(config: str) -> Any:
    register()
    torch.manual_seed(0)
    settings = getattr(transformers, config)(**{**SHAPE, **FAMILIES[config]})
    settings._attn_implementation = IMPLEMENTATION
    model = transformers.AutoModelForCausalLM.from_config(settings).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.2)
    return model.to(DEVICE, torch.float16)


def sparse_mlp(model: Any) -> Any:
    return model.model.layers[0].mlp


def run(mlp: Any, rows: Tensor) -> Tensor:
    """[R, H] -> [R, H]."""
    out = mlp(rows.unsqueeze(0))
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result.view(rows.shape)


@torch.inference_mode()
@pytest.mark.parametrize("config", FAMILIES)
def test_mixture_gives_its_own_result_row_by_row(config: str) -> None:
    model = build(config)
    mlp = sparse_mlp(model)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    model.set_experts_implementation("eager")
    expected = run(mlp, x)
    make_linears_exact(model)
    assert make_routers_exact(model) == (config != "AfmoeConfig")  # whose router has a linear
    experts = make_experts_exact(model)
    assert experts == [mlp.experts]
    assert model.config._experts_implementation == EXPERTS
    found = run(mlp, x)
    assert (found.float() - expected.float()).norm() < 5e-3 * expected.float().norm()
    for rows in (slice(0, 1), slice(2, 4)):
        assert torch.equal(run(mlp, x[rows]), found[rows])


@torch.inference_mode()
def test_rows_of_experts_alone_and_together_have_equal_bits() -> None:
    experts = make_experts_exact(build("Qwen3MoeConfig"))
    assert len(experts) == 1
    assert find_experts_variance(experts) == []


def test_experts_without_gate_give_their_own_result() -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    config = transformers.NemotronHConfig(
        hidden_size=32, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    experts = NemotronHExperts(config)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.2)
    experts.to(DEVICE, torch.float16)
    assert not experts.has_gate
    with torch.inference_mode():
        inputs = exact_experts._sample(experts, 2)
        own, found = experts(*inputs).float(), experts_forward(experts, *inputs).float()
    assert (found - own).norm() < 5e-3 * own.norm()


def test_experts_that_compute_otherwise_stay_as_they_are() -> None:
    model = build("Qwen3MoeConfig")
    experts = sparse_mlp(model).experts
    before = model.config._experts_implementation
    own = type(experts).forward

    class Doubled(type(experts)):  # type: ignore[misc]
        def forward(self, *inputs: Tensor) -> Tensor:
            result: Tensor = 2 * own(self, *inputs)
            return result

    experts.__class__ = Doubled
    assert make_experts_exact(model) == []
    assert model.config._experts_implementation == before


def test_dense_models_have_no_experts_and_no_routers() -> None:
    register()
    settings = transformers.LlamaConfig(**SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(settings).to(torch.float16)
    make_linears_exact(model)
    assert make_experts_exact(model) == []
    assert make_routers_exact(model) == 0


@torch.inference_mode()
def test_routers_in_float32_compute_by_the_kernel() -> None:
    model = build("DeepseekV3Config")
    router = sparse_mlp(model).gate
    make_routers_exact(model)
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    expected = float_linear(x.float(), router.weight.float())
    assert torch.equal(router(x)[0], expected)


def test_router_keeps_its_class_name_and_attributes() -> None:
    model = build("Qwen3MoeConfig")
    router: nn.Module = sparse_mlp(model).gate
    own = type(router)
    make_routers_exact(model)
    assert isinstance(router, own)
    assert type(router).__name__ == own.__name__
