"""A fingerprint of a model's weights, by which instances compare their targets."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

_SAMPLES = 32


@torch.inference_mode()
def weights_fingerprint(model: nn.Module) -> str:
    """Return a model's class and a hash of its parameters' names, shapes and some of their values.

    Call it before the engine shards or changes the model, which depends on the run.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        size = parameter.numel()
        places = torch.arange(0, size, max(1, size // _SAMPLES), device=parameter.device)
        values = torch.take(parameter, places).to("cpu", torch.float64)
        digest.update(values.numpy().tobytes())
    return f"{type(model).__name__} {digest.hexdigest()}"
