"""The target's pass over the nodes of all drafts.

SGLang's Triton attention reads a mask, and its CUDA graphs have one width: every request has the
most nodes there, of which some are nobody's. Its torch attention is taught to read our plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.runner import base_runner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor
from torch.nn.functional import pad

from specplug.kernels.attention_form import kept_form
from specplug.speculative.draft import Draft
from specplug.speculative.host_copy import upload
from specplug.speculative.paged_plan import PagedKVCache, PagedPlan
from specplug_sglang.step_slots import Nodes, StepSlots

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class SpecplugVerifyInput(SpecInput):
    """What the target's pass needs of the drafts.

    SGLang's list of types is closed: this has the one of the algorithm that is likest.

    Args:
        width: rows of a request, or the most of them.
        captures: whether the pass returns hidden states.
        mask: of Triton attention.
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


def drafted_nodes(draft: Draft, req_indices: Tensor, starts: Tensor, table: StepSlots) -> PagedPlan:
    """Return the plan of the T nodes of drafts, and of no other rows.

    Args:
        req_indices, starts: [bs] int64, rows of the requests and their committed lengths.
    """
    return table.plan(
        req_indices,
        starts,
        draft.widths or draft.width,
        positions=None if draft.is_chain else starts.unsqueeze(1) + draft.depths,
        mask=None if draft.is_chain else draft.mask,
    )


def padded_nodes(
    draft: Draft,
    req_indices: Tensor,
    starts: Tensor,
    table: StepSlots,
    width: int,
    most: Sequence[int],
) -> Nodes:
    """Return as many rows of each request: its nodes, then rows that nobody reads.

    Args:
        req_indices, starts: as for ``drafted_nodes``.
        width: N, rows of each.
        most: at least ``starts`` and N together, as the host knows it.
    """
    missing = width - draft.width
    positions = None if draft.is_chain else starts.unsqueeze(1) + pad(draft.depths, (0, missing))
    drafted = None
    if missing or draft.widths is not None:
        widths = draft.widths or (draft.width,) * len(starts)
        rows = [width * b + node for b, count in enumerate(widths) for node in range(count)]
        drafted = upload(rows, starts.device)
    seen = pad(draft.mask, (0, missing, 0, missing)).expand(len(starts), -1, -1)
    return Nodes(
        plan=table.plan(req_indices, starts, width, positions=positions),
        tokens=pad(draft.tokens, (0, missing)).flatten(),
        width=width,
        drafted=drafted,
        mask=_flat_mask(seen, starts, width * sum(length + width for length in most)),
    )


def _flat_mask(seen: Tensor, starts: Tensor, size: int) -> Tensor:
    """Return which positions each row sees as SGLang has it: for each request [N, start + N], one
    after the other; all are seen before its start.

    Args:
        seen: [bs, N, N] bool, of the rows from ``starts`` [bs] on.
        size: at least what is written.
    """
    width = seen.shape[1]
    order = torch.arange(width, device=starts.device)
    lengths = starts + width
    first = (width * lengths).cumsum(0) - width * lengths + starts
    rows = first.unsqueeze(1) + order * lengths.unsqueeze(1)
    mask = torch.ones(size, dtype=torch.bool, device=starts.device)
    return mask.scatter_(0, (rows.unsqueeze(2) + order).flatten(), seen.flatten())


def teach_graphs() -> None:
    """Let SGLang record the target's verification for our algorithms too."""
    recorder = DecodeCudaGraphRunner
    plain, plain_warm_up = recorder.get_spec_info, base_runner.create_dummy_verify_input
    if hasattr(plain, "__wrapped__"):
        return

    def get_spec_info(self: DecodeCudaGraphRunner, num_tokens: int) -> SpecInput | None:
        made = _recorded(self.model_runner.spec_algorithm, self.buffers.custom_mask)
        return plain(self, num_tokens) if made is None else made

    def create_dummy_verify_input(
        spec_algorithm: Any, *more: Any, **named: Any
    ) -> SpecInput | None:
        mask = next((each for each in more if isinstance(each, Tensor)), None)
        made = _recorded(spec_algorithm, mask)
        return plain_warm_up(spec_algorithm, *more, **named) if made is None else made

    get_spec_info.__wrapped__ = plain  # type: ignore[attr-defined]
    recorder.get_spec_info = get_spec_info
    base_runner.create_dummy_verify_input = create_dummy_verify_input


def _recorded(algorithm: Any, mask: Tensor | None) -> SpecplugVerifyInput | None:
    worker = getattr(algorithm, "worker", None)
    return (
        None
        if worker is None
        else SpecplugVerifyInput(worker.num_draft_tokens, worker.captures, mask)
    )


def teach_torch_native() -> None:
    """Let SGLang's torch attention verify drafts, which it cannot: it reads no mask."""
    backend = TorchNativeAttnBackend
    plain = backend.forward_extend
    if hasattr(plain, "__wrapped__"):
        return

    def forward_extend(
        self: TorchNativeAttnBackend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Tensor:
        verified = forward_batch.spec_info
        if (
            isinstance(verified, SpecplugVerifyInput)
            and forward_batch.forward_mode.is_target_verify()
        ):
            assert verified.plan is not None
            return _attend(self, verified.plan, q, k, v, layer, forward_batch)
        out: Tensor = plain(self, q, k, v, layer, forward_batch, save_kv_cache, **more)
        return out

    forward_extend.__wrapped__ = plain  # type: ignore[attr-defined]
    backend.forward_extend = forward_extend


def _attend(
    backend: TorchNativeAttnBackend,
    plan: PagedPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: RadixAttention,
    forward_batch: ForwardBatch,
) -> Tensor:
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
