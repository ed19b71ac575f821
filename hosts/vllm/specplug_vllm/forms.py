"""The form in which we write down what we use of vLLM, and compare it with what is installed.

A place is a module and a name in it: ``"vllm.config:VllmConfig.__post_init__"``. Parameters and
fields are names with commas between them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any

import attrs

from specplug import UsageError
from specplug_vllm.versions import TESTED, installed_version


@attrs.frozen
class Written:
    """An attribute of a model runner that we set.

    Attributes:
        why: why we must set it.
        upstream: the change to vLLM that would end it.
        section: heading of docs/hosts.md with the code of that change.
    """

    why: str
    upstream: str
    section: str


@attrs.frozen(kw_only=True)
class Names:
    """What we use of vLLM besides its public interface, as it was tested.

    Attributes:
        functions: that are called or implemented: the parameters of each, by place.
        fields: that are read or given: those of each class, by place.
        runner: attributes that are read of a model runner and of its parts, by part; "": itself.
        written: attributes of a model runner that are set, by name.
        of_version: more of them, which one version of vLLM has alone.
    """

    functions: Mapping[str, str] = attrs.field(factory=dict)
    fields: Mapping[str, str] = attrs.field(factory=dict)
    runner: Mapping[str, str] = attrs.field(factory=dict)
    written: Mapping[str, Written] = attrs.field(factory=dict)
    of_version: Mapping[str, Names] = attrs.field(factory=dict)

    def check(self) -> None:
        """Compare functions and fields with those of the vLLM that is installed.

        Raises:
            UsageError: something differs.
        """
        for place, parameters in self.functions.items():
            check_function(place, parameters)
        for place, fields in self.fields.items():
            known = _parameters(place)
            _compare(place, [name for name in _split(fields) if name in known], fields)
        found = self.of_version.get(installed_version() or "")
        if found is not None:
            found.check()

    def check_runner(self, runner: Any) -> None:
        """Look for the attributes of a model runner.

        Raises:
            UsageError: something is missing.
        """
        parts = dict(self.runner)
        if self.written:
            parts[""] = ", ".join([*_split(parts.get("", "")), *self.written])
        for part, names in parts.items():
            owner = attrgetter(part)(runner) if part else runner
            place = ".".join(filter(None, (type(runner).__name__, part)))
            _compare(place, [name for name in _split(names) if hasattr(owner, name)], names)
        found = self.of_version.get(installed_version() or "")
        if found is not None:
            found.check_runner(runner)

    def write(self, runner: Any, name: str, value: Any) -> None:
        """Set an attribute of a model runner, one of ``written``."""
        assert name in self.written
        setattr(runner, name, value)


def check_function(place: str, parameters: str) -> None:
    """Compare a function's or a property's parameters with those of the installed vLLM.

    Raises:
        UsageError: they differ.
    """
    _compare(place, _parameters(place), parameters)


def find(place: str) -> tuple[Any, str, Any]:
    """Return the module or class that has a place, its name there, and what it is.

    Raises:
        UsageError: there is none.
    """
    module, _, path = place.partition(":")
    found: Any = import_module(module)
    name = ""
    owner = found
    for name in path.split("."):
        owner, found = found, inspect.getattr_static(found, name, None)
        if found is None:
            raise _changed(place, f"has no {name}")
    return owner, name, found


def _parameters(place: str) -> list[str]:
    _, _, found = find(place)
    function: Any = found.fget if isinstance(found, property) else found
    return list(inspect.signature(function).parameters)


def _split(names: str) -> list[str]:
    return names.split(", ") if names else []


def _compare(place: str, found: Iterable[str], expected: str) -> None:
    if (joined := ", ".join(found)) != expected:
        raise _changed(place, f"has ({joined}), expected ({expected})")


def _changed(place: str, what: str) -> UsageError:
    return UsageError(
        f"vLLM {installed_version()}: {place.rpartition(':')[2]} {what}; specplug-vllm was tested "
        f"with the published {', '.join(TESTED)}; install one of these again"
    )
