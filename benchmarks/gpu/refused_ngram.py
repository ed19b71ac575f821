"""NGRAM that drafts as always and is never accepted.

Random prompts say nothing of what follows, so NGRAM would draft nothing. What an earlier generation
of the same prompts wrote is in its history: from the second one on it drafts the true continuation,
as wide as it can, in every step. Here each drafted token is replaced by another one, after NGRAM
has chosen it. So every step is of full width and makes one token, as with the drafts of random
weights. Prompts that teach it wrong tokens would not do: NGRAM learns that they are refused, and
then drafts in few steps, at batch 8 in hardly any.
"""

from __future__ import annotations

from specplug import Batch, Draft, DraftInput, Runtime, hookimpl
from specplug_ngram import Ngram


class RefusedNgram(Ngram):
    """The hooks of NGRAM, with other tokens in its drafts. The vocabulary's size must be even."""

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        draft = super().propose(runtime, batch, draft_input)
        draft.tokens[:, 1:].bitwise_xor_(1)
        return draft
