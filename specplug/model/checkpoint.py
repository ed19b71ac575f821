"""Load a target's checkpoint; refuse one that is damaged or incomplete.

A model's repository is data: no code in it runs, and no prompt asks whether it may.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from specplug.algorithm import DATA_ONLY
from specplug.errors import CheckpointError, first_line, warn_fallback
from specplug.model.attention import IMPLEMENTATION, register
from specplug.model.quantization import prepare_quantization, settle_dtype, stored_tensors

CPU = torch.device("cpu")

_KINDS = {"full_attention", "sliding_attention"}
_SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"
"""The variable with which transformers reads without threads."""
_NAMED = 5
"""The most tensors that a message names."""
_SAMPLES = 32
"""Values of each parameter that a fingerprint hashes."""
_LOADING = threading.RLock()
"""Held while a model is loaded. Meanwhile transformers changes what is the whole process's: how
weights are tied and initialized, the default dtype, its logging."""


@contextmanager
def weights_progress(report: Callable[[int, int], None]) -> Iterator[None]:
    """Call ``report`` while weights are loaded, with how many tensors are there and of how many."""
    logging: Any = import_module("transformers.utils.logging")

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if named.get("desc") == "Loading weights":
            return _reported(args[0], report)
        return factory(*args, **named)

    with _LOADING:
        before = logging.set_tqdm_hook(hook)
        try:
            yield
        finally:
            logging.set_tqdm_hook(before)


def _reported(tensors: Collection[Any], report: Callable[[int, int], None]) -> Iterator[Any]:
    for count, tensor in enumerate(tensors):
        report(count, len(tensors))
        yield tensor
    report(len(tensors), len(tensors))


def load_checkpoint(path: str, dtype: torch.dtype | None, device: torch.device = CPU) -> Any:
    """Load a causal LM of transformers from a folder or hub id, with our attention.

    Each tensor goes from its file to the device by itself. On the CPU a weight that has the file's
    dtype is the mapped file, without a copy.

    Args:
        path: of the model.
        dtype: of its weights; None: what its config says, or its files if that says nothing.
        device: of its weights.

    Raises:
        CheckpointError: there is no such model; transformers cannot load it; its files are damaged;
            tensors are missing or have another shape than its config says; its class has attention
            that cannot be replaced; or it is quantized in a way that cannot be loaded here.
    """
    from transformers import AutoModelForCausalLM

    register()
    config = read_config(path)
    _check_attention(path, config)
    quantized = prepare_quantization(path, config)
    for file in _weight_files(Path(path)):
        _check_file(path, file)
    with _refusing(path, quantized), _LOADING, _no_progress_bars(), _reading_for(device):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype or "auto",
            device_map=None if device.type == "cpu" else {"": device},
            attn_implementation=IMPLEMENTATION,
            weights_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # ``_check_tensors`` refuses them
            **DATA_ONLY,
        )
        model, info = loaded
        _check_tensors(path, model, info)
        if quantized is not None:
            settle_dtype(model, dtype or model.config.get_text_config().dtype)
    return model


@contextmanager
def _refusing(path: str, quantized: str | None) -> Iterator[None]:
    """Turn what is raised while a model is loaded into a ``CheckpointError``, if the model is the
    cause.

    Args:
        quantized: by what it is quantized; None: it is not.
    """
    try:
        yield
    except UnpicklingError as error:
        raise CheckpointError(
            f"model {path!r} cannot be loaded: its weights are a pickle with more than tensors in "
            "it; expected *.safetensors, or a pickle of tensors alone"
        ) from error
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        refuse_code(f"model {path!r}", error)
        raise CheckpointError(f"model {path!r} cannot be loaded: {first_line(error)}") from error
    except CheckpointError:
        raise
    except Exception as error:
        if quantized is None or isinstance(error, torch.OutOfMemoryError):
            raise
        # Other libraries run here, and raise what they like.
        raise CheckpointError(
            f"model {path!r} is quantized by {quantized} and cannot be loaded: {first_line(error)}"
        ) from error


def needs_code(error: Exception) -> bool:
    """Return whether transformers refuses to load because it would have to run the repository's
    code."""
    return isinstance(error, ValueError) and "custom code" in str(error)


def refuse_code(what: str, error: Exception) -> None:
    """Raise if ``error`` says that ``what`` needs code of its repository.

    Raises:
        CheckpointError: it does.
    """
    if needs_code(error):
        raise CheckpointError(
            f"{what} is code in its repository, which specplug never runs; expected an "
            "architecture that transformers has: choose another model"
        ) from error


@torch.inference_mode()
def weights_fingerprint(model: nn.Module) -> str:
    """Return a model's class and a hash of its weights' names, shapes and some of their values.

    Call it before the engine shards or changes the model, which depends on the run.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(stored_tensors(model)):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        size = tensor.numel()
        places = torch.arange(0, size, max(1, size // _SAMPLES), device=tensor.device)
        values = tensor.flatten()[places].to("cpu", torch.float64)
        digest.update(values.numpy().tobytes())
    return f"{type(model).__name__} {digest.hexdigest()}"


def check_model_path(path: str) -> None:
    """Refuse a path that is not the folder of a model.

    Raises:
        CheckpointError: it looks like a path and there is no such folder, or no ``config.json``.
    """
    folder = Path(path)
    if os.path.isdir(folder):  # False, too, for what cannot be a path
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"model {path!r}: the folder has no config.json")
    elif path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise CheckpointError(
            f"model {path!r}: no such folder; expected the folder of a transformers checkpoint, "
            "a hub id (organisation/name), or nothing for the default model"
        )


def read_config(path: str) -> Any:
    """Read a model's ``config.json`` as transformers' configuration.

    Raises:
        CheckpointError: there is no such model, or its config cannot be read.
    """
    from transformers import AutoConfig

    check_model_path(path)
    try:
        config = AutoConfig.from_pretrained(path, **DATA_ONLY)
        config.get_text_config()  # raises if there are several
        return config
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        refuse_code(f"model {path!r}: its config", error)
        raise CheckpointError(
            f"model {path!r}: its config cannot be read: {first_line(error)}"
        ) from error


def _check_attention(path: str, config: Any) -> None:
    """Refuse a class whose attention cannot be replaced by ours."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    cls = found[0] if isinstance(found, tuple) else found
    if cls is None:
        return  # transformers says what it is when it loads it
    strange = sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - _KINDS)
    if strange or not cls._supports_attention_backend:
        what = ", ".join(strange) or "attention of its own"
        raise CheckpointError(
            f"model {path!r} ({cls.__name__}) has {what}; expected full or sliding-window "
            "attention through transformers' AttentionInterface: choose another model"
        )


def _weight_files(folder: Path) -> Iterator[Path]:
    """Yield the safetensors files that transformers will read; none for a hub id."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        yield folder / "model.safetensors"
    elif index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{index}: expected JSON with a weight_map of tensors: {first_line(error)}"
            ) from error
        yield from (folder / name for name in sorted(names))


