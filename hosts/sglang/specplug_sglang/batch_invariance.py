"""What draft models need of the products that SGLang puts in torch's place.

With ``--enable-deterministic-inference`` SGLang replaces ``aten::addmm`` on GPUs, among others, in
the whole process. What its own adds to a product is a vector; draft models add a residual.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.batch_invariant_ops import batch_invariant_ops
from torch import Tensor


def teach_addmm() -> None:
    """Let SGLang's ``aten::addmm`` add a matrix: it computes the product, then the sum."""
    plain = batch_invariant_ops.matmul_persistent
    if hasattr(plain, "__wrapped__"):
        return

    def matmul_persistent(
        a: Tensor, b: Tensor, bias: Tensor | None = None, *more: Any, **named: Any
    ) -> Tensor:
        added = bias if bias is not None and bias.dim() > 1 else None
        product: Tensor = plain(a, b, bias if added is None else None, *more, **named)
        return product if added is None else product.add_(added)

    matmul_persistent.__wrapped__ = plain  # type: ignore[attr-defined]
    batch_invariant_ops.matmul_persistent = matmul_persistent
