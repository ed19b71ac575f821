"""The layers that draft networks are built of. Parameter names are those of published checkpoints.

Draft networks keep their attention outside: a network computes queries, keys and values, and hands
them to an ``Attend`` callback. Serving gives the paged one of an ``AttentionPlan``; training gives
its own; a test gives a plain one. So one class is trained, served and tested.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specplug.kernels.attention_form import kept_form
from specplug.kernels.cpu_kernels import CPUKernels, LayerWeights, Panels, is_kept_twice
from specplug.kernels.kernel_table import Operation, kernels_in_c, runs_triton
from specplug.speculative.buckets import product_rows
from specplug.speculative.last_rows import LastRows
from specplug.speculative.paged_plan import PagedKVCache, plan_of
from specplug.speculative.runtime import AttentionPlan, KVCache

DRAFT_KERNEL_ROWS = 64
"""The most rows of a draft's product that the kernel computes: up to there it is as fast as cuBLAS
at every shape, and does more in one launch. From there to 128 wide ones are some 8 % slower: a
target pays that for its bits (``exact_linear.TARGET_KERNEL_ROWS``), a draft has no need to."""

_PANELS = "specplug_panels"
"""The attribute of a weight that has a copy for the CPU's kernels."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, q [R, H, D], k [R, Hkv, D], v [R, Hkv, D]) -> [R, H * D]``: keeps the keys and values
where they belong and attends."""


def has_kernels(x: Tensor) -> bool:
    """Return whether the layers compute rows [R, …] by kernels: on a GPU in half precision. They
    know no gradient, so training does not."""
    return runs_triton(Operation.LAYERS, x.device, x.dtype) and not torch.is_grad_enabled()


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Compute ``residual + (x @ weight.T + bias)``: [R, K] and [N, K] to [R, N]."""
    panels = _panels_of(weight)
    if panels is not None:
        out = panels.linear(x, bias, residual)
        if out is not None:
            return out
    if has_kernels(x):
        if len(x) <= DRAFT_KERNEL_ROWS:
            from specplug.kernels import linear as kernels

            return kernels.linear(x.contiguous(), weight, bias, residual)
        padded = product_rows(len(x))
        if padded > len(x):
            product = F.linear(F.pad(x, (0, 0, 0, padded - len(x))), weight, bias)[: len(x)]
            return product if residual is None else residual + product
    if residual is not None and bias is None:
        return torch.addmm(residual, x, weight.t())
    product = F.linear(x, weight, bias)
    return product if residual is None else residual + product


def pack_weights(weights: Sequence[Tensor]) -> None:
    """Have ``linear`` multiply by the CPU's kernels, for serving, where the table chooses them and
    the weights are small enough to be kept twice.

    Args:
        weights: [N, K] each, all of a network. They are not changed after that.
    """
    if not is_kept_twice(weights):
        return
    for weight in weights:
        kernels = kernels_in_c(Operation.LAYERS, weight.device, weight.dtype)
        if kernels is not None:
            setattr(weight, _PANELS, kernels.panels(weight.detach()))


def _panels_of(weight: Tensor) -> Panels | None:
    panels: Panels | None = getattr(weight, _PANELS, None)
    return panels


