"""Messages between instances as frames of bytes: JSON and raw tensors, never pickle."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.errors import SpecplugError
from specplug.speculative.output_kind import DTYPES

MAGIC = b"specplug/1"
"""First frame of every message. Each version of the protocol has its own."""

_GREATEST = 1 << 32
"""The greatest size of an axis. An empty tensor's other sizes are not bounded by its bytes."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}

_MOST_AXES = 8


class WireError(SpecplugError):
    """The frames are not a whole message, or the message is not what was expected.

    Attributes:
        fields: of its header; empty if that could not be read.
    """

    def __init__(self, what: str, fields: Mapping[str, Any] | None = None) -> None:
        super().__init__(what)
        self.fields = dict(fields or {})


@attrs.define(eq=False)
class WireMessage:
    """One message.

    Attributes:
        kind: what it says; ``PrefillInstance`` and ``DecodeInstance`` list the kinds.
        fields: values that JSON can express.
        tensors: by name, on the CPU.
    """

    kind: str
    fields: dict[str, Any] = attrs.field(factory=dict)
    tensors: dict[str, Tensor] = attrs.field(factory=dict)


def encode(message: WireMessage) -> list[bytes | memoryview]:
    """Return the frames of a message: magic, header, then each tensor's bytes, not copied."""
    tensors = {name: tensor.contiguous() for name, tensor in message.tensors.items()}
    header = {
        "kind": message.kind,
        "fields": message.fields,
        "tensors": [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in tensors.items()
        ],
    }
    return [MAGIC, json.dumps(header).encode(), *map(_as_bytes, tensors.values())]


def decode(frames: Sequence[bytes | memoryview]) -> WireMessage:
    """Return the message of these frames.

    Raises:
        WireError: they are not a whole message.
    """
    if not frames or bytes(frames[0]) != MAGIC:
        first = bytes(frames[0][:20]) if frames else b""
        raise WireError(f"a message begins with {first!r}; expected {MAGIC!r}")
    try:
        header = json.loads(bytes(frames[1]))
        kind, fields, forms = header["kind"], header["fields"], header["tensors"]
        named = [(str(name), _DTYPES[dtype], _shape(shape)) for name, dtype, shape in forms]
    except (IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"a message's header cannot be read: {error!r}") from error
    if not isinstance(kind, str) or not isinstance(fields, dict):
        raise WireError(f"a message's header has kind {kind!r:.40} and no fields")
    if len(frames) != len(named) + 2:
        raise WireError(
            f"a {kind!r} message has {len(frames) - 2} tensors; its header says {len(named)}",
            fields,
        )
    tensors = {}
    for (name, dtype, shape), frame in zip(named, frames[2:], strict=True):
        size = math.prod(shape) * dtype.itemsize
        if len(frame) != size:
            raise WireError(
                f"tensor {name!r} of a {kind!r} message has {len(frame)} bytes; its header says "
                f"{size}: it was cut short, or is not what it says",
                fields,
            )
        data = bytearray(frame)
        flat = torch.frombuffer(data, dtype=dtype) if size else torch.empty(0, dtype=dtype)
        try:
            tensors[name] = flat.view(shape)
        except RuntimeError as error:  # an empty one whose strides are too large
            raise WireError(f"tensor {name!r} has the shape {shape}: {error}", fields) from error
    return WireMessage(kind, fields, tensors)


def _as_bytes(tensor: Tensor) -> memoryview | bytes:
    if not tensor.numel():
        return b""
    flat: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _shape(shape: Any) -> tuple[int, ...]:
    sound = all(type(size) is int and 0 <= size <= _GREATEST for size in shape)
    if not sound or len(shape) > _MOST_AXES:
        raise ValueError(f"shape {shape!r:.60}")
    return tuple(shape)
