"""Targets and drafts of real sizes with random weights, as checkpoints that any engine loads.

    python benchmarks/gpu/shapes.py FOLDER --shapes llama-8b qwen3-8b

writes ``FOLDER/llama-8b/target``, ``…/eagle3`` and ``…/dflash``: weights are drawn on the device
and written in shards, several at a time. The next token is a random function of the last one, with
a little of the context, so no draft is accepted and a step is a step. What is there already is left
as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

MTP_LAYERS = 4
"""Of MULTI_LAYER_EAGLE's draft."""
SHARD_BYTES = 1 << 29
WRITERS = 8


def _target(kind: str, **sizes: int) -> dict[str, Any]:
    """The ``config.json`` of a target: a Llama, or a Qwen3, which norms queries and keys."""
    name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
    return {
        "architectures": [name],
        "model_type": kind,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 40960,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5 if kind == "llama" else 1e-6,
        "rope_theta": 500000.0 if kind == "llama" else 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **sizes,
    }


_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_SMALL = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
_TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}

SHAPES: Mapping[str, dict[str, Any]] = {
    "llama-8b": _target(
        "llama", **_8B, num_hidden_layers=32, intermediate_size=14336, vocab_size=128256
    ),
    "qwen3-8b": _target(
        "qwen3", **_8B, num_hidden_layers=36, intermediate_size=12288, vocab_size=151936
    ),
    "llama-small": _target(
        "llama", **_SMALL, num_hidden_layers=8, intermediate_size=2816, vocab_size=32000
    ),
    "qwen3-small": _target(
        "qwen3", **_SMALL, num_hidden_layers=8, intermediate_size=2816, vocab_size=32000
    ),
    "llama-tiny": _target(
        "llama", **_TINY, num_hidden_layers=8, intermediate_size=128, vocab_size=512
    ),
    "qwen3-tiny": _target(
        "qwen3", **_TINY, num_hidden_layers=8, intermediate_size=128, vocab_size=512
    ),
}
"""By name: the ``config.json`` of each target."""


def write_shape(
    folder: Path, name: str, drafts: Iterable[str], device: str, *, context: float = 0.02
) -> Path:
    """Write a target and drafts for it, those that are not there.

    Args:
        drafts: of ``eagle``, ``eagle3``, ``peagle``, ``multi_layer_eagle``, ``dflash``, ``dspark``
            and ``standalone``.
        context: how much a layer adds to the residual stream, whose embedding is 1. At 0.02 the
            last token decides. At 1 the whole context does, and every rounding with it.

    Returns:
        ``folder / name``.
    """
    base, target = folder / name, SHAPES[name]
    write_target(base / "target", target, device, context=context)
    for draft in drafts:
        config, tensors = DRAFTS[draft](target)
        _write(base / draft, config, tensors, _Drawn(1.0, 1), device)
    return base


def write_target(folder: Path, config: dict[str, Any], device: str, *, context: float) -> None:
    """Write a target with random weights, unless it is there."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    tensors = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    _write(folder, config, tensors, _Drawn(context, config["num_hidden_layers"]), device)


def weight_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's tensors that a decode step reads: all but the embedding."""
    index = json.loads((folder / "sizes.json").read_text())
    return sum(size for name, size in index.items() if "embed_tokens" not in name)


def kv_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of a token's keys and values in bfloat16."""
    heads, width = config["num_key_value_heads"], config["head_dim"]
    return int(2 * 2 * config["num_hidden_layers"] * heads * width)


def _decoder(target: Mapping[str, Any], layers: int, **more: Any) -> dict[str, Any]:
    """The ``config.json`` of a draft whose layers are as the target's."""
    return {
        **target,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        **more,
    }


