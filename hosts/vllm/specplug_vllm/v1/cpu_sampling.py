"""Two faults of vLLM 0.32.0 where it verifies the drafts of sampled requests on a CPU, mended.

Its own drafters have them too, and are mended in a process that has one of our proposers. Greedy
requests have neither.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

_MARK = "_specplug"


def mend() -> None:
    """Have sampled requests accept drafts by their own temperature, top-k and top-p.

    vLLM's kernel for CPUs writes these settings into a copy, and the sampler reads memory that
    nobody wrote. And a step without drafts, as every prompt's first, ends the engine where all
    requests have a top-k: there is no largest of none.
    """
    from vllm.v1.sample import rejection_sampler

    if hasattr(rejection_sampler.expand_batch_to_tokens, _MARK):
        return
    expand = functools.wraps(rejection_sampler.expand_batch_to_tokens)(expand_batch_to_tokens)
    setattr(expand, _MARK, True)
    rejection_sampler.expand_batch_to_tokens = expand
    constrain = rejection_sampler.apply_sampling_constraints

    @functools.wraps(constrain)
    def apply_sampling_constraints(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        constrained: Tensor = constrain(logits, *args, **kwargs) if len(logits) else logits
        return constrained

    rejection_sampler.apply_sampling_constraints = apply_sampling_constraints


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat a setting of each request for each token that it drafted.

    Args:
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
