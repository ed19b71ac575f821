"""A small random target and draft checkpoints for it, in the published layouts, in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted_tokens import CONTEXT, HIDDEN, VOCAB, save_llama
from safetensors.torch import save_file
from torch import Tensor

DRAFT_VOCAB, BLOCK, MASK = 50, 8, 96

DECODER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "hidden_act": "silu",
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": CONTEXT,
    "sliding_window": None,
}

Z_LAB = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    **DECODER,
    "block_size": BLOCK,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
}

CONV_GROUP, RANK, TOP_K = 8, 12, 4

SECOND = {
    "conv_kernel_size": 2,
    "conv_group_size": CONV_GROUP,
    "selector_rank": RANK,
    "selector_top_k": TOP_K,
}
"""What DFlash 2 adds to a checkpoint's keys."""

Z_LAB_2 = {
    **{key: value for key, value in Z_LAB.items() if key != "block_size"},
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "dflash_config": {
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layer_ids": [0, 2],
        **SECOND,
        "input_embedding_scale": 0.8,
        "output_multiplier": 0.7,
        "final_logit_softcapping": 20.0,
    },
}

SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [1, 3],
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "draft_vocab_size": DRAFT_VOCAB,
    "target_hidden_size": None,
    "sliding_window_non_causal": False,
    "sample_from_anchor": False,
    "transformer_layer_config": {"model_type": "qwen3", **DECODER},
}


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers with grouped heads."""
    return save_llama(tmp_path_factory.mktemp("target"), layers=4)


def z_lab_shapes(hidden: int = HIDDEN, features: int = 2 * HIDDEN) -> dict[str, tuple[int, ...]]:
    """Names and shapes of z-lab's layout: two layers, 4 query and 2 key heads of size 8."""
    layer = {
        "self_attn.q_proj.weight": (32, hidden),
        "self_attn.k_proj.weight": (16, hidden),
        "self_attn.v_proj.weight": (16, hidden),
        "self_attn.o_proj.weight": (hidden, 32),
        "self_attn.q_norm.weight": (8,),
        "self_attn.k_norm.weight": (8,),
        "mlp.gate_proj.weight": (48, hidden),
        "mlp.up_proj.weight": (48, hidden),
        "mlp.down_proj.weight": (hidden, 48),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    return {
        "fc.weight": (hidden, features),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()},
    }


def z_lab_tensors(hidden: int = HIDDEN) -> dict[str, Tensor]:
    """Random tensors of z-lab's layout."""
    torch.manual_seed(1)
    shapes = z_lab_shapes(hidden)
    return {n: torch.randn(shape, dtype=torch.float64) * 0.5 for n, shape in shapes.items()}


