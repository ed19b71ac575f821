"""The training of a network: its passes are those of the served one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_target import LENGTH, RandomTarget, random_target
from safetensors.torch import save_file
from torch import Tensor

from specplug import UsageError
from specplug_dflash.trainer import DECAY, REACH, DFlashTrainer


def plain_attention(context: list[tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """Attend to what is before a block, and to all rows of it."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pairs = zip(context[layer], (key, value), strict=True)
        keys, values = (
            torch.cat(pair).repeat_interleave(2, dim=1).transpose(0, 1) for pair in pairs
        )
        scores = query.transpose(0, 1) @ keys.transpose(1, 2) * query.shape[-1] ** -0.5
        return (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)

    return attend


def test_blocks_are_the_networks_own_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is the cross entropy of the network as it is served, a block at a time."""
    monkeypatch.setattr("specplug_dflash.trainer.SHORTER", 0.0)
    made = DFlashTrainer(random_target(num_steps=3, blocks=LENGTH, intermediate_size=24))
    batch, network, runtime = made.runtime.example(), made.network, made.runtime
    losses, weights = [], []
    for text in range(2):
        goal = runtime.lm_head(batch.features["head"][text]).softmax(-1)
        features = batch.features["layers"][text]
        for anchor in range(1, LENGTH - 1):
            fused = network.fuse(features[:anchor])
            context = network.context_kv(fused, torch.arange(anchor))
            ids = torch.tensor([int(batch.tokens[text, anchor]), 96, 96, 96])
            attend = plain_attention(context)
            hidden = network(runtime.embed_tokens(ids), anchor + torch.arange(4), attend, 4)
            said = runtime.lm_head(network.norm(hidden)[1:]).log_softmax(-1)
            reached = torch.tensor(1.0)
            for j, token in enumerate(batch.tokens[text, anchor + 1 : anchor + 4].tolist()):
                here = goal[anchor + j]
                weight = torch.exp(torch.tensor(-j / DECAY)) * (1 - REACH + REACH * reached)
                weights.append(weight)
                losses.append(-(here * said[j]).sum() * weight)
                reached = reached * (said[j, token].exp() / here[token]).clamp(max=1)
    expected = torch.stack(losses).sum() / torch.stack(weights).sum()
    assert made.loss(batch).loss.item() == pytest.approx(float(expected.detach()), rel=1e-4)


def test_training_goes_on_from_its_own_export(tmp_path: Path) -> None:
    first = DFlashTrainer(random_target(intermediate_size=24))
    files = first.export()
    (tmp_path / "config.json").write_text(json.dumps(dict(files.config)))
    save_file(dict(files.tensors), tmp_path / "model.safetensors")
    made = DFlashTrainer(random_target(tmp_path))
    assert made.export().config == files.config
    for name, tensor in files.tensors.items():
        assert torch.equal(made.network.state_dict()[name], tensor), name


@pytest.mark.parametrize("layers", [["full_attention"] * 2, ["sliding_attention"] * 2])
def test_published_networks_are_gone_on_from(
    layers: list[str], speculators: Callable[..., Any], write_draft: Callable[..., Path]
) -> None:
    """With a vocabulary of their own, and windows."""
    tensors, layout = speculators(RandomTarget.hidden_size)
    made = DFlashTrainer(
        random_target(write_draft(tensors, layout, layer_types=layers, sliding_window=4))
    )
    found = made.loss(made.runtime.example())
    found.loss.backward()
    assert torch.isfinite(found.loss)
    assert made.network.lm_head is not None
    assert made.network.lm_head.weight.grad is not None
    assert made.export().tensors.keys() == tensors.keys()


def test_heads_without_a_loss_are_refused(
    write_draft: Callable[..., Path], second: tuple[dict[str, Tensor], dict[str, Any]]
) -> None:
    with pytest.raises(UsageError, match=r"has a candidate selector; expected one without"):
        DFlashTrainer(random_target(write_draft(*second)))
