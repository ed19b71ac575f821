"""The target's KV of accepted nodes."""

from __future__ import annotations

import torch

from specplug.engine.kv_pool import KVPool
from specplug.kernels.kernel_table import runs_tree_kernels
from specplug.kv.tensors import move_slots
from specplug.speculative.step_stages import Drafted
from specplug.speculative.verify import VerifyOutput


def keep_accepted(kv: KVPool, drafted: Drafted, accepted: VerifyOutput) -> None:
    """Move the KV of a tree's accepted nodes to the slots from ``drafted.seq_lens`` on, in the
    order of the path. A chain's is there already."""
    draft, index = drafted.draft, accepted.accept_index
    if draft.is_chain:
        return
    pool, slots = kv.tensors[0], kv.table.slots
    rows, starts = drafted.req_indices, drafted.seq_lens
    if runs_tree_kernels(draft.tokens):
        from specplug.kernels.tree import move_accepted

        offsets = None if draft.widths is None else draft.offsets
        move_accepted(pool, slots, rows, starts, index, draft.width, offsets)
        return
    valid = index >= 0
    local = (index - draft.offsets.unsqueeze(1)).clamp(min=0)
    row, start = rows.unsqueeze(1), starts.unsqueeze(1)
    columns = torch.arange(index.shape[1], device=index.device)
    source = torch.where(valid, slots[row, start + local], 0)
    target = torch.where(valid, slots[row, start + columns], 0)
    move_slots(pool, source.view(-1), target.view(-1))
