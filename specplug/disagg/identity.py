"""The identity of an instance, by which a decode instance accepts a prefill instance or not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from specplug import __version__
from specplug.config import INSTANCES, agreeing
from specplug.errors import InstanceError

_OF_THE_FILE = ("dtype", "torch_dtype", "transformers_version")
"""Keys of a model's configuration that say how it was saved, not what it computes."""

_SAMPLES = 32
_BLOCK = 4096


def _as_tuple(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


class HandshakeError(InstanceError):
    """Two instances cannot work together; the message names both values."""


@attrs.frozen(kw_only=True)
class Identity:
    """An instance, as it introduces itself. All but ``draft`` must be the same on both sides.

    Attributes:
        version: of specplug.
        model: class of the target, a fingerprint of its weights and its configuration.
        dtype: of its KV.
        page_size: tokens per page.
        kv: layers, key/value heads and head size of the target's cache.
        draft: algorithm and the fingerprint of its weights. Where it differs, the target's KV still
            travels, the draft's does not. Its settings may differ: what the one side has fewer of,
            layers of a draft's KV or entries of a state, the other takes as they come.
    """

    version: str = __version__
    model: str
    dtype: str
    page_size: int
    kv: tuple[int, ...] = attrs.field(converter=_as_tuple)
    draft: str

    def misfit(self, other: Identity) -> str | None:
        """Return why this decode instance cannot work with a prefill instance; None if it can."""
        fix = {
            "version": "install the same version of specplug on both sides",
            "model": "start both with the same --model",
            **{
                name: f"start both with the same {about.option}"
                for name, about in agreeing(INSTANCES).items()
            },
            "kv": "start both with the same --model",
        }
        for name, how in fix.items():
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return (
                    f"{name} is {ours!r} at the decode instance and {theirs!r} at the prefill "
                    f"instance; expected the same: {how}"
                )
        return None

    def as_fields(self) -> dict[str, Any]:
        """Return the fields for a message."""
        return attrs.asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Identity:
        """Read the fields of a message.

        Raises:
            HandshakeError: the fields are not those of an identity, as those of another version
                may be.
        """
        if not isinstance(fields, Mapping):
            raise HandshakeError(f"an identity is {fields!r:.60}; expected names and values")
        try:
            return cls(**fields)
        except TypeError as error:
            raise HandshakeError(
                f"version is {__version__!r} at the decode instance and "
                f"{fields.get('version')!r} at the prefill instance, which introduces itself by "
                f"{sorted(fields)}; expected the same: install the same version on both sides"
            ) from error


def model_fingerprint(weights: str, config: Mapping[str, Any]) -> str:
    """Return the class of a model, and a hash of its ``weights_fingerprint`` and configuration."""
    told = {k: v for k, v in config.items() if not k.startswith("_") and k not in _OF_THE_FILE}
    text = weights + json.dumps(told, sort_keys=True, default=str)
    kind = weights.partition(" ")[0]
    return f"{kind} {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def folder_fingerprint(folder: Path | None) -> str:
    """Hash the sizes and some blocks of a folder's weight files; "" for no folder."""
    if folder is None:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(folder.glob("*")):
        if file.suffix in (".safetensors", ".bin", ".json"):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as data:
                for place in range(0, size, max(_BLOCK, size // _SAMPLES)):
                    data.seek(place)
                    digest.update(data.read(_BLOCK))
    return digest.hexdigest()
