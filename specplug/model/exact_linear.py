"""Products of a target in half precision: a row's bits depend on nothing but the row.

A few rows are computed by the kernel of ``specplug.kernels.linear``, and so are more of narrow
products in recorded passes. Many rows are computed by cuBLAS, which is faster there, wherever it
gives the kernel's bits. Whether it does is found by comparing the two, once for each shape: cuBLAS
splits some products over K, by a rule that is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from specplug.kernels.described_tiles import are_described
from specplug.kernels.kernel_table import HALF
from specplug.kernels.linear import NARROW, gated_linear, linear
from specplug.kernels.recorded_launches import recorded_launches
from specplug.kernels.rotary import rotate_and_write
from specplug.kernels.rotated_linear import rotated_linear
from specplug.kernels.silu_mul import silu_mul
from specplug.model.quantization import is_plain_linear
from specplug.speculative.buckets import MANY_ROWS, PRODUCT_STEP

TARGET_KERNEL_ROWS = 128
"""The most rows of a target's product that the kernel computes. With what is fused into it it is as
fast as cuBLAS, but for wide products from 65 rows on."""
_PADDINGS = (MANY_ROWS, 64), (1 << 62, PRODUCT_STEP)
"""Padding of cuBLAS's rows: up to so many rows, to a multiple of so many. So few shapes have to
be proved, and of drafts of 32 requests few passes have to be padded."""
_MOST_ROWS = 4096
"""Most rows of a product of cuBLAS; more take several. A multiple of all paddings."""
_ALIGNMENT = 256
"""Bytes: what cuBLAS chooses depends on the alignment of its operands up to this."""
_MOST_SAMPLED = 1 << 26
"""Numbers in the largest result that the products are tried out with."""

_WIDE_ROWS = 200
"""Rows of a product whose tiles are those of 129 to 256 rows."""

HeadNorms = tuple[Tensor, Tensor, float] | None
"""The weights of the norms of each head of queries and keys, and their eps; None: there are
none."""

_proofs: dict[tuple[torch.device, torch.dtype, int, int, int], bool] = {}
"""Whether cuBLAS gives the kernel's bits, by (device, dtype, N, K, rows): facts about the card."""


class Products:
    """Computes the products of a target.

    Args:
        exact: each row's bits depend on nothing but the row. Else cuBLAS computes all products of
            many rows as it likes.
        kernel_rows: the most rows that the kernels compute; None: ``TARGET_KERNEL_ROWS``.
    """

    def __init__(self, *, exact: bool, kernel_rows: int | None = None) -> None:
        self.exact = exact
        self._kernel_rows = kernel_rows

    @property
    def kernel_rows(self) -> int:
        """The most rows of a product that the kernels compute."""
        return TARGET_KERNEL_ROWS if self._kernel_rows is None else self._kernel_rows

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Compute ``x @ weight.T``, round it, then add the bias and the residual, rounded each.

        Args:
            x: [R, K] in half precision, contiguous.
            weight: [N, K] contiguous.
            bias: [N] or None.
            residual: [R, N] contiguous, or None.

        Returns:
            [R, N] contiguous.
        """
        if len(x) <= self.kernel_rows or (self.exact and _is_narrow(x, weight)):
            return linear(x, weight, bias, residual)
        if not self.exact:
            out = F.linear(x, weight)
        else:
            out = x.new_empty(len(x), len(weight))
            for first in range(0, len(x), _MOST_ROWS):
                rows = slice(first, first + _MOST_ROWS)
                _many_rows(x[rows], weight, out[rows])
        if bias is not None:
            out += bias
        if residual is not None:
            out += residual
        return out

    def gated_linear(
        self,
        x: Tensor,
        gate: tuple[Tensor, Tensor | None],
        up: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        """Compute ``silu(gate) * up`` of two products, as ``linear`` rounds.

        Args:
            x: [R, K] in half precision, contiguous.
            gate, up: weight [I, K] contiguous, and bias [I] or None, of each.

        Returns:
            [R, I] contiguous.
        """
        if len(x) <= self.kernel_rows and gate[1] is None and up[1] is None:
            return gated_linear(x, gate[0], up[0])
        return silu_mul(self.linear(x, *gate), self.linear(x, *up))

    def rotated_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        norms: HeadNorms = None,
    ) -> Tensor:
        """Compute queries, keys and values; rotate queries and keys; write keys and values.

        Args:
            x: [R, K] in half precision, contiguous.
            weight, bias: [(H + 2 Hkv) * D, K] contiguous, and [(H + 2 Hkv) * D] or None: of the
                queries, the keys, the values.
            cos, sin, slots, keys, values, norms: see ``rotate_and_write``.

        Returns:
            The rotated queries, [R, H, D] contiguous.
        """
        if len(x) <= self.kernel_rows and norms is None:
            return rotated_linear(x, weight, bias, cos, sin, slots, keys, values)
        qkv = self.linear(x, weight, bias)
        return rotate_and_write(qkv, cos, sin, slots, keys, values, norms)


EXACT = Products(exact=True)


class ExactLinear(nn.Linear):
    """An ``nn.Linear`` whose rows do not depend on one another; the same parameters."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, K] -> […, N]."""
        rows = input.reshape(-1, input.shape[-1])
        out = EXACT.linear(rows.contiguous(), self.weight, self.bias)
        return out.view(*input.shape[:-1], -1)


