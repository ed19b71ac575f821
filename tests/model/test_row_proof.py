"""A target whose rows depend on one another is told so when it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_targets import TINY_EXPERTS, TINY_SHAPE
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from specplug.errors import FallbackWarning
from specplug.kernels import paged_attention
from specplug.kernels.recorded_launches import are_recorded
from specplug.kv.tensors import fill_cache
from specplug.model import target as target_file
from specplug.model.target import Target
from specplug.model.trials import TrialRequests

CPU = torch.device("cpu")
SHAPE = {**TINY_SHAPE, "max_position_embeddings": 1024}
KINDS = {"LlamaConfig": {}, "Gemma2Config": {}, "GPT2Config": {}, "MixtralConfig": TINY_EXPERTS}


class _Odd(nn.Module):
    """A module with another result for some numbers of rows, far within every tolerance."""

    __module__ = "another_library"

    def __init__(self, inner: nn.Module, odd: Callable[[int], bool]) -> None:
        super().__init__()
        self.inner = inner
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out * (1 + 2**-7) if self.odd(x.numel() // x.shape[-1]) else out


@pytest.fixture(scope="module")
def folder(build_model: Callable[..., Path]) -> Path:
    return build_model(transformers.LlamaConfig(**SHAPE))


def _replace_mlp(monkeypatch: pytest.MonkeyPatch, odd: Callable[[int], bool]) -> None:
    """Have the second layer's MLP be one of another library."""

    def fuse_norms(model: Any) -> None:
        layer = model.model.layers[1]
        layer.mlp = _Odd(layer.mlp, odd)

    monkeypatch.setattr(target_file, "fuse_norms", fuse_norms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", KINDS)
def test_halves_on_the_cpu_are_row_invariant(
    config: str, dtype: torch.dtype, build_model: Callable[..., Path]
) -> None:
    folder = build_model(getattr(transformers, config)(**{**SHAPE, **KINDS[config]}))
    target = Target(str(folder), dtype, CPU)
    told = target.row_invariance
    target.close()
    if told != "on":
        pytest.skip(f"products of several rows vary on this processor: {told}")


@pytest.mark.parametrize("config", KINDS)
def test_no_product_of_a_pass_has_one_row(config: str, build_model: Callable[..., Path]) -> None:
    """In any module: linears, GPT-2's own, routers, experts of one token."""
    rows: list[int] = []

    class Counted(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func in (F.linear, torch.addmm):
                x: Tensor = args[func is torch.addmm]
                rows.append(x.numel() // x.shape[-1])
            return func(*args, **(kwargs or {}))

    folder = build_model(getattr(transformers, config)(**{**SHAPE, **KINDS[config]}))
    target = Target(str(folder), torch.bfloat16, CPU)
    fill_cache(target.cache, target.kv_shape, 9, target.dtype, CPU)
    plan = TrialRequests(1, 8, 8, 8, CPU).plan((0,), (1,))
    with torch.inference_mode(), Counted():
        target.forward(torch.tensor([5]), plan, 0)
    assert rows
    assert min(rows) == 2


@pytest.mark.parametrize(
    ("odd", "name"),
    [
        (lambda rows: rows == 1, "a row alone"),
        (lambda rows: 64 < rows <= 128, "a chunk of 70 rows"),
        (lambda rows: rows > 128, "a row alone"),
        (lambda rows: are_recorded(), "a chunk of 70 rows, recorded"),
        (lambda rows: are_recorded() and rows > 128, "whole, recorded"),
    ],
)
def test_module_with_a_kernel_for_some_rows_is_told(
    odd: Callable[[int], bool], name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _replace_mlp(monkeypatch, odd)
    with pytest.warns(FallbackWarning, match="row invariance does not hold"):
        target = Target(str(folder), torch.bfloat16, CPU)
    assert target.row_invariance == f"off: {name}: from layer 1 on"
    target.close()


def test_packed_weights_are_never_plainly_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_mlp(monkeypatch, lambda rows: False)
    target = Target(str(folder), torch.bfloat16, CPU)
    assert target.row_invariance.startswith("on, but for packed weights (1 of _Odd): ")
    target.close()


def test_attention_that_varies_over_long_contexts_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = paged_attention.attention_reference

    def odd(q: Tensor, k: Tensor, *how: Any) -> Tensor:
        out = right(q, k, *how)
        return out * (1 + 2**-7) if k.shape[1] > 600 and q.shape[2] == 1 else out

    monkeypatch.setattr(paged_attention, "attention_reference", odd)
    with pytest.warns(FallbackWarning, match="attention over 650 keys, a row alone"):
        target = Target(str(folder), torch.float16, CPU)
    assert target.row_invariance == "off: attention over 650 keys, a row alone"
    target.close()


def test_proof_is_not_made_where_it_is_declined(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _replace_mlp(monkeypatch, lambda rows: rows == 1)
    target = Target(str(folder), torch.bfloat16, CPU, row_invariant=False)
    assert target.row_invariance == "off: disable_row_invariance"
    target = Target(str(folder), torch.bfloat16, CPU, skip_check=True)
    assert target.row_invariance == "on, not proved: skip_model_check"
