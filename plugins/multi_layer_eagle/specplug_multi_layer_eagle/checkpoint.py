"""Load published MTP layers, from a folder of their own or from the target's checkpoint.

The names of the tensors tell two layouts apart. L is ``num_hidden_layers``.

- DeepSeek-V3, GLM-4.5: ``model.layers.{L + k}.`` with ``enorm``, ``hnorm``, ``eh_proj`` over
  (embedding, hidden state), ``shared_head.norm``, and the decoder layer's own names. A folder with
  ``num_hidden_layers`` = ``num_nextn_predict_layers`` counts from ``model.layers.0`` (SGLang).
- MiMo: ``model.mtp_layers.{k}.`` with ``token_layernorm``, ``hidden_layernorm``, ``input_proj``
  over (hidden state, embedding), ``final_layernorm``, and the names of a Qwen2 layer.

``embed_tokens`` and ``shared_head.head`` are copies of the target's, and are not loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug import Checkpoint, CheckpointError, Runtime, SpecConfig, layers
from specplug_multi_layer_eagle.families import FAMILIES, Family
from specplug_multi_layer_eagle.network import MTPConfig, MTPNetwork

_NAME = re.compile(r"(?:model\.)?(layers|mtp_layers)\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_SHARED = ("embed_tokens.", "shared_head.head.")
_JOINT = ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.")
_MIMO = {
    "token_layernorm.": "enorm.",
    "hidden_layernorm.": "hnorm.",
    "input_proj.": "eh_proj.",
    "final_layernorm.": "shared_head.norm.",
}


@attrs.frozen
class Layout:
    """The place of the MTP layers in a checkpoint.

    Attributes:
        first: the number of the first MTP layer among ``model.layers``.
        num_layers: the number of MTP layers.
    """

    first: int
    num_layers: int

    @classmethod
    def of(cls, path: Path, config: Mapping[str, Any]) -> Layout:
        """Return the layout that ``config.json`` describes.

        Raises:
            CheckpointError: the config has no MTP layer.
        """
        count = config.get("num_nextn_predict_layers")
        if type(count) is not int or count < 1:
            raise CheckpointError(
                f"draft model {path}: its config.json says num_nextn_predict_layers={count!r}; "
                "expected at least 1: choose a checkpoint with multi-token-prediction layers"
            )
        depth = config.get("num_hidden_layers") or 0
        return cls(first=0 if depth == count else depth, num_layers=count)

    def name(self, stored: str) -> str | None:
        """Return ``MTPNetwork``'s name of a stored tensor; None if no MTP layer has it."""
        match = _NAME.fullmatch(stored)
        if match is None:
            return None
        stack, number, rest = match[1], int(match[2]), match[3]
        index = number if stack == "mtp_layers" else number - self.first
        if not 0 <= index < self.num_layers or rest.startswith(_SHARED) or "rotary_emb" in rest:
            return None
        for theirs, ours in _MIMO.items() if stack == "mtp_layers" else ():
            if rest.startswith(theirs):
                rest = ours + rest.removeprefix(theirs)
        return f"layers.{index}.{rest if rest.startswith(_JOINT) else f'block.{rest}'}"


def fit_depth(config: SpecConfig) -> SpecConfig:
    """Limit the draft steps of ``config`` to the number of MTP layers.

    Raises:
        CheckpointError: the draft model's config is missing, or has no MTP layer.
    """
    path = config.draft_model_path
    assert path is not None
    most = Layout.of(path, Checkpoint.read_config(path)).num_layers
    if config.num_steps <= most:
        return config
    reason = f"num_steps {config.num_steps} -> {most}: the draft model has one layer a step"
    nodes = min(config.num_draft_tokens, most + 1)
    return config.adjust(reason, num_steps=most, num_draft_tokens=nodes)


def load_network(runtime: Runtime) -> MTPNetwork:
    """Load the run's MTP layers to the runtime's device, packed for serving.

    Raises:
        CheckpointError: the layers are missing or incomplete, of a kind that is not supported, or
            made for another target.
    """
    path = runtime.config.draft_model_path
    assert path is not None
    keys = Checkpoint.read_config(path)
    layout = Layout.of(path, keys)
    checkpoint = Checkpoint.read(path, keep=lambda name: layout.name(name) is not None)
    if not checkpoint.tensors:
        raise CheckpointError(
            f"draft model {path}: it has no multi-token-prediction layer; expected tensors "
            f"model.layers.{layout.first}.* or model.mtp_layers.0.*"
        )
    _check_fit(checkpoint, runtime)
    tensors = {str(layout.name(name)): tensor for name, tensor in checkpoint.tensors.items()}
    is_mimo = any("mtp_layers." in name for name in checkpoint.tensors)
    if is_mimo:
        tensors = {n: _swapped(t) if "eh_proj" in n else t for n, t in tensors.items()}
    family = FAMILIES.get(keys.get("model_type", ""))
    if family is not None and not is_mimo:
        with runtime.device:
            network = family_network(checkpoint, family, layout, runtime)
        tensors = stack_experts(tensors)
    else:
        _check_dense(checkpoint)
        config = dense_config(checkpoint, layout, tensors, runtime.context_len)
        config = attrs.evolve(config, normed_chain=is_mimo, masks_first=is_mimo)
        with runtime.device:
            network = MTPNetwork(config)
    network = network.to(runtime.dtype).eval()
    if runtime.dtype.itemsize < 4:
        keep_router_bias(network)
    attrs.evolve(checkpoint, tensors=tensors).load_into(network)
    layers.pack(network)
    return network


