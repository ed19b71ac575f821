"""What plugins raise inside vLLM: told in its log, each failure once."""

from __future__ import annotations

from specplug import PluginError
from specplug.debug import DEBUG
from specplug_vllm import vllm_names


class FailureLog:
    """Writes plugins' failures to vLLM's log."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, error: PluginError) -> None:
        """Write a failure, unless the same one was written before."""
        text = str(error)
        if text not in self._told:
            self._told.add(text)
            vllm_names.log_error(
                f"{text}. Requests of that step go on without drafts; their tokens are right.",
                error.__cause__ if DEBUG else None,
            )
