"""Steps of made-up requests, before the first real one: no request waits for a compiler.

Their rows of the table hold no block that a request has. What they leave in a row is written anew
for the request that gets it. Hooks see them as ``Batch.is_warm_up``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import torch

from specplug_vllm.runtime import VllmRuntime
from specplug_vllm.v2.step import NewRequest, Step

_LONG = 256
"""Tokens of a long prompt: few rows and many go through other kernels."""
_SHORT = 16
"""Tokens of a request that is to decode."""


def warm_up_requests(step: Step) -> list[NewRequest]:
    """Return the requests of a step, as vLLM would tell of them."""
    lengths = step.prefill_lens.tolist()
    return [
        NewRequest(req_id, [0] * length, [], None, 0)
        for req_id, length in zip(step.ids, lengths, strict=True)
    ]


@attrs.frozen(kw_only=True)
class WarmUp:
    """Makes the steps.

    Args:
        runtime: of the run.
        sizes: of batches that decode.
        columns: rows of a request that verifies drafts.
        pauses: whether the run stops drafting while that is slower.
    """

    runtime: VllmRuntime
    sizes: Sequence[int]
    columns: int
    pauses: bool

    def steps(self) -> Iterator[tuple[Step, bool]]:
        """Yield steps, and whether each drafts: a long prompt, prompts together, one beside a
        request that decodes; then of all sizes prompts, and what decodes after them."""
        short, long = self._short, min(_LONG, self.runtime.context_len)
        yield self._step([long], prompts=1), True
        if self.runtime.max_running_requests > 1:
            yield self._step([short, long], prompts=2), True
            yield self._step([self.columns, short], prompts=1), True
        forms = [(self.columns, True)]
        if self.pauses:  # the last drafts are verified, none are, and then there are some again
            forms += [(self.columns, False), (1, False), (1, True)]
        for size in self.sizes:
            yield self._step([short] * size, prompts=size), True
            for greedy in (True, False) if self.runtime.sampling is not None else (True,):
                for width, drafts in forms:
                    yield self._step([width] * size, greedy=greedy), drafts

    def timed(self, size: int) -> Iterator[Step]:
        """Yield a step of so many prompts, and one in which these requests verify drafts."""
        yield self._step([self._short] * size, prompts=size)
        yield self._step([self.columns] * size)

    @property
    def _short(self) -> int:
        most: int = self.runtime.context_len - self.columns
        return max(1, min(_SHORT, most))

    def _ids(self, size: int) -> list[str]:
        return [f"specplug_warm_up_{row}" for row in range(1, size + 1)]

    def _step(self, rows: Sequence[int], prompts: int = 0, *, greedy: bool = True) -> Step:
        """Return a step of requests with so many rows each, the last of which are prompts."""
        runtime, size = self.runtime, len(rows)
        widths, ends = np.array(rows), np.cumsum(rows)
        prefills = np.arange(size) >= size - prompts
        starts = np.where(prefills, 0, self._short)
        firsts = ends - widths
        positions = np.arange(ends[-1]) + np.repeat(starts - firsts, widths)
        made = {"dtype": runtime.dtype, "device": runtime.device}
        states = torch.zeros(int(ends[-1]), runtime.hidden_size, **made)

        def on_device(numbers: np.ndarray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.from_numpy(numbers).to(runtime.device, dtype)

        return Step(
            ids=self._ids(size),
            rows=np.arange(1, size + 1),
            widths=widths,
            prefills=prefills,
            starts=starts,
            prefill_lens=np.where(prefills, widths, starts),
            longest=int((starts + widths).max()),
            greedy=greedy,
            is_warm_up=True,
            idx_mapping=on_device(np.arange(size)),
            query_start_loc=on_device(np.append(firsts, ends[-1])),
            positions=on_device(positions, torch.int64),
            tokens=on_device(np.zeros_like(positions)),
            num_sampled=on_device(np.ones_like(widths)),
            last_sampled_by_row=on_device(
                np.zeros((runtime.req_table_size - 1, 1), np.int64), torch.int64
            ),
            hidden_states=states,
            layer_inputs=dict.fromkeys(runtime.captured_layers, states),
        )
