"""The training of a head: its steps are those that the served network takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafted_tokens import CONTEXT, HIDDEN, VOCAB
from torch import Tensor, nn

from specplug import Checkpoint, CheckpointError, TrainingBatch
from specplug_eagle3.checkpoint import flatten_config, network_config
from specplug_eagle3.trainer import Eagle3Trainer

LAYERS, LENGTH = 4, 12


class Target:
    """A target of a few random matrices, as a trainer sees it."""

    device, dtype = torch.device("cpu"), torch.float32
    vocab_size, hidden_size, num_layers, context_len = VOCAB, HIDDEN, LAYERS, CONTEXT
    tokenizer = None

    def __init__(self, start: Path | None = None, **options: int) -> None:
        torch.manual_seed(3)
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.final_norm = nn.RMSNorm(HIDDEN)
        self.options = options
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
        self.config: Any = SimpleNamespace(
            num_steps=3, draft_model_path=start, target_config={**sizes, "rope_theta": 1e4}
        )

    def capture_layer_inputs(self, layer_ids: tuple[int, ...]) -> str:
        return "layers"

    def capture_lm_head_input(self) -> str:
        return "head"

    def setting(self, name: str, default: int) -> int:
        return self.options.get(name, default)

    def token_counts(self) -> Tensor:
        return torch.arange(VOCAB).flip(0)

    def target_layer(self, index: int) -> nn.Module:
        return nn.Module()

    def lm_head_rows(self, token_ids: Tensor) -> Tensor:
        return self.lm_head.weight[token_ids]

    def example(self) -> TrainingBatch:
        generator = torch.Generator().manual_seed(4)
        return TrainingBatch(
            tokens=torch.randint(VOCAB, (2, LENGTH), generator=generator),
            counted=torch.ones(2, LENGTH, dtype=torch.bool),
            features={
                "layers": torch.randn(2, LENGTH, 3 * HIDDEN, generator=generator),
                "head": torch.randn(2, LENGTH, HIDDEN, generator=generator),
            },
        )


def trainer(start: Path | None = None, **options: int) -> Eagle3Trainer:
    return Eagle3Trainer(Target(start, **{"draft_vocab_size": 40, **options}))  # type: ignore[arg-type]


def test_draft_vocabulary_is_what_is_written_most() -> None:
    assert trainer().token_ids.tolist() == list(range(40))


def test_new_head_begins_with_the_targets_output_head() -> None:
    made = trainer()
    assert torch.equal(made.network.lm_head.weight, made.runtime.lm_head.weight[:40])  # type: ignore[attr-defined]


def test_loss_counts_only_what_is_learnt() -> None:
    """What stands after the last place that counts changes nothing."""
    made, batch = trainer(), trainer().runtime.example()
    counted = batch.counted.clone()
    counted[:, 6:] = False
    losses = []
    for fill in (0, 1):
        tokens = batch.tokens.clone()
        tokens[:, 7:] = fill
        given = TrainingBatch(tokens=tokens, counted=counted, features=batch.features)
        losses.append(made.loss(given).loss.item())
    assert losses[0] == pytest.approx(losses[1])


def test_first_step_is_the_networks_own_pass() -> None:
    """The loss of one step is the cross entropy of the network as it is served."""
    made = trainer()
    made.num_steps = 1
    batch = made.runtime.example()
    total, count = 0.0, 0
    for text in range(2):
        wanted = made.runtime.lm_head(batch.features["head"][text])
        fused = made.network.fuse(batch.features["layers"][text])
        for p in range(LENGTH - 1):
            if wanted[p + 1].argmax() >= 40:
                continue

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                k, v = (x.repeat_interleave(2, dim=1).transpose(0, 1) for x in (k, v))
                scores = q.transpose(0, 1) @ k.transpose(1, 2) * q.shape[-1] ** -0.5
                mask = torch.ones(scores.shape[-2:]).tril().bool()
                mixed = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
                return mixed.transpose(0, 1).flatten(1)

            embeds = made.runtime.embed_tokens(batch.tokens[text, 1 : p + 2])
            hidden = made.network(embeds, fused[: p + 1], torch.arange(p + 1), attend)
            said = made.network.logits(hidden[-1:]).log_softmax(-1)[0]
            total -= float((wanted[p + 1, :40].softmax(-1) * said).sum().detach())
            count += 1
    assert made.loss(batch).loss.item() == pytest.approx(total / count, rel=1e-4)


def test_published_sizes_are_read_back(tmp_path: Path) -> None:
    files = trainer(intermediate_size=24).export()
    checkpoint = Checkpoint(tmp_path, files.config, files.tensors)
    read = network_config(flatten_config(checkpoint, "eagle3"), LAYERS, CONTEXT)
    assert read.intermediate_size == 24
    assert read.draft_vocab_size == 40
    assert read.aux_layer_ids == (2, 2, 1)


def test_start_goes_on_from_a_checkpoint(write_draft: Callable[..., Path]) -> None:
    made = trainer(write_draft())
    stored = Checkpoint.read(write_draft()).tensors["fc.weight"]
    torch.testing.assert_close(made.network.fc.weight, stored.float())


def test_start_of_another_target_is_refused(write_draft: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match="does not fit the target"):
        trainer(write_draft(target_hidden_size=HIDDEN + 8))
