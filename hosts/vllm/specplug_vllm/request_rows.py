"""The rows of the requests that vLLM runs, and how far each is."""

from __future__ import annotations

from typing import Any

import numpy as np

from specplug_vllm.request_view import VllmRequest
from specplug_vllm.vllm_names import RunnerStep


class RequestRows:
    """Gives each running request a row of the request table, and sorts those of a step.

    Arrays by row have ``num_rows`` entries; row 0 is padding.

    Args:
        num_rows: rows, row 0 included.
        context_len: most tokens of a request.

    Attributes:
        views: the requests as hooks see them, by id.
        failed: [rows] bool, requests that are drafted for no more: a plugin has failed with them,
            or a step of theirs was not seen.
        num_failed: how many have failed so far.
        of_step: [n] int, the row of each request of the step that was sorted last.
        is_first, ends_prompt: [n] bool, whether the step is the first of a request since it got its
            row, and whether it computes the last token known before it.
        started: the requests of the step that have just got a row, as indices.
    """

    def __init__(self, num_rows: int, context_len: int) -> None:
        self.views: dict[str, VllmRequest] = {}
        self.failed = np.zeros(num_rows, dtype=bool)
        self.num_failed = 0
        self.of_step = np.zeros(0, dtype=np.int64)
        self.is_first = self.ends_prompt = np.zeros(0, dtype=bool)
        self.started: list[int] = []
        self._context_len = context_len
        self._rows: dict[str, int] = {}
        self._free = list(range(num_rows - 1, 0, -1))
        self._length = np.zeros(num_rows, dtype=np.int64)
        self._decodes = np.zeros(num_rows, dtype=bool)
        self._most_tokens = np.zeros(num_rows, dtype=np.int64)
        self._least_tokens = np.zeros(num_rows, dtype=np.int64)

    def free(self, request_id: str) -> None:
        """Take the row of a request that has ended or lost its blocks, if it has one."""
        row = self._rows.pop(request_id, None)
        self.views.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def fail(self, rows: np.ndarray) -> None:
        """Draft for the requests of these rows no more."""
        self.num_failed += int((~self.failed[rows]).sum())
        self.failed[rows] = True

    def sort(self, step: RunnerStep) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Give rows to new requests, and find what each request did in a step.

        A request whose steps were not all seen cannot be drafted for, and counts as failed.

        Returns:
            Three arrays of indices into the step: the requests of which it computed a chunk of the
            prompt, those that it decoded, and those that decode next.
        """
        self.started = []
        self.of_step = rows = np.array(
            [self._row(index, state) for index, state in enumerate(step.states)], dtype=np.int64
        )
        self.is_first = np.zeros(len(rows), dtype=bool)
        self.is_first[self.started] = True
        known = step.lengths - step.sampled
        ends = step.starts + step.widths
        self.ends_prompt = ends >= known
        decoded = self._decodes[rows] & (step.starts + 1 == known) & (step.sampled > 0)
        unseen = self._length[rows] != step.starts
        if unseen.any():
            self.fail(rows[~self.is_first & unseen])
        works = ~self.failed[rows]
        self._length[rows] = np.where(decoded, step.starts + step.sampled, ends)
        self._decodes[rows] = decoded | self.ends_prompt
        ready = works & self._decodes[rows] & (step.lengths < self._most_tokens[rows])
        chunk = works & ~decoded
        return chunk.nonzero()[0], (works & decoded).nonzero()[0], ready.nonzero()[0]

    def max_nodes(self, step: RunnerStep, chosen: np.ndarray, most: int) -> tuple[int, ...]:
        """Return how many nodes of each request vLLM may verify next: no more than it has tokens
        left, and what fits into the context, as vLLM's scheduler counts it.

        While a request is below its ``min_tokens``, all of a step's tokens must be: vLLM keeps the
        last of them from ending the request if the first is.
        """
        most = min(most, step.most_drafts + 1)
        lengths = step.lengths[chosen].tolist()
        tokens = self._most_tokens[self.of_step[chosen]].tolist()
        least = self._least_tokens[self.of_step[chosen]].tolist()
        context = self._context_len
        return tuple(
            max(min(end - at, context - at, least_end - at if at < least_end else most, most), 1)
            for at, end, least_end in zip(lengths, tokens, least, strict=True)
        )

    def _row(self, index: int, state: Any) -> int:
        row = self._rows.get(state.req_id)
        if row is None:
            row = self._rows[state.req_id] = self._free.pop()
            self.views[state.req_id] = view = VllmRequest(state, self._context_len)
            self._most_tokens[row] = len(state.prompt_token_ids) + view.max_tokens
            self._least_tokens[row] = len(state.prompt_token_ids) + view.min_tokens
            self.failed[row] = self._decodes[row] = False
            self.started.append(index)
        return row
