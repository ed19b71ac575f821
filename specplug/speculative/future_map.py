"""What one decode step leaves for the next, on the device and by request row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specplug.kernels.kernel_table import Operation, runs_triton
from specplug.speculative.draft import DraftInput

if TYPE_CHECKING:
    from specplug.speculative.draft_state import StateTensor
    from specplug.speculative.verify import CommittedOutput


class FutureMap:
    """What a step leaves for the step that is scheduled before its results reach the host.

    Buffers hold one row per request (row 0 is padding: what is published there is never read).
    Steps run in the order they are launched, so a row written by step n is what step n+1 reads.

    Args:
        req_table_size: rows of the request table.
        device: of the buffers.

    Attributes:
        seq_lens: [rows] int64, committed lengths.
        bonus_tokens: [rows] int64, the roots of the next step's drafts.
        state: the draft's state by name, [rows, …] each.
        req_table_size: as given.
    """

    def __init__(self, req_table_size: int, device: torch.device) -> None:
        self._known = torch.zeros(2, req_table_size, dtype=torch.int64, device=device)
        self._ends = self.seq_lens, self.bonus_tokens = self._known.unbind(0)
        self.state: dict[str, Tensor] = {}
        self.req_table_size = req_table_size

    def declare(self, spec: Mapping[str, StateTensor]) -> None:
        """Make the buffers of what the worker declares: zeros, until a request leaves its own."""
        for name, declared in spec.items():
            shape = self.req_table_size, *declared.shape
            zeros = torch.zeros(shape, dtype=declared.dtype, device=self.bonus_tokens.device)
            self.state[name] = zeros

    def publish(self, req_indices: Tensor, seq_lens: Tensor, output: CommittedOutput) -> None:
        """Say how far each request is: committed lengths [bs] and bonus tokens [bs]."""
        if runs_triton(Operation.PUBLISH, self._known.device):
            from specplug.kernels.publish import publish

            publish(self._known, req_indices, seq_lens, output.bonus_tokens)
            return
        self.seq_lens.index_copy_(0, req_indices, seq_lens)
        self.bonus_tokens.index_copy_(0, req_indices, output.bonus_tokens)

    def publish_step(
        self, req_indices: Tensor, starts: Tensor, output: CommittedOutput
    ) -> tuple[Tensor, Tensor]:
        """Say how far each request is after a decode step.

        Args:
            starts: [bs] int64, the committed lengths before it.

        Returns:
            Those after it, [bs] int64, and the report: [bs, C + 1] int64, the tokens after the rows
            of each accepted path, and then its accept length.
        """
        lens, tokens = output.accept_lens, output.next_tokens
        if runs_triton(Operation.PUBLISH, self._known.device):
            from specplug.kernels.publish import publish_step

            bonus = output.bonus_tokens
            return publish_step(self._known, req_indices, starts, lens, bonus, tokens)
        seq_lens = starts + lens
        self.publish(req_indices, seq_lens, output)
        return seq_lens, torch.cat((tokens.view(len(lens), -1), lens.unsqueeze(1)), dim=1)

    def stash(self, req_indices: Tensor, draft_input: DraftInput) -> None:
        """Keep the draft state of the next step. What was not declared gets a buffer when its name
        first appears.

        Any state can follow any other: one that is absent is read as zeros, not as that of the
        request which had the row before, and one of another width leaves the other rows theirs.
        """
        self._write(req_indices, *self._buffers_of(req_indices, draft_input))

    def publish_and_stash(
        self,
        req_indices: Tensor,
        seq_lens: Tensor,
        output: CommittedOutput,
        draft_input: DraftInput,
    ) -> None:
        """Do both, in one launch where a kernel writes rows."""
        buffers, tensors = self._buffers_of(req_indices, draft_input)
        ends = seq_lens, output.bonus_tokens
        both = [*self._ends, *buffers]
        if self._runs_kernels(both) and all(
            t.shape == req_indices.shape and t.dtype == torch.int64 for t in ends
        ):
            self._write(req_indices, both, [*ends, *tensors])
            return
        self.publish(req_indices, seq_lens, output)  # which says what does not fit
        self._write(req_indices, buffers, tensors)

    def _buffers_of(
        self, req_indices: Tensor, draft_input: DraftInput
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the buffers of a state and its tensors, which fit them; clear those of these
        requests that it lacks."""
        for name, buffer in self.state.items():
            if draft_input.state.get(name) is None:
                buffer.index_fill_(0, req_indices, 0)
        buffers, tensors = [], []
        for name, tensor in draft_input.state.items():
            if tensor is None:
                continue
            if name not in self.state:
                self.state[name] = tensor.new_zeros((self.req_table_size, *tensor.shape[1:]))
            buffer = self.state[name]
            if buffer.shape[1:] != tensor.shape[1:] or buffer.dtype != tensor.dtype:
                both = _below(buffer, tensor)
                buffer = self.state[name] = both[: self.req_table_size]
                tensor = both[self.req_table_size :]
            buffers.append(buffer)
            tensors.append(tensor)
        return buffers, tensors

    def _write(
        self, req_indices: Tensor, buffers: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> None:
        """Write tensors [bs, …] to these rows of buffers."""
        if self._runs_kernels(buffers):
            from specplug.kernels.state_rows import write_rows

            write_rows(buffers, req_indices, tensors)
            return
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.index_copy_(0, req_indices, tensor)

    def resolve(self, req_indices: Tensor) -> tuple[Tensor, DraftInput]:
        """Return the committed lengths [bs] and the draft input of these requests [bs]."""
        buffers = list(self.state.values())
        if self._runs_kernels(buffers):
            from specplug.kernels.state_rows import read_rows

            return self._resolved(read_rows([*self._ends, *buffers], req_indices))
        known = self._known.index_select(1, req_indices).unbind(0)
        return self._resolved([*known, *(buffer[req_indices] for buffer in buffers)])

    def resolve_with(
        self, other: FutureMap, req_indices: Tensor
    ) -> tuple[tuple[Tensor, DraftInput], tuple[Tensor, DraftInput]] | None:
        """Resolve these requests [bs] in this map and in another one, in one launch.

        Returns:
            What ``resolve`` of each returns; None if the kernel that reads state cannot read both:
            there is none, the other map is of a subclass, or it was given buffers of other sizes.
        """
        if not other.state or not is_plain(other):
            return None
        own, others = list(self.state.values()), list(other.state.values())
        buffers = [*self._ends, *own, *other._ends, *others]
        if not all(isinstance(each, Tensor) for each in others):
            return None
        if not self._runs_kernels(buffers):
            return None
        from specplug.kernels.state_rows import read_rows

        rows = read_rows(buffers, req_indices)
        split = 2 + len(own)
        return self._resolved(rows[:split]), other._resolved(rows[split:])

    def _resolved(self, rows: list[Tensor]) -> tuple[Tensor, DraftInput]:
        """Return what ``resolve`` does, of the rows of all buffers."""
        seq_lens, bonus_tokens, *others = rows
        state: dict[str, Tensor | None] = dict(zip(self.state, others, strict=True))
        return seq_lens, DraftInput(bonus_tokens=bonus_tokens, state=state)

    def _runs_kernels(self, buffers: Sequence[Tensor]) -> bool:
        """Return whether a kernel copies rows of these buffers; of none there is nothing to copy.
        What a plugin has put in their place may be of other sizes."""
        device = self._known.device
        if not buffers or not runs_triton(Operation.STATE_ROWS, device):
            return False
        from specplug.kernels.state_rows import serves

        return serves(buffers, self._known.shape[1], device)


def is_plain(future_map: FutureMap) -> bool:
    """Return whether a future map does what this module says: no plugin has changed a method."""
    if type(future_map) is not FutureMap:
        return False
    return {"publish", "stash", "resolve"}.isdisjoint(vars(future_map))


def _below(upper: Tensor, lower: Tensor) -> Tensor:
    """Join two tensors one below the other, whatever their shapes, in a type that holds both: each
    is filled up with zeros to the larger size of every further axis."""
    rank = max(upper.dim(), lower.dim())
    shaped = [t.reshape(t.shape + (1,) * (rank - t.dim())) for t in (upper, lower)]
    shape = [max(sizes) for sizes in zip(*(t.shape[1:] for t in shaped), strict=True)]
    dtype = torch.promote_types(upper.dtype, lower.dtype)
    out = upper.new_zeros((len(upper) + len(lower), *shape), dtype=dtype)
    for tensor, start in zip(shaped, (0, len(upper)), strict=True):
        region = (slice(start, start + len(tensor)), *(slice(n) for n in tensor.shape[1:]))
        out[region] = tensor
    return out
