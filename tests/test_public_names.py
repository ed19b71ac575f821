"""Every public name says what it is."""

from __future__ import annotations

import inspect
import re

import pytest

import specplug

VALUES = {
    "API_VERSION",
    "DATA_ONLY",
    "DEFAULT_MODEL",
    "DEFAULT_MODEL_PATH",
    "HELD_OUT_PROMPTS",
    "__version__",
    "hookimpl",
}
"""Neither classes nor functions nor modules: their docstrings are comments to Python."""


@pytest.mark.parametrize("name", sorted(set(specplug.__all__) - VALUES))
def test_public_name_begins_with_a_sentence(name: str) -> None:
    value = getattr(specplug, name)
    # A class shows its base's docstring if it has none.
    own = vars(value)["__doc__"] if inspect.isclass(value) else value.__doc__
    first = inspect.cleandoc(own or "").partition("\n")[0]
    assert re.fullmatch(r"\S.{10,}[.]", first), f"{name}: {first!r}"
    assert not first.startswith("See "), f"{name} only gestures: {first!r}"