def second_tensors(hidden: int = HIDDEN) -> dict[str, Tensor]:
    """Random tensors of z-lab's layout of DFlash 2."""
    tensors = z_lab_tensors(hidden)
    shapes = {
        "candidate_selector.predecessor_codebook": (VOCAB, RANK),
        "candidate_selector.successor_codebook": (VOCAB, RANK),
        "candidate_selector.hidden_projection.weight": (RANK, hidden),
        **{
            f"layers.{i}.{name}_conv.{key}": shape
            for i in range(2)
            for name in ("attention", "mlp")
            for key, shape in (
                ("base_kernel", (2, 2, hidden)),
                ("kernel_projection.weight", (2 * 2 * hidden // CONV_GROUP, hidden)),
            )
        },
    }
    drawn = {n: torch.randn(shape, dtype=torch.float64) * 0.5 for n, shape in shapes.items()}
    return {**tensors, **drawn}


def speculators_tensors(hidden: int = HIDDEN) -> dict[str, Tensor]:
    """Random tensors of ``speculators``' layout: a head of its own over fewer tokens."""
    tensors = z_lab_tensors(hidden)
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    return {
        **tensors,
        "lm_head.weight": torch.randn(DRAFT_VOCAB, hidden, dtype=torch.float64) * 0.5,
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True),
    }


@pytest.fixture
def write_draft(tmp_path: Path) -> Callable[..., Path]:
    """Write a checkpoint: ``write_draft(tensors, layout, **config) -> folder``.

    z-lab's layout unless another is given; a key of None is left out of ``config.json``.
    """

    def write(
        tensors: dict[str, Tensor] | None = None,
        layout: dict[str, Any] = Z_LAB,
        **changes: Any,
    ) -> Path:
        tensors = z_lab_tensors() if tensors is None else tensors
        config = {k: v for k, v in {**layout, **changes}.items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return write


@pytest.fixture
def second() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of DFlash 2, in z-lab's layout."""
    return second_tensors(), Z_LAB_2


@pytest.fixture
def domino() -> Callable[..., tuple[dict[str, Tensor], dict[str, Any]]]:
    """``domino(**keys) -> (tensors, config)`` of a Domino head, in its published layout."""

    def make(**keys: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        shapes = {
            "prefix_gru.weight_ih_l0": (3 * 12, HIDDEN),
            "prefix_gru.weight_hh_l0": (3 * 12, 12),
            "embed_proj.0.weight": (20, HIDDEN + 12),
            "embed_proj.2.weight": (VOCAB, 20),
        }
        tensors = z_lab_tensors()
        drawn = {n: torch.randn(shape, dtype=torch.float64) * 0.5 for n, shape in shapes.items()}
        head = {
            "projector_type": "domino",
            "shift_label": True,
            "pure_draft_prefix_len": 1,
            "gru_hidden_dim": 12,
            "emb_dim": 20,
        }
        keys = {**Z_LAB["dflash_config"], **head, **keys}
        return {**tensors, **drawn}, {**Z_LAB, "dflash_config": keys}

    return make


@pytest.fixture
def lilicorr() -> Callable[..., tuple[dict[str, Tensor], dict[str, Any]]]:
    """``lilicorr(width, **keys) -> (tensors, config)`` of a LiLiCorr head in its published layout,
    of this width or, if it is 0, of the draft's."""

    def make(width: int, **keys: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        own = width or HIDDEN
        linears = {
            "pass_hidden_proj": (own, HIDDEN),
            "feature_mlp.up_proj": (own, 5),
            "feature_mlp.down_proj": (own, own),
            "context_proj": (own, HIDDEN),
            "factor_input_proj": (own, 3 * own),
            "out_head": (6, own),
            "in_head": (6, own),
            "anchor_out_head": (6, own),
            **({"token_proj": (own, HIDDEN)} if width else {}),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "feature_norm.weight": (5,),
            "feature_norm.bias": (5,),
            "slot_embedding": (1, 1, BLOCK - 1, 1, own),
            "rank_embedding": (1, 1, 1, TOP_K, own),
            "relative_slot_bias": (2, 2 * BLOCK - 1),
            "same_slot_bias": (2,),
            "output_norm.weight": (own,),
            "anchor_norm.weight": (own,),
        }
        for i in range(2):
            linears[f"layers.{i}.attn.out_proj"] = (own, own)
            linears[f"layers.{i}.mlp.up_proj"] = (2 * own, own)
            linears[f"layers.{i}.mlp.down_proj"] = (own, 2 * own)
            shapes[f"layers.{i}.attn.in_proj_weight"] = (3 * own, own)
            shapes[f"layers.{i}.attn.in_proj_bias"] = (3 * own,)
            shapes[f"layers.{i}.attn_norm.weight"] = (own,)
            shapes[f"layers.{i}.mlp_norm.weight"] = (own,)
        for name, shape in linears.items():
            shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]
        tensors = z_lab_tensors()
        drawn = {
            f"lilicorr.{n}": torch.randn(shape, dtype=torch.float64) * 0.5
            for n, shape in shapes.items()
        }
        head = {
            "lilicorr_candidate_topk": TOP_K,
            "lilicorr_hidden_size": width,
            "lilicorr_num_layers": 2,
            "lilicorr_num_heads": 2,
            "lilicorr_mlp_ratio": 2.0,
            "lilicorr_factor_dim": 6,
            "lilicorr_vector_eps": 1e-6,
            "lilicorr_logit_scale": 8.0,
        }
        layout = {**Z_LAB, "architectures": ["LiLiCorrDraftModel"]}
        layout["dflash_config"] = {**Z_LAB["dflash_config"], **head, **keys}
        return {**tensors, **drawn}, layout

    return make


@pytest.fixture
def speculators() -> Callable[[int], tuple[dict[str, Tensor], dict[str, Any]]]:
    """``speculators(hidden) -> (tensors, config)``; another width than the target's wants an
    embedding of its own."""

    def make(hidden: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = speculators_tensors(hidden)
        if hidden == HIDDEN:
            return tensors, SPECULATORS
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, hidden, dtype=torch.float64)
        decoder = {"model_type": "qwen3", **DECODER, "hidden_size": hidden}
        layout = {**SPECULATORS, "transformer_layer_config": decoder, "target_hidden_size": HIDDEN}
        return tensors, layout

    return make


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts of differing lengths."""
    torch.manual_seed(2)
    return [torch.randint(0, VOCAB, (n,)).tolist() for n in (5, 17, 33, 1, 60)]