def _layer(config: Mapping[str, Any], inputs: int, prefix: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a decoder layer but its norms."""
    hidden, width = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    middle = config["intermediate_size"]
    return {
        f"{prefix}self_attn.q_proj.weight": (heads * width, inputs),
        f"{prefix}self_attn.k_proj.weight": (kv_heads * width, inputs),
        f"{prefix}self_attn.v_proj.weight": (kv_heads * width, inputs),
        f"{prefix}self_attn.o_proj.weight": (hidden, heads * width),
        f"{prefix}mlp.gate_proj.weight": (middle, hidden),
        f"{prefix}mlp.up_proj.weight": (middle, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, middle),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }


Draft = tuple[dict[str, Any], dict[str, tuple[int, ...]]]
"""The ``config.json`` of a draft, and the shapes of its tensors."""


def _eagle(target: Mapping[str, Any]) -> Draft:
    """One layer, in SafeAILab's layout."""
    hidden = target["hidden_size"]
    tensors = _layer(target, hidden, "layers.0.")
    return _decoder(target, 1, bias=False), {"fc.weight": (hidden, 2 * hidden), **tensors}


def _eagle3(target: Mapping[str, Any]) -> Draft:
    """One layer over three features and a quarter of the vocabulary, in SafeAILab's layout."""
    hidden, vocabulary = target["hidden_size"], target["vocab_size"]
    own = 32000 if vocabulary > 64000 else vocabulary // 2
    config = _decoder(target, 1, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=own)
    return config, {
        "fc.weight": (hidden, 3 * hidden),
        **_layer(target, 2 * hidden, "midlayer."),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (own, hidden),
        "d2t": (own,),
        "t2d": (vocabulary,),
    }


def _peagle(target: Mapping[str, Any]) -> Draft:
    """EAGLE-3's layer and three more, in vLLM's layout."""
    config, tensors = _eagle3(target)
    hidden = target["hidden_size"]
    for index in range(1, 4):
        tensors |= _layer(target, hidden, f"layers.{index}.")
        tensors[f"layers.{index}.input_layernorm.weight"] = (hidden,)
    tensors["mask_hidden"] = (1, 3 * hidden)
    masks = {"num_hidden_layers": 4, "ptd_token_id": target["vocab_size"] - 1}
    return {**config, **masks, "parallel_drafting": True}, tensors


def _multi_layer_eagle(target: Mapping[str, Any]) -> Draft:
    """A layer for each drafted token, in DeepSeek-V3's layout."""
    hidden, depth, count = target["hidden_size"], target["num_hidden_layers"], MTP_LAYERS
    tensors: dict[str, tuple[int, ...]] = {}
    for index in range(depth, depth + count):
        prefix = f"model.layers.{index}."
        tensors |= _layer(target, hidden, prefix)
        tensors[f"{prefix}input_layernorm.weight"] = (hidden,)
        tensors[f"{prefix}enorm.weight"] = tensors[f"{prefix}hnorm.weight"] = (hidden,)
        tensors[f"{prefix}eh_proj.weight"] = (hidden, 2 * hidden)
        tensors[f"{prefix}shared_head.norm.weight"] = (hidden,)
    return _decoder(target, depth, num_nextn_predict_layers=count), tensors


def _dflash(target: Mapping[str, Any]) -> Draft:
    """Five layers and blocks of 16, in z-lab's layout."""
    hidden, depth, count = target["hidden_size"], target["num_hidden_layers"], 5
    width = target["head_dim"]
    features = [round(1 + i * (depth - 4) / (count - 1)) for i in range(count)]
    config = _decoder(
        target,
        count,
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        block_size=16,
        dflash_config={"mask_token_id": target["vocab_size"] - 1, "target_layer_ids": features},
        layer_types=["full_attention"] * count,
        num_target_layers=depth,
        tie_word_embeddings=True,
    )
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, count * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(count):
        prefix = f"layers.{index}."
        tensors |= _layer(target, hidden, prefix)
        tensors[f"{prefix}input_layernorm.weight"] = (hidden,)
        tensors[f"{prefix}self_attn.q_norm.weight"] = (width,)
        tensors[f"{prefix}self_attn.k_norm.weight"] = (width,)
    return config, tensors


def _dspark(target: Mapping[str, Any]) -> Draft:
    """DFlash's layers and blocks of 7 with a Markov and a confidence head, as deepseek-ai's."""
    config, tensors = _dflash(target)
    hidden, vocab_size, rank = target["hidden_size"], target["vocab_size"], 256
    heads = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    tensors["markov_head.markov_w1.weight"] = (vocab_size, rank)
    tensors["markov_head.markov_w2.weight"] = (vocab_size, rank)
    tensors["confidence_head.proj.weight"] = (1, hidden + rank)
    return {**config, **heads}, tensors


def _standalone(target: Mapping[str, Any]) -> Draft:
    """A language model of four layers as the target's, with an embedding and a head of its own."""
    hidden, vocab_size, count = target["hidden_size"], target["vocab_size"], 4
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab_size, hidden),
    }
    for index in range(count):
        prefix = f"model.layers.{index}."
        tensors |= _layer(target, hidden, prefix)
        tensors[f"{prefix}input_layernorm.weight"] = (hidden,)
    return _decoder(target, count, tie_word_embeddings=False), tensors


