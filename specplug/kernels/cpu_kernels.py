"""Kernels in C for the CPU, compiled at first use by the machine's own compiler.

torch attends to copies of paged keys, and calls an operation for each small part of a layer.
``cpu_kernels.c`` reads the pages where they stand and computes each part in one call. It is
compiled once per processor and kept in the user's cache folder. ``kernel_table`` says where torch
computes instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
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
_MOST_TWICE_BYTES = 256 << 20
"""Bytes of a network's weights up to which they are kept a second time, as ``Panels``."""
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
        in_c: the same as C reads it; None: it cannot.
    """

    table: Tensor
    req_indices: Tensor
    starts: Tensor
    first_rows: Tensor
    count: int
    offset: int = 0
    mask: Tensor | None = None
    is_readable: bool = attrs.field(init=False)
    in_c: cpu_library.Pass | None = attrs.field(init=False)

    @is_readable.default
    def _find_readable(self) -> bool:
        starts, mask = self.starts, self.mask
        bs = starts.numel()
        return (
            _is_whole(self.table, torch.int64)
            and _is_whole(self.req_indices, torch.int64)
            and _is_whole(starts, torch.int64)
            and _is_whole(self.first_rows, torch.int64)
            and self.table.dim() == 2
            and self.req_indices.shape == starts.shape == (bs,)
            and self.first_rows.shape == (bs + 1,)
            and (mask is None or (_is_whole(mask, torch.bool) and mask.shape[:-2] in ((1,), (bs,))))
        )

    @in_c.default
    def _make_in_c(self) -> cpu_library.Pass | None:
        if not self.is_readable:
            return None
        table_rows, table_stride = self.table.shape
        made = cpu_library.Pass(  # by their places: names take twice as long
            self.table.data_ptr(), self.req_indices.data_ptr(), self.starts.data_ptr(),
            self.first_rows.data_ptr(), table_rows, table_stride, self.starts.shape[0],
            self.count, self.offset,
        )  # fmt: skip
        mask = self.mask
        if mask is not None:
            made.mask = mask.data_ptr()
            made.mask_batch = 0 if len(mask) == 1 else mask.stride(0)
            made.mask_rows, made.span = mask.shape[1:]
        return made


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


def is_kept_twice(weights: Iterable[Tensor]) -> bool:
    """Return whether a network with these weights is small enough for products in C, which read
    copies of them."""
    return sum(each.nbytes for each in weights) <= _MOST_TWICE_BYTES


@attrs.frozen(eq=False)
class Panels:
    """A weight [N, K] as the kernel of products reads it: in its order in memory.

    Attributes:
        kernels: compute the products.
        columns: [N / C, rounded up; K; C]: C columns of the product stand together, as many as the
            kernels say. What is after the last is zero. In bfloat16 if that changes no number, as
            of most checkpoints: a few rows take as long as the weights are read. Else float32.
        outputs, inputs: N and K.
        half: whether it is bfloat16.
    """

    kernels: CPUKernels
    columns: Tensor
    outputs: int
    inputs: int
    half: bool = attrs.field(init=False)

    @half.default
    def _find_half(self) -> bool:
        return self.columns.dtype is torch.bfloat16

    def of_outputs(self, start: int, stop: int) -> Panels | None:
        """Return the panels of some outputs, without copying them; None if they do not begin and
        end where panels do."""
        width = self.columns.shape[2]
        if start % width or (stop % width and stop < self.outputs):
            return None
        own = self.columns[start // width : -(-stop // width)]
        return Panels(self.kernels, own, stop - start, self.inputs)

    def linear(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor | None:
        """Compute as ``CPUKernels.linear``."""
        return self.kernels.linear(x, self, bias, residual)


@attrs.frozen(eq=False, kw_only=True)
class LayerWeights:
    """The weights of a decoder layer of the Llama kind, for ``CPUKernels.decoder_layer``.

    Attributes:
        input_norm: weight [inputs] and eps of the norm of what is read; None: there is none.
        qkv: of queries, keys and values, [(H + 2 Hkv) * D, inputs].
        head_norm: weight [H + Hkv, D] and eps [H + Hkv, 1] of the heads of queries and keys; None:
            there is none.
        o: [hidden, H * D].
        mlp_norm: weight [hidden] and eps of the norm before the MLP.
        gate_up: of both, [2 * inner, hidden].
        down: [hidden, inner].
        heads, kv_heads: H and Hkv.
        qkv_bias, o_bias, gate_up_bias, down_bias: None: there is none.
        size: D.
        in_c: all of these as C reads them; None: they do not fit one another.
    """

    qkv: Panels
    o: Panels
    gate_up: Panels
    down: Panels
    mlp_norm: tuple[Tensor, float]
    heads: int
    kv_heads: int
    input_norm: tuple[Tensor, float] | None = None
    head_norm: tuple[Tensor, Tensor] | None = None
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    size: int = attrs.field(init=False)
    in_c: cpu_library.Layer | None = attrs.field(init=False)

    @size.default
    def _find_size(self) -> int:
        return self.qkv.outputs // (self.heads + 2 * self.kv_heads)

    @in_c.default
    def _make_in_c(self) -> cpu_library.Layer | None:
        heads, kv_heads, size = self.heads, self.kv_heads, self.size
        inputs, hidden, inner = self.qkv.inputs, self.o.outputs, self.down.inputs
        turned = heads + kv_heads
        expected: list[tuple[Tensor | None, tuple[int, ...]]] = [
            (self.mlp_norm[0], (hidden,)),
            (self.qkv_bias, (self.qkv.outputs,)),
            (self.o_bias, (hidden,)),
            (self.gate_up_bias, (2 * inner,)),
            (self.down_bias, (hidden,)),
        ]
        if self.input_norm is not None:
            expected.append((self.input_norm[0], (inputs,)))
        if self.head_norm is not None:
            weight, eps = self.head_norm
            expected += [(weight, (turned, size)), (eps, (turned, 1))]
        fits = (
            kv_heads > 0
            and heads % kv_heads == 0
            and size > 0
            and size % _HEAD_STEP == 0
            and self.qkv.outputs == (turned + kv_heads) * size
            and self.o.inputs == heads * size
            and (self.gate_up.inputs, self.gate_up.outputs) == (hidden, 2 * inner)
            and self.down.outputs == hidden
            and all(
                tensor is None or (_is_whole(tensor) and tensor.shape == shape)
                for tensor, shape in expected
            )
        )
        if not fits:
            return None
        made = cpu_library.Layer(
            qkv=self.qkv.columns.data_ptr(),
            qkv_half=self.qkv.half,
            qkv_bias=_address(self.qkv_bias),
            o=self.o.columns.data_ptr(),
            o_half=self.o.half,
            o_bias=_address(self.o_bias),
            mlp_norm=self.mlp_norm[0].data_ptr(),
            gate_up=self.gate_up.columns.data_ptr(),
            gate_up_half=self.gate_up.half,
            gate_up_bias=_address(self.gate_up_bias),
            down=self.down.columns.data_ptr(),
            down_half=self.down.half,
            down_bias=_address(self.down_bias),
            inputs=inputs,
            hidden=hidden,
            inner=inner,
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            mlp_eps=self.mlp_norm[1],
        )
        if self.input_norm is not None:
            made.input_norm, made.input_eps = self.input_norm[0].data_ptr(), self.input_norm[1]
        if self.head_norm is not None:
            made.head_norm, made.head_eps = (each.data_ptr() for each in self.head_norm)
        return made


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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
        self._linear = library.linear
        self._layer = library.decoder_layer
        self._places = library.row_places
        self._likeliest = library.likeliest
        self._panel_columns: int = library.panel_columns()

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
        _check_attended(failed, rows, num_slots)
        return out

    def decoder_layer(
        self,
        weights: LayerWeights,
        rows: CPURows,
        input: Tensor,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        form: AttentionForm,
    ) -> Tensor | None:
        """Run a decoder layer of the Llama kind: what the other methods compute, in one call and to
        the same bits.

        Args:
            weights: of the layer.
            rows: of the pass.
            input: [R, inputs], which the layer norms if it has a norm for it.
            residual: [R, hidden], to which attention and MLP are added.
            cos, sin, slots, keys, values: as in ``rotate_and_write``.
            form: of the attention.

        Returns:
            [R, hidden]; None if the kernel is not made for these.

        Raises:
            IndexError: a slot, a request's row or a slot of the table stands outside.
            MemoryError: there is none.
        """
        layer, own, window = weights.in_c, rows.in_c, form.window
        if not (
            layer is not None
            and own is not None
            and form.softcap is None
            and form.sinks is None
            and (window is None or (window > 0 and rows.mask is None))
            and _is_floats(input)
            and _is_floats(residual)
            and _is_whole(keys)
            and _is_whole(values)
            and _is_whole(cos)
            and _is_whole(sin)
            and _is_whole(slots, torch.int64)
        ):
            return None
        count, size, hidden = rows.count, weights.size, weights.o.outputs
        num_slots = keys.shape[0]
        if not (
            input.shape == (count, weights.qkv.inputs)
            and input.stride(1) == 1
            and residual.shape == (count, hidden)
            and residual.stride(1) == 1
            and cos.shape == sin.shape == (count, 1, size)
            and slots.shape == (count,)
            and keys.shape == values.shape == (num_slots, weights.kv_heads, size)
        ):
            return None
        out = torch.empty(count, hidden, dtype=torch.float32, device=_CPU)
        failed = self._layer(
            ctypes.byref(layer), ctypes.byref(own), input.data_ptr(), input.stride(0),
            residual.data_ptr(), residual.stride(0), cos.data_ptr(), sin.data_ptr(),
            slots.data_ptr(), keys.data_ptr(), values.data_ptr(), num_slots, window or 0,
            form.scale, out.data_ptr(),
        )  # fmt: skip
        _check_attended(failed, rows, num_slots)
        return out

    def panels(self, weight: Tensor) -> Panels:
        """Copy a weight [N, K] of float32 on the CPU for ``linear``."""
        outputs, inputs = weight.shape
        count = -(-outputs // self._panel_columns)
        shape = count * self._panel_columns, inputs
        padded = torch.zeros(shape, dtype=torch.float32, device=_CPU)
        padded[:outputs] = weight
        columns = padded.view(count, self._panel_columns, inputs).transpose(1, 2).contiguous()
        half = columns.bfloat16()
        columns = half if torch.equal(half.float(), columns) else columns
        return Panels(self, columns, outputs, inputs)

    def linear(
        self,
        x: Tensor,
        weight: Panels,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor | None:
        """Compute ``residual + (x @ weight.T + bias)``: [R, K] to [R, N].

        Weights are read once, whatever R is. Each sum runs over K in its order.

        Returns:
            None if the kernel is not made for these: not float32 on the CPU, other axes or sizes.
        """
        outputs, inputs = weight.outputs, weight.inputs
        if not (
            _is_floats(x)
            and x.dim() == 2
            and x.shape[1] == inputs
            and (x.stride(1) == 1 or inputs == 1)
            and (bias is None or (_is_whole(bias) and bias.shape == (outputs,)))
        ):
            return None
        rows = x.shape[0]
        of_residual: tuple[int | None, int] = None, 0
        if residual is not None:
            if not (
                _is_floats(residual)
                and residual.shape == (rows, outputs)
                and (residual.stride(1) == 1 or outputs == 1)
            ):
                return None
            of_residual = residual.data_ptr(), residual.stride(0)
        out = torch.empty(rows, outputs, dtype=torch.float32, device=_CPU)
        self._linear(
            x.data_ptr(), x.stride(0), weight.columns.data_ptr(), weight.half,
            None if bias is None else bias.data_ptr(), *of_residual, rows, inputs, outputs,
            out.data_ptr(),
        )  # fmt: skip
        return out

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor | None:
        """Compute ``x / sqrt(mean(x * x) + eps) * weight``, [R, size] to [R, size].

        Args:
            out: where it is written, such as columns of a wider tensor; None: to a new one.

        Returns:
            None if the kernel is not made for these: not float32 on the CPU, other axes or sizes.
        """
        if not (
            _is_floats(x)
            and _is_whole(weight)
            and x.dim() == 2
            and weight.shape == x.shape[1:]
            and x.stride(1) == 1
            and (out is None or (_is_floats(out) and out.shape == x.shape and out.stride(1) == 1))
        ):
            return None
        rows, size = x.shape
        if out is None:
            out = torch.empty(rows, size, dtype=torch.float32, device=_CPU)
        self._norm(
            x.data_ptr(), x.stride(0), weight.data_ptr(), eps, rows, size, out.data_ptr(),
            out.stride(0),
        )  # fmt: skip
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

    def row_places(
        self,
        rows: CPURows,
        width: int,
        last_position: int,
        floors: Tensor | None,
        given_positions: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """Return the slots and positions of a pass's R rows, [R] int64 each, as
        ``kernels.row_places.row_places`` does, whose arguments these are.

        Returns:
            None if the kernel is not made for these.

        Raises:
            IndexError: a request's row, or the rows of a pass, stand outside.
        """
        given = given_positions
        bs = rows.starts.shape[0]
        if not (
            rows.in_c is not None
            and (
                floors is None
                or (_is_whole(floors, torch.int64) and floors.shape >= rows.table.shape[:1])
            )
            and (
                given is None
                or (_is_whole(given, torch.int64) and given.shape in ((1, width), (bs, width)))
            )
        ):
            return None
        slots, positions = torch.empty(2, rows.count, dtype=torch.int64, device=_CPU)
        stride = 0 if given is None or len(given) == 1 else width
        failed = self._places(
            ctypes.byref(rows.in_c), _address(floors), _address(given), stride, width,
            last_position, slots.data_ptr(), positions.data_ptr(),
        )  # fmt: skip
        if failed:
            raise IndexError(
                f"req_indices or the rows of a pass: one stands outside of {len(rows.table)} rows "
                f"of the table, or of {rows.count} rows"
            )
        return slots, positions

    def likeliest(
        self, logits: Tensor, ids: Tensor | None = None, *, scored: bool = True
    ) -> tuple[Tensor, Tensor] | None:
        """Return each row's likeliest token and the logarithm of its probability, as
        ``kernels.argmax.likeliest_tokens`` does, whose arguments these are.

        Args:
            scored: whether the second is wanted; else it is anything.

        Returns:
            None if the kernel is not made for these: not float32 on the CPU.
        """
        if not (_is_floats(logits) and logits.dim() == 2 and logits.stride(1) == 1):
            return None
        rows, size = logits.shape
        if size < 1 or not (ids is None or (_is_whole(ids, torch.int64) and ids.shape == (size,))):
            return None
        tokens = torch.empty(rows, dtype=torch.int64, device=_CPU)
        logs = torch.empty(rows, dtype=torch.float32, device=_CPU)
        self._likeliest(
            logits.data_ptr(), logits.stride(0), rows, size, _address(ids), tokens.data_ptr(),
            logs.data_ptr() if scored else None,
        )  # fmt: skip
        return tokens, logs

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


def _check_attended(failed: int, rows: CPURows, num_slots: int) -> None:
    """Raise what C found."""
    if failed == _NO_MEMORY:
        raise MemoryError("no memory for the scores of an attention")
    if failed:
        raise IndexError(
            "req_indices, the table's slots or the rows of a pass: one stands outside of "
            f"{len(rows.table)} rows of the table, {num_slots} slots or {rows.count} rows of "
            "queries"
        )


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
    matrix, rows_before = keys.flatten(1), values.flatten(1)
    product = kernels.linear(matrix, kernels.panels(matrix), matrix[:, 0].clone())
    residual = kernels.linear(matrix, kernels.panels(matrix[:1].expand(64, -1)), None, rows_before)
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
        (product, F.linear(matrix, matrix, matrix[:, 0])),
        (residual, rows_before + matrix @ matrix[0].unsqueeze(1)),
        (normed, own_normed[:, 0]),
        (qkv[:, :4], turned),
        (new_keys, turned[:, 2:]),
        (new_values, values),
    )
    return all(a is not None and bool((a - b).abs().max() < 1e-4) for a, b in pairs)
