"""What trainers share: the mean over what counts, unrolled attention, weights to begin with."""

from __future__ import annotations

import attrs
import pytest
import torch
from frozen_target import LENGTH as TEXT_LENGTH
from frozen_target import random_target
from torch import Tensor, nn
from torch.nn import functional as F

from specplug import (
    DraftFiles,
    FeatureTrainer,
    TrainingBatch,
    UnrolledAttention,
    begin_like,
    layers,
    norm_weight,
)

TEXTS, LENGTH, HEADS, KV_HEADS, DIM = 2, 7, 4, 2, 8


def test_mean_is_over_what_counts() -> None:
    empty = torch.zeros(1, 1, dtype=torch.int64)
    batch = TrainingBatch(tokens=empty, counted=empty.bool(), features={})
    values, counted = torch.tensor([1.0, 5.0, 9.0]), torch.tensor([True, False, True])
    assert batch.mean(values, counted).item() == 5.0
    assert batch.mean(values, torch.zeros(3)).item() == 0.0


def rows(seed: int, heads: int) -> Tensor:
    """[B * L, H, D]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TEXTS * LENGTH, heads, DIM, generator=generator, dtype=torch.float64)


def attended(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One row alone: query [H, D], keys and values [n, Hkv, D] -> [H * D]."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values))
    shares = (torch.einsum("hd,nhd->hn", query, keys) * DIM**-0.5).softmax(-1)
    return torch.einsum("hn,nhd->hd", shares, values).flatten()


def test_positions_that_go_on_alone_see_the_same() -> None:
    at = torch.tensor([1, 4, 5])
    alone = [rows(40 + i, heads) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    first = [rows(50 + i, heads) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    every, some = UnrolledAttention(TEXTS), UnrolledAttention(TEXTS)
    every(0, *first), some(0, *first)
    some.go_on_from(at)
    chosen = [x.view(TEXTS, LENGTH, -1, DIM)[:, at].flatten(0, 1) for x in alone]
    mixed = some(0, *chosen).view(TEXTS, len(at), -1)
    torch.testing.assert_close(mixed, every(0, *alone).view(TEXTS, LENGTH, -1)[:, at])


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_unrolled_attention_sees_what_a_chain_does(passes: int) -> None:
    """Row p of a later pass sees the text up to p, and its own keys since."""
    attend = UnrolledAttention(TEXTS)
    queries = [rows(10 + i, HEADS) for i in range(passes)]
    keys = [rows(20 + i, KV_HEADS) for i in range(passes)]
    values = [rows(30 + i, KV_HEADS) for i in range(passes)]
    for given in zip(queries, keys, values, strict=True):
        mixed = attend(0, *given)
    for text in range(TEXTS):
        for p in range(LENGTH):
            row = text * LENGTH + p
            seen = [
                torch.cat([x[0][text * LENGTH : row + 1], *(later[row, None] for later in x[1:])])
                for x in (keys, values)
            ]
            torch.testing.assert_close(mixed[row], attended(queries[-1][row], *seen))


def test_begin_like_fills_a_wider_matrix_from_its_end() -> None:
    ours, theirs = nn.Module(), nn.Module()
    ours.q_proj, theirs.q_proj = nn.Linear(10, 6, bias=False), nn.Linear(4, 6, bias=False)
    before = ours.q_proj.weight.detach().clone()
    begin_like(ours, theirs)
    assert torch.equal(ours.q_proj.weight[:, -4:], theirs.q_proj.weight)
    assert torch.equal(ours.q_proj.weight[:, :-4], before[:, :-4])


def test_begin_like_leaves_attention_of_other_heads() -> None:
    ours, theirs = nn.Module(), nn.Module()
    ours.k_proj, theirs.k_proj = nn.Linear(4, 8, bias=False), nn.Linear(4, 6, bias=False)
    before = ours.k_proj.weight.detach().clone()
    begin_like(ours, theirs)
    assert torch.equal(ours.k_proj.weight, before)


def test_begin_like_fills_a_smaller_mlp() -> None:
    ours, theirs = nn.Module(), nn.Module()
    ours.mlp, theirs.mlp = layers.GatedMLP(4, 6), layers.GatedMLP(4, 9)
    begin_like(ours, theirs)
    assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight[:6])
    assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight[:, :6])


def test_begin_like_fills_the_first_of_more_heads() -> None:
    """Twice as many heads: the first half attends as the target does, in and out."""
    ours, theirs = nn.Module(), nn.Module()
    for module, heads in ((ours, 12), (theirs, 6)):
        module.q_proj = nn.Linear(4, heads, bias=False)
        module.k_proj = nn.Linear(4, heads // 2, bias=False)
        module.o_proj = nn.Linear(heads, 4, bias=False)
        module.self_attn = nn.Module()
        module.self_attn.o_proj = nn.Linear(heads, 4, bias=False)
    before = ours.self_attn.o_proj.weight.detach().clone()
    begin_like(ours, theirs)
    assert torch.equal(ours.q_proj.weight[:6], theirs.q_proj.weight)
    assert torch.equal(ours.k_proj.weight[:3], theirs.k_proj.weight)
    assert torch.equal(ours.self_attn.o_proj.weight[:, :6], theirs.self_attn.o_proj.weight)
    assert torch.equal(ours.self_attn.o_proj.weight[:, 6:], before[:, 6:])


class Marked(FeatureTrainer):
    """A trainer whose rows carry their positions.

    Attributes:
        asked: the positions that take the distribution, by unrolled step, of the last loss.
    """

    def __init__(self, *, num_steps: int = 3, learns_distance: bool = True) -> None:
        self.network = nn.Sequential()
        self.network.embed_tokens = nn.Embedding(16, 8)
        self.network.lm_head = nn.Linear(8, 16)
        self.network.fc = nn.Linear(8, 16)  # as many inner features as tokens
        self.network.layer = nn.Sequential(nn.Linear(16, 8), nn.RMSNorm(8))
        super().__init__(random_target(), torch.arange(16), num_steps)
        self._learns_distance = learns_distance
        self.asked: list[set[int]] = []

    def features(self, batch: TrainingBatch) -> Tensor:
        rows, length = batch.tokens.shape
        return torch.arange(float(length)).repeat(rows).unsqueeze(1)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: object) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        self.asked.append({int(position) for position in hidden[:, 0]})
        return torch.zeros(len(hidden), 16)

    def distance(self, hidden: Tensor, wanted: Tensor) -> Tensor | None:
        return torch.zeros(len(hidden)) if self._learns_distance else None

    def export(self) -> DraftFiles:
        return DraftFiles(config={}, tensors={})

    def positions(self, step: int) -> list[set[int]]:
        """Those that take the distribution in a step of the optimizer."""
        self.asked.clear()
        self.loss(attrs.evolve(self.runtime.example(), step=step))
        return list(self.asked)


@pytest.mark.parametrize("learns_distance", [True, False])
def test_every_position_takes_part_over_eight_steps(learns_distance: bool) -> None:
    trainer = Marked(learns_distance=learns_distance)
    steps = [trainer.positions(step) for step in range(8)]
    for unrolled in range(3):
        taken = set().union(*(step[unrolled] for step in steps))
        assert taken == set(range(TEXT_LENGTH)), unrolled
    later = sum(len(step[1]) for step in steps)  # every other one of them, where half is enough
    assert later == (TEXT_LENGTH if learns_distance else 2 * TEXT_LENGTH)


def test_orthogonal_tells_tokens_by_what_they_are() -> None:
    trainer = Marked()
    network = trainer.network
    assert [id(p) for p in trainer.orthogonal()] == [
        id(network.fc.weight),
        id(network.layer[0].weight),
    ]


class OneMore(nn.Module):
    """A norm that stores what it multiplies by less one, as Gemma's does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -0.25, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (3,)) * (1 + self.weight)


def test_norm_weight_is_what_the_norm_multiplies_by() -> None:
    found = norm_weight(OneMore(), torch.ones(3))
    assert found is not None
    torch.testing.assert_close(found, torch.tensor([1.5, 0.75, 2.0]))


def test_norm_of_another_width_or_kind_has_no_weight() -> None:
    assert norm_weight(OneMore(), torch.ones(5)) is None
    assert norm_weight(nn.LayerNorm(3), torch.ones(3)) is None
