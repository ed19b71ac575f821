"""A model's repository is data: no code in it runs, and no prompt asks whether it may."""

from __future__ import annotations

from typing import Any

from specplug.errors import CheckpointError

DATA_ONLY: dict[str, Any] = {"trust_remote_code": False}
"""Arguments of every ``from_pretrained``. Without them transformers asks on standard input."""


def needs_code(error: Exception) -> bool:
    """Whether transformers refuses to load because it would have to run the repository's code."""
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
