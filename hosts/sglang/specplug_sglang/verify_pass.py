"""The target's pass over the nodes of all drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor

from specplug_sglang.paged_plan import PagedPlan

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class VerifyInput(SpecInput):
    """What the target's pass needs of the drafts.

    SGLang's list of types is closed: this has the one of the algorithm that is likest.

    Args:
        plan: of the nodes.
        width: the most nodes of a request.
        captures: whether the pass returns hidden states.
    """

    def __init__(self, plan: PagedPlan, width: int, captures: bool) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.plan = plan
        self.positions = plan.positions
        self.draft_token_num = width
        self.num_tokens_per_req = width
        self.num_tokens_for_logprob_per_req = width
        self.capture_hidden_mode = CaptureHiddenMode.FULL if captures else CaptureHiddenMode.NULL


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
        if isinstance(verified, VerifyInput) and forward_batch.forward_mode.is_target_verify():
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
    pool = backend.token_to_kv_pool
    where = KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc)
    pool.set_kv_buffer(layer, where, k, v)
    sliding = layer.sliding_window_size
    return plan.attend_written(
        pool.get_key_buffer(layer.layer_id),
        pool.get_value_buffer(layer.layer_id),
        q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
        layer.scaling,
        # SGLang counts the positions before a row, the core counts the row's own too.
        sliding + 1 if sliding is not None and sliding > -1 else None,
    )
