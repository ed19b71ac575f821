"""Kernels in C for the CPU, compiled at first use by the machine's own compiler.

torch attends to copies of paged keys, and calls an operation for each small part of a layer.
``cpu_kernels.c`` reads the pages where they stand and computes each part in one call. It is
compiled once per processor and kept in the user's cache folder. ``kernel_table`` says where torch
computes instead.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specplug.kernels import cpu_library
from specplug.kernels.attention_form import AttentionForm
from specplug.kernels.cpu_compiler import CompilerError, load_or_reason
from specplug.kernels.cpu_library import open_library
from specplug.kernels.score_tables import BINS, DEPTHS, LEAST_SCORE, Outcome, ScoreTables

_SOURCE = Path(__file__).with_suffix(".c")
_HEAD_STEP = 16
"""Head sizes are multiples of this."""
_NO_MEMORY = 1
"""Returned by the attention; 2: an index stands outside."""
_CPU = torch.device("cpu")
_NO_TREE = None, None
_NO_OUTCOME: tuple[int | None, ...] = None, 0, None, None, None


@attrs.frozen(eq=False, kw_only=True)
class CPURows:
    """The rows of a pass as the kernels read them.

    Attributes:
        table: [rows, context] int64 slots by request row and position.
        req_indices: [bs] int64, each request's row there.
        starts: [bs] int64 committed lengths.
        first_rows: [bs + 1] int64, each request's first row of the pass; R at the end.
        count: R.
        offset: of a request's first row after its committed length.
        mask: [bs or 1, Q, W] bool over the slots from ``starts`` on; None: causal.
        is_readable: whether the kernels can read all of these; found once for the layers of a pass.
    """

    table: Tensor
    req_indices: Tensor
    starts: Tensor
    first_rows: Tensor
    count: int
    offset: int = 0
    mask: Tensor | None = None
    is_readable: bool = attrs.field(init=False)

    @is_readable.default
    def _find_readable(self) -> bool:
        indices = self.table, self.req_indices, self.starts, self.first_rows
        bs, mask = self.starts.numel(), self.mask
        return (
            all(_is_whole(each, torch.int64) for each in indices)
            and self.table.dim() == 2
            and self.req_indices.shape == self.starts.shape == (bs,)
            and self.first_rows.shape == (bs + 1,)
            and (mask is None or (_is_whole(mask, torch.bool) and mask.shape[:-2] in ((1,), (bs,))))
        )


_PLAIN = Tensor, nn.Parameter
"""Other tensors, of subclasses, may have no memory of their own."""


def _is_floats(tensor: Tensor) -> bool:
    """Return whether C may read a tensor as float32 by its sizes and strides."""
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.dtype is torch.float32
        and tensor.layout is torch.strided
    )


def _is_whole(tensor: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether C may read a tensor from its first element to its last."""
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.dtype is dtype
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )


