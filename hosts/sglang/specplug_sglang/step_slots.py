"""The KV slots of a step's requests in SGLang's pools."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specplug.speculative.host_copy import upload
from specplug.speculative.host_kernels import DraftKernels
from specplug.speculative.padding import Padding
from specplug.speculative.paged_plan import PagedPlan, RequestSlots


class StepSlots:
    """The KV slots of a step's requests, by row of SGLang's request table. Row 0 is padding:
    recorded passes fill their batches with it, SGLang's and ours.

    The slots are copied when the step begins: SGLang may give the row of a request that has ended
    to another one while the step runs. The copy is the same memory in every step, since recorded
    passes read it.

    Args:
        req_to_token: [rows, positions], SGLang's request table.
        context_len: most tokens of a request. Positions are clamped to the last: a node after it
            is never used, but must not read past a rotary table.
        kernels: of the draft models; without ``attention`` among them torch attends.

    Attributes:
        floors: [rows] int64, by row the first position that its request may write. The KV before
            it was found in the prefix cache.
    """

    def __init__(self, req_to_token: Tensor, context_len: int, kernels: DraftKernels) -> None:
        rows, positions = req_to_token.shape
        self._req_to_token = req_to_token
        self.floors = torch.zeros(rows, dtype=torch.int64, device=req_to_token.device)
        self._slots = self.floors.new_zeros(rows, positions + 1)  # the last column is padding
        self._order = torch.arange(positions, device=req_to_token.device)
        self._requests = RequestSlots(
            slots=self._slots,
            last_position=context_len - 1,
            floors=self.floors,
            kernels=kernels.attention,
        )
        self.begin(self.floors[:0], ())

    def begin(self, req_indices: Tensor, counts: Sequence[int]) -> None:
        """Copy the slots of the requests in rows ``req_indices`` [bs] int64.

        Args:
            counts: how many positions of each row are the request's own; slots after them are
                those of an earlier request. 0 for a request that has ended while its next step was
                planned.
        """
        self._rows, self._length = req_indices, max(1, *counts) if counts else 1
        if not counts:
            return
        self._slots.index_fill_(0, req_indices, 0)
        found = self._req_to_token[req_indices, : self._length].to(torch.int64)
        is_own = self._order[: self._length] < upload(counts, found.device).unsqueeze(1)
        own = torch.where(is_own, found, 0)
        self._slots[:, : self._length].index_copy_(0, req_indices, own)

    @property
    def written(self) -> Tensor:
        """[bs * positions] int64, the slots that the step's requests may write, and 0 elsewhere."""
        slots = self._slots[self._rows, : self._length]
        is_own = self._order[: self._length] >= self.floors[self._rows].unsqueeze(1)
        return torch.where(is_own, slots, 0).flatten()

    def plan(
        self,
        req_indices: Tensor,
        starts: Tensor,
        width: int | Sequence[int],
        *,
        offset: int = 0,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> PagedPlan:
        """Return the plan of a pass over requests of the step, as ``Runtime.plan_attention`` does.

        Args:
            req_indices: [bs] int64, their rows; a recorded pass is given row 0 as padding.
        """
        width, padding = Padding.between(width, starts.device)
        return PagedPlan(
            requests=self._requests,
            req_indices=req_indices,
            starts=starts,
            width=width,
            length=self._length,
            offset=offset,
            given_positions=positions,
            mask=mask,
            padding=padding,
        )
