"""One request: its tokens, how far it is, and when it ends."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor

from specplug.engine.collected_output import CollectedOutput
from specplug.engine.detokenizer import Detokenizer
from specplug.engine.received_prefill import ReceivedPrefill
from specplug.grammar.state import GrammarState
from specplug.kv.prefix_cache import CachedPage
from specplug.model.rotary import FIXED, NEVER, LengthRule
from specplug.outputs import RequestOutput
from specplug.sampling_params import Needs, SamplingParams


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
        number: of its arrival.
        priority: requests of a lower one come first.
        max_tokens: most tokens it may generate, within the context.
        seed: of its noise.
        req_index: its row in the request table; 0 while it has none.
        pages: KV pages of its positions, in their order.
        shared: the last of them that belongs to the prefix cache, as all before it do.
        num_computed_tokens: tokens whose KV is in the pool: those of launched prefills and of
            processed decode steps.
        peak_computed_tokens: the greatest ``num_computed_tokens`` it had when it was retracted.
        max_computed_tokens: the most tokens whose KV can be committed when all launched steps are
            done.
        in_flight: launched steps whose results are not processed.
        num_cached: tokens that were in the prefix cache when it was first admitted.
        times_retracted: how often it lost its pages, to be prefilled again.
        grammar_state: where it stands in its grammar; None if it has none.
        token_ids: its prompt and what it has generated.
        most_tokens: its prompt and all that it may generate.
        last_root: the position of the last root whose step can add a token; what is launched
            behind it was launched before the end was known, and means nothing.
        outputs: what it gets for each token besides the token, by name.
        rule: how its rotary frequencies follow from its length.
        rotary_len: the length by which its rows are rotated, at least: its prompt's, or where a
            sequence is recomputed the one it is being prefilled with.
        rotary_set: the set of ``rule`` that its first rows have.
        outgrows: the position from which on it must be prefilled anew, with another set.
        inbox: where to put it when a step has moved it, for whoever waits for that.
        delivered: whether its last output has been handed out.
        export_from: the first position whose KV another instance wants; None: nobody does.
        received: its prefill by another instance, until that is in the pool.
        draft_state: what came with it for the algorithm, until that has seen it.
    """

    request_id: str
    number: int = 0
    priority: int = 0
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    detokenizer: Detokenizer | None = None
    needs: Needs = Needs.NOTHING
    grammar_state: GrammarState | None = None
    rule: LengthRule = FIXED

    status: RequestStatus = RequestStatus.WAITING
    req_index: int = 0
    pages: list[int] = attrs.field(factory=list)
    shared: CachedPage = attrs.field(factory=CachedPage)
    num_computed_tokens: int = 0
    peak_computed_tokens: int = 0
    max_computed_tokens: int = 0
    in_flight: int = 0
    num_cached: int = 0
    times_retracted: int = 0

    token_ids: list[int] = attrs.field(init=False)
    most_tokens: int = attrs.field(init=False)
    last_root: int = attrs.field(init=False)
    rotary_len: int = attrs.field(init=False)
    rotary_set: int = attrs.field(init=False)
    outgrows: int = attrs.field(init=False)
    _enders: frozenset[int] = attrs.field(init=False)
    output_token_ids: list[int] = attrs.field(factory=list)
    outputs: dict[str, CollectedOutput] = attrs.field(factory=dict)
    accept_lens: list[int] = attrs.field(factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    sent: int = 0
    inbox: list[Request] = attrs.field(factory=list)
    delivered: bool = False
    export_from: int | None = None
    received: ReceivedPrefill | None = None
    draft_state: Mapping[str, Tensor] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.most_tokens = len(self.prompt_token_ids) + self.max_tokens
        self.last_root = self.most_tokens - 2
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        self._enders = eos.union(self.params.stop_token_ids)
        self.choose_rotary()

    def choose_rotary(self) -> None:
        """Choose by what of it is known the frequencies with which it will be prefilled."""
        rule, known = self.rule, len(self.token_ids)
        self.rotary_len = known if rule.recomputes else len(self.prompt_token_ids)
        self.rotary_set = rule.set_of(self.rotary_len)
        outgrows = rule.recomputes and known <= rule.limit <= self.last_root
        self.outgrows = rule.limit if outgrows else NEVER

    @property
    def sort_key(self) -> tuple[int, int]:
        """The less, the sooner it gets a turn, and the longer it keeps what it has."""
        return self.priority, self.number

    @property
    def finished(self) -> bool:
        """Whether it has ended (steps in flight may still hold its pages)."""
        return self.status is RequestStatus.FINISHED

    @property
    def may_decode(self) -> bool:
        """Whether another decode step could add a token: each one in flight adds at least one."""
        sure = len(self.output_token_ids) + self.in_flight
        running = self.status is RequestStatus.RUNNING and self.max_computed_tokens < self.outgrows
        return running and sure < self.max_tokens

    def append(self, token_id: int) -> None:
        """Take one generated token, and end if it ends the request.

        It is not taken if the grammar has ended before it: no allowed token was left to choose.
        """
        if self._is_at_end_of_grammar:
            return self._end_with_grammar()
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)
        if token_id in self._enders:
            self._stop(token_id if token_id in self.params.stop_token_ids else None)
        else:
            if self.detokenizer is not None:
                self.stop_reason = self.detokenizer.push(token_id)
            if self.stop_reason is not None:
                self.finish("stop")
            elif self._is_at_end_of_grammar:
                self._end_with_grammar()
            elif len(self.output_token_ids) >= self.max_tokens:
                self.finish("length")

    def _end_with_grammar(self) -> None:
        assert self.grammar_state is not None
        self.error = self.grammar_state.error
        self.finish("stop" if self.error is None else "error")

    @property
    def _is_at_end_of_grammar(self) -> bool:
        return self.grammar_state is not None and self.grammar_state.ended_at == len(
            self.output_token_ids
        )

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
        own: dict[str, Any] = {}
        added: dict[str, Any] = {}
        for name, collected in self.outputs.items():
            value = collected.hand_out(len(self.output_token_ids), finished=self.finished)
            (own if collected.output.has_own_field else added)[name] = value
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            text=text,
            token_ids=tuple(self.output_token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            accept_lens=tuple(self.accept_lens),
            num_cached_tokens=self.num_cached,
            times_retracted=self.times_retracted,
            error=self.error,
            delta=delta,
            outputs=added,
            **own,
        )


def make_detokenizer(tokenizer: Any | None, params: SamplingParams) -> Detokenizer | None:
    """A detokenizer for a request, if there is a tokenizer."""
    if tokenizer is None:
        return None
    return Detokenizer(tokenizer, params.stop, params.skip_special_tokens)
