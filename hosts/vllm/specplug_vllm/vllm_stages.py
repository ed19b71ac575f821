"""Stages of a step of vLLM's, as ``HookOrder`` takes and gives them, for both model runners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from specplug import Batch, Draft, PluginError, RequestView
from specplug.speculative.hook_order import Chunks, ForwardMode, HookOrder
from specplug.speculative.host_copy import upload
from specplug_vllm.runtime import VllmRuntime


def prefilled_chunks(
    requests: Sequence[RequestView],
    req_indices: Tensor,
    tokens: Tensor,
    starts: np.ndarray,
    ends: np.ndarray,
    *,
    first: Sequence[bool],
    last: Sequence[bool],
    is_warm_up: bool = False,
) -> Chunks:
    """Return the chunks of m requests whose prompts vLLM has computed.

    Args:
        req_indices: [m] int64.
        tokens: [R] int64, the chunks' tokens.
        starts, ends: [m] int, tokens of each request with KV before its chunk, and after it.
        first, last: m, whose first chunk it is, and whose last.
    """
    widths, device = ends - starts, req_indices.device
    seq_lens = upload(starts, device)
    batch = Batch(
        mode=ForwardMode.PREFILL,
        requests=requests,
        req_indices=req_indices.clone(),
        seq_lens=seq_lens.clone(),
        chunk_widths=tuple(widths.tolist()),
        chunk_ends=tuple(ends.tolist()),
        first_chunk=tuple(first),
        last_chunk=tuple(last),
        is_warm_up=is_warm_up,
    )
    return Chunks(
        req_indices=req_indices,
        batch=batch,
        seq_lens=seq_lens,
        tokens=tokens,
        last_rows=upload(widths.cumsum() - 1, device),
    )


def feed_chunks(
    order: HookOrder,
    runtime: VllmRuntime,
    chunks: Chunks,
    after: Tensor,
    per_node: Mapping[str, Tensor],
) -> None:
    """Commit chunks and feed them to the algorithm.

    Args:
        after: [m] int64, the token after each chunk.
        per_node: named tensors of leading size R.
    """
    plan = None
    if runtime.has_draft_cache:
        batch = chunks.batch
        plan = runtime.plan_attention(batch, chunks.seq_lens, batch.chunk_widths)
    order.feed(chunks, order.commit_chunks(chunks, after, per_node), plan)


def chains(draft: Draft, algorithm: str) -> Draft:
    """Return drafts that are chains.

    Raises:
        PluginError: they are trees.
    """
    if not draft.is_chain:
        raise PluginError(
            f"{algorithm}: propose() returned a tree with topk=1; expected a chain, as vLLM "
            "verifies nothing else; fix the plugin"
        )
    return draft
