"""The rows of the target's pass over the nodes of all drafts.

SGLang's Triton attention reads a mask, and its CUDA graphs have one width: there every request has
the most nodes, and rows after its own nodes are padding. SGLang's torch attention is patched to
read our plan, so there the pass has no other rows than the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor
from torch.nn.functional import pad

from specplug.speculative.draft import Draft
from specplug.speculative.host_copy import upload
from specplug.speculative.host_kernels import kept_form
from specplug.speculative.paged_plan import PagedKVCache, PagedPlan
from specplug_sglang.step_slots import StepSlots

if TYPE_CHECKING:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class SpecplugVerifyInput(SpecInput):
    """SGLang's ``SpecInput`` of a verification: what attention reads of the drafts.

    SGLang's list of input types is closed: this one has the type of SGLang's NGRAM.

    Args:
        width: the most rows of a request.
        captures: whether the pass returns hidden states.
        mask: what Triton attention reads; None: attention reads the plan.
        plan: of the rows; None while SGLang records its CUDA graphs.
    """

    def __init__(
        self, width: int, captures: bool, mask: Tensor | None, plan: PagedPlan | None = None
    ) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.plan = plan
        self.positions = None if plan is None else plan.positions
        self.custom_mask = mask
        self.draft_token_num = width
        self.num_tokens_per_req = width
        self.num_tokens_for_logprob_per_req = width
        self.capture_hidden_mode = CaptureHiddenMode.FULL if captures else CaptureHiddenMode.NULL

    def attend(
        self,
        backend: TorchNativeAttnBackend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> Tensor:
        """Write the keys and values of a verification's rows to SGLang's pool, and attend by the
        plan, as ``TorchNativeAttnBackend.forward_extend`` does for other passes."""
        plan = self.plan
        assert plan is not None
        pool, index = backend.token_to_kv_pool, layer.layer_id
        where = KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc)
        pool.set_kv_buffer(layer, where, k, v)
        sliding = layer.sliding_window_size
        return plan.attend_written(
            PagedKVCache([pool.get_key_buffer(index)], [pool.get_value_buffer(index)]),
            0,
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            # SGLang counts the positions before a row, the core counts the row's own too.
            kept_form(layer.scaling, sliding + 1 if sliding is not None and sliding > -1 else None),
        )


@attrs.frozen(eq=False)
class VerifyRows:
    """The R rows of the target's pass over drafts.

    Attributes:
        plan: of the rows.
        tokens: [R] int64.
        width: the most rows of a request.
        drafted: [T] int64, the rows that are nodes of a draft; None: all rows are.
        mask: what SGLang's Triton attention reads; None: attention reads the plan.
    """

    plan: PagedPlan
    tokens: Tensor
    width: int
    drafted: Tensor | None = None
    mask: Tensor | None = None

    def of_drafts(self, values: Tensor) -> Tensor:
        """Return the values of the drafts' nodes: [R, …] -> [T, …]."""
        return values if self.drafted is None else values[self.drafted]


def drafted_nodes(draft: Draft, req_indices: Tensor, starts: Tensor, slots: StepSlots) -> PagedPlan:
    """Return the plan of the T nodes of drafts, and of no other rows.

    Args:
        req_indices: [bs] int64, the requests' rows in the request table.
        starts: [bs] int64, their committed lengths.
    """
    return slots.plan(req_indices, starts, draft.widths or draft.width).of_nodes(draft)


def padded_nodes(
    draft: Draft,
    req_indices: Tensor,
    starts: Tensor,
    slots: StepSlots,
    width: int,
    longest: Sequence[int],
) -> VerifyRows:
    """Return the same number of rows for each request: its nodes, then padding.

    Args:
        req_indices, starts: as for ``drafted_nodes``.
        width: N, rows of each request.
        longest: an upper bound of ``starts`` + N for each request, known on the CPU.
    """
    missing = width - draft.width
    positions = None if draft.is_chain else starts.unsqueeze(1) + pad(draft.depths, (0, missing))
    drafted = None
    if missing or draft.widths is not None:
        widths = draft.widths or (draft.width,) * len(starts)
        rows = [width * b + node for b, count in enumerate(widths) for node in range(count)]
        drafted = upload(rows, starts.device)
    seen = pad(draft.mask, (0, missing, 0, missing)).expand(len(starts), -1, -1)
    return VerifyRows(
        plan=slots.plan(req_indices, starts, width, positions=positions),
        tokens=pad(draft.tokens, (0, missing)).flatten(),
        width=width,
        drafted=drafted,
        mask=_flat_mask(seen, starts, width * sum(length + width for length in longest)),
    )


def _flat_mask(seen: Tensor, starts: Tensor, size: int) -> Tensor:
    """Return the mask that SGLang's Triton attention reads: [N, start + N] bool of each request,
    one after the other. Every row sees all positions before ``start``.

    Args:
        seen: [bs, N, N] bool, which of the positions from ``starts`` [bs] on each row sees.
        size: elements of the mask, at least those that are written.
    """
    width = seen.shape[1]
    order = torch.arange(width, device=starts.device)
    lengths = starts + width
    first = (width * lengths).cumsum(0) - width * lengths + starts
    rows = first.unsqueeze(1) + order * lengths.unsqueeze(1)
    mask = torch.ones(size, dtype=torch.bool, device=starts.device)
    return mask.scatter_(0, (rows.unsqueeze(2) + order).flatten(), seen.flatten())
