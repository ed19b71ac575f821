"""Decoder layers with a forward for the CPU give their own results; layers of other kinds stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from two_layer_models import NUM_TOKENS, SHAPE, make_model, run_model

from specplug.kernels.cpu_kernels import CPUKernels
from specplug.model.cpu_layer import CPUHead, fuse_cpu_head, fuse_cpu_layers
from specplug.model.fused_norms import fuse_norms

CPU = torch.device("cpu")
FUSED = {
    "LlamaConfig": {},
    "Qwen2Config": {},  # queries, keys and values have biases
    "Qwen3Config": {},  # each head has a norm
    "MistralConfig": {"sliding_window": 7},
}
OTHERS = {
    "LlamaConfig": {"attention_bias": True},  # the output's bias too
    "GemmaConfig": {},  # its MLP is not gated by SiLU
    "Gemma2Config": {},
    "GlmConfig": {"partial_rotary_factor": 0.6},
    "GraniteConfig": {"residual_multiplier": 0.5},
    "Ministral3Config": {  # it scales the queries of late positions
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
        },
    },
}


def build(config: str, dtype: torch.dtype, **changes: Any) -> Any:
    model = make_model(config, dtype, CPU, **changes)
    fuse_norms(model)
    return model


@pytest.mark.parametrize("config", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_fused_layers_give_the_models_logits(config: str, dtype: torch.dtype) -> None:
    model = build(config, dtype, **FUSED[config])
    expected = run_model(model)
    fused = fuse_cpu_layers(model, model.model.layers)
    assert len(fused) == 2
    for found, own in zip(run_model(model), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)
    window = FUSED[config].get("sliding_window")
    assert [layer.form.window for layer in fused] == [window, window]


@pytest.mark.parametrize("config", FUSED)
def test_fused_layers_of_kernels_give_the_logits(config: str, cpu_kernels: CPUKernels) -> None:
    model = build(config, torch.float32, **FUSED[config])
    expected = run_model(model)
    fused = fuse_cpu_layers(model, model.model.layers, cpu_kernels)
    assert [layer.kernels for layer in fused] == [cpu_kernels, cpu_kernels]
    for found, own in zip(run_model(model), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    gate_up = fused[0].gate_up
    assert gate_up is not None
    assert torch.equal(gate_up[:, :40].t(), mlp.gate_proj.weight)
    assert mlp.up_proj.weight.data_ptr() == gate_up[:, 40:].data_ptr()
    assert fused[0].qkv.data_ptr() == attention.q_proj.weight.data_ptr()


def test_head_of_kernels_gives_the_logits(
    cpu_kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("LlamaConfig", torch.float32)
    head, hidden = model.get_output_embeddings(), torch.randn(2, 3, SHAPE["hidden_size"])
    expected = head(hidden)
    with monkeypatch.context() as small:
        small.setattr("specplug.kernels.cpu_kernels._MOST_TWICE_BYTES", 1000)
        assert fuse_cpu_head(model, cpu_kernels) is None
    assert fuse_cpu_head(model, cpu_kernels) is head
    assert isinstance(head, CPUHead)
    panels = head.panels
    assert panels is not None
    torch.testing.assert_close(head(hidden), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(head(hidden)[1], panels.linear(hidden[1]))
    head.close()
    assert head.panels is None
    assert torch.equal(head(hidden), expected)
    assert fuse_cpu_head(build("LlamaConfig", torch.float64), cpu_kernels) is None


def test_large_models_weights_are_not_kept_twice(
    cpu_kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("Qwen3Config", torch.float32)
    expected = run_model(model)
    monkeypatch.setattr("specplug.kernels.cpu_kernels._MOST_TWICE_BYTES", 1000)
    fused = fuse_cpu_layers(model, model.model.layers, cpu_kernels)
    assert [layer.weights for layer in fused] == [None, None]
    for found, own in zip(run_model(model), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", OTHERS)
def test_layers_of_other_kinds_stay(config: str) -> None:
    model = build(config, torch.float32, **OTHERS[config])
    expected = run_model(model)
    assert fuse_cpu_layers(model, model.model.layers) == []
    for found, own in zip(run_model(model), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)


def test_layers_in_half_precision_stay() -> None:
    model = build("LlamaConfig", torch.bfloat16)
    assert fuse_cpu_layers(model, model.model.layers) == []


def test_fused_layers_keep_one_copy_of_the_weights() -> None:
    model = build("Qwen2Config", torch.float32)
    names = {name: parameter.clone() for name, parameter in model.named_parameters()}
    (first, _) = fuse_cpu_layers(model, model.model.layers)
    attention = model.model.layers[0].self_attn
    assert first.qkv.data_ptr() == attention.q_proj.weight.data_ptr()
    assert torch.equal(first.qkv[:, -20:].t(), attention.v_proj.weight)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, names[name])
    first.close()
    assert first.weights is None
    assert {part.numel() for part in (first.qkv, first.up, first.down)} == {0}


def test_hooks_on_a_fused_layer_run() -> None:
    model = build("LlamaConfig", torch.float32)
    seen: dict[str, Tensor] = {}

    def before(module: Any, args: Any, kwargs: Any) -> None:
        seen["input"] = args[0] if args else kwargs["hidden_states"]

    def after(module: Any, args: Any, output: Tensor) -> None:
        seen["output"] = output

    model.model.layers[1].register_forward_pre_hook(before, with_kwargs=True)
    model.model.layers[0].register_forward_hook(after)
    assert len(fuse_cpu_layers(model, model.model.layers)) == 2
    assert seen == {}, "the proof calls no hook"
    run_model(model)
    assert seen["input"].shape == (1, NUM_TOKENS, SHAPE["hidden_size"])
    assert torch.equal(seen["input"], seen["output"])