class CPUKernels:
    """The compiled kernels of float32 on the CPU.

    A row's bits depend on nothing but the row. The kernels run on the calling thread alone. A
    plugin may hand over any tensor: each method checks type, device, dtype, layout and sizes of
    what C would read, and torch computes, or refuses, what C is not made for. C checks the indices.

    Args:
        path: of the shared library.
    """

    def __init__(self, path: Path) -> None:
        library = open_library(str(path))
        self._attend = library.paged_attention
        self._norm = library.rms_norm
        self._rotate = library.rotate_and_write
        self._silu = library.silu_and_mul
        self._score = library.score_nodes

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: CPURows,
        form: AttentionForm,
    ) -> Tensor | None:
        """Attend to the pages of each row's request: q [R, H, D] and a layer's keys and values
        [slots, Hkv, D] to [R, H * D].

        Returns:
            None if the kernel is not made for this: other dtypes and devices, softcaps, sinks,
            windows over trees, head sizes that 16 does not divide.

        Raises:
            IndexError: a request's row, or a slot of the table, stands outside.
            MemoryError: there is none for the scores.
        """
        mask, window = rows.mask, form.window
        if not (
            rows.is_readable
            and form.softcap is None
            and form.sinks is None
            and (window is None or (window > 0 and mask is None))
            and _is_floats(q)
            and _is_whole(keys)
            and _is_whole(values)
            and q.dim() == keys.dim() == 3
            and values.shape == keys.shape
        ):
            return None
        count, heads, size = q.shape
        num_slots, kv_heads, key_size = keys.shape
        if (
            count != rows.count
            or size == 0
            or size % _HEAD_STEP
            or key_size != size
            or kv_heads == 0
            or heads % kv_heads
            or q.stride()[1:] != (size, 1)
        ):
            return None
        out = torch.empty(count, heads * size, dtype=torch.float32, device=_CPU)
        table = rows.table
        masked = (None, 0, 0, 0)
        if mask is not None:
            batch_stride = 0 if len(mask) == 1 else mask.stride(0)
            masked = mask.data_ptr(), batch_stride, *mask.shape[1:]
        failed = self._attend(
            q.data_ptr(), q.stride(0), keys.data_ptr(), values.data_ptr(), num_slots,
            table.data_ptr(), *table.shape, rows.req_indices.data_ptr(), rows.starts.data_ptr(),
            rows.first_rows.data_ptr(), len(rows.starts), count, rows.offset, window or 0, *masked,
            heads, kv_heads, size, form.scale, out.data_ptr(),
        )  # fmt: skip
        if failed == _NO_MEMORY:
            raise MemoryError("no memory for the scores of an attention")
        if failed:
            raise IndexError(
                "req_indices, the table's slots or the rows of a pass: one stands outside of "
                f"{len(table)} rows of the table, {num_slots} slots or {count} rows of queries"
            )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Compute ``x / sqrt(mean(x * x) + eps) * weight``, [R, size] to [R, size].

        Returns:
            None if the kernel is not made for these: not float32 on the CPU, other axes or sizes.
        """
        if not (
            _is_floats(x)
            and _is_whole(weight)
            and x.dim() == 2
            and weight.shape == x.shape[1:]
            and x.stride(1) == 1
        ):
            return None
        rows, size = x.shape
        out = torch.empty(rows, size, dtype=torch.float32, device=_CPU)
        self._norm(
            x.data_ptr(), x.stride(0), weight.data_ptr(), eps, rows, size, out.data_ptr(), size
        )
        return out

    def rotate_and_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        norm: tuple[Tensor, Tensor] | None,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> bool:
        """Norm the heads of queries and keys if there is a norm, turn them, both in place, and
        write keys and values to their slots.

        Args:
            qkv: [R, H + 2 Hkv, D], contiguous.
            cos, sin: [R, 1, D] each; the sines of the first half are negative.
            norm: weight [H + Hkv, D] and eps [H + Hkv, 1]; None: there is none.
            slots: [R] int64.
            keys, values: of the layer, [slots, Hkv, D].

        Returns:
            Whether the kernel is made for these; if not, nothing was done.

        Raises:
            IndexError: a slot stands outside of keys and values; nothing was written.
        """
        floats = qkv, cos, sin, keys, values, *(norm or ())
        if not (
            all(map(_is_whole, floats))
            and _is_whole(slots, torch.int64)
            and qkv.dim() == keys.dim() == 3
        ):
            return False
        rows, heads, size = qkv.shape
        num_slots, kv_heads, _ = keys.shape
        turned = heads - kv_heads
        if not (
            turned >= kv_heads
            and size % 2 == 0
            and cos.shape == sin.shape == (rows, 1, size)
            and slots.shape == (rows,)
            and keys.shape == values.shape == (num_slots, kv_heads, size)
            and (norm is None or (norm[0].shape, norm[1].shape) == ((turned, size), (turned, 1)))
        ):
            return False
        weight, eps = (None, None) if norm is None else (norm[0].data_ptr(), norm[1].data_ptr())
        failed = self._rotate(
            qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), weight, eps, slots.data_ptr(), rows,
            turned - kv_heads, kv_heads, size, keys.data_ptr(), values.data_ptr(), num_slots,
        )  # fmt: skip
        if failed:
            raise IndexError(f"slots of a pass: one stands outside of the {num_slots} of the cache")
        return True

    def silu_and_mul(self, both: Tensor) -> Tensor | None:
        """Compute ``silu(gate) * up`` of rows that hold both, [R, 2 * size] to [R, size].

        Returns:
            None if the kernel is not made for these: not float32 on the CPU, other axes.
        """
        if not _is_whole(both) or both.dim() != 2 or both.shape[1] % 2:
            return None
        rows, size = both.shape[0], both.shape[1] // 2
        out = torch.empty(rows, size, dtype=torch.float32, device=_CPU)
        self._silu(both.data_ptr(), rows, size, out.data_ptr())
        return out

    def score_nodes(
        self,
        scores: Tensor,
        tree: tuple[Tensor, Tensor] | None,
        tables: ScoreTables,
        req_indices: Tensor,
        outcome: Outcome | None = None,
    ) -> Tensor:
        """Do as ``kernels.scored_nodes.score_nodes``, whose arguments these are. The core's own
        tensors stand here, but for ``scores``, which ``Draft.check`` has seen.

        Raises:
            IndexError: a request's row stands outside of the tables.
        """
        scores = scores.contiguous()
        bs, width = scores.shape
        out = torch.empty(bs, width, dtype=torch.float32, device=_CPU)
        # They hold what C reads until it has returned.
        shape = () if tree is None else tuple(each.contiguous() for each in tree)
        taken = _NO_OUTCOME
        if outcome is not None:
            index, lens, offsets, counts = outcome
            taken = (
                index.data_ptr(), index.shape[1], lens.data_ptr(), offsets.data_ptr(),
                None if counts is None else counts.data_ptr(),
            )  # fmt: skip
        failed = self._score(
            scores.data_ptr(), *([each.data_ptr() for each in shape] or _NO_TREE), bs, width,
            req_indices.data_ptr(), tables.first_cells.data_ptr(), len(tables.first_cells),
            tables.bounds.data_ptr(), BINS, DEPTHS, LEAST_SCORE, tables.rates.data_ptr(),
            len(tables.rates), *taken, tables.seen.data_ptr(), tables.taken.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        if failed:
            raise IndexError(f"req_indices outside of {len(tables.first_cells)} rows of requests")
        return out


@cache
def load_cpu_kernels() -> CPUKernels | str:
    """Return the kernels, compiled if they are not yet; or why there are none.

    A fresh compilation takes about a second.
    """
    return load_or_reason(_SOURCE, Path(cpu_library.__file__), _opened)


def _opened(path: Path) -> CPUKernels:
    kernels = CPUKernels(path)
    if not _is_right(kernels):
        raise CompilerError("what was compiled gives other results than torch")
    return kernels


@torch.inference_mode()
def _is_right(kernels: CPUKernels) -> bool:
    """Return whether each kernel gives torch's results."""
    generator = torch.Generator().manual_seed(0)
    length, size = 37, 32
    qkv = torch.randn(length, 6, size, generator=generator)
    q, keys, values = (part.contiguous() for part in qkv.split(2, 1))
    slots = torch.arange(length)
    rows = CPURows(
        table=slots.unsqueeze(0),
        req_indices=torch.tensor([0]),
        starts=torch.tensor([0]),
        first_rows=torch.tensor([0, length]),
        count=length,
    )
    found = kernels.attend(q, keys, values, rows, AttentionForm(size**-0.5))
    by_head = [each.transpose(0, 1) for each in (q, keys, values)]
    own = F.scaled_dot_product_attention(by_head[0], by_head[1], by_head[2], is_causal=True)
    gated = kernels.silu_and_mul(q.flatten(1))
    weight, eps = torch.rand(4, size, generator=generator), torch.full((4, 1), 1e-5)
    normed = kernels.rms_norm(qkv[:, 0], weight[0], 1e-5)
    cos, sin = torch.rand(2, length, 1, size, generator=generator)
    own_normed = F.rms_norm(qkv[:, :4], (size,), eps=1e-5) * weight
    turned = own_normed * cos + own_normed.roll(size // 2, -1) * sin
    new_keys, new_values = torch.empty(2, length, 2, size)
    if not kernels.rotate_and_write(qkv, cos, sin, (weight, eps), slots, new_keys, new_values):
        return False
    pairs = (
        (found, own.transpose(0, 1).flatten(1)),
        (gated, F.silu(q[:, 0]) * q[:, 1]),
        (normed, own_normed[:, 0]),
        (qkv[:, :4], turned),
        (new_keys, turned[:, 2:]),
        (new_values, values),
    )
    return all(a is not None and bool((a - b).abs().max() < 1e-4) for a, b in pairs)
