"""A target whose modules compute by our kernels gives its own logits, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from specplug import LLM
from specplug.errors import FallbackWarning
from specplug.kernels.linear import linear
from specplug.kernels.paged_attention_kernels import PagedAttention
from specplug.model import exact_experts, exact_linear, row_proof
from specplug.model.attention import IMPLEMENTATION, register
from specplug.model.exact_experts import EXPERTS
from specplug.model.exact_linear import ExactConv1D, ExactLinear
from specplug.model.exact_norms import ExactLayerNorm, ExactRMSNorm
from specplug.model.half_precision import replace_modules
from specplug.model.layer_fusion import SequencePlan
from specplug.model.target import Target
from specplug.speculative import layers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "n_inner": 48,  # of GPT-2
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 32,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
TOKENS = torch.arange(9, device=DEVICE) * 5 % 48


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are tried out with one row more than a kernel takes, of which the interpreter,
    30 ms a row, takes few. Passes and contexts are short for the same reason."""
    monkeypatch.setattr(exact_linear, "_MOST_SAMPLED", 0)
    if DEVICE.type == "cpu":
        for name, rows in {"PASS_LENGTH": 10, "_CHUNK": 6, "_SHORT": 3, "KEYS": 24}.items():
            monkeypatch.setattr(row_proof, name, rows)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(exact_linear, "TARGET_KERNEL_ROWS", 16)


def build(config: str) -> Any:
    register()
    torch.manual_seed(0)
    settings = getattr(transformers, config)(**SHAPE)
    settings._attn_implementation = IMPLEMENTATION
    return transformers.AutoModelForCausalLM.from_config(settings).eval().to(DEVICE, torch.float16)


@torch.inference_mode()
def logits_of(model: Any) -> Tensor:
    def forward(ids: Tensor, *, position_ids: Tensor, **named: Any) -> Tensor:
        logits: Tensor = model(input_ids=ids, position_ids=position_ids, use_cache=False).logits
        return logits

    plan = SequencePlan(len(TOKENS), 4, SHAPE["head_dim"], torch.float16, DEVICE)
    return plan.run(forward, 1, TOKENS.unsqueeze(0), None)


@pytest.mark.parametrize(
    ("config", "num_fused", "num_linears", "num_norms"),
    [("Qwen3Config", 2, 1, 1), ("Gemma2Config", 0, 15, 9), ("GPT2Config", 0, 9, 5)],
)
def test_replaced_modules_give_the_models_logits(
    config: str, num_fused: int, num_linears: int, num_norms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(config)
    layers = getattr(model.base_model, "layers", None) or model.base_model.h
    expected = logits_of(model)
    fused, variant = replace_modules(model, layers, row_invariant=True)
    assert (len(fused), variant) == (num_fused, [])
    modules = list(model.modules())
    assert sum(isinstance(each, ExactLinear | ExactConv1D) for each in modules) == num_linears
    assert sum(isinstance(each, ExactRMSNorm | ExactLayerNorm) for each in modules) == num_norms
    found = logits_of(model)
    assert (found.float() - expected.float()).norm() < 1e-2 * expected.float().norm()


@pytest.mark.parametrize("config", ["LlamaConfig", "Gemma3TextConfig"])
def test_a_plain_input_embedding_is_read_by_a_kernel(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3's scales what it reads, and stays."""
    monkeypatch.setattr(layers, "has_kernels", lambda x: True)
    model = build(config)
    module = model.get_input_embeddings()
    expected = module(TOKENS.view(3, 3))
    replace_modules(model, [], row_invariant=False)
    assert type(module) is not nn.Embedding
    assert isinstance(module, layers.Embedding) == (config == "LlamaConfig")
    with torch.no_grad():
        assert torch.equal(module(TOKENS.view(3, 3)), expected)


def test_declined_row_invariance_replaces_fused_layers_alone() -> None:
    model = build("LlamaConfig")
    (first, _), _ = replace_modules(model, model.model.layers, row_invariant=False)
    assert not first.products.exact
    assert type(model.lm_head) is nn.Linear
    assert not isinstance(model.model.norm, ExactRMSNorm)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there the targets of other tests show it")
@pytest.mark.filterwarnings("error::specplug.errors.FallbackWarning")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
def test_all_passes_of_a_target_give_a_row_the_same_bits(
    build_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, in chunks, two requests together, as a tree: the check at loading compares them."""
    monkeypatch.setattr(
        "specplug.model.target.attention_kernels", lambda device, dtype: PagedAttention(device)
    )
    changes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = build_model(transformers.Qwen3Config(**{**SHAPE, **changes}))
    target = Target(str(folder), torch.float16, DEVICE)
    assert isinstance(target.lm_head, ExactLinear)
    attention: Any = target.model.model.layers[0].self_attn
    storage = attention.q_proj.weight.untyped_storage()
    assert storage.data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    target.close()
    assert sum(parameter.numel() for parameter in target.model.parameters()) == 0


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there the targets of other tests show it")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
def test_variant_products_turn_row_invariance_off(
    build_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specplug.model.target.attention_kernels", lambda device, dtype: PagedAttention(device)
    )

    def by_count(x: Tensor, weight: Tensor, *more: Any) -> Tensor:
        return linear(x, weight, *more) * (1 + len(x) / 1024)

    changes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = build_model(transformers.Gemma2Config(**{**SHAPE, **changes}))
    monkeypatch.setattr(exact_linear, "linear", by_count)
    monkeypatch.setattr(exact_linear, "TARGET_KERNEL_ROWS", 2)
    with pytest.warns(FallbackWarning, match="row invariance") as told:
        target = Target(str(folder), torch.float16, DEVICE)
    warned = [each for each in told if each.category is FallbackWarning]
    assert len(warned) == 1, "the check of whole passes finds it too"
    assert target.row_invariance.startswith("off: products of shape 16 x 32, 8 x 32, ")
    target.close()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there the targets of other tests show it")
@pytest.mark.filterwarnings("error::specplug.errors.FallbackWarning")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
def test_passes_of_a_mixture_of_experts_give_the_same_bits(
    build_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact_experts, "_PAIRS_OF_EXPERT", (1,))
    monkeypatch.setattr(
        "specplug.model.target.attention_kernels", lambda device, dtype: PagedAttention(device)
    )
    changes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
               "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}  # fmt: skip
    folder = build_model(transformers.Qwen3MoeConfig(**{**SHAPE, **changes}))
    target = Target(str(folder), torch.float16, DEVICE)
    assert target.model.config._experts_implementation == EXPERTS
    target.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
@pytest.mark.parametrize(
    ("dtype", "told"),
    [
        ("float32", "not needed in float32"),
        ("bfloat16", "on"),
    ],
)
def test_effective_config_tells_row_invariance(tiny_model: Path, dtype: str, told: str) -> None:
    with LLM(tiny_model, dtype=dtype) as llm:
        assert llm.effective_config["row_invariance"] == told
