"""The KV caches of draft models, in the blocks that vLLM's own manager hands out.

vLLM sees layers that attend to nothing: it allocates their tensors, gives their requests blocks,
shares blocks by the prefix cache and takes them back. How keys and values lie inside a block is
ours, since only an ``AttentionPlan`` of ours reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from specplug import PluginError
from specplug.speculative.host_copy import upload
from specplug.speculative.paged_plan import PagedKVCache
from specplug.speculative.slot_pages import enter_pages
from specplug_vllm.vllm_names import attention_classes, target_indexes_by_block_stride

_VLLM: Any = attention_classes()

PREFIX = "specplug_draft."
"""How the names of the draft models' layers begin."""


class _NoAttention(_VLLM.impl):
    """Is asked for nothing: draft models attend by their plans."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError("draft models attend by their plans")


class _NoMetadata(_VLLM.metadata_builder):
    """Makes nothing for a step, and so never stands in the way of a CUDA graph of the target's."""

    _cudagraph_support = _VLLM.graph_support.ALWAYS

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, *args: Any, **kwargs: Any) -> None:
        return None


class DraftBackend(_VLLM.backend):
    """The attention backend of draft models, for vLLM's KV manager alone. It takes any head size,
    block size and layout."""

    @staticmethod
    def get_name() -> str:
        return "SPECPLUG_DRAFT"

    @staticmethod
    def get_impl_cls() -> type:
        return _NoAttention

    @staticmethod
    def get_builder_cls() -> type:
        return _NoMetadata

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        """Answer as the target does; vLLM 0.25.0 asks. With another answer draft layers would be of
        a kind of their own. Where a target has layers of several kinds, vLLM's groups of layers are
        as small as the smallest kind, here of one layer."""
        return target_indexes_by_block_stride(PREFIX)


class DraftLayer(nn.Module, _VLLM.layer):
    """A draft model's layer, as vLLM's KV manager sees it.

    Args:
        num_kv_heads, head_dim, dtype: of its keys and values.
        num_heads: query heads of the target, by which vLLM groups layers.
    """

    is_draft_layer = True

    def __init__(
        self, num_kv_heads: int, head_dim: int, dtype: torch.dtype, num_heads: int
    ) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
        self.num_heads = num_heads
        self.kv_cache = torch.tensor([])  # bound by vLLM

    def get_attn_backend(self) -> type:
        return DraftBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return _VLLM.full_attention_spec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_dim,
            dtype=self.dtype,
        )


@attrs.define(eq=False)
class DraftCache(PagedKVCache):
    """A draft model's layers.

    A block holds the keys of its tokens, then their values. So keys [slots, Hkv, D] and values are
    the same memory, the values' view a block's tokens further, and block b's first slot is
    ``2 * b * block_size`` in both. Slot 0 is of vLLM's null block, which no request has.

    Attributes:
        layers: as vLLM knows them.
        keys, values: of each layer; none until the first step.
    """

    layers: list[DraftLayer] = attrs.field(factory=list)

    def view(self, block_size: int) -> None:
        """View the memory that vLLM has bound to the layers."""
        for layer in self.layers:
            memory = layer.kv_cache
            if not memory.is_contiguous():
                raise PluginError(
                    f"vLLM gives a draft model's layer blocks of {tuple(memory.shape)} with "
                    f"strides {memory.stride()}; expected them without gaps: turn off what pads "
                    "or interleaves KV blocks"
                )
            flat = memory.view(-1, layer.num_kv_heads, layer.head_dim)
            self.keys.append(flat[:-block_size])
            self.values.append(flat[block_size:])


class SlotTable:
    """The slots of each request, by row and position.

    vLLM's blocks come here as it hands them out, so that a step without a new one costs nothing.

    Args:
        num_rows: rows, row 0 (padding) included.
        context_len: most tokens of a request.
        lookahead: slots after them that drafts may write.
        block_size: tokens of a block.
        device: of the tensors.

    Attributes:
        slots: [rows, positions] int64; 0 where a request has no block.
        floors: [rows] int64, the first position that each may write; those before it were found in
            the prefix cache.
    """

    def __init__(
        self,
        num_rows: int,
        context_len: int,
        lookahead: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        blocks = -(-(context_len + lookahead) // block_size)
        self.block_size = block_size
        self.slots = torch.zeros(num_rows, blocks * block_size, dtype=torch.int64, device=device)
        self.floors = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._blocks_a_row = blocks
        self._counts = np.zeros(num_rows, dtype=np.int64)
        self._started: dict[int, int] = {}
        self._new: list[tuple[int, int, int]] = []

    def start(self, row: int, floor: int) -> None:
        """Give a row to a request that starts at ``floor``."""
        self._counts[row] = 0
        self._started[row] = floor
        self._new = [new for new in self._new if new[0] != row]

    def fill(self, rows: np.ndarray, blocks: np.ndarray, counts: np.ndarray) -> None:
        """Add the blocks that requests got since the last step.

        Args:
            rows: [n] int, of the requests.
            blocks: [n, most] int, their block numbers.
            counts: [n] int, how many each has.
        """
        for index in np.nonzero(self._counts[rows] < counts[: len(rows)])[0]:
            row = rows[index]
            self.add(int(row), blocks[index, self._counts[row] : counts[index]])

    def add(self, row: int, blocks: Sequence[int] | np.ndarray) -> None:
        """Add blocks to those of a row."""
        start = int(self._counts[row])
        new = blocks[: self._blocks_a_row - start]
        # A block's keys lie where those of two pages would, as it holds its values too.
        self._new += [(row, start + place, 2 * int(block)) for place, block in enumerate(new)]
        self._counts[row] += len(new)

    def update(self) -> None:
        """Write what was started and added since the last call to the tensors."""
        device = self.slots.device
        if self._started:
            started = torch.tensor([list(self._started), list(self._started.values())])
            rows, floors = started.to(device, non_blocking=True)
            self.slots.index_fill_(0, rows, 0)
            self.floors.index_copy_(0, rows, floors)
            self._started.clear()
        if self._new:
            enter_pages(self.slots, upload(self._new, device), self.block_size)
            self._new.clear()
