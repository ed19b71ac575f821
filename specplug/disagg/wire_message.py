"""Messages between instances as frames of bytes: JSON and raw tensors, never pickle."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.errors import SpecplugError
from specplug.speculative.output_kind import DTYPES

MAGIC = b"specplug/1"
"""First frame of every message. Each version of the protocol has its own."""

MOST_FRAME_BYTES = 4 << 20
"""The size of the largest frame. What is longer takes several, so that a connection can refuse
every larger one."""

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
    """Return the frames of a message: magic, header, then each tensor's bytes, not copied.

    The header and each tensor take as many frames as they need. The last frame of a header, and no
    other of it, is shorter than ``MOST_FRAME_BYTES``.
    """
    tensors = {name: tensor.contiguous() for name, tensor in message.tensors.items()}
    header = {
        "kind": message.kind,
        "fields": message.fields,
        "tensors": [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in tensors.items()
        ],
    }
    told = json.dumps(header).encode()
    frames: list[bytes | memoryview] = [MAGIC, *_cut(told)]
    if len(told) % MOST_FRAME_BYTES == 0:
        frames.append(b"")
    for tensor in tensors.values():
        frames += _cut(_as_bytes(tensor))
    return frames


def decode(frames: Sequence[bytes | memoryview]) -> WireMessage:
    """Return the message of these frames.

    Raises:
        WireError: they are not a whole message.
    """
    if not frames or bytes(frames[0]) != MAGIC:
        first = bytes(frames[0][:20]) if frames else b""
        raise WireError(f"a message begins with {first!r}; expected {MAGIC!r}")
    rest = iter(frames[1:])
    try:
        header = json.loads(b"".join(_header_frames(rest)))
        kind, fields, tensors = header["kind"], header["fields"], header["tensors"]
        named = [(str(name), _DTYPES[dtype], _shape(shape)) for name, dtype, shape in tensors]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"a message's header cannot be read: {error!r}") from error
    if not isinstance(kind, str) or not isinstance(fields, dict):
        raise WireError(f"a message's header has kind {kind!r:.40} and no fields")
    found, sizes = list(rest), [math.prod(shape) * dtype.itemsize for _, dtype, shape in named]
    counts = [_num_frames(size) for size in sizes]
    if len(found) != sum(counts):
        raise WireError(
            f"a {kind!r} message has {len(found)} frames of tensors; its header says {sum(counts)}",
            fields,
        )
    parts = iter(found)
    read: dict[str, Tensor] = {}
    for (name, dtype, shape), size, count in zip(named, sizes, counts, strict=True):
        data = bytearray().join(islice(parts, count))
        if len(data) != size:
            raise WireError(
                f"tensor {name!r} of a {kind!r} message has {len(data)} bytes; its header says "
                f"{size}: it was cut short, or is not what it says",
                fields,
            )
        flat = torch.frombuffer(data, dtype=dtype) if size else torch.empty(0, dtype=dtype)
        try:
            read[name] = flat.view(shape)
        except RuntimeError as error:  # an empty one whose strides are too large
            raise WireError(f"tensor {name!r} has the shape {shape}: {error}", fields) from error
    return WireMessage(kind, fields, read)


def _num_frames(size: int) -> int:
    return max(1, -(-size // MOST_FRAME_BYTES))


def _cut(data: bytes | memoryview) -> Iterator[bytes | memoryview]:
    """Yield the frames of some bytes; one, if there are none."""
    for number in range(_num_frames(len(data))):
        yield data[number * MOST_FRAME_BYTES : (number + 1) * MOST_FRAME_BYTES]


def _header_frames(frames: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield frames up to the first that is shorter than ``MOST_FRAME_BYTES``."""
    for frame in frames:
        yield frame
        if len(frame) < MOST_FRAME_BYTES:
            return


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
