"""The rows that a network is trained on, and their order."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import attrs
import torch
from torch import Tensor

from specplug.training.corpus import Text

SHORTEST = 8
"""Tokens of the shortest row."""
REPEATED = (6, 70)
"""Tokens of a piece that is repeated, from and to."""


@attrs.frozen(eq=False, kw_only=True)
class Rows:
    """n texts of at most L tokens.

    Attributes:
        tokens: [n, L] int32, padded at the end with 0.
        learnt: [n, L] bool, the tokens that the draft is to learn to say.
        lengths: [n] int64.
    """

    tokens: Tensor
    learnt: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, texts: Iterable[Text], length: int) -> Rows:
        """Cut texts into rows of ``length`` tokens. Pieces that are very short, or of which nothing
        is to be learnt, are left out."""
        pieces = [
            (text.token_ids[at : at + length], text.learnt[at : at + length])
            for text in texts
            for at in range(0, len(text.token_ids), length)
        ]
        kept = [
            (tokens, learnt) for tokens, learnt in pieces if len(tokens) >= SHORTEST and any(learnt)
        ]
        rows = cls(
            tokens=torch.zeros(len(kept), length, dtype=torch.int32),
            learnt=torch.zeros(len(kept), length, dtype=torch.bool),
            lengths=torch.tensor([len(tokens) for tokens, _ in kept], dtype=torch.int64),
        )
        for index, (tokens, learnt) in enumerate(kept):
            rows.tokens[index, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            rows.learnt[index, : len(tokens)] = torch.tensor(learnt)
        return rows

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor]) -> Rows:
        """Return what ``as_tensors`` gave."""
        return cls(**tensors)

    def as_tensors(self) -> dict[str, Tensor]:
        """Return them by name."""
        return {"tokens": self.tokens, "learnt": self.learnt, "lengths": self.lengths}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return int(self.lengths.sum())

    def joined(self, other: Rows) -> Rows:
        """Return these rows and then the other's, as wide."""
        pairs = zip(self.as_tensors().items(), other.as_tensors().values(), strict=True)
        return Rows(**{name: torch.cat((mine, its)) for (name, mine), its in pairs})

    def chosen(self, count: int, seed: int) -> Rows:
        """Return ``count`` of the rows at random, or all if there are fewer."""
        generator = torch.Generator().manual_seed(seed)
        return self.picked(torch.randperm(len(self), generator=generator)[:count])

    def picked(self, indices: Tensor) -> Rows:
        """Return these rows, in this order."""
        return Rows(**{name: tensor[indices] for name, tensor in self.as_tensors().items()})

    def repeated(self, count: int, seed: int) -> Rows:
        """Return ``count`` rows, each of which begins as one of these, and then says a piece of it
        again and again.

        Targets repeat what they have read: edits, calls, loops. A draft that has learnt to copy is
        right there for as long as it lasts, and in few texts it would see it seldom.
        """
        length, chance = self.tokens.shape[1], random.Random(seed)
        at = torch.zeros(count, length, dtype=torch.int64)
        chosen = [chance.randrange(len(self)) for _ in range(count)]
        for row, index in zip(at, chosen, strict=True):
            own = int(self.lengths[index])
            piece = min(chance.randint(*REPEATED), own)
            begin, lead = chance.randint(0, own - piece), chance.randint(0, min(own, length // 6))
            row[:lead] = torch.arange(lead)
            row[lead:] = begin + torch.arange(length - lead) % piece
        picked = torch.tensor(chosen, dtype=torch.int64)
        return Rows(
            tokens=self.tokens[picked].gather(1, at),
            learnt=self.learnt[picked].gather(1, at),
            lengths=torch.full((count,), length, dtype=torch.int64),
        )

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens [B, L'] int64 of these rows, as long as the longest of them, and where
        what the target says after a position is to be learnt [B, L'] bool."""
        chosen = torch.as_tensor(indices)
        width = int(self.lengths[chosen].max())
        learnt = self.learnt[chosen, :width]
        # The last token has none after it in the row: it counts if it was learnt itself.
        last = learnt.gather(1, self.lengths[chosen].sub(1).unsqueeze(1))
        counted = torch.cat((learnt[:, 1:], learnt[:, :1] & False), dim=1)
        counted.scatter_(1, self.lengths[chosen].sub(1).unsqueeze(1), last)
        return self.tokens[chosen, :width].long(), counted

    def indices(self, step: int, size: int, seed: int) -> Tensor:
        """Return which rows a step takes, [size]: each once in an epoch, in an order that follows
        from the seed and the epoch alone."""
        each = torch.arange(step * size, (step + 1) * size)
        epochs = each // len(self)
        return torch.stack(
            [
                _order(len(self), seed + int(epoch))[i % len(self)]
                for epoch, i in zip(epochs, each, strict=True)
            ]
        )


@lru_cache(maxsize=2)
def _order(count: int, seed: int) -> Tensor:
    """Return the order of an epoch; a step is of one epoch, or of the end of one and the next."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
