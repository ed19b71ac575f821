"""A small random target and MTP layers for it, in the published layouts, in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted_tokens import CONTEXT, HIDDEN, save_llama, save_random
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

VOCAB, DEPTH = 41, 3
HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 8, 48

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": DEPTH,
    "num_nextn_predict_layers": 4,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT,
}


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with grouped heads."""
    return save_llama(tmp_path_factory.mktemp("target"), layers=DEPTH, vocab_size=VOCAB)


def block_shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama decoder layer."""
    return {
        "input_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.gate_proj.weight": (WIDTH, HIDDEN),
        "mlp.up_proj.weight": (WIDTH, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, WIDTH),
    }


BIASED = (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))


def joint_shapes() -> dict[str, tuple[int, ...]]:
    """What an MTP module of DeepSeek-V3 has around its decoder layer."""
    return {
        "enorm.weight": (HIDDEN,),
        "hnorm.weight": (HIDDEN,),
        "eh_proj.weight": (HIDDEN, 2 * HIDDEN),
        "shared_head.norm.weight": (HIDDEN,),
    }


def random_tensors(
    shapes: dict[str, tuple[int, ...]], prefix: str = "", seed: int = 1
) -> dict[str, Tensor]:
    """Random float64 tensors, those of norms around one."""
    torch.manual_seed(seed)
    return {
        prefix + name: torch.randn(shape, dtype=torch.float64) * 0.3 + ("norm" in name)
        for name, shape in shapes.items()
    }


def mtp_tensors(
    first: int = DEPTH, layers: int = 4, block: dict[str, tuple[int, ...]] | None = None
) -> dict[str, Tensor]:
    """MTP layers under DeepSeek-V3's names."""
    shapes = {**joint_shapes(), **(block or block_shapes())}
    tensors: dict[str, Tensor] = {}
    for k in range(layers):
        tensors |= random_tensors(shapes, f"model.layers.{first + k}.", seed=k + 1)
    return tensors


def rename_mimo(tensors: dict[str, Tensor], first: int = DEPTH) -> dict[str, Tensor]:
    """Tensors of DeepSeek-V3's layout under the names that MiMo has; the values are the same."""
    names = {
        "enorm": "token_layernorm",
        "hnorm": "hidden_layernorm",
        "eh_proj": "input_proj",
        "shared_head.norm": "final_layernorm",
    }
    renamed = {}
    for name, tensor in tensors.items():
        _, _, number, rest = name.split(".", 3)
        part, _, kind = rest.rpartition(".")
        renamed[f"model.mtp_layers.{int(number) - first}.{names.get(part, part)}.{kind}"] = tensor
    return renamed


def add_shard(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """Put more tensors into a model's folder, as a second shard under one index."""
    whole = folder / "model.safetensors"
    if whole.is_file():
        with safe_open(whole, framework="pt") as stored:
            weight_map = dict.fromkeys(stored.keys(), "model-00001-of-00002.safetensors")
        whole.rename(folder / "model-00001-of-00002.safetensors")
    second = "model-00002-of-00002.safetensors"
    save_file(tensors, folder / second, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {**weight_map, **dict.fromkeys(tensors, second)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, **config}))
    return folder


@pytest.fixture(scope="session")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiMo's layout: two MTP layers inside the checkpoint of a Qwen2, with biases.

    transformers has no MiMo; a user serves it as the Qwen2 that it is.
    """
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=None,
    )
    folder = save_random(config, tmp_path_factory.mktemp("mimo"))
    biases = {f"self_attn.{p}_proj.bias": (h * HEAD_DIM,) for p, h in BIASED}
    tensors = rename_mimo(mtp_tensors(layers=2, block={**block_shapes(), **biases}))
    return add_shard(folder, tensors, num_nextn_predict_layers=2)


def expert_shapes(experts: int, width: int) -> dict[str, tuple[int, ...]]:
    """Routed and shared experts, one by one, and their router."""
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (experts, HIDDEN),
        "mlp.gate.e_score_correction_bias": (experts,),
    }
    for name in (*(f"experts.{e}" for e in range(experts)), "shared_experts"):
        shapes[f"mlp.{name}.gate_proj.weight"] = (width, HIDDEN)
        shapes[f"mlp.{name}.up_proj.weight"] = (width, HIDDEN)
        shapes[f"mlp.{name}.down_proj.weight"] = (HIDDEN, width)
    return shapes


NORM_SHAPES = {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)}
EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}


@pytest.fixture(scope="session")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-4.5's layout: an MTP layer with experts, half rotary, biases and normed queries and
    keys after the last layer of the target; with an embedding and a head that are not used."""
    from transformers import Glm4MoeConfig

    config = Glm4MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        use_qk_norm=True,
        attention_bias=True,
        rms_norm_eps=1e-5,
        eos_token_id=None,
        **EXPERTS,
    )
    folder = save_random(config, tmp_path_factory.mktemp("glm"))
    attention = {n: s for n, s in block_shapes().items() if n.startswith("self_attn")}
    biases = {f"self_attn.{p}_proj.bias": (h * HEAD_DIM,) for p, h in BIASED}
    norms = {f"self_attn.{p}_norm.weight": (HEAD_DIM,) for p in "qk"}
    block = {**attention, **biases, **norms, **NORM_SHAPES, **expert_shapes(4, 16)}
    tensors = mtp_tensors(first=2, layers=1, block=block)
    shared = {"embed_tokens.weight": (VOCAB, HIDDEN), "shared_head.head.weight": (VOCAB, HIDDEN)}
    tensors |= random_tensors(shared, "model.layers.2.", seed=9)
    return add_shard(folder, tensors, num_nextn_predict_layers=1)


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3's layout in a folder of its own, as SGLang exports it: two MTP layers with
    latent attention and experts."""
    folder = tmp_path_factory.mktemp("deepseek")
    sizes = {"q_lora_rank": 12, "kv_lora_rank": 10, "v_head_dim": 6}
    sizes |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    block = {
        "self_attn.q_a_proj.weight": (12, HIDDEN),
        "self_attn.q_a_layernorm.weight": (12,),
        "self_attn.q_b_proj.weight": (HEADS * 12, 12),
        "self_attn.kv_a_proj_with_mqa.weight": (14, HIDDEN),
        "self_attn.kv_a_layernorm.weight": (10,),
        "self_attn.kv_b_proj.weight": (HEADS * 14, 10),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * 6),
    }
    block |= NORM_SHAPES | expert_shapes(4, 16)
    keys = {**CONFIG, **sizes, **EXPERTS, "model_type": "deepseek_v3"}
    keys |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 2, "num_key_value_heads": HEADS}
    del keys["head_dim"]
    (folder / "config.json").write_text(json.dumps(keys | {"first_k_dense_replace": 0}))
    save_file(mtp_tensors(0, 2, block), folder / "model.safetensors")
    return folder


@pytest.fixture
def write_draft(tmp_path: Path) -> Callable[..., Path]:
    """Write MTP layers in a folder of their own: ``write_draft(tensors, **config) -> folder``."""

    def write(tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
        config = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(mtp_tensors() if tensors is None else tensors, tmp_path / "model.safetensors")
        return tmp_path

    return write


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts of differing lengths, some of them shorter than the window of four layers."""
    torch.manual_seed(2)
    return [torch.randint(0, VOCAB, (n,)).tolist() for n in (5, 17, 2, 33, 1, 3)]
