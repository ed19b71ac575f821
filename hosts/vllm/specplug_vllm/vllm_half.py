"""The requests of a step of vLLM's that decode, or those that prefill, for both model runners."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from torch import Tensor

from specplug import (
    AttentionPlan,
    Batch,
    CommittedOutput,
    Draft,
    PluginError,
    RequestView,
    VerifyOutput,
)
from specplug.speculative.batch import ForwardMode
from specplug.speculative.hook_order import Half
from specplug_vllm.runtime import VllmRuntime


@attrs.define(eq=False, kw_only=True)
class VllmHalf(Half):
    """A ``Half``, with the plan of a prefill's rows."""

    plan: AttentionPlan | None = None

    def begin_prefill(
        self,
        runtime: VllmRuntime,
        requests: Sequence[RequestView],
        widths: np.ndarray,
        ends: np.ndarray,
        first: Sequence[bool],
        last: Sequence[bool],
    ) -> None:
        """Make the batch and the plan of chunks. ``seq_lens`` is set before.

        Args:
            widths, ends: [m] int, tokens of each chunk, and of its request with KV after it.
            first, last: m, whose first chunk it is, and whose last.
        """
        self.batch = Batch(
            mode=ForwardMode.PREFILL,
            requests=requests,
            req_indices=self.req_indices.clone(),
            seq_lens=self.seq_lens.clone(),
            chunk_widths=tuple(widths.tolist()),
            chunk_ends=tuple(ends.tolist()),
            first_chunk=tuple(first),
            last_chunk=tuple(last),
            is_warm_up=self.is_warm_up,
        )
        if runtime.has_draft_cache:
            self.plan = runtime.plan_attention(self.batch, self.seq_lens, self.batch.chunk_widths)


class VllmCallbacks:
    """What the order of hooks asks of a host, where vLLM verifies by itself."""

    def keep_accepted(self, half: VllmHalf, verified: VerifyOutput) -> None:
        """Not called."""

    def deliver(self, half: VllmHalf, output: CommittedOutput) -> None:
        """Give the plan; vLLM hands out the tokens."""
        half.batch.attention = half.plan


def drafted_tokens(draft: Draft, algorithm: str) -> Tensor:
    """Return the tokens of drafts after their roots, [m, N - 1] int64.

    Raises:
        PluginError: it is a tree.
    """
    if not draft.is_chain:
        raise PluginError(
            f"{algorithm}: propose() returned a tree with topk=1; expected a chain, as vLLM "
            "verifies nothing else; fix the plugin"
        )
    return draft.tokens[:, 1:]
