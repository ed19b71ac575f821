"""What of the engine is on in a run, and why the rest is not."""

from __future__ import annotations

import warnings

import attrs

from specplug.errors import FallbackWarning


@attrs.define
class Features:
    """Decides what is on. What was wanted and cannot be is warned of once, with the reason.

    Attributes:
        states: by name "on", or "off: " and why.
    """

    states: dict[str, str] = attrs.field(factory=dict)

    def decide(self, name: str, *, refused_by: str | None, obstacle: str | None) -> bool:
        """Whether a feature is on.

        Args:
            refused_by: the option by which the caller turned it off, or None.
            obstacle: why it cannot be on, or None.
        """
        if refused_by is not None:
            self.states[name] = f"off: {refused_by}"
        elif obstacle is not None:
            self.states[name] = f"off: {obstacle}"
            warnings.warn(f"{name} is off: {obstacle}", FallbackWarning, stacklevel=3)
        else:
            self.states[name] = "on"
        return self.states[name] == "on"
