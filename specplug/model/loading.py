"""What a run's settings name: the device, the model's folder, its config, its tokenizer."""

from __future__ import annotations

import ctypes
import os
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from specplug.algorithm import DEFAULT_MODEL
from specplug.errors import FallbackWarning, UsageError
from specplug.model.checkpoint import DATA_ONLY, check_model_path, needs_code, refuse_code
from specplug.model.model_runner import ModelRunner

ASSETS = Path(__file__).parent.parent / "assets"
_SMALL_MODEL = 50_000_000


def silence_libraries() -> None:
    """No warnings or progress bars of the libraries that load models: errors say what matters."""
    for library in ("transformers", "huggingface_hub"):
        import_module(f"{library}.utils.logging").set_verbosity_error()
    import_module("transformers.utils.logging").disable_progress_bar()


def choose_device(device: str | None) -> torch.device:
    """The device of that name; None: CUDA if there is one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device={device!r}: expected cpu, cuda or cuda:N") from error
    if where.type not in ("cpu", "cuda"):
        raise UsageError(f"device={device!r}: expected cpu, cuda or cuda:N")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device={device!r}: there is no CUDA device here; use cpu")
    return where


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype | None:
    """The dtype of that name; None is the checkpoint's."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else None
    names = ("float32", "bfloat16", "float16", "float64")
    if dtype not in names:
        raise UsageError(f"dtype={dtype!r}: expected auto, {', '.join(names)}")
    value: torch.dtype = getattr(torch, dtype)
    return value


def set_threads(num_threads: int | None, num_parameters: int) -> None:
    """Set torch's threads: one for a small model unless told otherwise."""
    if num_threads is None and num_parameters < _SMALL_MODEL:
        num_threads = 1
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def optional_path(path: str | Path | None) -> Path | None:
    """A path with ``~`` resolved."""
    return None if path is None else Path(path).expanduser()


def find_model(model: str | Path | None) -> str:
    """Folder or hub id; the default model's folder by its name, or None."""
    if model is None or str(model) == DEFAULT_MODEL:
        return str(ASSETS / "tiny_code")
    return str(model)


def read_target_config(path: str) -> dict[str, Any]:
    """The target's ``config.json``, read before any weight so that a misfit is told early."""
    from transformers import AutoConfig

    from specplug.errors import CheckpointError

    check_model_path(path)
    try:
        found = AutoConfig.from_pretrained(path, **DATA_ONLY)
        config: dict[str, Any] = found.get_text_config().to_dict()
    except (OSError, ValueError, KeyError) as error:
        refuse_code(f"model {path!r}: its config", error)
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"model {path!r}: its config cannot be read: {first}") from error
    return config


def load_tokenizer(tokenizer: str | Path | None, model_path: str) -> Any | None:
    """The tokenizer that is named, or the model's own; None if that has none."""
    from transformers import AutoTokenizer

    from specplug.errors import CheckpointError

    try:
        return AutoTokenizer.from_pretrained(str(tokenizer or model_path), **DATA_ONLY)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if tokenizer is not None:
            refuse_code(f"tokenizer {str(tokenizer)!r}", error)
            raise CheckpointError(f"tokenizer {str(tokenizer)!r} cannot be loaded") from error
        if needs_code(error):
            warnings.warn(
                f"model {model_path!r}: its tokenizer is code in its repository, which specplug "
                "never runs; prompts and outputs are token ids, or name another tokenizer",
                FallbackWarning,
                stacklevel=4,
            )
        return None


def backend_of(tokenizer: Any | None) -> Any | None:
    """The ``tokenizers.Tokenizer`` within a tokenizer of transformers."""
    return None if tokenizer is None else tokenizer.backend_tokenizer


def read_eos_token_ids(runner: ModelRunner) -> frozenset[int]:
    """Tokens that end an output, as the model's configuration says."""
    generation = getattr(runner.model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(runner.config, "eos_token_id", None)
    return frozenset() if found is None else frozenset([found] if isinstance(found, int) else found)


def trim_heap() -> None:
    """Have the C library give back what is free: it keeps some 64 MB of the weights that went
    through its heap. Libraries other than glibc have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
