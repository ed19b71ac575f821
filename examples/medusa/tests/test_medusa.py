"""MEDUSA: the training of its heads, and the conformance kit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch
from safetensors.torch import save_file
from shallow_tests import ShallowTests
from torch import nn

from specplug import SpecConfig, TrainingBatch
from specplug_medusa import WEIGHTS, algorithm
from specplug_medusa.heads import read_heads
from specplug_medusa.trainer import MedusaTrainer


class TestMedusa(ShallowTests):
    algorithm = algorithm
    settings: ClassVar = {"speculative_draft_model_path": WEIGHTS / "tiny_code"}


def runtime_of(path: Path | None = None) -> SimpleNamespace:
    torch.manual_seed(0)
    config = SpecConfig(algorithm="MEDUSA", num_steps=2, draft_model_path=path)
    return SimpleNamespace(
        config=config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        hidden_size=8,
        lm_head=nn.Linear(8, 16, bias=False).requires_grad_(False),
        capture_lm_head_input=lambda: "head_input",
        setting=lambda name, default: default,
    )


def test_heads_learn_what_the_target_says_next(tmp_path: Path) -> None:
    trainer = MedusaTrainer(runtime_of())
    hidden = torch.randn(1, 4, 8).repeat(2, 3, 1)  # the same four states again and again
    batch = TrainingBatch(
        tokens=torch.zeros(2, 12, dtype=torch.int64),
        counted=torch.ones(2, 12, dtype=torch.bool),
        features={"head_input": hidden},
    )
    optimizer = torch.optim.AdamW(trainer.network.parameters(), lr=0.02)
    for _ in range(150):
        trainer.loss(batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert trainer.loss(batch).metrics["top-1"].tolist() == [1.0, 1.0]
    files = trainer.export()
    (tmp_path / "config.json").write_text(json.dumps(dict(files.config)))
    save_file(dict(files.tensors), tmp_path / "model.safetensors")
    read = read_heads(tmp_path, 8)
    assert torch.equal(read[1](hidden), trainer.network[1](hidden))
    assert len(MedusaTrainer(runtime_of(tmp_path)).network) == 2


def test_draft_is_no_deeper_than_there_are_heads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    config = SpecConfig(
        algorithm="MEDUSA", num_steps=4, num_draft_tokens=5, draft_model_path=tmp_path
    )
    fitted = algorithm.validate_config(config)
    assert (fitted.num_steps, fitted.num_draft_tokens) == (2, 3)
    assert "there are 2 heads" in fitted.adjustments[0]
