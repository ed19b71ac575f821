"""The training of a network's heads, new ones and those of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from frozen_target import random_target
from safetensors.torch import save_file

from specplug import DraftFiles, UsageError
from specplug_dflash.trainer import DFlashTrainer
from specplug_dspark.trainer import CROSS_ENTROPY, DSparkTrainer


def write(folder: Path, files: DraftFiles) -> Path:
    (folder / "config.json").write_text(json.dumps(dict(files.config)))
    tensors = {name: tensor.detach().contiguous() for name, tensor in files.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_new_heads_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cross entropy is that of the DFlash network which the training goes on from."""
    monkeypatch.setattr("specplug_dspark.trainer.DISTANCE", 0.0)
    monkeypatch.setattr("specplug_dspark.trainer.CONFIDENCE", 0.0)
    backbone = DFlashTrainer(random_target(intermediate_size=24))
    made = DSparkTrainer(random_target(write(tmp_path, backbone.export())))
    losses = []
    for trainer in (backbone, made):
        torch.manual_seed(5)
        losses.append(trainer.loss(trainer.runtime.example()).loss.item())
    assert losses[1] == pytest.approx(CROSS_ENTROPY * losses[0])


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_heads_learn_and_are_gone_on_from(kind: str, tmp_path: Path) -> None:
    options = {"intermediate_size": 24, "markov_head_type": kind, "markov_rank": 8}
    made = DSparkTrainer(random_target(**options))  # type: ignore[arg-type]
    found = made.loss(made.runtime.example())
    found.loss.backward()
    for head in (made.network.markov_head, made.network.confidence_head):
        assert head is not None
        assert any(p.grad is not None and bool(p.grad.any()) for p in head.parameters())
    again = DSparkTrainer(random_target(write(tmp_path, made.export())))
    assert again.export().config == made.export().config
    for name, tensor in made.network.state_dict().items():
        assert torch.equal(again.network.state_dict()[name], tensor), name


def test_unknown_head_is_refused() -> None:
    with pytest.raises(UsageError, match=r"markov_head_type=lstm: expected one of vanilla, gated"):
        DSparkTrainer(random_target(markov_head_type="lstm"))  # type: ignore[arg-type]
