"""What of the engine is on in a run, and why the rest is not."""

from __future__ import annotations

import attrs

from specplug.algorithm import AlgorithmInfo
from specplug.config import EngineConfig
from specplug.errors import warn_fallback


@attrs.define
class Features:
    """Decides what is on. What was wanted and cannot be is warned of once, with the reason.

    Attributes:
        states: by name "on", or "off: " and why.
    """

    states: dict[str, str] = attrs.field(factory=dict)

    @classmethod
    def of_run(cls, config: EngineConfig, algorithm: AlgorithmInfo) -> Features:
        """Decide on "overlap" and "prefix_cache", which the settings or the algorithm turn off."""
        features, name, able = cls(), algorithm.name, algorithm.capabilities
        features.decide(
            "overlap",
            refused_by="disable_overlap_schedule" if config.disable_overlap_schedule else None,
            obstacle=None if able.overlap else f"{name} drafts from what the host has read",
        )
        must_see = f"{name} must itself see every token that it drafts after"
        features.decide(
            "prefix_cache",
            refused_by="disable_radix_cache" if config.disable_radix_cache else None,
            obstacle=None if able.prefix_cache else must_see,
        )
        return features

    def is_on(self, name: str) -> bool:
        """Return whether a feature has been found to be on."""
        return self.states[name] == "on"

    def decide(self, name: str, *, refused_by: str | None, obstacle: str | None) -> bool:
        """Decide whether a feature is on, and return it.

        Args:
            refused_by: the option by which the caller turned it off, or None.
            obstacle: why it cannot be on, or None.
        """
        if refused_by is not None:
            self.states[name] = f"off: {refused_by}"
        elif obstacle is not None:
            self.states[name] = f"off: {obstacle}"
            warn_fallback(f"{name} is off: {obstacle}")
        else:
            self.states[name] = "on"
        return self.states[name] == "on"