class ExactConv1D(Conv1D):
    """The linear module of GPT-2, whose weight is [K, N], with rows that do not depend on one
    another. Its weight is stored as that of an ``nn.Linear`` is."""

    def forward(self, x: Tensor) -> Tensor:
        """[…, K] -> […, N]."""
        rows = x.reshape(-1, x.shape[-1])
        out = EXACT.linear(rows.contiguous(), self.weight.t(), self.bias)
        return out.view(*x.shape[:-1], -1)


def modules_outside(model: nn.Module, keep: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules of a model but those to keep, and what is in these."""
    kept = {id(inner) for module in keep for inner in module.modules()}
    return [module for module in model.modules() if id(module) not in kept]


def make_linears_exact(model: nn.Module, keep: Iterable[nn.Module] = ()) -> int:
    """Make the linear modules of a model exact, in place, and return how many.

    Args:
        model: in half precision.
        keep: modules that stay as they are, with all that is in them.
    """
    count = 0
    for module in modules_outside(model, keep):
        if is_plain_linear(module) and module.weight.dtype in HALF:
            module.__class__ = ExactLinear
        elif type(module) is Conv1D and module.weight.dtype in HALF:
            module.weight.data = module.weight.t().contiguous().t()
            module.__class__ = ExactConv1D
        else:
            continue
        count += 1
    return count


@torch.inference_mode()
def find_row_variance(
    weights: Iterable[Tensor],
    gated: Iterable[tuple[Tensor, Tensor]] = (),
    rotated: Iterable[tuple[Tensor, int, int, HeadNorms]] = (),
) -> list[str]:
    """Return the shapes of weights whose products' rows depend on how many there are.

    Many rows are computed together, and some of them again in small numbers, and compared bit by
    bit. It is a fact about the card and its software, and there should be none.

    Args:
        weights: [N, K]; of those with the same shape one is tried.
        gated: the two weights of gated products.
        rotated: the weights of rotated products, D, Hkv, and the norms of heads.
    """
    found = []
    products: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {}
    for weight in weights:
        products[_shape(weight)] = weight, partial(EXACT.linear, weight=weight)
    for gate, up in gated:
        both = partial(EXACT.gated_linear, gate=(gate, None), up=(up, None))
        products[f"2 x {_shape(gate)}"] = gate, both
    for weight, head_dim, kv_heads, norms in rotated:
        turned = partial(_rotate, weight, head_dim, kv_heads, norms)
        products[f"{_shape(weight)}, rotated"] = weight, turned
    for name, (weight, product) in products.items():
        x = _sample(weight, max(TARGET_KERNEL_ROWS + 1, min(1024, _MOST_SAMPLED // len(weight))))
        whole = product(x)
        middle = len(x) // 2
        ends = [n for n in (1, 16, 64, TARGET_KERNEL_ROWS, _WIDE_ROWS) if n < len(x)]
        parts = slice(middle, middle + 1), *(slice(0, end) for end in ends)
        for launches in (nullcontext, recorded_launches):  # whose kernels are others
            with launches():
                if not all(torch.equal(product(x[rows]), whole[rows]) for rows in parts):
                    found.append(name)
                    break
    return found


def _rotate(weight: Tensor, head_dim: int, kv_heads: int, norms: HeadNorms, x: Tensor) -> Tensor:
    """Return queries, keys and values of rows at one position, [R, H + 2 Hkv, D]."""
    angles = torch.linspace(-1, 1, 2 * head_dim, dtype=x.dtype, device=x.device)
    cos, sin = angles.view(2, 1, head_dim).expand(2, len(x), head_dim)
    slots = torch.arange(len(x), device=x.device)
    keys, values = x.new_empty(2, len(x), kv_heads, head_dim)
    q = EXACT.rotated_linear(x, weight, None, cos, sin, slots, keys, values, norms)
    return torch.cat((q, keys, values), dim=1)


def _is_narrow(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel computes a product faster than cuBLAS although it has many rows:
    cuBLAS splits such ones over K, or leaves a part of the card idle."""
    return len(weight) <= NARROW and are_described(x, weight)


def _shape(weight: Tensor) -> str:
    return " x ".join(map(str, weight.shape))


def _many_rows(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write the product of up to ``_MOST_ROWS`` rows to ``out``: by cuBLAS if it is proved."""
    padded = _proved_rows(weight, len(x))
    if padded is None:
        out.copy_(linear(x, weight))
    elif padded == len(x) and not (x.data_ptr() | out.data_ptr()) % _ALIGNMENT:
        torch.mm(x, weight.t(), out=out)
    else:
        out.copy_(F.linear(F.pad(x, (0, 0, 0, padded - len(x))), weight)[: len(x)])


def _proved_rows(weight: Tensor, rows: int) -> int | None:
    """Return for how many rows, these or more, cuBLAS gives the kernel's bits; None: for none.

    A product of few rows that is split over K often is whole at twice as many.
    """
    if weight.device.type != "cuda" or weight.data_ptr() % _ALIGNMENT:
        return None
    multiple = next(multiple for most, multiple in _PADDINGS if rows <= most)
    least = -(-rows // multiple) * multiple
    return next((each for each in (least, 2 * least) if _is_proved(weight, each)), None)


def _is_proved(weight: Tensor, rows: int) -> bool:
    """Return whether cuBLAS gives the kernel's bits for so many rows; found out at the first call.

    While a graph is recorded nothing can be compared, so what is not known counts as no.
    """
    if rows > _MOST_ROWS:
        return False
    key = weight.device, weight.dtype, *weight.shape, rows
    if key not in _proofs:
        if torch.cuda.is_current_stream_capturing():
            return False
        _proofs[key] = _compare(weight, rows)
    return _proofs[key]


@torch.inference_mode()
def _compare(weight: Tensor, rows: int) -> bool:
    """Return whether cuBLAS and the kernel give the same bits for random rows."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")  # the comparison waits, once for each shape
    try:
        x = _sample(weight, rows)
        return torch.equal(F.linear(x, weight), linear(x, weight))
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _sample(weight: Tensor, rows: int) -> Tensor:
    generator = torch.Generator(weight.device).manual_seed(rows)
    shape = rows, weight.shape[1]
    return torch.randn(shape, dtype=weight.dtype, device=weight.device, generator=generator)
