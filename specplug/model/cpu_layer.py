"""Decoder layers of the Llama kind on the CPU as some thirty operations each, not eighty.

A decode step of a small model pays for each call, and for each weight that is read against its
order. Here queries, keys and values are one product and are rotated together, residuals are added
by the products, and weights are kept transposed: the product of a few rows is then up to a third
faster. Where there are ``CPUKernels``, they compute a layer in one call; of a model whose weights
are too large to be kept twice, what stands around the products: eight calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specplug.kernels.cpu_kernels import CPUKernels, LayerWeights, Panels, is_kept_twice
from specplug.model.attention import TargetPass
from specplug.model.fused_norms import FusedRMSNorm, rms_norm
from specplug.model.layer_fusion import (
    HEAD_NORMS,
    NORMS,
    PROJECTIONS,
    FusedLayer,
    fuse_layers,
    number_and_head_dim,
)
from specplug.model.quantization import is_plain_linear
from specplug.speculative.paged_plan import PagedPlan

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
"""The proof computes attention in float32."""

_Norm = tuple[Tensor, Tensor]
"""Weight, and eps without axes."""


class Turns:
    """Cosines and sines as the layers of a pass need them, made once for all of them."""

    def __init__(self) -> None:
        self._sin: Tensor | None = None
        self._turns: tuple[Tensor, Tensor] = torch.empty(0), torch.empty(0)

    def __call__(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return [R, 1, D] each of what transformers gives, [1, R, D] each: the cosines; and the
        sines, of which those of the first half are negative."""
        if sin is not self._sin:
            size = sin.shape[-1]
            signed = sin.view(-1, 1, size).clone()
            signed[..., : size // 2].neg_()
            self._turns = cos.view(-1, 1, size).contiguous(), signed
            self._sin = sin
        return self._turns


@attrs.define(eq=False, kw_only=True)
class CPULayer(FusedLayer):
    """The forward of a decoder layer, in place of its module's own.

    Attributes:
        input_norm, mlp_norm: before the attention, and before the MLP.
        qkv, o, gate, up, down: weights, transposed: [inputs, outputs].
        qkv_bias: None: there is none.
        heads: those of the queries.
        head_norm: of each head of queries and keys, [H + Hkv, D]; None: there is none.
        turns: of the model.
        kernels: compute what stands around the products, in float32; None: torch does.
        gate_up: both weights in one, for the kernels; None: there are none.
        weights: copies of all weights, with which the kernels compute the products, too; None:
            torch does.
        eps: of both norms, for the kernels: a step reads no tensor.
    """

    input_norm: _Norm
    mlp_norm: _Norm
    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    heads: int
    head_norm: _Norm | None
    turns: Turns
    kernels: CPUKernels | None = None
    gate_up: Tensor | None = None
    weights: LayerWeights | None = None
    eps: tuple[float, float] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        first, second = (float(eps) for _, eps in (self.input_norm, self.mlp_norm))
        self.eps = first, second

    def run(self, target_pass: TargetPass, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[R, H] -> [R, H], with cos and sin [1, R, D]."""
        cos, sin = self.turns(cos, sin)
        if self.kernels is not None and self.gate_up is not None:
            out = None
            if self.weights is not None:
                out = self._run_in_one(self.kernels, self.weights, target_pass, hidden, cos, sin)
            if out is None:
                out = self._run_kernels(self.kernels, self.gate_up, target_pass, hidden, cos, sin)
            if out is not None:
                return out
        x = rms_norm(hidden, *self.input_norm)
        qkv = x.mm(self.qkv) if self.qkv_bias is None else self.qkv_bias.addmm(x, self.qkv)
        qkv = qkv.view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        turned = qkv[:, : -self.kv_heads]
        if self.head_norm is not None:
            turned = rms_norm(turned, *self.head_norm)
        turned = torch.addcmul(turned * cos, turned.roll(self.head_dim // 2, -1), sin)
        mixed = target_pass.plan.attend(
            target_pass.cache,
            self.layer,
            turned[:, : self.heads],
            turned[:, self.heads :],
            qkv[:, -self.kv_heads :],
            self.form,
        )
        hidden = torch.addmm(hidden, mixed, self.o)
        x = rms_norm(hidden, *self.mlp_norm)
        inner = F.silu(x.mm(self.gate), inplace=True).mul_(x.mm(self.up))
        return torch.addmm(hidden, inner, self.down)

    def _run_in_one(
        self,
        kernels: CPUKernels,
        weights: LayerWeights,
        target_pass: TargetPass,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor | None:
        """Run the layer by one kernel, with cos and sin [R, 1, D]; None if it is not made for these
        tensors, or for this plan."""
        plan, cache = target_pass.plan, target_pass.cache
        rows = plan.rows_in_c if isinstance(plan, PagedPlan) else None
        if rows is None:
            return None
        return kernels.decoder_layer(
            weights, rows, hidden, hidden, cos, sin, plan.slots,
            cache.keys[self.layer], cache.values[self.layer], self.form,
        )  # fmt: skip

    def _run_kernels(
        self,
        kernels: CPUKernels,
        gate_up: Tensor,
        target_pass: TargetPass,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor | None:
        """Run the layer with all but its attention by kernels, with cos and sin [R, 1, D]; None if
        they are not made for these tensors."""
        eps, mlp_eps = self.eps
        weights = self.weights
        x = kernels.rms_norm(hidden, self.input_norm[0], eps)
        if x is None:
            return None
        qkv = _product(x, self.qkv, None if weights is None else weights.qkv, self.qkv_bias)
        qkv = qkv.view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        plan, cache = target_pass.plan, target_pass.cache
        keys, values = cache.keys[self.layer], cache.values[self.layer]
        if not kernels.rotate_and_write(qkv, cos, sin, self.head_norm, plan.slots, keys, values):
            return None
        mixed = plan.attend_written(cache, self.layer, qkv[:, : self.heads], self.form)
        hidden = _product(mixed, self.o, None if weights is None else weights.o, hidden)
        x = kernels.rms_norm(hidden, self.mlp_norm[0], mlp_eps)
        if x is None:
            return None
        both = _product(x, gate_up, None if weights is None else weights.gate_up)
        gated = kernels.silu_and_mul(both)
        if gated is None:
            return None
        return _product(gated, self.down, None if weights is None else weights.down, hidden)

    def close(self) -> None:
        """Free the weights."""
        self.qkv = self.o = self.gate = self.up = self.down = self.o.new_empty(0)
        self.gate_up = self.weights = None


def _product(
    x: Tensor, weight: Tensor, panels: Panels | None, added: Tensor | None = None
) -> Tensor:
    """Compute ``added + x @ weight``: [R, K], and [N] or [R, N]. ``panels`` are of the weight."""
    if panels is not None:
        whole = added is not None and added.dim() == 2
        bias, residual = (None, added) if whole else (added, None)
        out = panels.linear(x, bias, residual)
        if out is not None:
            return out
    return x.mm(weight) if added is None else torch.addmm(added, x, weight)


class CPUHead(nn.Linear):
    """An LM head whose products the CPU's kernels compute, where they are made for its input."""

    panels: Panels | None = None

    def forward(self, input: Tensor) -> Tensor:
        """[…, K] -> […, N]."""
        if self.panels is not None:
            rows = input.reshape(-1, input.shape[-1])
            logits = self.panels.linear(rows, self.bias)
            if logits is not None:
                return logits.view(*input.shape[:-1], self.panels.outputs)
        return super().forward(input)

    def close(self) -> None:
        """Free the copy of the weight."""
        self.panels = None


def fuse_cpu_head(model: Any, kernels: CPUKernels) -> CPUHead | None:
    """Have the kernels compute a model's logits, and return its head; None: it stays, as it is no
    plain linear one in float32, or the model is too large for weights that are kept twice."""
    head = model.get_output_embeddings()
    if not (
        isinstance(head, nn.Linear)
        and is_plain_linear(head)
        and head.weight.dtype is torch.float32
        and is_kept_twice(model.parameters())
    ):
        return None
    head.__class__ = CPUHead
    assert isinstance(head, CPUHead)
    head.panels = kernels.panels(head.weight.data)
    return head


def fuse_cpu_layers(
    model: Any, layers: Iterable[nn.Module], kernels: CPUKernels | None = None
) -> list[CPULayer]:
    """Give the decoder layers of a model these forwards, as ``fuse_layers`` says.

    The parameters of the products become views of transposed weights.

    Args:
        model: in float32 or float64, its norms fused.
        layers: its decoder layers.
        kernels: for what stands around the products of a model in float32.
    """
    twice = kernels is not None and is_kept_twice(model.parameters())
    make = partial(_make, turns=Turns(), kernels=kernels, twice=twice)
    return fuse_layers(model, layers, make, _TOLERANCE)


def _make(
    layer: Any, parts: dict[str, Any], turns: Turns, kernels: CPUKernels | None, twice: bool
) -> CPULayer | None:
    """Return the forward of a layer with these parts, before its proof."""
    linears = q, k, v, o, gate, up, down = [parts[path] for path in PROJECTIONS]
    norms = [parts[path] for path in (*NORMS, *HEAD_NORMS) if path in parts]
    found = number_and_head_dim(layer)
    if found is None or any(type(norm) is not FusedRMSNorm for norm in norms):
        return None
    number, head_dim = found
    biases = [each.bias for each in linears if each.bias is not None]
    if biases and [q.bias, k.bias, v.bias] != biases:
        return None
    heads, kv_heads = (each.out_features // head_dim for each in (q, k))
    if q.weight.dtype != torch.float32:
        kernels = None
    gate_up = None if kernels is None else _transposed(gate, up)
    qkv = _transposed(q, k, v)
    qkv_bias = torch.cat([each.data for each in biases]) if biases else None
    head_norm = _of_heads(norms[2:], (heads, kv_heads))
    weights = None
    if kernels is not None and gate_up is not None and twice:
        weights = LayerWeights(
            input_norm=(norms[0].weight.data, norms[0].eps),
            qkv=kernels.panels(qkv.t()),
            qkv_bias=qkv_bias,
            head_norm=head_norm,
            o=kernels.panels(o.weight.data),
            mlp_norm=(norms[1].weight.data, norms[1].eps),
            gate_up=kernels.panels(gate_up.t()),
            down=kernels.panels(down.weight.data),
            heads=heads,
            kv_heads=kv_heads,
        )
    return CPULayer(
        layer=number,
        input_norm=_of(norms[0]),
        mlp_norm=_of(norms[1]),
        qkv=qkv,
        qkv_bias=qkv_bias,
        o=_transposed(o),
        gate=_transposed(gate) if gate_up is None else gate.weight.data.t(),
        up=_transposed(up) if gate_up is None else up.weight.data.t(),
        down=_transposed(down),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_norm=head_norm,
        turns=turns,
        kernels=kernels,
        gate_up=gate_up,
        weights=weights,
    )


def _of(norm: FusedRMSNorm) -> _Norm:
    return norm.weight.data, torch.tensor(norm.eps, dtype=norm.weight.dtype)


def _of_heads(norms: list[FusedRMSNorm], counts: tuple[int, int]) -> _Norm | None:
    """Return the norm of all heads of queries and keys; None if they have none."""
    if not norms:
        return None
    weights = [norm.weight.expand(n, -1) for norm, n in zip(norms, counts, strict=True)]
    eps = [torch.tensor(norm.eps, dtype=norm.weight.dtype).expand(n, 1)
           for norm, n in zip(norms, counts, strict=True)]  # fmt: skip
    return torch.cat(weights), torch.cat(eps)


def _transposed(*linears: nn.Linear) -> Tensor:
    """Copy weights into one tensor [inputs, outputs] and make the parameters views of it."""
    joint = torch.cat([each.weight.data.t() for each in linears], dim=1).contiguous()
    first = 0
    for each in linears:
        each.weight.data = joint[:, first : first + each.out_features].t()
        first += each.out_features
    return joint
