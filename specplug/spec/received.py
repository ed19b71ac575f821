"""The draft states that came with requests which another instance has prefilled."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specplug.spec.batch import Batch

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape of a request's tensor, without a leading size, and its type."""


def received_state(batch: Batch, forms: Mapping[str, Form]) -> tuple[dict[str, Tensor], list[int]]:
    """Stack what came with each request of a batch, which may be empty.

    Args:
        batch: of received requests.
        forms: by name, what a request's tensors must be like.

    Returns:
        By name [bs, …] tensors on the batch's device, and the indices of the requests that came
        without a state, or with one of another form: their rows are zeros.
    """
    device, requests = batch.rows.device, batch.requests
    sound = [_fits(request.draft_state, forms) for request in requests]
    stacked = {}
    for name, (shape, dtype) in forms.items():
        rows = torch.zeros(len(requests), *shape, dtype=dtype)
        for row, request, fits in zip(rows, requests, sound, strict=True):
            if fits:
                row.copy_(request.draft_state[name])
        stacked[name] = rows.to(device, non_blocking=True)
    return stacked, [i for i, fits in enumerate(sound) if not fits]


def all_received(batch: Batch) -> dict[str, Tensor | None]:
    """As ``received_state``, in whatever form the first request with a state brought it."""
    first = next((r.draft_state for r in batch.requests if r.draft_state), {})
    forms: dict[str, Form] = {name: (tuple(t.shape), t.dtype) for name, t in first.items()}
    return dict(received_state(batch, forms)[0])


def _fits(state: Mapping[str, Tensor], forms: Mapping[str, Form]) -> bool:
    return all(
        name in state and tuple(state[name].shape) == shape and state[name].dtype == dtype
        for name, (shape, dtype) in forms.items()
    )
