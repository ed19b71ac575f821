"""An extension that adds a per-token output: how sure the target is of each token it generates.

    SamplingParams(token_outputs=("entropy",))  ->  RequestOutput.token_outputs["entropy"]

a float32 tensor [tokens].

Under every algorithm it is the same, as the tokens are.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import specplug

if TYPE_CHECKING:
    from torch import Tensor


def entropy(logits: Tensor, predict: Tensor) -> Tensor:
    """Of the distribution that each token was chosen from, before temperature, in nats.

    Args:
        logits: [M, V].
        predict: [M] int64, the tokens; they do not matter here.

    Returns:
        [M] float32; 0 if the target was certain.
    """
    logprobs = logits.float().log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


class TokenEntropy:
    """The extension."""

    @specplug.hookimpl(wrapper=True)
    def create_worker(self, runtime: specplug.Runtime) -> Generator[None, object, object]:
        """Add the output, and leave the algorithm's worker as it is."""
        runtime.add_output(specplug.PerTokenOutput(name="entropy", compute=entropy))
        return (yield)


extension = TokenEntropy()
