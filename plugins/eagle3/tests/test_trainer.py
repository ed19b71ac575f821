"""The training of a head: its steps are those that the served network takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafted_tokens import CONTEXT, HIDDEN
from frozen_target import LENGTH, RandomTarget, random_target
from torch import Tensor, nn

from specplug import Checkpoint, CheckpointError, TrainingBatch, UsageError
from specplug_eagle3.checkpoint import flatten_config, network_config
from specplug_eagle3.trainer import Eagle3Trainer

GOAL_TOKENS = 32
"""The likeliest tokens of the target, which the network learns to say."""


def trainer(start: Path | None = None, **options: int) -> Eagle3Trainer:
    return Eagle3Trainer(random_target(start, **{"draft_vocab_size": 40, **options}))


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
    made._scale = None  # the distribution alone
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
            most = wanted[p + 1, :40].topk(GOAL_TOKENS)
            shares = most.values.softmax(-1)
            total -= float((shares * said[most.indices]).sum().detach())
            count += 1
    assert made.loss(batch).loss.item() == pytest.approx(total / count, rel=1e-4)


def test_published_sizes_are_read_back(tmp_path: Path) -> None:
    files = trainer(intermediate_size=24).export()
    checkpoint = Checkpoint(tmp_path, files.config, files.tensors)
    read = network_config(flatten_config(checkpoint, "eagle3"), 4, CONTEXT)
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


def test_distance_is_in_units_of_the_final_norm() -> None:
    """A feature that the norm makes twice as large may be twice as far off."""
    target = random_target(draft_vocab_size=40)
    target.final_norm.weight.data[0] = 2.0  # type: ignore[attr-defined]
    made = Eagle3Trainer(target)
    hidden = torch.randn(5, HIDDEN)
    wanted = made.network.norm(hidden).detach()
    near, first, second = wanted, wanted.clone(), wanted.clone()
    first[:, 0] += 2.0
    second[:, 1] += 1.0
    found = [made.distance(hidden, each) for each in (near, first, second)]
    for distance, expected in zip(found, (0.0, 1 / HIDDEN, 1 / HIDDEN), strict=True):
        assert distance is not None
        torch.testing.assert_close(distance, torch.full((5,), expected), atol=1e-6, rtol=1e-4)


def test_distance_of_a_feature_that_hardly_counts_is_bounded() -> None:
    target = random_target(draft_vocab_size=40)
    target.final_norm.weight.data[0] = 1e-9  # type: ignore[attr-defined]
    made = Eagle3Trainer(target)
    hidden = torch.randn(5, HIDDEN)
    wanted = made.network.norm(hidden).detach()
    wanted[:, 0] += 0.01
    distance = made.distance(hidden, wanted)
    assert distance is not None
    assert bool((distance < 1.1 / HIDDEN).all())


def test_network_that_goes_on_learns_the_distribution_alone(
    write_draft: Callable[..., Path],
) -> None:
    assert trainer(write_draft()).distance(torch.randn(2, HIDDEN), torch.randn(2, HIDDEN)) is None


class WithLayer(RandomTarget):
    """A target whose last layer has the attention of one."""

    def target_layer(self, index: int) -> nn.Module:
        torch.manual_seed(5)
        layer, size = nn.Module(), HIDDEN // 4
        layer.self_attn = nn.Module()
        layer.self_attn.q_proj = nn.Linear(HIDDEN, 4 * size, bias=False)
        layer.self_attn.k_proj = nn.Linear(HIDDEN, 2 * size, bias=False)
        layer.self_attn.v_proj = nn.Linear(HIDDEN, 2 * size, bias=False)
        layer.self_attn.o_proj = nn.Linear(4 * size, HIDDEN, bias=False)
        return layer


def test_head_of_more_attention_heads_begins_as_the_targets() -> None:
    """Its first heads read and write what the target's do, each with its own keys and values."""
    target = WithLayer(draft_vocab_size=40, num_attention_heads=12)
    network = Eagle3Trainer(target).network  # type: ignore[arg-type]
    assert network.config.num_attention_heads == 12
    assert network.config.num_key_value_heads == 6  # two queries to a key, as the target has
    ours, theirs = network.midlayer.self_attn, target.target_layer(-1).self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        expected = getattr(theirs, name).weight
        assert torch.equal(getattr(ours, name).weight[: len(expected), -HIDDEN:], expected)
    assert torch.equal(ours.o_proj.weight[:, :HIDDEN], theirs.o_proj.weight)


@pytest.mark.parametrize("wanted", [0, 6])
def test_odd_number_of_attention_heads_is_refused(wanted: int) -> None:
    with pytest.raises(UsageError, match=f"={wanted}: expected a multiple of the target's 4"):
        trainer(num_attention_heads=wanted)
