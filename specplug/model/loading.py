"""Load the device, the config, the model and the tokenizer that a run's settings name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from specplug.algorithm import DATA_ONLY, AlgorithmInfo, SpecConfig, find_model
from specplug.config import EngineConfig
from specplug.distributed.rank_group import RankGroup
from specplug.errors import CheckpointError, UsageError, shown, warn_fallback
from specplug.model.checkpoint import needs_code, read_config, refuse_code
from specplug.model.target import Target
from specplug.startup import Startup


def silence_libraries() -> None:
    """Turn off the warnings and progress bars of the libraries that load models: errors say what
    matters."""
    for library in ("transformers", "huggingface_hub"):
        import_module(f"{library}.utils.logging").set_verbosity_error()
    import_module("transformers.utils.logging").disable_progress_bar()


def choose_device(device: str | None) -> torch.device:
    """Return the device of that name; None: CUDA if there is one.

    Raises:
        UsageError: there is no such device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device={shown(device)}: expected cpu, cuda or cuda:N") from error
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"device={shown(device)}: expected cpu, cuda or cuda:N")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device={shown(device)}: there is no CUDA device here; use cpu")
    if found.type == "cuda":
        count, index = torch.cuda.device_count(), found.index
        if index is None:  # the thread's, which another thread may have otherwise
            index = torch.cuda.current_device()
        if index >= count:
            raise UsageError(f"device={shown(device)}: expected cuda:0 to cuda:{count - 1} here")
        found = torch.device("cuda", index)
    return found


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype of that name; None is the checkpoint's."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else None
    value: torch.dtype = getattr(torch, dtype)
    return value


def resolve_speculation(
    config: EngineConfig, algorithm: AlgorithmInfo, target_config: Mapping[str, Any]
) -> SpecConfig:
    """Return the speculation settings of a run, over the algorithm's defaults.

    Args:
        target_config: the target's ``config.json``, which the settings will have.

    Raises:
        UsageError: the algorithm cannot run with these settings.
    """
    folder = config.speculative_draft_model_path
    return SpecConfig.resolve(
        algorithm,
        num_steps=config.speculative_num_steps,
        topk=config.speculative_eagle_topk,
        num_draft_tokens=config.speculative_num_draft_tokens,
        draft_model_path=None if folder is None else Path(folder).expanduser(),
        model_name=find_model(config.model),
        target_config=target_config,
        settings=config.speculative_settings,
    )


def load_target(
    config: EngineConfig, device: torch.device, ranks: RankGroup | None, startup: Startup
) -> Target:
    """Load the target of a run to its device; on the CPU set torch's threads, too.

    Raises:
        CheckpointError: there is no such model, it cannot be loaded, or not be run rightly here.
    """
    return Target(
        find_model(config.model),
        choose_dtype(config.dtype, device),
        device,
        ranks,
        identified=config.disaggregation is not None,
        skip_check=config.skip_model_check,
        row_invariant=not config.disable_row_invariance,
        startup=startup,
        num_threads=config.num_threads,
    )


def read_target_config(path: str) -> dict[str, Any]:
    """Read the target's ``config.json``, before any weight so that a misfit is told early.

    Raises:
        CheckpointError: it cannot be read.
    """
    config: dict[str, Any] = read_config(path).get_text_config().to_dict()
    return config


def load_tokenizer(config: EngineConfig) -> Any | None:
    """Load the tokenizer that a run's settings name, or the model's own; None if that has none.

    Raises:
        CheckpointError: the one that is named cannot be loaded.
    """
    from transformers import AutoTokenizer

    named, model = config.tokenizer, find_model(config.model)
    try:
        return AutoTokenizer.from_pretrained(str(named or model), **DATA_ONLY)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if named is not None:
            refuse_code(f"tokenizer {named!r}", error)
            raise CheckpointError(f"tokenizer {named!r} cannot be loaded") from error
        if needs_code(error):
            warn_fallback(
                f"model {model!r}: its tokenizer is code in its repository, which specplug "
                "never runs; prompts and outputs are token ids, or name another tokenizer"
            )
        return None


def backend_of(tokenizer: Any | None) -> Any | None:
    """Return the ``tokenizers.Tokenizer`` within a tokenizer of transformers."""
    return None if tokenizer is None else tokenizer.backend_tokenizer
