"""Decoder layers with a fused forward give their own results; layers of other kinds stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from two_layer_models import NUM_TOKENS, SHAPE, make_model, run_model

from specplug.model.exact_linear import Products
from specplug.model.gpu_layer import fuse_gpu_layers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FUSED = {
    "LlamaConfig": {"attention_bias": True, "mlp_bias": True},
    "Qwen2Config": {},
    "Qwen3Config": {},
    "MistralConfig": {"sliding_window": 7},
}
OTHERS = {
    "GemmaConfig": {},  # its MLP is not gated by SiLU
    "Gemma2Config": {},
    "GlmConfig": {"partial_rotary_factor": 0.6},
    "CohereConfig": {},
    "Qwen3MoeConfig": {
        "hidden_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}


def build(config: str, **changes: Any) -> Any:
    return make_model(config, torch.float16, DEVICE, **changes)


@pytest.mark.parametrize("config", FUSED)
def test_fused_layers_give_the_models_logits(config: str) -> None:
    model = build(config, **FUSED[config])
    expected = run_model(model)
    fused = fuse_gpu_layers(model, model.model.layers, Products(exact=True))
    assert len(fused) == 2
    for found, own in zip(run_model(model), expected, strict=True):
        assert (found.float() - own.float()).norm() < 1e-2 * own.float().norm()
    window = FUSED[config].get("sliding_window")
    assert [layer.form.window for layer in fused] == [window, window]


@pytest.mark.parametrize("config", OTHERS)
def test_layers_of_other_kinds_stay(config: str) -> None:
    model = build(config, **OTHERS[config])
    expected = run_model(model)
    assert fuse_gpu_layers(model, model.model.layers, Products(exact=True)) == []
    for found, own in zip(run_model(model), expected, strict=True):
        assert torch.equal(found, own)


def test_fused_layers_keep_one_copy_of_the_weights() -> None:
    model = build("Qwen2Config")
    names = {name: parameter.clone() for name, parameter in model.named_parameters()}
    (first, _) = fuse_gpu_layers(model, model.model.layers, Products(exact=True))
    attention = model.model.layers[0].self_attn
    assert first.qkv[0].data_ptr() == attention.q_proj.weight.data_ptr()
    assert first.qkv[1].data_ptr() == attention.q_proj.bias.data_ptr()
    assert torch.equal(first.qkv[0][-20:], attention.v_proj.weight)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, names[name])
    first.close()
    assert {part.numel() for part in (first.qkv[0], first.up[0], first.down[0])} == {0}


def test_hooks_on_a_fused_layer_run() -> None:
    model = build("LlamaConfig")
    seen: dict[str, Tensor] = {}

    def before(module: Any, args: Any, kwargs: Any) -> None:
        seen["input"] = args[0] if args else kwargs["hidden_states"]

    def after(module: Any, args: Any, output: Tensor) -> None:
        seen["output"] = output

    model.model.layers[1].register_forward_pre_hook(before, with_kwargs=True)
    model.model.layers[0].register_forward_hook(after)
    assert len(fuse_gpu_layers(model, model.model.layers, Products(exact=True))) == 2
    assert seen == {}, "the proof calls no hook"
    run_model(model)
    assert seen["input"].shape == (1, NUM_TOKENS, SHAPE["hidden_size"])
    assert torch.equal(seen["input"], seen["output"])
