"""The draft states that came with requests which another instance has prefilled."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from specplug.speculative.batch import Batch
from specplug.speculative.state import StateTensor


@attrs.frozen(eq=False, kw_only=True)
class ReceivedState:
    """What came with the requests of a batch.

    Attributes:
        tensors: by name [bs, …] as declared, on the batch's device; zeros where nothing came.
        counts: by name, how many entries along the first axis came with each request: as many as
            declared, fewer from an instance with a lower ``topk`` or ``num_steps``, or 0.
    """

    tensors: dict[str, Tensor]
    counts: dict[str, list[int]]

    def lacking(self, name: str) -> list[int]:
        """The requests' indices that came with fewer entries of a tensor than declared."""
        tensor = self.tensors[name]
        whole = tensor.shape[1] if tensor.dim() > 1 else 1
        return [i for i, count in enumerate(self.counts[name]) if count < whole]


def received_state(batch: Batch, spec: Mapping[str, StateTensor]) -> ReceivedState:
    """Stack what came with each request of a batch, which may be empty.

    Each tensor is taken by itself, as far as it is as declared: what another instance has more of
    is left out, what it has fewer of is filled up with zeros (see ``StateTensor.kept``).

    Args:
        batch: of received requests.
        spec: what ``worker.state_spec()`` declares.
    """
    device, states = batch.req_indices.device, [request.draft_state for request in batch.requests]
    tensors, counts = {}, {}
    for name, declared in spec.items():
        rows = torch.zeros(len(states), *declared.shape, dtype=declared.dtype)
        found = [0] * len(states)
        for i, state in enumerate(states):
            if declared.common(state.get(name)):
                found[i] = declared.take(rows[i], state[name])
        tensors[name], counts[name] = rows.to(device, non_blocking=True), found
    return ReceivedState(tensors=tensors, counts=counts)