DRAFTS = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "peagle": _peagle,
    "multi_layer_eagle": _multi_layer_eagle,
    "dflash": _dflash,
    "dspark": _dspark,
    "standalone": _standalone,
}


class _Drawn:
    """Draws a tensor by its name.

    Args:
        context: see ``write_shape``.
        layers: of the model, which share it.
    """

    def __init__(self, context: float, layers: int) -> None:
        self._residual = context / math.sqrt(2 * layers)

    def __call__(
        self, name: str, shape: tuple[int, ...], device: str, generator: torch.Generator
    ) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=device)
        scale = 1.0
        if "embed_tokens" not in name:
            scale = shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale *= self._residual
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return tensor.normal_(0, scale, generator=generator)


def _vocabulary(own: int, vocabulary: int) -> dict[str, Tensor]:
    """``d2t`` and ``t2d`` of a draft vocabulary that is spread over the target's."""
    order = torch.arange(own)
    ids = order * (vocabulary // own)
    members = torch.zeros(vocabulary, dtype=torch.bool)
    members[ids] = True
    return {"d2t": ids - order, "t2d": members}


def _write(
    folder: Path,
    config: dict[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    draw: _Drawn,
    device: str,
) -> None:
    """Write a checkpoint in shards, and last ``sizes.json``, by which a whole one is known."""
    if (folder / "sizes.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards({n: s for n, s in tensors.items() if n not in ("d2t", "t2d")})
    given = _vocabulary(tensors["d2t"][0], tensors["t2d"][0]) if "d2t" in tensors else {}

    def write(number: int) -> dict[str, str]:
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        generator = torch.Generator(device).manual_seed(1000 + number)
        made = {n: draw(n, tensors[n], device, generator).cpu() for n in shards[number]}
        if number == 0:
            made |= given
        save_file(made, folder / file, metadata={"format": "pt"})
        return dict.fromkeys(made, file)

    with ThreadPoolExecutor(WRITERS) as pool:
        parts = list(pool.map(write, range(len(shards))))
    places = {name: file for part in parts for name, file in part.items()}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    sizes = {n: 2 * math.prod(shape) for n, shape in tensors.items() if n not in given}
    (folder / "sizes.json").write_text(json.dumps(sizes, indent=1))


def _shards(tensors: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    shards: list[list[str]] = []
    room = 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        if size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", nargs="+", default=["llama-8b"], choices=SHAPES)
    parser.add_argument("--drafts", nargs="*", default=["eagle3", "dflash"], choices=DRAFTS)
    parser.add_argument("--context", type=float, default=0.02, help="how much a layer adds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    for name in arguments.shapes:
        start = time.monotonic()
        base = write_shape(
            arguments.folder, name, arguments.drafts, arguments.device, context=arguments.context
        )
        size = sum(file.stat().st_size for file in base.rglob("*.safetensors"))
        print(f"{base}: {size / 1e9:.2f} GB in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
