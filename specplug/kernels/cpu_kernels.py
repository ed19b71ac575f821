"""Kernels in C for the CPU, compiled at first use by the machine's own compiler.

torch attends to paged keys in copies, and calls an operation for each small thing that a layer
does. ``cpu_kernels.c`` reads the pages where they stand and does each of them in one call. It is
compiled once per processor and kept in the user's cache folder. Where there is no C compiler, or
the result fails its test, torch computes as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from specplug.kernels import cpu_library
from specplug.kernels.cpu_compiler import CompilerError, load_or_reason
from specplug.kernels.cpu_library import open_library

_SOURCE = Path(__file__).with_suffix(".c")
_HEAD_STEP = 16
"""Head sizes are multiples of this."""


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
        num_slots: more than any slot in the table.
    """

    table: Tensor
    req_indices: Tensor
    starts: Tensor
    first_rows: Tensor
    count: int
    offset: int = 0
    mask: Tensor | None = None
    num_slots: int = 0


class CPUKernels:
    """The compiled kernels. All tensors are float32 on the CPU; a row is contiguous.

    A row's bits depend on nothing but the row. The kernels run on the calling thread alone.

    Args:
        path: of the shared library.
    """

    def __init__(self, path: Path) -> None:
        library = open_library(str(path))
        self._attend = library.paged_attention
        self._norm = library.rms_norm
        self._rotate = library.rotate_and_write
        self._silu = library.silu_and_mul

    def serves(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: CPURows,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> bool:
        """Return whether ``attend`` knows this attention. What it is not made for it must not
        read: a plugin may hand over anything."""
        count, heads, size = q.shape
        return (
            q.dtype == keys.dtype == values.dtype == torch.float32
            and count == rows.count
            and size % _HEAD_STEP == 0
            and q.stride()[1:] == (size, 1)
            and keys.shape[2] == size
            and len(keys) >= rows.num_slots
            and heads % keys.shape[1] == 0
            and values.shape == keys.shape
            and keys.is_contiguous()
            and values.is_contiguous()
            and softcap is None
            and sinks is None
            and (window is None or (window > 0 and rows.mask is None))
        )

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: CPURows,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Attend to the pages of each row's request: q [R, H, D] and a layer's keys and values
        [slots, Hkv, D] to [R, H * D]."""
        count, heads, size = q.shape
        out = q.new_empty(count, heads * size)
        mask = rows.mask
        failed = self._attend(
            q.data_ptr(),
            q.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            rows.table.data_ptr(),
            rows.table.shape[1],
            rows.req_indices.data_ptr(),
            rows.starts.data_ptr(),
            rows.first_rows.data_ptr(),
            len(rows.starts),
            rows.offset,
            window or 0,
            None if mask is None else mask.data_ptr(),
            0 if mask is None or len(mask) == 1 else mask.stride(0),
            0 if mask is None else mask.stride(1),
            0 if mask is None else mask.shape[2],
            heads,
            keys.shape[1],
            size,
            scale,
            out.data_ptr(),
        )
        if failed:
            raise MemoryError("no memory for the scores of an attention")
        return out

    def norms(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether ``rms_norm`` knows these rows and this weight."""
        return (
            x.dtype == weight.dtype == torch.float32
            and x.dim() == 2
            and x.stride(1) == 1
            and x.shape[1] == len(weight)
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute ``x / sqrt(mean(x * x) + eps) * weight``, [R, size] to [R, size]; the weight is
        contiguous."""
        rows, size = x.shape
        out = x.new_empty(rows, size)
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
    ) -> None:
        """Norm the heads of queries and keys if there is a norm, turn them, both in place, and
        write keys and values to their slots.

        Args:
            qkv: [R, H + 2 Hkv, D], contiguous.
            cos, sin: [R, 1, D] each; the sines of the first half are negative.
            norm: weight [H + Hkv, D] and eps [H + Hkv, 1]; None: there is none.
            slots: [R] int64.
            keys, values: of the layer, [slots, Hkv, D].
        """
        rows, heads, size = qkv.shape
        kv_heads = keys.shape[1]
        weight, eps = (None, None) if norm is None else (norm[0].data_ptr(), norm[1].data_ptr())
        self._rotate(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            weight,
            eps,
            slots.data_ptr(),
            rows,
            heads - 2 * kv_heads,
            kv_heads,
            size,
            keys.data_ptr(),
            values.data_ptr(),
        )

    def silu_and_mul(self, both: Tensor) -> Tensor:
        """Compute ``silu(gate) * up`` of rows that hold both, [R, 2 * size] to [R, size]."""
        rows, size = both.shape[0], both.shape[1] // 2
        out = both.new_empty(rows, size)
        self._silu(both.data_ptr(), rows, size, out.data_ptr())
        return out


_of_draft: ContextVar[CPUKernels | None] = ContextVar("cpu_kernels_of_draft", default=None)


@contextmanager
def cpu_kernels_of_draft(kernels: CPUKernels | None) -> Iterator[None]:
    """Have the drafts that this thread loads meanwhile compute with ``kernels``, as the target of
    their run does; None: with torch."""
    before = _of_draft.set(kernels)
    try:
        yield
    finally:
        _of_draft.reset(before)


def cpu_kernels_for(weight: Tensor) -> CPUKernels | None:
    """Return what a draft's layers with such a weight compute with, while it is loaded."""
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32
    return _of_draft.get() if fits else None


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
    found = kernels.attend(q, keys, values, rows, size**-0.5)
    by_head = [each.transpose(0, 1) for each in (q, keys, values)]
    own = F.scaled_dot_product_attention(by_head[0], by_head[1], by_head[2], is_causal=True)
    gated = kernels.silu_and_mul(q.flatten(1))
    weight, eps = torch.rand(4, size, generator=generator), torch.full((4, 1), 1e-5)
    normed = torch.stack([kernels.rms_norm(qkv[:, h], weight[h], 1e-5) for h in range(4)], 1)
    cos, sin = torch.rand(2, length, 1, size, generator=generator)
    own_normed = F.rms_norm(qkv[:, :4], (size,), eps=1e-5) * weight
    turned = own_normed * cos + own_normed.roll(size // 2, -1) * sin
    new_keys, new_values = torch.empty(2, length, 2, size)
    kernels.rotate_and_write(qkv, cos, sin, (weight, eps), slots, new_keys, new_values)
    pairs = (
        (found, own.transpose(0, 1).flatten(1)),
        (gated, F.silu(q[:, 0]) * q[:, 1]),
        (normed, own_normed),
        (qkv[:, :4], turned),
        (new_keys, turned[:, 2:]),
        (new_values, values),
    )
    return all(bool((a - b).abs().max() < 1e-4) for a, b in pairs)
