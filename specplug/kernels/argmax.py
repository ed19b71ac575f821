"""The greatest of each row, and its probability."""

from __future__ import annotations

import torch
from torch import Tensor

from specplug.kernels.kernel_table import Operation, kernels_in_c, runs_triton

_LEAST = float("-inf")


def argmax_rows(scores: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return the index of each row's greatest score, as ``scores.argmax(-1)`` does, but faster.

    On the CPU torch's ``max`` takes a third of the time of its ``argmax``. On a GPU torch reads a
    row by one program, the kernel by several.

    Args:
        scores: [R, V] of any floating dtype, V at least 1.
        ids: [V] int64, the target's token for each column; None: the column itself.

    Returns:
        [R] int64. Of equal scores the first; a NaN is greater than all else.

    Raises:
        ValueError: an argument is something else: a kernel would read past its end.
    """
    _check("argmax_rows", "scores", scores, ids)
    if runs_triton(Operation.GREATEST, scores.device, scores.dtype):
        from specplug.kernels.sampling import find_greatest

        return find_greatest(scores, None if ids is None else ids.contiguous())
    best = _argmax(scores)
    return best if ids is None else ids[best]


def likeliest_tokens(logits: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return each row's likeliest token and the logarithm of its probability: a draft's scores.

    The token is that of ``argmax_rows``. A kernel finds both in one read of the logits.

    Args:
        logits: [R, V] of any floating dtype, V at least 1; the softmax is over these V.
        ids: [V] int64, the target's token for each column; None: the column itself.

    Returns:
        [R] int64, and [R] of float64 for logits of float64, else of float32, at most 0. A row with
        NaN or inf, or without a finite logit, has no softmax: -inf.

    Raises:
        ValueError: an argument is something else.
    """
    _check("likeliest_tokens", "logits", logits, ids)
    if runs_triton(Operation.GREATEST, logits.device, logits.dtype):
        from specplug.kernels.sampling import find_likeliest

        return find_likeliest(logits, None if ids is None else ids.contiguous())
    best = _argmax(logits)
    precise = torch.promote_types(logits.dtype, torch.float32)
    logs = logits.log_softmax(-1, dtype=precise).gather(1, best.unsqueeze(1)).squeeze(1)
    return best if ids is None else ids[best], logs.nan_to_num_(nan=_LEAST, neginf=_LEAST)


class LikeliestTokens:
    """Finds likeliest tokens as ``likeliest_tokens`` does, by the run's kernels in C too.

    Make it in ``create_worker``: it takes the kernels of the run that starts in this thread.

    Args:
        device: of the logits.
    """

    def __init__(self, device: torch.device) -> None:
        self._in_c = kernels_in_c(Operation.GREATEST, device, torch.float32)

    def __call__(self, logits: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return what ``likeliest_tokens`` does."""
        found = None
        if self._in_c is not None and isinstance(logits, Tensor):
            found = self._in_c.likeliest(logits, ids)
        if found is not None:
            return found
        return likeliest_tokens(logits, ids)


def _argmax(scores: Tensor) -> Tensor:
    return scores.max(-1).indices if scores.device.type == "cpu" else scores.argmax(-1)


def _check(function: str, name: str, rows: Tensor, ids: Tensor | None) -> None:
    """Refuse what ``function`` is not made for; ``name`` is that of its first argument."""
    if not isinstance(rows, Tensor) or not _has_columns(rows):
        raise ValueError(
            f"{function}: {name} {_described(rows)}; expected a tensor [R, V] of floating "
            "dtype, V at least 1: flatten what stands before V"
        )
    if ids is not None and not (
        isinstance(ids, Tensor)
        and ids.dtype == torch.int64
        and ids.shape == rows.shape[1:]
        and ids.device == rows.device
    ):
        raise ValueError(
            f"{function}: ids {_described(ids)}; expected [{rows.shape[1]}] of torch.int64 on "
            f"{rows.device}, the target's token for each column of {name}"
        )


def _has_columns(scores: Tensor) -> bool:
    return scores.dim() == 2 and scores.is_floating_point() and scores.shape[1] > 0


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    return f"{list(value.shape)} of {value.dtype} on {value.device}"
