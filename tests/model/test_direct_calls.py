"""Modules that are cheaper to call compute what they computed before."""

from __future__ import annotations

import torch
from torch import nn

from specplug.model.direct_calls import shorten_calls


def test_shorten_calls_keeps_results_and_kept_hooks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    x = torch.randn(2, 4)
    before = model(x)
    shorten_calls(model, keep=[model[1]])
    seen: list[str] = []
    model[0].register_forward_pre_hook(lambda *_: seen.append("shortened"))
    model[1].register_forward_pre_hook(lambda *_: seen.append("kept"))
    assert torch.equal(model(x), before)
    assert seen == ["kept"]
    assert isinstance(model[0], nn.Linear)
    assert sum(p.numel() for p in model.parameters()) == 40