class Embedding(nn.Embedding):
    """An ``nn.Embedding`` without ``max_norm``; where there are kernels, one reads its rows, since
    torch takes long for a few rows on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        """[…] int64 -> […, embedding_dim]."""
        if has_kernels(self.weight):
            from specplug.kernels.row_gather import gather_rows

            rows = gather_rows(self.weight, input.reshape(-1))
            return rows.view(*input.shape, rows.shape[1])
        return super().forward(input)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, one fused call."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self._kernels: CPUKernels | None = None

    def pack(self) -> None:
        """Have the CPU's kernels compute, for serving, where the table chooses them."""
        self._kernels = kernels_in_c(Operation.LAYERS, self.weight.device, self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[…, size] -> […, size]."""
        if self._kernels is not None:
            normed = self._kernels.rms_norm(x, self.weight, self.eps)
            if normed is not None:
                return normed
        if has_kernels(x):
            from specplug.kernels import rms_norm as kernels

            rows = x.reshape(-1, x.shape[-1])
            return kernels.rms_norm(rows, self.weight, self.eps).view(x.shape)
        if x.dtype is not self.weight.dtype:  # in training, where products are of half precision
            x = x.to(self.weight.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def joined_norms(*parts: tuple[RMSNorm, Tensor]) -> Tensor:
    """Norm several inputs and join them: norms and their inputs [R, size] to [R, sum of sizes]."""
    inputs = [x for _, x in parts]
    if not has_kernels(inputs[0]):
        joined = _joined_in_c(parts)
        if joined is None:
            joined = torch.cat([norm(x) for norm, x in parts], dim=-1)
        return joined
    from specplug.kernels.rms_norm import rms_norm

    sizes = [x.shape[1] for x in inputs]
    joint = inputs[0].new_empty(len(inputs[0]), sum(sizes))
    for (norm, x), out in zip(parts, torch.split(joint, sizes, dim=1), strict=True):
        rms_norm(x, norm.weight, norm.eps, out=out)
    return joint


def _joined_in_c(parts: Sequence[tuple[RMSNorm, Tensor]]) -> Tensor | None:
    """Compute ``joined_norms`` by the CPU's kernels; None if they are not made for these."""
    if parts[0][0]._kernels is None:
        return None
    sizes = [x.shape[-1] for _, x in parts]
    joint = torch.empty(len(parts[0][1]), sum(sizes), dtype=torch.float32, device="cpu")
    for (norm, x), out in zip(parts, torch.split(joint, sizes, dim=1), strict=True):
        if norm._kernels is None or norm._kernels.rms_norm(x, norm.weight, norm.eps, out) is None:
            return None
    return joint


class _Heads(NamedTuple):
    """The weights of heads that are computed by one product.

    Attributes:
        weight: [n * D, input_size].
        bias: [n * D]; None: they have none.
        norm: [turned, D], of those that are normed and turned, the first ones; None: no norm.
    """

    weight: Tensor
    bias: Tensor | None
    norm: Tensor | None

    def part(self, heads: slice, size: int) -> _Heads:
        """Return some heads of ``size`` numbers, which keep their part of a copy for the CPU's
        kernels."""
        own = slice(heads.start * size, heads.stop * size)
        weight, panels = self.weight[own], _panels_of(self.weight)
        if panels is not None:
            setattr(weight, _PANELS, panels.of_outputs(own.start, own.stop))
        return _Heads(
            weight,
            None if self.bias is None else self.bias[own],
            None if self.norm is None else self.norm[heads],
        )


class QKVProjection(nn.Module):
    """The projections of an attention layer: queries, keys and values in, the output back.

    Args:
        input_size: width of what queries, keys and values are made from.
        hidden_size: width of the result.
        num_heads, num_kv_heads, head_dim: H, Hkv, D.
        bias: whether q, k and v have biases (Qwen2).
        output_bias: whether the output projection has one.
        norm_eps: root-mean-square norms of queries and keys, by head (Qwen3); None: none.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        output_bias: bool = False,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.heads = num_heads, num_kv_heads
        self.head_dim = head_dim
        self.norm_eps = norm_eps
        self.q_proj = nn.Linear(input_size, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(input_size, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=output_bias)
        self.q_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.k_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.packed: _Heads | None = None
        self._parts: tuple[_Heads, _Heads] | None = None

    @property
    def joined(self) -> tuple[nn.Linear, ...]:
        """The projections that ``pack`` joins."""
        return self.q_proj, self.k_proj, self.v_proj

    def pack(self) -> None:
        """Join q, k and v into one matrix, for serving (no gradient flows to it)."""
        parts = self.joined
        weight = _joined(parts)
        biased = self.q_proj.bias is not None
        bias = torch.cat([part.bias for part in parts]).detach() if biased else None
        norm = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = zip((self.q_norm, self.k_norm), self.heads, strict=True)
            norm = torch.cat([n.weight.expand(count, -1) for n, count in norms]).detach()
        self.packed = _Heads(weight, bias, norm)

    def pack_parts(self) -> None:
        """Have queries, and keys and values, be computed by themselves by their part of the joined
        matrix."""
        assert self.packed is not None
        heads, kv_heads = self.heads
        self._parts = (
            self.packed.part(slice(0, heads), self.head_dim),
            self.packed.part(slice(heads, heads + 2 * kv_heads), self.head_dim),
        )

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of [R, input_size], turned by cos and sin [R, 1, D]."""
        if self.packed is not None:
            heads, kv_heads = self.heads
            qk, v = self._project(x, cos, sin, self.packed, heads + kv_heads)
            return qk[:, :heads], qk[:, heads:], v
        return self.queries(x, cos, sin), *self.kv(x, cos, sin)

    def _project(
        self, x: Tensor, cos: Tensor, sin: Tensor, weights: _Heads, turned: int
    ) -> tuple[Tensor, Tensor]:
        """Compute heads of [R, input_size], with one product, and one norm and rotation for the
        first ``turned`` of them: return these and the others, [R, …, D]."""
        joint = linear(x, weights.weight, weights.bias).view(x.shape[0], -1, self.head_dim)
        first = rotate(joint[:, :turned], cos, sin, weights.norm, self.norm_eps or 0.0)
        return first, joint[:, turned:]

    def output(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """Add the output projection of [R, H * D] to the residual [R, hidden_size]."""
        return linear(mixed, self.o_proj.weight, self.o_proj.bias, residual)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return queries alone, [R, H, D]."""
        if self._parts is not None:
            return self._project(x, cos, sin, self._parts[0], self.heads[0])[0]
        q = self.q_proj(x).view(x.shape[0], -1, self.head_dim)
        return rotate(q if self.q_norm is None else self.q_norm(q), cos, sin)

    def kv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values alone, each [R, Hkv, D]."""
        if self._parts is not None:
            return self._project(x, cos, sin, self._parts[1], self.heads[1])
        k, v = (part(x).view(x.shape[0], -1, self.head_dim) for part in (self.k_proj, self.v_proj))
        return rotate(k if self.k_norm is None else self.k_norm(k), cos, sin), v


def _joined(parts: Sequence[nn.Linear]) -> Tensor:
    """Join the weights of several projections; theirs become views of the whole, not copies."""
    whole = _for_few_rows(torch.cat([part.weight for part in parts]).detach())
    start = 0
    for part in parts:
        part.weight.data = whole[start : start + len(part.weight)]
        start += len(part.weight)
    return whole


def _for_few_rows(weight: Tensor) -> Tensor:
    """Return a weight [N, K] as it is read fastest: on the CPU it is stored [K, N], which makes a
    product of a dozen rows a third faster."""
    return weight.t().contiguous().t() if weight.device.type == "cpu" else weight


class GatedMLP(nn.Module):
    """Gated feed-forward layer (SwiGLU)."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.packed: tuple[Tensor, Tensor | None] | None = None
        self._kernels: CPUKernels | None = None

    @property
    def joined(self) -> tuple[nn.Linear, ...]:
        """The projections that ``pack`` joins."""
        return self.gate_proj, self.up_proj

    def pack(self) -> None:
        """Join gate and up into one matrix, for serving (no gradient flows to it)."""
        parts = self.joined
        biased = self.gate_proj.bias is not None
        bias = torch.cat([part.bias for part in parts]).detach() if biased else None
        self.packed = _joined(parts), bias
        weight = self.gate_proj.weight
        self._kernels = kernels_in_c(Operation.LAYERS, weight.device, weight.dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[R, hidden_size] -> [R, hidden_size], added to the residual if there is one."""
        inner = self._inner(x)
        return linear(inner, self.down_proj.weight, self.down_proj.bias, residual)

    def _inner(self, x: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, intermediate_size]."""
        if self.gate_proj.bias is None and len(x) <= DRAFT_KERNEL_ROWS and has_kernels(x):
            from specplug.kernels.linear import gated_linear

            return gated_linear(x.contiguous(), self.gate_proj.weight, self.up_proj.weight)
        if self.packed is not None:
            both = linear(x, *self.packed)
            gated = None if self._kernels is None else self._kernels.silu_and_mul(both)
            if gated is not None:
                return gated
            gate, up = both.chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return F.silu(gate) * up


@attrs.frozen(eq=False)
class PagedAttend:
    """An ``Attend`` over a draft model's pages. Decoder layers that get it may run as one kernel.

    Attributes:
        cache: from ``allocate_kv``.
        plans: of each layer, or one for all.
        windows: of each layer, as ``AttentionPlan.attend`` takes it; none: no layer has one.
    """

    cache: KVCache
    plans: AttentionPlan | Sequence[AttentionPlan]
    windows: Sequence[int | None] = ()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write keys and values, then attend."""
        window = self.windows[layer] if self.windows else None
        return self._plan(layer).attend(self.cache, layer, q, k, v, window=window)

    def run(
        self,
        weights: LayerWeights,
        layer: int,
        x: Tensor,
        residual: Tensor,
        rotary: tuple[Tensor, Tensor],
    ) -> Tensor | None:
        """Run a layer by one kernel; the arguments as in ``DecoderBody.run``. None if there is none
        for its rows: no plan of ours, or not on this device."""
        plan = plan_of(self._plan(layer))
        rows = None if plan is None else plan.rows_in_c
        if plan is None or rows is None or not isinstance(self.cache, PagedKVCache):
            return None
        form = kept_form(weights.size**-0.5, self.windows[layer] if self.windows else None)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return weights.qkv.kernels.decoder_layer(
            weights, rows, x, residual, *rotary, plan.slots, keys, values, form
        )

    def _plan(self, layer: int) -> AttentionPlan:
        plans = self.plans
        return plans[layer] if isinstance(plans, Sequence) else plans


class DecoderBody(nn.Module):
    """A decoder layer's attention and gated feed-forward part. A subclass makes them.

    Attributes:
        self_attn, mlp, post_attention_layernorm: the parts; the norm is the one before the MLP.
    """

    self_attn: QKVProjection
    mlp: GatedMLP
    post_attention_layernorm: RMSNorm
    _weights: LayerWeights | None = None

    @property
    def input_norm(self) -> RMSNorm | None:
        """The norm of what the attention reads; None: it is read as it is."""
        return None

    def pack(self) -> None:
        """Have one kernel run all of it, for serving, if its parts are packed for the CPU."""
        attention, mlp, norm = self.self_attn, self.mlp, self.post_attention_layernorm
        if attention.packed is None or mlp.packed is None:
            return
        (qkv, qkv_bias, head_norm), (gate_up, gate_up_bias) = attention.packed, mlp.packed
        o, down = attention.o_proj, mlp.down_proj
        weights = qkv, o.weight, gate_up, down.weight
        panels = [found for weight in weights if (found := _panels_of(weight)) is not None]
        if len(panels) < len(weights):
            return
        heads, kv_heads = attention.heads
        eps = torch.full((heads + kv_heads, 1), attention.norm_eps or 0.0)
        read = self.input_norm
        self._weights = LayerWeights(
            input_norm=None if read is None else (read.weight.detach(), read.eps),
            qkv=panels[0],
            qkv_bias=qkv_bias,
            head_norm=None if head_norm is None else (head_norm, eps),
            o=panels[1],
            o_bias=None if o.bias is None else o.bias.detach(),
            mlp_norm=(norm.weight.detach(), norm.eps),
            gate_up=panels[2],
            gate_up_bias=gate_up_bias,
            down=panels[3],
            down_bias=None if down.bias is None else down.bias.detach(),
            heads=heads,
            kv_heads=kv_heads,
        )

    def run(
        self,
        x: Tensor,
        residual: Tensor,
        rotary: tuple[Tensor, Tensor],
        index: int,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Add attention and MLP of rows [R, input] to the residual [R, hidden].

        Args:
            rotary: what ``Rotary`` gives for the rows' positions.
            index: the layer's number, for ``attend``. All rows leave their keys and values.
            rows: [n] int64, those that are wanted; None: all, or as ``LastRows`` says.

        Returns:
            [R, hidden], or [n, hidden].
        """
        if self._weights is not None and rows is None and isinstance(attend, PagedAttend):
            out = attend.run(self._weights, index, x, residual, rotary)
            if out is not None:
                return out
        norm = self.input_norm
        if norm is not None:
            x = norm(x)
        if isinstance(attend, LastRows) and index == attend.last:
            mixed, rows = self._attend_last(x, rotary, attend)
        else:
            mixed = attend(index, *self.self_attn.qkv(x, *rotary))
            mixed = mixed if rows is None else mixed[rows]
        residual = self.self_attn.output(mixed, residual if rows is None else residual[rows])
        added: Tensor = self.mlp(self.post_attention_layernorm(residual), residual)
        return added

    def _attend_last(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: LastRows
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of all rows [R, input], normed, and attend for those that are
        wanted: return [n, H * D] and their index."""
        k, v = self.self_attn.kv(x, *rotary)
        wanted = attend.write(k, v)
        rows, (cos, sin) = wanted.index, rotary
        q = self.self_attn.queries(x[rows], cos[rows], sin[rows])
        return wanted.plan.attend(attend.cache, attend.last, q, k[rows], v[rows]), rows


class DecoderLayer(DecoderBody):
    """A decoder layer of the Llama kind: grouped-query attention and a gated feed-forward layer.

    Args:
        hidden_size, intermediate_size: widths of the layer and of its feed-forward part.
        num_heads, num_kv_heads, head_dim: H, Hkv, D.
        eps: of all norms.
        bias, output_bias: of the query, key and value, and of the output projection.
        qk_norm: queries and keys are normed by head (Qwen3).
        input_norm: what is read is normed first.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        input_norm: bool = True,
    ) -> None:
        super().__init__()
        self.self_attn = QKVProjection(
            hidden_size,
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
            bias=bias,
            output_bias=output_bias,
            norm_eps=eps if qk_norm else None,
        )
        self.mlp = GatedMLP(hidden_size, intermediate_size)
        self.input_layernorm = RMSNorm(hidden_size, eps) if input_norm else None
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)

    @property
    def input_norm(self) -> RMSNorm | None:
        return self.input_layernorm

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        index: int,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """[R, hidden] -> [R, hidden], or [n, hidden] if only ``rows`` [n] are wanted; the arguments
        as in ``run``."""
        return self.run(x, x, rotary, index, attend, rows)


class Rotary(nn.Module):
    """Rotary position embedding, as transformers computes it from a model's configuration.

    Args:
        config: ``config.json`` of the draft model; ``rope_theta``, ``rope_scaling`` or
            ``rope_parameters`` are read (every type that transformers knows). Frequencies that
            follow from a sequence's length (dynamic, longrope) are, at a position, those of the
            sequence that ends there.
        head_dim: D.
        num_positions: positions 0 to ``num_positions - 1`` can be asked for.
    """

    tables: Tensor

    def __init__(self, config: Mapping[str, Any], head_dim: int, num_positions: int) -> None:
        super().__init__()
        cos, sin = _rotary_tables(config, head_dim, num_positions)
        # ``rotate`` exchanges the halves; the sign that one of them needs stands here.
        half = head_dim // 2
        sin = torch.cat((-sin[:, :half], sin[:, half:]), dim=1)
        self.register_buffer("tables", torch.stack((cos, sin)), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[R] int64 -> cos and sin [R, 1, D], for ``rotate``."""
        # Not index_select: rows that are not read may have negative positions.
        cos, sin = self._read(positions).unsqueeze(2)
        return cos, sin

    def _read(self, positions: Tensor) -> Tensor:
        if has_kernels(self.tables):
            from specplug.kernels.row_gather import gather_rows

            return gather_rows(self.tables, positions)
        return self.tables[:, positions]


def rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a target's ``config.json`` that ``Rotary`` reads, for a draft whose
    positions are to be embedded alike. Of a target with several kinds of layers they are those of
    full attention."""
    found = config.get("rope_parameters") or {}
    if isinstance(next(iter(found.values()), None), Mapping):
        found = found.get("full_attention") or next(iter(found.values()))
    keys = {"rope_theta": found.get("rope_theta") or config.get("rope_theta") or 10000.0}
    if found.get("rope_type", "default") != "default":
        keys["rope_scaling"] = dict(found)
    return keys


def _rotary_tables(
    config: Mapping[str, Any], head_dim: int, num_positions: int
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [positions, D] float32, the halves repeated (Llama's layout)."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    known = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
    rope = {key: config[key] for key in known if config.get(key) is not None}
    shape = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=config.get("max_position_embeddings") or num_positions,
        **rope,
    )
    return tabulate_rotary(LlamaRotaryEmbedding(shape), num_positions)


def tabulate_rotary(rotary: Any, num_positions: int) -> tuple[Tensor, Tensor]:
    """Tabulate a rotary embedding of transformers, each position as the last one of its sequence.

    That is what published drafts do with dynamic scaling while they generate: a key keeps the
    rotation that it was written with, and a later one has that of the length by then. (They turn a
    prompt that is longer than the draft was trained for by its own length as a whole.)

    Args:
        rotary: the module, with one set of frequencies for all layers.
        num_positions: rows of the table.

    Returns:
        What the module gives for positions 0 to ``num_positions - 1``, usually cos and sin
        [positions, D].
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    positions, nothing = torch.arange(num_positions), torch.empty(0, dtype=torch.float32)
    limit = num_positions
    if "dynamic" in rotary.rope_type:
        limit = rotary.config.max_position_embeddings
    elif rotary.rope_type == "longrope":
        limit = rotary.config.rope_parameters["original_max_position_embeddings"]
    pieces = [rotary(nothing, positions[:limit].unsqueeze(0))]
    if limit < num_positions:
        lengths = positions[limit:].unsqueeze(1) + 1
        init = ROPE_INIT_FUNCTIONS[rotary.rope_type]
        # With longrope all further lengths have the same frequencies.
        seq_len = limit + 1 if rotary.rope_type == "longrope" else lengths
        rotary.inv_freq, _ = init(rotary.config, None, seq_len=seq_len)
        body = inspect.unwrap(type(rotary).forward)  # which takes the frequencies as they are
        pieces.append(body(rotary, nothing, positions[limit:].unsqueeze(0)))
    cos, sin = (torch.cat(parts, dim=1).squeeze(0) for parts in zip(*pieces, strict=True))
    return cos, sin


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Apply the rotary embedding to [R, H, D] by what ``Rotary`` gives, [R, 1, D].

    Args:
        norm: [H, D], the weights of a root-mean-square norm of each head before; None: none.
        eps: of the norm.
    """
    if has_kernels(x) and cos.dtype == x.dtype:
        from specplug.kernels import rotary

        return rotary.rotate(x, cos, sin, norm, eps)
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], None, eps) * norm
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def pack(network: nn.Module) -> None:
    """Join those matrices of a network's layers that read the same input, for serving; on the CPU
    transpose all.

    Call it when the weights are loaded and on their device: the joined ones do not move later.
    """
    for module in network.modules():
        if isinstance(module, QKVProjection | GatedMLP | RMSNorm):
            module.pack()
    looked_up = {m.weight for m in network.modules() if isinstance(m, nn.Embedding)}
    linears = [m.weight for m in network.modules() if isinstance(m, nn.Linear)]
    joined: list[Tensor] = []
    parts: list[nn.Linear] = []
    for module in network.modules():
        if isinstance(module, QKVProjection | GatedMLP):
            assert module.packed is not None
            joined.append(module.packed[0])
            parts += module.joined
    for weight in linears:
        if weight not in looked_up and weight.is_contiguous():  # the joined ones are not any more
            weight.data = _for_few_rows(weight.data)
    of_parts = {id(part.weight) for part in parts}
    pack_weights([*joined, *(weight for weight in linears if id(weight) not in of_parts)])
    for module in network.modules():
        if isinstance(module, QKVProjection):
            module.pack_parts()
        if isinstance(module, DecoderBody):
            module.pack()
