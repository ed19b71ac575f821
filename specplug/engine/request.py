"""One request: its tokens, how far it is, and when it ends."""

from __future__ import annotations

import enum
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.engine.detokenizer import Detokenizer
from specplug.engine.outputs import Logprob, RequestOutput
from specplug.engine.sampling_params import Needs, SamplingParams


class RequestStatus(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@attrs.define(eq=False, kw_only=True)
class Request:
    """A request and what the host knows of it.

    Attributes:
        max_tokens: most tokens it may generate, within the context.
        seed: of its noise.
        row: its row in the request table; 0 while it has none.
        pages: KV pages it owns, in the order of its positions.
        page_budget: pages it needs without drafts; they are kept for it from its admission on.
        prefilled: prompt tokens whose prefill has been launched.
        kv_bound: the most tokens whose KV can be committed when all launched steps are done.
        in_flight: launched steps whose results are not processed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    detokenizer: Detokenizer | None = None
    needs: Needs = Needs.NOTHING

    status: RequestStatus = RequestStatus.WAITING
    row: int = 0
    pages: list[int] = attrs.field(factory=list)
    page_budget: int = 0
    prefilled: int = 0
    kv_bound: int = 0
    in_flight: int = 0

    output_token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[dict[int, Logprob]] = attrs.field(factory=list)
    accept_lens: list[int] = attrs.field(factory=list)
    routed_experts: list[Tensor] = attrs.field(factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    sent: int = 0

    @property
    def finished(self) -> bool:
        """Whether it has ended (steps in flight may still hold its pages)."""
        return self.status is RequestStatus.FINISHED

    @property
    def most_tokens(self) -> int:
        """Its prompt and all that it may generate."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def last_root(self) -> int:
        """The position of the last root whose step can add a token; what is launched behind it
        was launched before the end was known, and means nothing."""
        return self.most_tokens - 2

    @property
    def may_decode(self) -> bool:
        """Whether another decode step could add a token: each one in flight adds at least one."""
        sure = len(self.output_token_ids) + self.in_flight
        return self.status is RequestStatus.RUNNING and sure < self.max_tokens

    def append(self, token_id: int, logprobs: dict[int, Logprob] | None = None) -> None:
        """Take one generated token, and end if it ends the request."""
        self.output_token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token_id in self.params.stop_token_ids:
            self._stop(token_id)
        elif token_id in self.eos_token_ids and not self.params.ignore_eos:
            self._stop(None)
        else:
            if self.detokenizer is not None:
                self.stop_reason = self.detokenizer.push(token_id)
            if self.stop_reason is not None:
                self.finish("stop")
            elif len(self.output_token_ids) >= self.max_tokens:
                self.finish("length")

    def append_experts(self, experts: Tensor) -> None:
        """Take the experts [tokens, layers, experts a token] of tokens that the target has read."""
        if self.params.return_routed_experts:
            self.routed_experts.append(experts.clone())  # not the whole step's, which it is part of

    def finish(self, reason: str) -> None:
        """End; what the detokenizer held back is text now."""
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        if self.detokenizer is not None:
            self.detokenizer.finish()

    def _stop(self, token_id: int | None) -> None:
        self.stop_reason = token_id
        self.finish("stop")

    def output(self) -> RequestOutput:
        """What it is so far; ``delta`` is the text since the last call."""
        text: str | None = None
        delta = ""
        if self.detokenizer is not None:
            text = self.detokenizer.text
            sure = len(text) if self.finished else self.detokenizer.sure
            delta, self.sent = text[self.sent : sure], max(self.sent, sure)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            text=text,
            token_ids=tuple(self.output_token_ids),
            logprobs=tuple(self.logprobs) if self.params.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            accept_lens=tuple(self.accept_lens),
            routed_experts=self._all_experts() if self.finished else None,
            error=self.error,
            delta=delta,
        )

    def _all_experts(self) -> Tensor | None:
        return torch.cat(self.routed_experts) if self.routed_experts else None


def make_detokenizer(tokenizer: Any | None, params: SamplingParams) -> Detokenizer | None:
    """A detokenizer for a request, if there is a tokenizer."""
    if tokenizer is None:
        return None
    return Detokenizer(tokenizer, params.stop, params.skip_special_tokens)
