"""The rows of the requests that vLLM runs, and how far each is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from specplug.speculative.undrafted import UndraftedRequests
from specplug_vllm.request_view import VllmRequest
from specplug_vllm.v1.step import RunnerStep

UNSEEN = "a step was not seen"
"""Why a request is drafted for no more that vLLM did not ask drafts for in each of its steps."""


class RequestRows:
    """Gives each running request a row of the request table, and sorts those of a step.

    Lists by row have ``num_rows`` entries; row 0 is padding. They are lists and no arrays, since a
    step has few requests, between two passes that leave nothing of Python in the caches.

    Args:
        num_rows: rows, row 0 included.
        context_len: most tokens of a request.
        undrafted: counts those that are drafted for no more.

    Attributes:
        views: the requests as hooks see them, by id.
        failed: by row, whether a request is drafted for no more: a plugin has failed with it, or a
            step of it was not seen.
        of_step: the row of each request of the step that was sorted last.
        is_first, ends_prompt: of each, whether the step is its first since it got its row, and
            whether it computes the last token known before it.
        started: the requests of the step that have just got a row, as indices.
    """

    def __init__(self, num_rows: int, context_len: int, undrafted: UndraftedRequests) -> None:
        self.views: dict[str, VllmRequest] = {}
        self.failed = [False] * num_rows
        self.of_step: list[int] = []
        self.is_first: list[bool] = []
        self.ends_prompt: list[bool] = []
        self.started: list[int] = []
        self._context_len, self._undrafted = context_len, undrafted
        self._rows: dict[str, int] = {}
        self._names = [""] * num_rows
        self._free = list(range(num_rows - 1, 0, -1))
        self._length = [0] * num_rows
        self._decodes = [False] * num_rows
        self._most_tokens = [0] * num_rows
        self._least_tokens = [0] * num_rows

    def free(self, request_id: str) -> None:
        """Take the row of a request that has ended or lost its blocks, if it has one."""
        row = self._rows.pop(request_id, None)
        self.views.pop(request_id, None)
        self._undrafted.forget(request_id)
        if row is not None:
            self._free.append(row)

    def fail(self, rows: Iterable[int], reason: str) -> None:
        """Draft for the requests of these rows no more."""
        for row in rows:
            self.failed[row] = True
            self._undrafted.add(self._names[row], reason)

    def sort(self, step: RunnerStep) -> tuple[list[int], list[int], list[int]]:
        """Give rows to new requests, and find what each request did in a step.

        A request whose steps were not all seen cannot be drafted for, and counts as failed.

        Returns:
            Three lists of indices into the step: the requests of which it computed a chunk of the
            prompt, those that it decoded, and those that decode next.
        """
        self.of_step, self.is_first, self.ends_prompt, self.started = [], [], [], []
        chunks: list[int] = []
        decoded: list[int] = []
        ready: list[int] = []
        starts, ends, samples = step.starts.tolist(), step.ends.tolist(), step.sampled.tolist()
        lengths = step.lengths.tolist()
        each = zip(step.states, starts, ends, samples, lengths, strict=True)
        for index, (state, start, end, sampled, length) in enumerate(each):
            row, is_first = self._row(state)
            if is_first:
                self.started.append(index)
            elif self._length[row] != start:
                self.fail((row,), UNSEEN)
            known = length - sampled
            decodes = self._decodes[row] and start + 1 == known and sampled > 0
            self.of_step.append(row)
            self.is_first.append(is_first)
            self.ends_prompt.append(end >= known)
            self._length[row] = start + sampled if decodes else end
            self._decodes[row] = decodes or end >= known
            if not self.failed[row]:
                (decoded if decodes else chunks).append(index)
                if self._decodes[row] and length < self._most_tokens[row]:
                    ready.append(index)
        return chunks, decoded, ready

    def max_nodes(self, step: RunnerStep, chosen: Sequence[int], most: int) -> tuple[int, ...]:
        """Return how many nodes of each request vLLM may verify next: no more than it has tokens
        left, and what fits into the context, as vLLM's scheduler counts it.

        While a request is below its ``min_tokens``, all of a step's tokens must be: vLLM keeps the
        last of them from ending the request if the first is.
        """
        most = min(most, step.most_drafts + 1)
        lengths = step.lengths.tolist()
        return tuple(self._max_nodes(self.of_step[i], lengths[i], most) for i in chosen)

    def _max_nodes(self, row: int, length: int, most: int) -> int:
        nodes = min(most, self._most_tokens[row] - length, self._context_len - length)
        least = self._least_tokens[row] - length
        return max(min(nodes, least) if least > 0 else nodes, 1)

    def _row(self, state: Any) -> tuple[int, bool]:
        """Return a request's row, and whether it has just got it."""
        row = self._rows.get(state.req_id)
        if row is not None:
            return row, False
        row = self._rows[state.req_id] = self._free.pop()
        self._names[row] = state.req_id
        self.views[state.req_id] = view = VllmRequest(state, self._context_len)
        self._most_tokens[row] = len(state.prompt_token_ids) + view.max_tokens
        self._least_tokens[row] = len(state.prompt_token_ids) + view.min_tokens
        self.failed[row] = self._decodes[row] = False
        return row, True
