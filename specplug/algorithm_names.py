"""Names of algorithms with settings, as users type them: ``A,B:steps=5,topk=4``. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specplug.contract import nearest
from specplug.errors import UsageError

AUTO = "auto"
"""What users type for every installed algorithm that suits the model."""

SETTINGS = {
    "steps": "speculative_num_steps",
    "topk": "speculative_eagle_topk",
    "tokens": "speculative_num_draft_tokens",
    "draft": "speculative_draft_model_path",
}
"""The argument of ``LLM`` for each setting in ``NAME:setting=value``."""


def is_auto(algorithm: object) -> bool:
    """Return whether what the user gave as an algorithm is ``AUTO``."""
    return isinstance(algorithm, str) and algorithm.strip().lower() == AUTO


def split_names(text: str) -> Iterator[tuple[str, list[str]]]:
    """Split a text into names and their settings.

    Args:
        text: names with commas between them; a part with ``=`` and no name is another setting of
            the name before it.

    Raises:
        UsageError: a setting stands before any name.
    """
    name, settings = "", list[str]()
    for part in filter(None, map(str.strip, text.split(","))):
        if re.match(r"\w+\s*=", part):
            if not name:
                raise UsageError(f"{part!r} stands before any algorithm; expected NAME:{part}")
            settings.append(part)
            continue
        if name:
            yield name, settings
        name, _, first = (piece.strip() for piece in part.partition(":"))
        settings = [first] if first else []
    if name:
        yield name, settings


def read_settings(algorithm: str, settings: Sequence[str]) -> Mapping[str, Any]:
    """Return the arguments of ``LLM`` that ``setting=value`` texts stand for.

    Raises:
        UsageError: a setting or its value cannot be used.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        key, _, value = (piece.strip() for piece in setting.partition("="))
        if key not in SETTINGS:
            near = nearest(key, SETTINGS)
            meant = f"did you mean {near}? " if near else ""
            known = ", ".join(f"{known}=…" for known in SETTINGS)
            raise UsageError(f"{algorithm}:{setting}: {meant}expected {known}")
        if key != "draft" and not (re.fullmatch("[0-9]{1,18}", value) and int(value)):
            raise UsageError(f"{algorithm}:{setting}: expected an integer of at least 1")
        if not value:
            raise UsageError(f"{algorithm}:{setting}: expected the folder of draft weights")
        values[SETTINGS[key]] = value if key == "draft" else int(value)
    return values
