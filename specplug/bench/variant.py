"""A variant: an algorithm under speculation settings. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from specplug.algorithm_names import AUTO, SETTINGS, is_auto, read_settings, split_names
from specplug.errors import UsageError

BASELINE = "NONE"
EVERY = "all"


@attrs.frozen
class Variant:
    """An algorithm under settings of its own.

    Attributes:
        algorithm: its name, or several, as ``LLM`` takes them.
        own: the speculation settings in its label, as arguments of ``LLM``.
        named: whether the user typed its name, so that it must not be skipped.
        arguments: of ``LLM``: ``own``, and the speculation settings typed for all variants.
    """

    algorithm: str
    own: Mapping[str, Any] = attrs.field(factory=dict)
    named: bool = attrs.field(default=False, eq=False)
    arguments: Mapping[str, Any] = attrs.field(factory=dict, eq=False)

    @property
    def label(self) -> str:
        """The label as the user types it; unique among the variants."""
        own = [f"{key}={self.own[name]}" for key, name in SETTINGS.items() if name in self.own]
        name = f"[{self.algorithm}]" if "," in self.algorithm else self.algorithm
        return ":".join(filter(None, (name, ",".join(own))))

    def with_common(self, common: Mapping[str, Any]) -> Variant:
        """Return this variant with the settings typed for all, where it has none of its own."""
        settings = {} if self.is_baseline else {**common, **self.own}
        return attrs.evolve(self, arguments=settings)

    @property
    def is_several(self) -> bool:
        """Whether several algorithms draft in its run."""
        return "," in self.algorithm or is_auto(self.algorithm)

    @property
    def is_baseline(self) -> bool:
        """Whether the others are compared with this one."""
        return self.algorithm == BASELINE


def parse_variants(texts: Sequence[str], installed: Sequence[str]) -> list[Variant]:
    """Parse variants: the baseline, then those that ``texts`` name, each once.

    Args:
        texts: ``A,B:steps=5,topk=4,C``, ``all`` or ``auto``; a part with ``=`` and no name is
            another setting of the name before it. ``[A,B]`` is one variant, of several algorithms
            in one run.
        installed: the names that ``all`` stands for.

    Raises:
        UsageError: a setting or its value cannot be used, or nothing is named.
    """
    found = [Variant(BASELINE, named=True)]
    specs = [spec for text in texts for spec in _specs(text)]
    if not specs:
        raise UsageError(f"no algorithm was named; expected {EVERY}, or names as in A,B:steps=5,C")
    for name, settings in specs:
        if name.lower() in (EVERY, AUTO) and settings:
            more = "; --speculative-num-steps and the like are for all algorithms"
            raise UsageError(
                f"{name}:{settings[0]}: expected {name} alone{more if name == EVERY else ''}"
            )
        if name.lower() == EVERY:
            found += [Variant(each) for each in installed]
        elif is_auto(name) or "," in name:
            found.append(Variant(AUTO if is_auto(name) else name, named=True))
        else:
            found.append(_named(name, settings))
    # A variant that is named stays named, even if ``all`` adds it too.
    named = [variant for variant in found if variant.named]
    return [
        attrs.evolve(variant, named=variant in named)
        for number, variant in enumerate(found)
        if variant not in found[:number]
    ]


def _specs(text: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the names in a text and their settings; several in brackets are one name."""
    for place, piece in enumerate(_BRACKETS.split(text)):
        if place % 2:
            yield _several(piece), ()
            continue
        for name, settings in split_names(piece):
            if "[" in name or "]" in name:
                raise UsageError(
                    f"{text!r}: expected brackets around names alone, as in A,[B,C:steps=5],D"
                )
            yield name, settings


_BRACKETS = re.compile(r"(?:^|(?<=,))\s*\[([^\[\]]*)\]\s*(?=,|$)")


def _several(text: str) -> str:
    """Return the name of several algorithms in one run, with their settings.

    Raises:
        UsageError: a setting cannot be used, or there are not several.
    """
    parts = [(name.upper(), settings) for name, settings in split_names(text)]
    for name, settings in parts:
        read_settings(name, settings)
    if len(parts) < 2:
        raise UsageError(f"[{text}]: expected several algorithms, as in [A,B:steps=5]")
    return ",".join(":".join(filter(None, (name, ",".join(own)))) for name, own in parts)


def _named(name: str, settings: Sequence[str]) -> Variant:
    algorithm = name.upper()
    if algorithm == BASELINE and settings:
        raise UsageError(f"{BASELINE}:{settings[0]}: plain decoding has no settings; leave it out")
    return Variant(algorithm, read_settings(algorithm, settings), named=True)
