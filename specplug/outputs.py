"""The results of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen(kw_only=True)
class Logprob:
    """A token's log-probability under the model itself (before temperature and penalties).

    Attributes:
        logprob: natural logarithm.
        rank: 1 for the most likely token.
        decoded_token: its text, if there is a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@attrs.frozen(kw_only=True)
class RequestOutput:
    """A request's result, or, from ``LLM.stream``, what it is so far.

    Attributes:
        request_id: the request's name.
        prompt: the prompt's text, None if it was given as token ids.
        prompt_token_ids: the prompt's tokens.
        text: the generated text, up to a stop string; None without a tokenizer.
        token_ids: the generated tokens, the end-of-sequence or stop token included.
        logprobs: for each token of ``token_ids``, token id -> ``Logprob``; None if not asked for.
        finish_reason: "stop", "length", "abort", or "error"; None while it runs.
        stop_reason: the stop string or stop token that ended it, if one did.
        accept_lens: tokens of each pass after the one that gave the first token: those kept at a
            decode step, or one where the request was prefilled again, as after a retraction. So
            their sum is the number of tokens less one. All ones without speculation.
        routed_experts: [tokens - 1, layers, experts per token] int64, the experts of every prompt
            and output token but the last, which the target never read; fewer if the request was
            aborted in its prefill. None before it has ended, and if not asked for.
        hidden_states: [tokens - 1, layers, hidden size] in the target's dtype, of the same tokens
            as ``routed_experts`` and None when that is; the layers in the order asked for.
        token_outputs: name -> values, of the outputs that plugins add: see
            ``specplug.PerTokenOutput``. Each is None before the request has ended.
        num_cached_tokens: of its prompt, how many tokens were found in the prefix cache.
        times_retracted: how often it lost its KV to others and was prefilled again.
        error: the reason of ``finish_reason`` "error".
        delta: ``LLM.stream`` only: the text that came since this request's last output.
        index: its number among the outputs of its prompt, from 0 to ``SamplingParams.n`` - 1.
        others: ``LLM.generate`` only: the prompt's outputs after this one, the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str | None
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    accept_lens: tuple[int, ...] = ()
    routed_experts: Tensor | None = attrs.field(default=None, eq=False)
    hidden_states: Tensor | None = attrs.field(default=None, eq=False)
    token_outputs: Mapping[str, Tensor | None] = attrs.field(factory=dict, eq=False)
    num_cached_tokens: int = 0
    times_retracted: int = 0
    error: str | None = None
    delta: str = ""
    index: int = 0
    others: tuple[RequestOutput, ...] = ()

    @property
    def outputs(self) -> tuple[RequestOutput, ...]:
        """All outputs of the prompt: this one, then the others."""
        return self, *self.others

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.finish_reason is not None


def by_prompt(outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
    """Return the first output of each prompt, with the ``others`` that follow it."""
    firsts = [place for place, output in enumerate(outputs) if output.index == 0]
    ends = [*firsts, len(outputs)][1:]
    return [
        attrs.evolve(outputs[first], others=tuple(outputs[first + 1 : end]))
        for first, end in zip(firsts, ends, strict=True)
    ]
