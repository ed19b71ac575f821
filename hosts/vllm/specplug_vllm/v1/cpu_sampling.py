"""Two faults of vLLM's where it verifies the drafts of sampled requests on a CPU, mended.

Its own drafters have them too, and are mended in a process that has one of our proposers. Greedy
requests have neither. Each function gets vLLM's own first; ``patches`` says what is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def expand_batch_to_tokens(
    original: Callable[..., Tensor],
    x: Tensor,
    cu_num_tokens: Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Tensor:
    """Repeat a setting of each request for each token that it drafted.

    vLLM's kernel for CPUs writes into a copy, and the sampler reads memory that nothing wrote.

    Args:
        original: not called.
        x: [bs], of any dtype.
        cu_num_tokens: [bs] int, the sums of the tokens up to and with each request's.
        num_tokens: of all.
        replace_from, replace_to: where x is the first, the second is repeated.

    Returns:
        [num_tokens] of x's dtype.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=num_tokens)


def apply_sampling_constraints(
    original: Callable[..., Tensor], logits: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Return the logits of a step without drafts, as every prompt's first, as they are.

    vLLM's own asks for the largest of no number where all requests have a top-k.
    """
    return original(logits, *args, **kwargs) if len(logits) else logits
