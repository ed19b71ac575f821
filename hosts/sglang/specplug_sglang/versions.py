"""The code that differs between the tested versions of SGLang; ``sglang_names`` has the names."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from specplug import VerifyOutput

FIRST = "0.5.17"
"""The newest version for torch 2.11."""


def installed() -> str:
    """Return the version of SGLang."""
    return version("sglang")


def output_widths(nodes: int, columns: int) -> dict[str, int]:
    """Return the fields of ``GenerationBatchResult`` with the stride of requests in its tokens.

    Args:
        nodes: the most nodes of a request.
        columns: the most tokens that a request can get.
    """
    if installed() == FIRST:
        return {"speculative_num_draft_tokens": columns}
    return {"speculative_num_draft_tokens": nodes, "speculative_output_stride": columns}


def keep_logprobs(
    batch: ScheduleBatch, output: LogitsProcessorOutput, verified: VerifyOutput
) -> None:
    """Let SGLang compute the log-probabilities of the accepted tokens, in ``output``."""
    index, how = verified.accept_index, {}
    if installed() == FIRST:
        from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs as compute

        how["speculative_num_steps"] = index.shape[1] - 1
    else:
        from sglang.srt.layers.logprob_processor import compute_spec_logprobs as compute
    compute(batch, output, verified.predict, accept_index=index, **how)


def disagg_arguments(*given: Any) -> tuple[Any, Any]:
    """Return the last tokens and the future map among the arguments after the batch of SGLang's
    ``build_disagg_draft_input``: the first version has its settings before them."""
    last_tokens, future_map = given[-2:]
    return last_tokens, future_map
