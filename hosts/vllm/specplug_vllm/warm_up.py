"""Steps of requests that are nobody's, before the first one: no request waits for a compiler.

Their rows of the table hold slot 0 alone, of vLLM's null block. What they leave in a row is written
anew for the request that gets it. Hooks see them as ``Batch.is_warm_up``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from specplug_vllm.v2_step import Step

PROMPTS = 16, 256
"""Tokens of prompts: few rows and many go through other kernels."""
_CONTEXT = 64
"""Tokens of a request that decodes."""


@attrs.frozen
class _Params:
    """What hooks may ask of a request's sampling."""

    max_tokens: int | None = None
    min_tokens: int = 0


@attrs.frozen
class NobodysRequest:
    """Stands where vLLM's record of a request would."""

    req_id: str
    prompt_token_ids: Sequence[int] = attrs.field(factory=lambda: [0] * _CONTEXT)
    output_token_ids: Sequence[int] = ()
    sampling_params: _Params = _Params()


@attrs.frozen(kw_only=True)
class WarmUp:
    """Makes the steps.

    Args:
        sizes: of batches.
        columns: rows of a request that verifies drafts.
        greedy: whether all requests take their likeliest tokens; each is warmed up.
        num_rows: of the request table, row 0 (nobody's) included.
        context_len: most tokens of a request.
        hidden_size, dtype, device: of the target.
        layers: whose inputs the target returns.
    """

    sizes: Sequence[int]
    columns: int
    greedy: Sequence[bool]
    num_rows: int
    context_len: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    layers: Sequence[int]

    def requests(self) -> Iterator[NobodysRequest]:
        """Yield as many requests as the largest batch has."""
        return map(NobodysRequest, self._ids(max(self.sizes)))

    def steps(self) -> Iterator[Step]:
        """Yield prompts, then decode steps of all sizes."""
        for tokens in PROMPTS:
            yield self._step(1, min(tokens, self.context_len), prefills=True, greedy=True)
        for size in self.sizes:
            for greedy in self.greedy:
                yield self._step(size, self.columns, prefills=False, greedy=greedy)

    def _ids(self, size: int) -> list[str]:
        return [f"specplug_warm_up_{row}" for row in range(1, size + 1)]

    def _step(self, size: int, width: int, *, prefills: bool, greedy: bool) -> Step:
        start = 0 if prefills else min(_CONTEXT, self.context_len - width)
        order = torch.arange(size, device=self.device)
        hidden, layers = self._states(size * width)
        return Step(
            ids=self._ids(size),
            rows=np.arange(1, size + 1),
            widths=np.full(size, width),
            first_rows=np.arange(size) * width,
            prefills=np.full(size, prefills),
            starts=np.full(size, start),
            prefill_lens=np.full(size, width if prefills else start),
            longest=start + width,
            greedy=greedy,
            is_warm_up=True,
            idx_mapping=order.to(torch.int32),
            query_start_loc=(torch.arange(size + 1, device=self.device) * width).to(torch.int32),
            positions=(start + torch.arange(width, device=self.device)).repeat(size),
            tokens=torch.zeros(size * width, dtype=torch.int32, device=self.device),
            num_sampled=torch.ones_like(order, dtype=torch.int32),
            last_sampled_by_row=torch.zeros(
                self.num_rows - 1, 1, dtype=torch.int64, device=self.device
            ),
            hidden_states=hidden,
            layer_inputs=layers,
        )

    def _states(self, rows: int) -> tuple[Tensor, Mapping[int, Tensor]]:
        zeros = torch.zeros(rows, self.hidden_size, dtype=self.dtype, device=self.device)
        return zeros, dict.fromkeys(self.layers, zeros)
