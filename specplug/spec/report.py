"""What extensions are told after a step and after a request."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class StepReport:
    """One processed step.

    Attributes:
        mode: "prefill" or "decode".
        request_ids: the requests of the step.
        widths: nodes verified for each (decode), or prompt tokens (prefill).
        accept_lens: tokens accepted for each, bonus token included; 0 for a prefill chunk that
            did not end its prompt.
        seconds: wall time by part: "propose", "target", "verify", "extend".
    """

    mode: str
    request_ids: tuple[str, ...]
    widths: tuple[int, ...]
    accept_lens: tuple[int, ...]
    seconds: dict[str, float]


@attrs.frozen(kw_only=True)
class RequestReport:
    """One ended request.

    Attributes:
        request_id: its name.
        finish_reason: "stop", "length", "abort" or "error".
        num_prompt_tokens: length of its prompt.
        num_output_tokens: tokens generated.
        accept_lens: tokens kept at each of its decode steps.
    """

    request_id: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    accept_lens: tuple[int, ...]
