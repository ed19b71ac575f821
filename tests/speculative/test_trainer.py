"""What trainers share: the mean over what counts, unrolled attention, weights to begin with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specplug import TrainingBatch, UnrolledAttention, begin_like, layers, norm_weight

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
