"""Requests and tokens with which a target's passes are tried out when it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specplug.kernels.cpu_kernels import CPUKernels
from specplug.speculative.draft import Draft
from specplug.speculative.padding import Padding
from specplug.speculative.paged_plan import PagedPlan, RequestSlots

if TYPE_CHECKING:
    from specplug.kernels.paged_attention_kernels import PagedAttention

RunPass = Callable[[Tensor, PagedPlan, Tensor | int], Tensor]
"""Token ids [R], a plan and the rows whose logits are wanted (0: all) -> logits."""


class TrialRequests:
    """Requests whose slots are interleaved, and the plans of passes over them.

    Their rows in the request table are 1, 2, …

    Args:
        count: of requests.
        room: slots of each.
        length: tokens of each, by which its rotary frequencies are set.
        context_len: of the model.
        device: of the plans.
        kernels: attend on a GPU; None: torch.
        cpu_kernels: attend on the CPU; None: torch.

    Attributes:
        num_slots: that a cache needs.
    """

    def __init__(
        self,
        count: int,
        room: int,
        length: int,
        context_len: int,
        device: torch.device,
        kernels: PagedAttention | None = None,
        cpu_kernels: CPUKernels | None = None,
    ) -> None:
        self.num_slots = count * room + 1
        self._length = length
        self._device = device
        slots = torch.arange(1, self.num_slots).view(-1, count).t().flip(1)
        table = torch.cat((torch.zeros_like(slots[:1]), slots)).to(device)
        self._requests = RequestSlots(
            slots=table,
            last_position=context_len - 1,
            lengths=table.new_full((len(table),), length),
            kernels=kernels,
            cpu_kernels=cpu_kernels,
        )

    def plan(self, starts: Sequence[int], widths: Sequence[int]) -> PagedPlan:
        """Return the plan of a pass over the first requests, each with so many rows from there."""
        return PagedPlan(
            requests=self._requests,
            req_indices=torch.arange(1, len(starts) + 1, device=self._device),
            starts=torch.tensor(starts, device=self._device),
            width=max(widths),
            length=self._length,
            padding=Padding.of(widths, max(widths), self._device),
        )

    def fork(self, root: int, tokens: Tensor) -> PagedPlan:
        """Return the plan of a pass over two branches of the first request, from one root.

        Args:
            root: its position.
            tokens: [1 + 2 * depth], the root's, then those of both branches at each depth.
        """
        width = len(tokens)
        parents = [-1, *(max(0, node - 2) for node in range(1, width))]
        above = torch.tensor([parents], device=self._device)
        draft = Draft.tree(tokens.unsqueeze(0), above, width // 2)
        return PagedPlan(
            requests=self._requests,
            req_indices=torch.tensor([1], device=self._device),
            starts=torch.tensor([root], device=self._device),
            width=width,
            length=root + width,
            mask=draft.mask,
            given_positions=root + draft.depths,
        )


def random_tokens(vocab_size: int, shape: tuple[int, ...]) -> Tensor:
    """Return token ids on the CPU, the same each time and mostly no special ones."""
    generator = torch.Generator().manual_seed(0)
    most = min(vocab_size, 4096)  # special tokens come after these
    return torch.randint(most // 8, most, shape, generator=generator)


def rows_of(output: Any) -> Tensor:
    """Return what a decoder layer gives, [R, n]; of several streams side by side (Gemma 3n)."""
    state: Tensor = output if isinstance(output, Tensor) else output[0]
    rows = state.flatten(-3, -2)
    return rows if rows.dim() == 2 else rows.movedim(-2, 0).flatten(1)