def _check_file(path: str, file: Path) -> None:
    """Check that a file's header is complete and that the file has the length it gives."""
    if not file.is_file():
        raise CheckpointError(
            f"model {path!r}: {file.name} is not there, and model.safetensors.index.json names it; "
            "fetch the checkpoint again"
        )
    try:
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise CheckpointError(
            f"model {path!r}: {file.name} ({file.stat().st_size} bytes) is truncated or damaged: "
            f"{first_line(error)}; fetch the checkpoint again"
        ) from error


def _check_tensors(path: str, model: Any, info: Mapping[str, Any]) -> None:
    """Refuse a model with random weights for missing tensors, or with layers left out."""
    if info["mismatched_keys"]:
        shapes = (
            f"{name} {list(found)} instead of {list(expected)}"
            for name, found, expected in sorted(info["mismatched_keys"])
        )
        raise CheckpointError(
            f"model {path!r}: tensors of another shape than config.json says: {_some(shapes)}; "
            "expected the config that belongs to the weights"
        )
    if info["missing_keys"]:
        raise CheckpointError(
            f"model {path!r}: tensors are missing: {_some(sorted(info['missing_keys']))}; expected "
            "all weights of the config's model: fetch the checkpoint again, or look at "
            "num_hidden_layers"
        )
    unexpected = sorted(info["unexpected_keys"])
    dropped = [name for name in unexpected if _is_of_a_layer_too_many(name, model)]
    if dropped:
        raise CheckpointError(
            f"model {path!r}: the checkpoint has more layers than config.json says: "
            f"{_some(dropped)}; expected as many: look at num_hidden_layers"
        )
    if unexpected:
        warn_fallback(
            f"model {path!r}: the checkpoint has tensors that {type(model).__name__} does not "
            f"use: {_some(unexpected)}"
        )


def _is_of_a_layer_too_many(name: str, model: Any) -> bool:
    """Return whether a tensor is of a layer after the last; MTP layers (as DeepSeek's) do not
    count."""
    config = model.config.get_text_config()
    found = re.search(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.", name)
    drafting = getattr(config, "num_nextn_predict_layers", None) or 0
    return found is not None and int(found[1]) >= config.num_hidden_layers + drafting


def _some(names: Iterable[str]) -> str:
    """Join the first names, and say how many more there are."""
    named = list(names)
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return ", ".join(named[:_NAMED]) + more


@contextmanager
def _reading_for(device: torch.device) -> Iterator[None]:
    """Have transformers read one weight after the other on the CPU.

    Its threads would convert tensors far ahead of the one that puts them together: a mixture of
    experts took 1.8 times its own size, and 1.1 times without them.
    """
    given = os.environ.get(_SYNCHRONOUS)
    if device.type == "cpu" and given is None:
        os.environ[_SYNCHRONOUS] = "1"
    try:
        yield
    finally:
        if given is None:
            os.environ.pop(_SYNCHRONOUS, None)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
