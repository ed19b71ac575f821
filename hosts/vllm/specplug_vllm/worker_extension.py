"""What vLLM's workers answer besides their own methods: their ``worker_extension_cls``."""

from __future__ import annotations

from typing import Any

NAME = f"{__name__}.WorkerExtension"
"""As vLLM's setting names it."""


class WorkerExtension:
    """Methods for ``collective_rpc``. vLLM makes it a base of its worker."""

    model_runner: Any

    def specplug_undrafted(self) -> dict[str, int]:
        """Return how many requests so far went on without drafts, by reason."""
        runner = self.model_runner
        drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
        run = getattr(drafter, "run", None)
        return {} if run is None else dict(run.undrafted.counts)
