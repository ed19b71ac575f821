"""What hosts use of the core's kernels is chosen by the table."""

from __future__ import annotations

import pytest
import torch

from specplug.kernels import row_gather, table_pages
from specplug.kernels.cpu_kernels import CPUKernels
from specplug.kernels.kernel_table import kernels_used
from specplug.speculative.host_kernels import DraftKernels, join_rows
from specplug.speculative.slot_pages import enter_pages

CPU = torch.device("cpu")
# Triton's kernels run where they are compiled for, or in the interpreter.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("mode", ["torch", "triton"])
def test_join_rows_obeys_the_table(mode, monkeypatch):
    states = [torch.randn(9, 3, device=DEVICE), torch.randn(9, 5, device=DEVICE)]
    rows = torch.tensor([4, 0, 4, 8], device=DEVICE)
    launched = []
    kernel = row_gather.join_rows
    monkeypatch.setattr(row_gather, "join_rows", lambda *a: launched.append(a) or kernel(*a))
    with kernels_used(mode):
        found = join_rows(states, rows)
    assert torch.equal(found, torch.cat([state[rows] for state in states], dim=1))
    assert bool(launched) == (mode == "triton")


@pytest.mark.parametrize("mode", ["torch", "triton"])
def test_enter_pages_obeys_the_table(mode, monkeypatch):
    slots = torch.full((3, 12), -1, device=DEVICE)
    changes = torch.tensor([[1, 0, 5], [1, 2, 0], [2, 1, 7]], device=DEVICE)
    launched = []
    kernel = table_pages.enter_pages
    monkeypatch.setattr(table_pages, "enter_pages", lambda *a: launched.append(a) or kernel(*a))
    with kernels_used(mode):
        enter_pages(slots, changes, 4)
    expected = torch.full((3, 12), -1)
    expected[1, :4] = torch.arange(20, 24)
    expected[1, 8:] = 0
    expected[2, 4:8] = torch.arange(28, 32)
    assert torch.equal(slots.cpu(), expected)
    assert bool(launched) == (mode == "triton")


def test_draft_kernels_are_those_of_the_table(cpu_kernels: CPUKernels):
    with kernels_used("torch"):
        assert DraftKernels.of(CPU, torch.float32) == DraftKernels(None, None)
    assert DraftKernels.of(CPU, torch.float32) == DraftKernels(None, cpu_kernels)
    assert DraftKernels.of(CPU, torch.float64) == DraftKernels(None, None)
