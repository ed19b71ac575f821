"""Lent tensors are spoiled after their call, and not those that are lent now."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from specplug.speculative.hook_order import Chunks, Committed, HookOrder
from specplug.testing import Subject
from specplug.testing.kit import checks_named
from specplug.testing.laboratory import Laboratory
from specplug.testing.verdict import judge

_ROWS = 64


class OneMemory:
    """Puts the target's outputs of each step where those of the last step were, as a recorded pass
    of a GPU does."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self.used = 0

    def place(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor [R, ...] to the place of its name."""
        shape = (_ROWS, *tensor.shape[1:])
        memory = self._memory.setdefault(name, torch.empty(shape, dtype=tensor.dtype))
        self.used += 1
        return memory[: len(tensor)].copy_(tensor)


def test_memory_lent_again_is_not_spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, commit_chunks = OneMemory(), HookOrder.commit_chunks

    def commit(
        order: HookOrder, chunks: Chunks, predict: Tensor, per_node: Mapping[str, Tensor]
    ) -> Committed:
        placed = {name: memory.place(name, tensor) for name, tensor in per_node.items()}
        return commit_chunks(order, chunks, predict, placed)

    monkeypatch.setattr(HookOrder, "commit_chunks", commit)
    (check,) = checks_named(["conduct.lifetime"])
    verdict = judge(check, Laboratory(Subject(algorithm="EAGLE3")))
    assert memory.used
    assert verdict.status == "passed", verdict.told
