"""What is checked: an algorithm under settings, with what its author declares. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
from attrs.validators import ge, instance_of

from specplug.algorithm import find_model, shipped_name
from specplug.errors import SpecplugError, UsageError
from specplug.registry import Registry, SelectedAlgorithm


def _known_checks(_: Any, __: Any, value: Mapping[str, str]) -> None:
    for name, reason in value.items():
        if not isinstance(reason, str) or not reason.strip():
            raise UsageError(
                f"expected_failures[{name!r}]={reason!r}: expected the reason why it fails, a text"
            )


@attrs.frozen(kw_only=True)
class Subject:
    """An algorithm that is checked.

    Attributes:
        algorithm: its name as users type it, or a plugin object.
        model: the target; None: the default model.
        settings: of ``LLM``, for each run: the draft weights, the shape of drafts, and so on. They
            go over those that the plugin declares (``AlgorithmInfo.conformance``).
        accept_length: tokens a verification that it is known to reach, on the kit's prompts; None:
            what the plugin declares (``AlgorithmInfo.conformance``), if neither weights nor the
            shape of drafts are other ones.
        reference: another algorithm, a name or a plugin object, whose drafts are known to be as
            good as published; it is measured beside this one, with the same settings. None: what
            the plugin declares (``AlgorithmInfo.conformance``).
        seed: chooses texts, budgets and the seeds of sampled requests. 0: the texts of which accept
            lengths are declared.
        host: another engine in which the algorithm runs, by the name of a ``HostPlugin``; None: the
            embedded one. Checks that look into the embedded engine do not apply there.
        host_arguments: of that engine's command line.
        quick: few texts and short outputs, in all configurations, and no measurements: a suite of
            tests that runs often. It earns no grade.
        expected_failures: by the id of a check, why it fails. One that passes all the same is a
            failure: what is declared must be true. They go over those that the plugin declares
            (``AlgorithmInfo.conformance``).
    """

    algorithm: str | object
    model: str | Path | None = None
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    accept_length: float | None = None
    reference: str | object | None = None
    seed: int = attrs.field(default=0, validator=[instance_of(int), ge(0)])
    quick: bool = False
    host: str | None = None
    host_arguments: Sequence[str] = ()
    expected_failures: Mapping[str, str] = attrs.field(factory=dict, validator=_known_checks)

    @property
    def known_failures(self) -> dict[str, str]:
        """Why checks are known to fail, by their ids: what the plugin declares, and what is given
        here. Of a plugin that is broken, the latter alone."""
        try:
            declared = self.selected.info.conformance.expected_failures
        except SpecplugError:
            declared = {}
        return {**declared, **self.expected_failures}

    @property
    def declared_accept_length(self) -> float | None:
        """Tokens a verification that are expected of it; None: nothing is known."""
        if self.accept_length is not None:
            return self.accept_length
        if any(name.startswith("speculative_") for name in self.settings):
            return None
        published = self.selected.info.conformance.accept_lengths
        return published.get(shipped_name(find_model(self.model)))

    @property
    def measured_reference(self) -> str | object | None:
        """What is measured beside it: what is given, else what the plugin declares; None: nothing.

        Raises:
            UsageError: the plugin declares an object that cannot be imported.
        """
        declared = self.selected.info.conformance.reference
        if self.reference is not None or declared is None or ":" not in declared:
            return declared if self.reference is None else self.reference
        module, _, name = declared.partition(":")
        try:
            found: object = getattr(import_module(module), name)
            return found
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"Conformance(reference={declared!r}): {error}; expected an installed algorithm's "
                'name, or "module:object", a plugin object that can be imported'
            ) from error

    @property
    def selected(self) -> SelectedAlgorithm:
        """What its plugin declares.

        Raises:
            UnknownAlgorithm: none of that name is installed.
            PluginError: it is broken.
        """
        return Registry().select(self.algorithm)
