"""A request: its tokens, how far it is, and when it ends."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from specplug.engine.collected_output import CollectedOutput
from specplug.engine.detokenizer import Detokenizer
from specplug.grammar.state import GrammarState
from specplug.kv.prefix_cache import CachedPage
from specplug.model.rotary import FIXED, NEVER, LengthRule
from specplug.outputs import RequestOutput
from specplug.sampling_params import Needs, SamplingParams
from specplug.speculative.draft_plan import ANY_DRAFT, DraftWish


class RequestStatus(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@attrs.define(eq=False, kw_only=True)
class ReceivedPrefill:
    """A whole prefill of another instance that has arrived.

    Attributes:
        start, end: the positions whose KV is here; ``end`` is the prompt's length.
        caches: for each cache consecutive tensors [layers, 2, n, Hkv, D]. The target's alone, if
            the peer has no draft cache of this kind. A draft's cache may have more or fewer layers
            than here, as the peer's settings say.
        draft_state: what the peer's ``export_draft_state`` gave, on the CPU; empty if nothing.
        first_token: the token after the prompt.
        outputs: the per-token outputs that were asked for, by name of their tensors, [n, …]: of
            the whole prompt, or of the first token.
    """

    start: int
    end: int
    caches: Sequence[Sequence[Tensor]]
    draft_state: Mapping[str, Tensor] = attrs.field(factory=dict)
    first_token: int
    outputs: Mapping[str, Tensor] = attrs.field(factory=dict)

    @property
    def num_bytes(self) -> int:
        """The bytes of its KV and draft state."""
        tensors = [t for cache in self.caches for t in cache] + list(self.draft_state.values())
        return sum(t.numel() * t.element_size() for t in tensors)


@attrs.define(eq=False, kw_only=True)
class Request:
    """A request and what the host knows of it.

    Up to ``rule`` nothing changes after the input processor has made it. Of the rest each line
    names its writers; ``docs/architecture.md`` says when.

    Attributes:
        number: of its arrival.
        index: its number among the outputs of its prompt.
        priority: requests of a lower one come first.
        prompt: its text, None if it was given as tokens.
        max_tokens: most tokens it may generate, within the context.
        seed: of its noise.
        needs: what a step must do for it beyond the greatest logit.
        grammar_state: where it stands in its grammar; None if it has none.
        outputs: what it gets for each token besides the token, by name; the engine fills them.
        draft_wish: what it asks for of its drafts.
        rule: how its rotary frequencies follow from its length.

        status: where it is (scheduler; ``finish``).
        req_index: its row in the request table; 0 while it has none (scheduler).
        pages: KV pages of its positions, in their order (scheduler).
        shared: the last of its pages that the prefix cache has; it has all before that one too
            (scheduler).
        num_computed_tokens: tokens whose KV is in the pool: those of launched prefills and of
            processed decode steps (scheduler).
        max_computed_tokens: the most tokens whose KV can be committed when all launched steps are
            done (scheduler).
        peak_computed_tokens: the greatest ``num_computed_tokens`` it had when it was retracted
            (scheduler).
        in_flight: launched steps whose results are not processed (scheduler; the engine after a
            failure).
        num_cached: tokens that were in the prefix cache when it was first admitted (scheduler).
        times_retracted: how often it lost its pages, to be prefilled again (scheduler).

        token_ids: its prompt and what it has generated (``append``).
        output_token_ids: what it has generated (``append``).
        most_tokens: its prompt and all that it may generate.
        last_root: the last position of a root whose step can add a token. Results of roots after
            it are dropped: they were launched before the end was known.
        rotary_len: the least length by which its rows are rotated: its prompt's; for a rule that
            recomputes, that with which it is prefilled (``choose_rotary``).
        rotary_set: the set of ``rule`` that its first rows have (``choose_rotary``).
        outgrows: the position from which on it must be prefilled anew, with another set
            (``choose_rotary``).
        accept_lens: tokens that it took of each pass after its first token (engine).
        finish_reason, stop_reason: why it ended (``append``, ``finish``).
        error: what went wrong (``append``; the engine; the decode instance).
        sent: characters of its text that have been handed out (``output``).

        inbox: where to put it when a step has moved it, for the thread that waits (``LLM``).
        delivered: whether its last output has been handed out (``LLM``).
        export_from: the first position whose KV another instance still wants; None: none wants
            any (prefill instance, KV transfer).
        received: its prefill by another instance, until it is admitted (decode instance; engine;
            scheduler).
        draft_state: what came with it for the algorithm, until the algorithm has seen it
            (scheduler; step runner).
    """

    request_id: str
    number: int = 0
    index: int = 0
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
    outputs: dict[str, CollectedOutput] = attrs.field(factory=dict)
    draft_wish: DraftWish = ANY_DRAFT
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
        """Choose the rotary frequencies with which it will be prefilled, by its present length."""
        rule, known = self.rule, len(self.token_ids)
        self.rotary_len = known if rule.recomputes else len(self.prompt_token_ids)
        self.rotary_set = rule.set_of(self.rotary_len)
        outgrows = rule.recomputes and known <= rule.limit <= self.last_root
        self.outgrows = rule.limit if outgrows else NEVER

    @property
    def sort_key(self) -> tuple[int, int]:
        """Priority, then arrival: the least is admitted first and retracted last."""
        return self.priority, self.number

    @property
    def page_kind(self) -> Hashable:
        """What must be equal, besides the tokens, for requests to share pages."""
        salt = self.params.cache_salt
        return self.rotary_set if salt is None else (self.rotary_set, salt)

    @property
    def finished(self) -> bool:
        """Whether it has ended (steps in flight may still hold its pages)."""
        return self.status is RequestStatus.FINISHED

    @property
    def may_decode(self) -> bool:
        """Whether another decode step could add a token, given that each in flight adds one."""
        sure = len(self.output_token_ids) + self.in_flight
        running = self.status is RequestStatus.RUNNING and self.max_computed_tokens < self.outgrows
        return running and sure < self.max_tokens

    def extend(self, token_ids: Sequence[int]) -> int:
        """Add generated tokens up to the one that ends the request; return how many it took."""
        before = len(self.output_token_ids)
        if self._goes_on_after(token_ids):
            self.token_ids += token_ids
            self.output_token_ids += token_ids
            return len(token_ids)
        for token_id in token_ids:
            if self.finished:
                break
            self.append(token_id)
        return len(self.output_token_ids) - before

    def _goes_on_after(self, token_ids: Sequence[int]) -> bool:
        """Return whether none of these tokens can end the request, so that it takes all at once."""
        if self.finished or self.detokenizer is not None or self.grammar_state is not None:
            return False
        room = self.max_tokens - len(self.output_token_ids)
        return len(token_ids) < room and self._enders.isdisjoint(token_ids)

    def append(self, token_id: int) -> None:
        """Add a generated token, and end the request if the token ends it.

        If the grammar has ended before it, the token is dropped: none was allowed there.
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
        """End the request. What the detokenizer held back becomes text."""
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        if self.detokenizer is not None:
            self.detokenizer.finish()

    def _stop(self, token_id: int | None) -> None:
        self.stop_reason = token_id
        self.finish("stop")

    def output(self) -> RequestOutput:
        """Return what it is so far; ``delta`` is the text since the last call."""
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
            index=self.index,
            token_outputs=added,
            **own,
        )


def make_detokenizer(tokenizer: Any | None, params: SamplingParams) -> Detokenizer | None:
    """Return a detokenizer for a request, or None without a tokenizer."""
    return None if tokenizer is None else Detokenizer(tokenizer, params)


def take_all(inbox: list[Request]) -> list[Request]:
    """Empty an inbox: what was in it, each request once."""
    moved = list(dict.fromkeys(inbox))
    inbox.clear()
    return moved


def salt_of(page_kind: Hashable) -> str | None:
    """Return the ``cache_salt`` of the requests that have a ``Request.page_kind``."""
    return page_kind[1] if isinstance(page_kind, tuple) else None
