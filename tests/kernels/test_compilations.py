"""What Triton compiles, and what it finds in its cache, is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from specplug.kernels import compilations
from specplug.kernels.compilations import cache_folder, compilations_counted


def _stored(out):  # type: ignore[no-untyped-def]
    tl.store(out, 1.0)


def _compile() -> None:
    """Compile a kernel for a GPU that need not be there."""
    source = ASTSource(JITFunction(_stored), {"out": "*fp32"}, {})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, for kernels that are compiled on any device."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compilations, "compiles_triton", lambda device: True)
    return tmp_path


def test_compilations_are_counted_apart_from_cache_hits(empty_cache: Path) -> None:
    others: list[bool] = []

    def other(*, cache_hit: bool, **more: Any) -> None:
        others.append(cache_hit)

    knobs.compilation.listener = other
    try:
        with compilations_counted(torch.device("cpu")) as counts:
            _compile()
            assert (counts.compiled, counts.cached) == (1, 0)
            spent = counts.seconds
            assert spent > 0
            _compile()
            assert (counts.compiled, counts.cached, counts.seconds) == (1, 1, spent)
        assert knobs.compilation.listener is other
    finally:
        knobs.compilation.listener = None
    assert others == [False, True], "who listened before is told too"
    assert cache_folder() == str(empty_cache)
    assert any(empty_cache.rglob("*.cubin"))


def test_compilations_are_not_counted_without_a_gpu() -> None:
    with compilations_counted(torch.device("cpu")) as counts:
        assert knobs.compilation.listener is None
    assert (counts.compiled, counts.cached) == (0, 0)
