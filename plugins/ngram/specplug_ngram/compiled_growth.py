"""Grows drafts on the CPU by the functions of the compiled library."""

from __future__ import annotations

from ctypes import PyDLL

import torch
from torch import Tensor

from specplug import Draft
from specplug_ngram.growth_input import FIELDS, Form


class CompiledGrowth:
    """``grow_in_torch`` and ``write_in_torch`` in C. All tensors are on the CPU.

    Args:
        compiled: the functions that ``load_library`` returns.
    """

    def __init__(self, compiled: PyDLL) -> None:
        self._grow, self._write = compiled.grow, compiled.write_tokens

    def grow(
        self, texts: Tensor, draft: Draft, given: Tensor, rows: Tensor, ends: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Grow drafts, as ``path_continuation.grow_in_torch`` does."""
        bs, width = draft.tokens.shape
        tokens, parents = torch.empty(2, bs, form.width, dtype=torch.int64).unbind()
        scores = torch.empty(bs, form.width, dtype=torch.float32)
        of_draft = [
            None if tensor is None else tensor.contiguous()
            for tensor in (draft.tokens, draft.parents, draft.scores)
        ]
        self._grow(
            *(texts.data_ptr(), texts.shape[1], rows.data_ptr(), ends.data_ptr()),
            *(given.data_ptr(), given.shape[1] // FIELDS - 1),
            *(None if tensor is None else tensor.data_ptr() for tensor in of_draft),
            *(bs, width, form.steps, form.depth, form.width),
            *(tokens.data_ptr(), parents.data_ptr(), scores.data_ptr()),
        )
        return tokens, parents, scores

    def write(self, texts: Tensor, tokens: Tensor, rows: Tensor, ends: Tensor) -> None:
        """Write tokens after those that are committed, as ``write_in_torch`` does."""
        tokens = tokens.contiguous()
        bs, columns = tokens.shape
        self._write(
            *(texts.data_ptr(), texts.shape[1], rows.data_ptr(), ends.data_ptr()),
            *(tokens.data_ptr(), bs, columns),
        )
