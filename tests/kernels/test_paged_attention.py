"""The reference of the paged attention against one head and one query at a time."""

from __future__ import annotations

import pytest
import torch

from specplug.kernels.attention_form import AttentionForm
from specplug.kernels.paged_attention import paged_attention_reference


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_each_query_attends_to_its_own_requests_slots(
    kv_heads: int, softcap: float | None, has_sinks: bool
) -> None:
    bs, heads, width, head_dim, length = 3, 4, 2, 5, 7
    generator = torch.Generator().manual_seed(kv_heads)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    q = normal(bs, heads, width, head_dim)
    keys, values = normal(2, 40, kv_heads, head_dim)
    table = torch.randint(0, 40, (bs * length,), generator=generator)
    visible = torch.rand(bs, width, length, generator=generator) < 0.6
    visible[..., 0] = True
    group = heads // kv_heads
    bias = torch.zeros(bs, 1, group * width, length, dtype=torch.float64)
    bias.masked_fill_(~visible.repeat(1, group, 1).unsqueeze(1), float("-inf"))
    sinks = normal(heads) if has_sinks else None
    form = AttentionForm(0.3, softcap=softcap, sinks=sinks)
    found = paged_attention_reference(q, keys, values, table, bias, form)
    for b in range(bs):
        own = table.view(bs, length)[b]
        for head in range(heads):
            for i in range(width):
                seen = own[visible[b, i]]
                scores = keys[seen, head // group] @ q[b, head, i] * 0.3
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1]))
                chances = torch.softmax(scores, 0)[: len(seen)]
                expected = chances @ values[seen, head // group]
                torch.testing.assert_close(found[b, head, i], expected, rtol=0, atol=1e-12)
