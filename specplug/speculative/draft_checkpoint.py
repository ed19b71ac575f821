"""Reading a draft checkpoint, and saying what is wrong with it tensor by tensor."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from specplug.errors import CheckpointError

_UNREADABLE = (RuntimeError, EOFError, OSError, ValueError, UnpicklingError, AttributeError)
"""What reading a damaged file, or one that holds something else, raises."""


@attrs.frozen(eq=False)
class Checkpoint:
    """A draft model's folder: its ``config.json`` and its tensors, by the names they have there."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: Path, *, keep: Callable[[str], bool] = lambda name: True) -> Checkpoint:
        """Read a folder's ``config.json`` and all its tensors, on the CPU: of ``*.safetensors``, or
        of ``pytorch_model*.bin`` if there are none. The tensors are the mapped files, not copies.

        Args:
            keep: which tensors are wanted, by name. The others of a safetensors file are not read,
                so a draft inside its target's checkpoint costs no more than its own size.

        Raises:
            CheckpointError: the folder, its config or its weights are missing or unreadable.
        """
        return cls(path, cls.read_config(path), _read_tensors(path, keep))

    @staticmethod
    def read_config(path: Path) -> Mapping[str, Any]:
        """Read ``config.json`` of a folder, and nothing else of it.

        Raises:
            CheckpointError: the folder or its config is missing or unreadable.
        """
        if not path.is_dir():
            raise CheckpointError(
                f"draft model {path}: no such folder; expected one with config.json and weights"
            )
        config_file = path / "config.json"
        if not config_file.is_file():
            raise CheckpointError(f"draft model {path}: it has no config.json")
        try:
            config = json.loads(config_file.read_text())
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{config_file}: not JSON ({error})") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{config_file}: expected a JSON object")
        return config

    def require(self, key: str) -> Any:
        """Return a key of ``config.json``.

        Raises:
            CheckpointError: it is absent.
        """
        if self.config.get(key) is None:
            raise CheckpointError(f"{self.path / 'config.json'}: {key!r} is missing")
        return self.config[key]

    def check_target(self, **sizes: tuple[int, int]) -> None:
        """Refuse a draft that was made for another target.

        Args:
            sizes: what is compared (``hidden_size``, …) -> the draft's size and the target's.

        Raises:
            CheckpointError: two of them differ.
        """
        for name, (mine, target) in sizes.items():
            if mine != target:
                raise CheckpointError(
                    f"draft model {self.path} does not fit the target: it was made for a "
                    f"{name.replace('_', ' ')} of {mine}, the target's is {target}; use the draft "
                    "model of this target"
                )

    def check_plain_layers(self) -> None:
        """Refuse what ``specplug.layers`` does not compute, since it would draft nonsense.

        Raises:
            CheckpointError: another activation than SiLU, rotary embedding of a part of each head,
                or layers that ``layer_types`` calls sliding. ``sliding_window`` alone means nothing
                to the published code, which copies it from the target.
        """
        keys = self.config
        window = "sliding_attention" in (keys.get("layer_types") or ())
        for what, value, expected in (
            ("hidden_act", keys.get("hidden_act"), (None, "silu")),
            ("partial_rotary_factor", keys.get("partial_rotary_factor"), (None, 1)),
            ("sliding_attention in layer_types", window, (False,)),
        ):
            if value not in expected:
                raise CheckpointError(
                    f"draft model {self.path}: {what} {value!r} is not supported; "
                    f"expected {expected[-1]!r}"
                )

    def target_ids(self, d2t: Tensor, vocab_size: int) -> Tensor:
        """Return the draft vocabulary in the target's ids, [V_draft] int64: ``d2t`` holds the
        offsets.

        Raises:
            CheckpointError: an id is outside the target's vocabulary, or two are the same.
        """
        ids = torch.arange(len(d2t), device=d2t.device) + d2t
        if bool((ids < 0).any() | (ids >= vocab_size).any()):
            raise CheckpointError(
                f"draft model {self.path}: d2t points outside the vocabulary of "
                f"{vocab_size} tokens; expected offsets, target id = draft id + d2t"
            )
        if len(set(ids.tolist())) != len(ids):
            raise CheckpointError(
                f"draft model {self.path}: d2t gives two draft tokens the same target id; "
                "expected offsets, target id = draft id + d2t"
            )
        return ids

    def load_into(
        self,
        module: nn.Module,
        *,
        rename: Callable[[str], str | None] = lambda name: name,
        optional: frozenset[str] = frozenset(),
    ) -> None:
        """Copy the tensors into ``module``, by name.

        Args:
            rename: a tensor's name in the file -> its name in the module; None: not needed.
            optional: names of the module that the file may lack.

        Raises:
            CheckpointError: tensors are missing, unexpected, or of another shape; all are named.
        """
        wanted = module.state_dict()
        renamed = [(rename(name), tensor) for name, tensor in self.tensors.items()]
        found = {name: tensor for name, tensor in renamed if name is not None}
        counts = Counter(name for name, _ in renamed if name is not None)
        problems = [f"{n} is there {count} times" for n, count in counts.items() if count > 1]
        problems += [
            f"missing {n} {list(wanted[n].shape)}" for n in wanted.keys() - found.keys() - optional
        ]
        problems += [f"unexpected {n} {list(found[n].shape)}" for n in found.keys() - wanted.keys()]
        problems += [
            f"{n} is {list(found[n].shape)}, expected {list(wanted[n].shape)}"
            for n in found.keys() & wanted.keys()
            if found[n].shape != wanted[n].shape
        ]
        if problems:
            raise CheckpointError(
                f"draft model {self.path} does not fit: " + "; ".join(sorted(problems))
            )
        module.load_state_dict(found, strict=False)


def _read_tensors(path: Path, keep: Callable[[str], bool]) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    files = sorted(path.glob("*.safetensors"))
    pickles = sorted(path.glob("pytorch_model*.bin"))
    if not files and not pickles:
        raise CheckpointError(
            f"draft model {path}: it has no *.safetensors and no pytorch_model*.bin"
        )
    try:
        for file in files:
            with safe_open(file, framework="pt") as stored:
                tensors.update({n: stored.get_tensor(n) for n in stored.keys() if keep(n)})  # noqa: SIM118
        for file in pickles if not files else ():
            pickled = torch.load(
                file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
            )
            tensors.update({n: tensor for n, tensor in pickled.items() if keep(n)})
    except (SafetensorError, *_UNREADABLE) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    return tensors
