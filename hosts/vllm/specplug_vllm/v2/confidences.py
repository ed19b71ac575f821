"""What vLLM's adaptive verification is told of drafts.

With ``speculative_config={"enable_adaptive_verification": True, …}`` vLLM verifies no more of what
was drafted than pays in a step. It multiplies the confidences of a request's tokens up to each one,
and of all requests' tokens keeps those with the greatest products, as many as it expects most
tokens a second from. Our exact sampler takes the same tokens whatever is cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specplug import Draft


def confidences(draft: Draft) -> Tensor:
    """Return how likely the target takes each drafted token where it took those before it.

    That is ``exp(Draft.scores)``, within 0 and 1: 0 where a drafter ended its path (a score of
    -inf), and where a request drafts no token. Without scores, or where one is not a number, it is
    1, as vLLM has it for what is not known.

    Args:
        draft: chains of N nodes with the root.

    Returns:
        [bs, N - 1] float32.
    """
    tokens, widths = draft.tokens[:, 1:], draft.widths
    if draft.scores is None:
        made = torch.ones_like(tokens, dtype=torch.float32)
    else:
        made = draft.scores[:, 1:].nan_to_num(nan=0.0).clamp_(max=0.0).exp_()
    if widths is None:
        return made
    places = torch.arange(1, draft.width, device=tokens.device)
    return made.masked_fill_(places >= draft.counts.unsqueeze(1), 0.0)
