"""The hooks of a step of vLLM's model runner of version 2, for some of its requests.

Nothing is read on the CPU but what vLLM has scheduled. ``chosen`` [m] int are indices of requests
of the step, in ascending order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from specplug import Batch, CommittedOutput, Draft
from specplug.speculative.hook_order import Committed, ForwardMode, Half, HookOrder, Scheduled
from specplug.speculative.host_copy import upload
from specplug_vllm.request_view import VllmRequest
from specplug_vllm.runtime import VllmRuntime
from specplug_vllm.v2.committed_rows import CommittedRows
from specplug_vllm.v2.step import Step
from specplug_vllm.vllm_stages import chains, feed_chunks, prefilled_chunks


class StepHooks:
    """Calls them in their order.

    Args:
        runtime: with the algorithm's worker.
        order: of the hooks of the run.
        views: of the running requests by id, which others keep.
    """

    def __init__(
        self,
        runtime: VllmRuntime,
        order: HookOrder,
        views: Mapping[str, VllmRequest],
    ) -> None:
        self._runtime, self._views = runtime, views
        self._order = order
        self._of_all: tuple[Step, CommittedRows] | None = None

    def prefill(self, step: Step, chosen: np.ndarray, first: np.ndarray) -> None:
        """Feed the algorithm the chunks of requests whose prompt is computed.

        Args:
            first: [n] bool, whose first chunk it is.
        """
        starts, ends = step.starts[chosen], step.ends[chosen]
        rows = step.first_rows(chosen, ends - starts)
        chunks = prefilled_chunks(
            self._views_of(step, chosen),
            self._of(step.req_indices, chosen),
            step.tokens[rows].to(torch.int64),
            starts,
            ends,
            first=first[chosen].tolist(),
            last=(ends == step.prefill_lens[chosen]).tolist(),
            is_warm_up=step.is_warm_up,
        )
        after, per_node = self._of(step.last_sampled, chosen), self._per_node(step, rows)
        feed_chunks(self._order, self._runtime, chunks, after, per_node)

    def decode(self, step: Step, chosen: np.ndarray, *, drafts_follow: bool) -> None:
        """Feed the algorithm what was accepted of its drafts: of C columns each request uses as
        many as it got tokens, and repeats its root in the others."""
        columns = int(step.widths[chosen].max())
        device = self._runtime.device
        requests = None if len(chosen) == len(step.ids) else upload(chosen, device)
        committed = self._order.committed
        got = CommittedRows.of(step, requests, len(chosen), columns, committed)
        self._of_all = None if requests is not None else (step, got)
        batch = Batch(
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
        half = Half(req_indices=got.req_indices, batch=batch)
        self._order.feed(half, Committed(got.ends, output))

    def draft(self, step: Step, chosen: np.ndarray, wanted: int) -> Draft:
        """Return chains of at most so many drafted tokens for the m requests that decode next.

        Raises:
            PluginError: they are trees.
        """
        most = (min(self._runtime.config.num_draft_tokens, wanted + 1),) * len(chosen)
        rows, batch_rows = self._next_rows(step, chosen)
        drafted = self._order.draft(
            Scheduled(
                req_indices=rows,
                requests=self._views_of(step, chosen),
                max_draft_nodes=most,
                greedy=step.greedy,
                is_warm_up=step.is_warm_up,
                batch_rows=batch_rows,
            )
        )
        return chains(drafted.draft, self._runtime.config.algorithm)

    def _next_rows(self, step: Step, chosen: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Return the rows of requests of the step, and a copy where all of it decoded: both are
        there then."""
        if self._of_all is None or self._of_all[0] is not step or len(chosen) < len(step.ids):
            return self._of(step.req_indices, chosen), None
        got = self._of_all[1]
        return got.next_indices, got.lent_next_indices

    def _views_of(self, step: Step, chosen: np.ndarray) -> list[VllmRequest]:
        return [self._views[step.ids[index]] for index in chosen.tolist()]

    def _of(self, values: Tensor, chosen: np.ndarray) -> Tensor:
        """Return those of some requests, [n, …] -> [m, …]."""
        return values if len(chosen) == len(values) else values[upload(chosen, values.device)]

    def _per_node(self, step: Step, rows: Tensor) -> dict[str, Tensor]:
        return self._runtime.per_node(rows, step.hidden_states, step.layer_inputs)
