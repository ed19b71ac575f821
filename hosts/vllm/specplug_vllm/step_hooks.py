"""The hooks of a step of vLLM's model runner of version 2, for some of its requests.

Nothing is read on the CPU but what vLLM has scheduled. ``chosen`` [m] int are indices of requests
of the step, in ascending order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from specplug import Batch, CommittedOutput
from specplug.speculative.batch import ForwardMode
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.hook_order import HookOrder
from specplug.speculative.host_copy import upload
from specplug_vllm.committed_rows import CommittedRows
from specplug_vllm.request_view import VllmRequest
from specplug_vllm.runtime import VllmRuntime
from specplug_vllm.step_rows import ranges
from specplug_vllm.v2_step import Step
from specplug_vllm.vllm_half import VllmCallbacks, VllmHalf, drafted_tokens


class StepHooks(VllmCallbacks):
    """Calls them in their order, and is the ``Host`` of that order.

    Args:
        runtime: with the algorithm's worker.
        hooks: of the run.
        views: of the running requests by id, which others keep.
    """

    def __init__(
        self,
        runtime: VllmRuntime,
        hooks: HookCalls,
        views: Mapping[str, VllmRequest],
    ) -> None:
        self._runtime, self._views = runtime, views
        self._order = HookOrder(runtime, hooks, hooks.create_future_map(runtime), self)
        self._of_all: tuple[Step, CommittedRows] | None = None

    def prefill(self, step: Step, chosen: np.ndarray, first: np.ndarray) -> None:
        """Feed the algorithm the chunks of requests whose prompt is computed.

        Args:
            first: [n] bool, whose first chunk it is.
        """
        device, starts, ends = self._runtime.device, step.starts[chosen], step.ends[chosen]
        widths = ends - starts
        rows = upload(ranges(step.first_rows[chosen], widths), device)
        half = self._half(step, chosen)
        half.seq_lens = upload(starts, device)
        half.tokens = step.tokens[rows].to(torch.int64)
        half.begin_prefill(
            self._runtime,
            self._views_of(step, chosen),
            widths,
            ends,
            first=first[chosen].tolist(),
            last=(ends == step.prefill_lens[chosen]).tolist(),
        )
        after = self._of(step.last_sampled, chosen)
        last_rows = upload(widths.cumsum() - 1, device)
        self._order.finish_prefill(half, last_rows, after, self._per_node(step, rows))

    def decode(self, step: Step, chosen: np.ndarray, *, drafts_follow: bool) -> None:
        """Feed the algorithm what was accepted of its drafts: of C columns each request uses as
        many as it got tokens, and repeats its root in the others."""
        columns = int(step.widths[chosen].max())
        device = self._runtime.device
        requests = None if len(chosen) == len(step.ids) else upload(chosen, device)
        committed = self._order.committed
        got = CommittedRows.of(step, requests, len(chosen), columns, committed)
        self._of_all = None if requests is not None else (step, got)
        half = VllmHalf(req_indices=got.req_indices, is_warm_up=step.is_warm_up)
        half.seq_lens = got.starts
        half.batch = Batch(
            mode=ForwardMode.DECODE,
            requests=self._views_of(step, chosen),
            req_indices=got.lent_indices,
            seq_lens=got.lent_starts,
            greedy=step.greedy,
            is_warm_up=step.is_warm_up,
            drafts_follow=drafts_follow,
        )
        output = CommittedOutput(
            next_tokens=got.next_tokens,
            own_tokens=got.own_tokens,
            per_node=self._per_node(step, got.rows),
            last_rows=got.last_rows,
            accept_lens=got.accept_lens,
            bonus_tokens=got.bonus_tokens,
        )
        self._order.feed(half, got.ends, output)

    def draft(self, step: Step, chosen: np.ndarray, wanted: int) -> Tensor:
        """Return at most so many drafted tokens for each of the requests that decode next, [m, …]
        int64.

        Raises:
            PluginError: it is a tree.
        """
        most = (min(self._runtime.config.num_draft_tokens, wanted + 1),) * len(chosen)
        half = self._drafting_half(step, chosen)
        views = self._views_of(step, chosen)
        draft = self._order.begin_decode(half, views, most, greedy=step.greedy)
        return drafted_tokens(draft, self._runtime.config.algorithm)

    def _drafting_half(self, step: Step, chosen: np.ndarray) -> VllmHalf:
        """Return a half of requests of the step. Where all of it decoded, their rows are there."""
        if self._of_all is None or self._of_all[0] is not step or len(chosen) < len(step.ids):
            return self._half(step, chosen)
        got = self._of_all[1]
        return VllmHalf(
            req_indices=got.next_indices,
            lent_rows=[got.lent_next_indices],
            is_warm_up=step.is_warm_up,
        )

    def _half(self, step: Step, chosen: np.ndarray) -> VllmHalf:
        return VllmHalf(req_indices=self._of(step.req_indices, chosen), is_warm_up=step.is_warm_up)

    def _views_of(self, step: Step, chosen: np.ndarray) -> list[VllmRequest]:
        return [self._views[step.ids[index]] for index in chosen.tolist()]

    def _of(self, values: Tensor, chosen: np.ndarray) -> Tensor:
        """Return those of some requests, [n, …] -> [m, …]."""
        return values if len(chosen) == len(values) else values[upload(chosen, values.device)]

    def _per_node(self, step: Step, rows: Tensor) -> dict[str, Tensor]:
        return self._runtime.per_node(rows, step.hidden_states, step.layer_inputs)
