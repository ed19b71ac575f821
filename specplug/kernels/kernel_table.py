"""Whether Triton kernels stand in for torch: on a GPU; on the CPU in tests alone.

Imports no Triton: a machine without a GPU needs none.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specplug.kernels.card import card_of

if TYPE_CHECKING:
    from specplug.kernels.paged_attention_kernels import PagedAttention

HALF = torch.bfloat16, torch.float16
"""The dtypes of the kernels of passes."""

_LEAST_CAPABILITY = 8, 0

forced: bool | None = None
"""True: on the CPU too, through Triton's interpreter. False: on a GPU neither, to compare. Set by
tests and measurements alone."""

MOST_NODES = 64
"""Nodes of a request that the kernels of ``kernels.tree`` take: a bit each of an int64."""


def runs_kernels(device: torch.device) -> bool:
    """Return whether a device runs Triton kernels at all."""
    return device.type == "cuda" and _has_triton()


def runs_pass_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels of passes run on a device in a dtype: in half precision, on GPUs
    from compute capability 8.0 on, whose tensor cores know bfloat16."""
    return dtype in HALF and device.type == "cuda" and why_without_kernels(device) is None


def why_without_kernels(device: torch.device) -> str | None:
    """Return why a GPU does not run the kernels of passes; None: it does."""
    if not _has_triton():
        return "Triton is not installed"
    card = card_of(device)
    if card.is_nvidia and card.capability < _LEAST_CAPABILITY:
        found, least = (".".join(map(str, each)) for each in (card.capability, _LEAST_CAPABILITY))
        return f"this card has compute capability {found}, the kernels need {least}"
    return None


def attention_kernels(device: torch.device, dtype: torch.dtype) -> PagedAttention | None:
    """Return what attends over pages on a GPU in half precision; None: torch does."""
    if not runs_pass_kernels(device, dtype):
        return None
    from specplug.kernels.paged_attention_kernels import PagedAttention

    return PagedAttention(device)


def runs_step_kernels(device: torch.device) -> bool:
    """Return whether the kernels around a pass run on a device."""
    return runs_kernels(device) if forced is None else forced


def runs_tree_kernels(nodes: Tensor) -> bool:
    """Return whether ``kernels.tree`` serves drafts [bs, N] on this device."""
    bs, width = nodes.shape
    return runs_step_kernels(nodes.device) and bs > 0 and width <= MOST_NODES


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
