"""Tests of Triton kernels run them through Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from triton_interpreter import prepare_interpreter

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        prepare_interpreter()
