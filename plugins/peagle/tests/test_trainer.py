"""The training of a head: its passes are those of the served network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from frozen_target import LENGTH, causal_attention, random_target
from safetensors.torch import save_file

from specplug import DraftFiles
from specplug_eagle3.trainer import Eagle3Trainer
from specplug_peagle.trainer import DECAY, REACH, PEagleTrainer

SIZES = {"draft_vocab_size": 40, "intermediate_size": 24}


def write(folder: Path, files: DraftFiles) -> Path:
    (folder / "config.json").write_text(json.dumps(dict(files.config)))
    tensors = {name: tensor.detach().contiguous() for name, tensor in files.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_masks_are_the_networks_own_pass() -> None:
    """The loss is the cross entropy of the network as it is served, a text at a time."""
    made = PEagleTrainer(random_target(num_steps=3, groups=LENGTH - 1, **SIZES))
    for layer in made.network.layers.values():
        torch.nn.init.normal_(layer.self_attn.o_proj.weight, std=0.1)  # type: ignore[union-attr,arg-type]
    batch, network, runtime = made.runtime.example(), made.network, made.runtime
    of_text, of_masks = [], []
    for text in range(2):
        logits = runtime.lm_head(batch.features["head"][text])
        goal, counts = logits[:, :40].softmax(-1), logits.argmax(-1) < 40
        fused = network.fuse(batch.features["layers"][text])
        for p in range(LENGTH - 1):
            tokens = torch.cat((batch.tokens[text, 1 : p + 2], torch.tensor([96, 96])))
            hidden = torch.cat((fused[: p + 1], network.mask_feature().expand(2, -1)))
            positions = torch.arange(p + 3)
            out = network(runtime.embed_tokens(tokens), hidden, positions, causal_attention)
            said = network.logits(out[p:]).log_softmax(-1)
            here = goal[p + 1 : p + 4]
            if counts[p + 1]:
                of_text.append(-(here[0] * said[0]).sum())
            for d in range(1, len(here)):
                if counts[p + 1 : p + 2 + d].all():
                    taken = torch.minimum(here[:d], said[:d].exp()).sum(-1).prod()
                    weight = torch.exp(torch.tensor(-d / DECAY)) * (1 - REACH + REACH * taken)
                    of_masks.append((weight, -(here[d] * said[d]).sum() * weight))
    weights, losses = (torch.stack(each).sum() for each in zip(*of_masks, strict=True))
    expected = torch.stack(of_text).mean() + losses / weights
    assert made.loss(batch).loss.item() == pytest.approx(float(expected.detach()), rel=1e-4)


def test_training_goes_on_from_an_eagle3_head(tmp_path: Path) -> None:
    head = Eagle3Trainer(random_target(**SIZES))
    start = write(tmp_path, head.export())
    made = PEagleTrainer(random_target(start, num_hidden_layers=2))
    assert torch.equal(made.network.fc.weight, head.network.fc.weight)
    assert made.network.num_layers == 2


def test_training_goes_on_from_its_own_export(tmp_path: Path) -> None:
    first = PEagleTrainer(random_target(**SIZES))
    made = PEagleTrainer(random_target(write(tmp_path, first.export())))
    assert made.network.config.mask_token_id == first.network.config.mask_token_id
    for name, tensor in first.network.state_dict().items():
        assert torch.equal(made.network.state_dict()[name], tensor), name


def test_a_head_of_one_step_needs_no_masks() -> None:
    made = PEagleTrainer(random_target(num_steps=1, **SIZES))
    assert made.loss(made.runtime.example()).metrics["top-1"].shape == (1,)
