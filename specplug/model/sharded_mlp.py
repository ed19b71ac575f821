"""The MLPs of a target, sharded over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from specplug.distributed.rank_group import RankGroup
from specplug.errors import UsageError
from specplug.model.quantization import is_packed

_PREFIX = "layers.*.mlp."
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_TOLERANCE = 5e-2


class ShardedMLP(nn.Module):
    """This rank's shard of a layer's MLP, applied to the rows of all ranks.

    Every rank must call it at the same time. A router in it sees the rows of all ranks.

    Args:
        shard: the MLP, with its part of the intermediate columns.
        ranks: of the run.
    """

    def __init__(self, shard: nn.Module, ranks: RankGroup) -> None:
        super().__init__()
        self.shard = shard
        self._ranks = ranks

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[1, R, H] -> [1, R, H]; [B, T, H] counts as B·T rows."""
        rows = self._ranks.gather(hidden_states.flatten(0, 1))
        partial = self.shard(rows.unsqueeze(0)).squeeze(0)
        return self._ranks.scatter(partial).view_as(hidden_states)


@torch.inference_mode()
def shard_mlps(model: Any, ranks: RankGroup) -> None:
    """Shard the MLPs of a model of transformers in place, by its own plan of tensor parallelism.

    Checks that the shards add up to the result of the whole. An up or gate projection keeps some of
    its outputs, the down projection the same inputs. In a mixture of experts each expert is sharded
    like that, and the routers stay whole.

    Raises:
        UsageError: the model has no such plan, or its MLPs cannot be sharded by it.
    """
    name = type(model).__name__
    if is_packed(model):
        raise UsageError(
            f"enable_dp_attention: the weights of {name} are quantized and packed; expected plain "
            "ones, whose columns can be sharded: choose another checkpoint, or run each rank "
            "without it"
        )
    plan = _plan_of_mlps(model)
    if not plan:
        raise UsageError(
            f"enable_dp_attention: transformers has no plan to shard the MLPs of {name}; expected "
            f"entries {_PREFIX}* in its base_model_tp_plan: choose another model, or run each rank "
            "without it"
        )
    generator = torch.Generator().manual_seed(0)
    for number, layer in enumerate(model.get_decoder().layers):
        size = model.config.get_text_config().hidden_size
        sample = torch.randn(1, 2, size, generator=generator).to(model.dtype)
        expected = layer.mlp(sample)
        _shard(layer.mlp, plan, ranks, f"{name}, layer {number}")
        _check(ranks.sum(layer.mlp(sample)), expected, f"{name}, layer {number}")
        layer.mlp = ShardedMLP(layer.mlp, ranks).to(ranks.device)


def _plan_of_mlps(model: Any) -> dict[str, str]:
    """Return how to shard each part of an MLP, by its path there."""
    plan: Mapping[str, str] = model.config.get_text_config().base_model_tp_plan or {}
    return {
        path.removeprefix(_PREFIX): style
        for path, style in plan.items()
        if path.startswith(_PREFIX)
    }


def _shard(mlp: nn.Module, plan: Mapping[str, str], ranks: RankGroup, what: str) -> None:
    """Shard one MLP in place."""
    found = False
    for path, style in plan.items():
        owner_path, _, name = path.rpartition(".")
        try:
            owner = mlp.get_submodule(owner_path)
        except AttributeError:  # this layer has another kind of MLP
            continue
        part = getattr(owner, name, None)
        if part is None or style == "moe_tp_experts":  # its parameters have entries
            continue
        found = True
        if isinstance(part, nn.Linear) and style in ("colwise", "rowwise"):
            _shard_linear(part, style, ranks)
        elif isinstance(part, nn.Parameter) and style in ("packed_colwise", "rowwise"):
            part.data = _shard_experts(part.data, style, ranks)
        else:
            raise UsageError(
                f"enable_dp_attention: {what}: {path} is a {type(part).__name__} to be sharded "
                f"{style!r}, which is not supported: choose another model, or run each rank "
                "without it"
            )
    if not found:
        raise UsageError(
            f"enable_dp_attention: {what}: none of {', '.join(plan)} is in its MLP; choose another "
            "model, or run each rank without it"
        )


def _shard_linear(linear: nn.Linear, style: str, ranks: RankGroup) -> None:
    axis = 0 if style == "colwise" else 1
    linear.weight.data = _part(linear.weight.data, axis, ranks)
    linear.out_features, linear.in_features = linear.weight.shape
    if linear.bias is None:
        return
    if style == "colwise":
        linear.bias.data = _part(linear.bias.data, 0, ranks)
    elif ranks.rank:  # the bias is added once, by rank 0
        linear.bias.data = torch.zeros_like(linear.bias.data)


def _shard_experts(weights: Tensor, style: str, ranks: RankGroup) -> Tensor:
    """Shard [experts, outputs, inputs]. Packed outputs are the gate's, then the up's."""
    if style == "rowwise":
        return _part(weights, 2, ranks)
    return torch.cat([_part(half, 1, ranks) for half in weights.chunk(2, dim=1)], dim=1)


def _part(weights: Tensor, axis: int, ranks: RankGroup) -> Tensor:
    """Return a copy of this rank's part along an axis."""
    if weights.shape[axis] < ranks.size:
        raise UsageError(
            f"dp_size={ranks.size}: expected at most the MLPs' {weights.shape[axis]} columns"
        )
    return weights.tensor_split(ranks.size, dim=axis)[ranks.rank].clone()


def _check(found: Tensor, expected: Tensor, what: str) -> None:
    """Check that the shards add up to the result of the whole."""
    allowed = _TOLERANCE.get(expected.dtype, _HALF_TOLERANCE)
    if not (found - expected).norm() <= allowed * expected.norm():
        raise UsageError(
            f"enable_dp_attention: {what}: the shards of its MLP do not add up to the whole; "
            "expected the same weights in all ranks, and all of the MLP in transformers' plan: "
            "choose another model, or run each rank without it"
        )
