"""Attention of a few queries a request over its own slots of a paged KV pool."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specplug.kernels.attention_form import AttentionForm
from specplug.kernels.kernel_table import HALF


def paged_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    bias: Tensor,
    form: AttentionForm,
) -> Tensor:
    """Gather each request's keys and values, then attend with a mask. The torch reference.

    Args:
        q: [bs, H, Q, D].
        keys, values: [slots, Hkv, D], the pool of one layer.
        table: [bs * L] int64 slots of each request's keys, slot 0 where there is none.
        bias: [bs, 1, H // Hkv * Q, L], 0 where a query sees a key and -inf where it does not;
            the queries of a group of heads one after the other.
        form: but for its window, which is the mask's.

    Returns:
        [bs, H, Q, D].
    """
    shape = len(q), bias.shape[-1], *keys.shape[1:]
    k, v = keys.index_select(0, table).view(shape), values.index_select(0, table).view(shape)
    return attention_reference(q, k, v, bias, form)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, form: AttentionForm
) -> Tensor:
    """Attend as ``paged_attention_reference``, with keys and values [bs, L, Hkv, D].

    In half precision the CPU computes in float64 and rounds once: the order of summation, which
    depends on the shapes, is then lost in the rounding.
    """
    if q.dtype in HALF and q.device.type == "cpu":
        wide_q, k, v, bias = (each.double() for each in (q, k, v, bias))
        return attention_reference(wide_q, k, v, bias, form).to(q.dtype)
    scale, softcap, sinks = form.scale, form.softcap, form.sinks
    bs, heads, width, head_dim = q.shape
    length, kv_heads = k.shape[1:3]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    # The heads that share keys are folded into the queries, so nothing is repeated.
    folded = q.reshape(bs, kv_heads, heads // kv_heads * width, head_dim)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=bias, scale=scale)
    else:
        scores = folded @ k.transpose(2, 3) * (scale if softcap is None else scale / softcap)
        if softcap is not None:
            scores = softcap * torch.tanh(scores)
        scores = scores + bias
        if sinks is not None:
            sink = sinks.to(q.dtype).view(kv_heads, -1, 1).expand(-1, -1, width)
            sink = sink.reshape(1, kv_heads, -1, 1).expand(bs, -1, -1, -1)
            scores = torch.cat((scores, sink), dim=-1)
        out = torch.softmax(scores, dim=-1)[..., :length] @ v
    return out.reshape(bs, heads, width, head_dim)
