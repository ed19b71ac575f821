"""A variant: an algorithm under speculation settings. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from specplug.algorithm_names import SETTINGS, read_settings, split_names
from specplug.errors import UsageError

BASELINE = "NONE"
EVERY = "all"


@attrs.frozen
class Variant:
    """An algorithm under settings of its own.

    Attributes:
        algorithm: its name.
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
        return ":".join(filter(None, (self.algorithm, ",".join(own))))

    def with_common(self, common: Mapping[str, Any]) -> Variant:
        """Return this variant with the settings typed for all, where it has none of its own."""
        settings = {} if self.is_baseline else {**common, **self.own}
        return attrs.evolve(self, arguments=settings)

    @property
    def is_baseline(self) -> bool:
        """Whether the others are compared with this one."""
        return self.algorithm == BASELINE


def parse_variants(texts: Sequence[str], installed: Sequence[str]) -> list[Variant]:
    """Parse variants: the baseline, then those that ``texts`` name, each once.

    Args:
        texts: ``A,B:steps=5,topk=4,C`` or ``all``; a part with ``=`` and no name is another
            setting of the name before it.
        installed: the names that ``all`` stands for.

    Raises:
        UsageError: a setting or its value cannot be used, or nothing is named.
    """
    found = [Variant(BASELINE, named=True)]
    specs = [spec for text in texts for spec in split_names(text)]
    if not specs:
        raise UsageError(f"no algorithm was named; expected {EVERY}, or names as in A,B:steps=5,C")
    for name, settings in specs:
        if name.lower() == EVERY:
            if settings:
                raise UsageError(
                    f"{EVERY}:{settings[0]}: expected {EVERY} alone; --speculative-num-steps and "
                    "the like are for all algorithms"
                )
            found += [Variant(each) for each in installed]
        else:
            found.append(_named(name, settings))
    # A variant that is named stays named, even if ``all`` adds it too.
    named = [variant for variant in found if variant.named]
    return [
        attrs.evolve(variant, named=variant in named)
        for number, variant in enumerate(found)
        if variant not in found[:number]
    ]


def _named(name: str, settings: Sequence[str]) -> Variant:
    algorithm = name.upper()
    if algorithm == BASELINE and settings:
        raise UsageError(f"{BASELINE}:{settings[0]}: plain decoding has no settings; leave it out")
    return Variant(algorithm, read_settings(algorithm, settings), named=True)