def dense_config(
    checkpoint: Checkpoint, layout: Layout, names: Iterable[str], context_len: int
) -> MTPConfig:
    """Read dense layers' sizes from ``config.json``, and their biases and norms from ``names``."""
    keys, names = checkpoint.config, frozenset(names)
    heads, hidden_size = (checkpoint.require(k) for k in ("num_attention_heads", "hidden_size"))
    return MTPConfig(
        num_layers=layout.num_layers,
        hidden_size=hidden_size,
        intermediate_size=checkpoint.require("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=keys.get("num_key_value_heads") or heads,
        head_dim=keys.get("head_dim") or hidden_size // heads,
        rms_norm_eps=keys.get("rms_norm_eps", 1e-6),
        rope=keys,
        max_position_embeddings=context_len,
        attention_bias=any(name.endswith("self_attn.q_proj.bias") for name in names),
        output_bias=any(name.endswith("self_attn.o_proj.bias") for name in names),
        qk_norm=any(name.endswith("self_attn.q_norm.weight") for name in names),
    )


def family_network(
    checkpoint: Checkpoint, family: Family, layout: Layout, runtime: Runtime
) -> MTPNetwork:
    """Build a network with transformers' own decoder layers for the model type."""
    hidden_size = checkpoint.require("hidden_size")
    stack = family.build(checkpoint, layout.num_layers, runtime.context_len)
    config = MTPConfig(
        num_layers=layout.num_layers,
        hidden_size=hidden_size,
        intermediate_size=0,  # unused: transformers' blocks have their own
        num_attention_heads=stack.num_kv_heads,
        num_key_value_heads=stack.num_kv_heads,
        head_dim=stack.head_dim,
        rms_norm_eps=checkpoint.config.get("rms_norm_eps", 1e-6),
        rope={},
        max_position_embeddings=runtime.context_len,
        normed_chain=True,
        masks_first=True,
    )
    return MTPNetwork(config, stack.blocks, stack.rotary)


def keep_router_bias(network: MTPNetwork) -> None:
    """Keep the routers' score corrections in float32, as transformers does: rounded to half
    precision they would choose other experts."""
    for name, buffer in network.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()


def stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join experts that are stored one by one to the stacked tensors of transformers.

    If an expert is missing or has another shape, its layer's experts are not joined, and
    ``Checkpoint.load_into`` names the tensor in its error.
    """
    found: dict[str, dict[tuple[int, str], str]] = {}
    for name in tensors:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            found.setdefault(match[1], {})[int(match[2]), match[3]] = name
    stacked = dict(tensors)
    for prefix, names in found.items():
        count = 1 + max(index for index, _ in names)
        parts = {
            kind: [tensors[names[e, kind]] for e in range(count) if (e, kind) in names]
            for kind in ("gate", "up", "down")
        }
        shapes = {kind: {t.shape for t in part} for kind, part in parts.items()}
        whole = len(names) == 3 * count and all(len(s) == 1 for s in shapes.values())
        if not whole or shapes["gate"] != shapes["up"]:
            continue
        pairs = zip(parts["gate"], parts["up"], strict=True)
        for name in names.values():
            del stacked[name]
        stacked[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        stacked[f"{prefix}.down_proj"] = torch.stack(parts["down"])
    return stacked


def _swapped(weight: Tensor) -> Tensor:
    """Return a projection of (hidden state, embedding) as one of (embedding, hidden state)."""
    return torch.cat(weight.chunk(2, dim=-1)[::-1], dim=-1)


def _check_fit(checkpoint: Checkpoint, runtime: Runtime) -> None:
    for key, target in (("hidden_size", runtime.hidden_size), ("vocab_size", runtime.vocab_size)):
        if checkpoint.require(key) != target:
            raise CheckpointError(
                f"draft model {checkpoint.path} does not fit the target: its {key} is "
                f"{checkpoint.config[key]}, the target's {target}; use the layers of this target"
            )
    if checkpoint.config.get("quantization_config"):
        raise CheckpointError(
            f"draft model {checkpoint.path} is quantized; expected float weights: "
            "use a checkpoint in bfloat16"
        )


def _check_dense(checkpoint: Checkpoint) -> None:
    """Refuse layers that ``layers.DecoderLayer`` cannot compute: their drafts would be wrong."""
    keys = checkpoint.config
    foreign = sorted(
        part
        for part in ("mlp.experts", "mlp.gate.", "kv_a_proj_with_mqa", "attention_sink_bias")
        if any(part in name for name in checkpoint.tensors)
    )
    if keys.get("hidden_act") not in (None, "silu"):
        foreign.append(f"hidden_act={keys['hidden_act']}")
    if keys.get("partial_rotary_factor") not in (None, 1, 1.0):
        foreign.append(f"partial_rotary_factor={keys['partial_rotary_factor']}")
    if keys.get("sliding_window") and keys.get("use_sliding_window", True):
        foreign.append(f"sliding_window={keys['sliding_window']}")
    if foreign:
        raise CheckpointError(
            f"draft model {checkpoint.path}: layers of model type {keys.get('model_type')!r} with "
            f"{', '.join(foreign)} are not supported; expected dense Llama-like layers with full "
            f"attention, or the layers of {' or '.join(FAMILIES)}"
        )
