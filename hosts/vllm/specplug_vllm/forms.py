"""Compares the forms of vLLM's functions and classes with those that were tested.

A place is a module and a name in it: ``"vllm.config:VllmConfig.__post_init__"``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any

from specplug import UsageError
from specplug_vllm.host import TESTED, installed_version


def check_forms(
    functions: Mapping[str, tuple[str, ...]], fields: Mapping[str, tuple[str, ...]]
) -> None:
    """Compare functions' parameters and classes' fields with those of the installed vLLM.

    Raises:
        UsageError: something differs.
    """
    for place, parameters in functions.items():
        found = _find(place)
        function: Any = found.fget if isinstance(found, property) else found
        _compare(place, tuple(inspect.signature(function).parameters), parameters)
    for place, expected in fields.items():
        known = tuple(inspect.signature(_find(place)).parameters)
        _compare(place, tuple(name for name in expected if name in known), expected)


def check_attributes(runner: Any, attributes: Mapping[str, tuple[str, ...]]) -> None:
    """Look for the attributes of a model runner and of its parts.

    Raises:
        UsageError: something is missing.
    """
    for part, names in attributes.items():
        owner = attrgetter(part)(runner) if part else runner
        place = ".".join(filter(None, (type(runner).__name__, part)))
        _compare(place, tuple(name for name in names if hasattr(owner, name)), names)


def _find(place: str) -> Any:
    module, _, path = place.partition(":")
    found: Any = import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name, None)
        if found is None:
            raise _changed(place, f"has no {name}")
    return found


def _compare(place: str, found: tuple[str, ...], expected: tuple[str, ...]) -> None:
    if found != expected:
        raise _changed(place, f"has ({', '.join(found)}), expected ({', '.join(expected)})")


def _changed(place: str, what: str) -> UsageError:
    return UsageError(
        f"vLLM {installed_version()}: {place.rpartition(':')[2]} {what}; specplug-vllm was tested "
        f"with the published {', '.join(TESTED)}; install one of these again"
    )
