"""Make the responses and stream chunks of the API from an engine's updates."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from statistics import fmean
from typing import Any

import attrs
from pydantic import BaseModel

from specplug.serve.messages import Accepted, TokenLogprobs, Update
from specplug.serve.protocol import (
    Answer,
    CachedTokens,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDeltaChoice,
    ChatLogprob,
    ChatLogprobs,
    ChatRequest,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Delta,
    FunctionCall,
    RequestMetrics,
    SpeculativeDecoding,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from specplug.serve.tool_calls import CallPiece, ToolCallParser
from specplug.serve.tool_choice import ToolUse

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity in a response, since JSON has no such number."""


@attrs.define(kw_only=True)
class Choice:
    """One completion so far, or what a chunk adds to it.

    Attributes:
        offset: characters before ``text``, if each token is as long as its own text.
        calls: what a chunk adds to tool calls.
        accept_lens: ``Update.accept_lens``.
    """

    index: int
    text: str = ""
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    cached_tokens: int = 0
    finish_reason: Any = None
    stop_reason: str | int | None = None
    offset: int = 0
    calls: list[ToolCallDelta] = attrs.field(factory=list)
    accept_lens: list[int] | None = None

    def add(self, update: Update) -> None:
        """Append an update."""
        self.text += update.text
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs or ()
        self.cached_tokens = update.cached_tokens
        self.finish_reason = update.finish_reason
        self.stop_reason = update.stop_reason
        self.accept_lens = update.accept_lens


class Reply(ABC):
    """The response to one request: takes updates, makes chunks or the whole response.

    Args:
        model: the name under which it is served.

    Attributes:
        spec_decode_metrics: how much is told of what was accepted, "none", "summary" or
            "detailed".
    """

    prefix: str
    spec_decode_metrics = "none"

    def __init__(self, request: CompletionRequest | ChatRequest, model: str) -> None:
        self.choices: list[Choice] = []
        self._request = request
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._prompt_tokens: list[int] = []

    def accept(self, accepted: Accepted) -> None:
        """Begin with empty choices, or with the prompts if they are echoed."""
        n = self._request.num_choices
        self._prompt_tokens = accepted.prompt_tokens
        self.choices = [Choice(index=i) for i in range(n * len(accepted.prompt_tokens))]
        for choice in self.choices if accepted.echo else ():
            choice.text = accepted.echo[choice.index // n]  # type: ignore[index]

    def add(self, update: Update) -> BaseModel | None:
        """Take an update. Return its chunk, or None if it has nothing that a client asked for."""
        whole = self.choices[update.index]
        new = Choice(index=update.index, offset=whole.offset)
        new.add(update)
        whole.add(update)
        whole.offset += sum(len(each.text) for each in new.logprobs)
        tokens = self._request.return_token_ids or self._request.num_logprobs is not None
        self._split(new, whole)
        if new.text or new.calls or new.finish_reason or (tokens and new.token_ids):
            return self._chunk(new)
        return None

    @abstractmethod
    def _split(self, new: Choice, whole: Choice) -> None:
        """Take tool calls out of the text of an update, where there may be any."""

    def usage(self) -> Usage:
        """Count the tokens so far. A prompt counts once, however many choices it has."""
        n = self._request.num_choices
        prompt = sum(self._prompt_tokens)
        completion = sum(len(choice.token_ids) for choice in self.choices)
        cached = sum(choice.cached_tokens for choice in self.choices[::n])
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=CachedTokens(cached_tokens=cached),
        )

    def metrics(self) -> RequestMetrics | None:
        """Tell what verifications accepted, if that is wanted. As in vLLM, of several choices it
        is not told."""
        if self.spec_decode_metrics == "none" or len(self.choices) != 1:
            return None
        accept_lens = self.choices[0].accept_lens
        if accept_lens is None:
            return None
        accepted = [length - 1 for length in accept_lens]
        counts = Counter(accepted)
        told = SpeculativeDecoding(
            mean_acceptance_length=fmean(accept_lens) if accept_lens else None,
            acceptance_histogram=[counts[n] for n in range(max(accepted, default=-1) + 1)],
            num_spec_steps=len(accepted),
            num_accepted_draft_tokens=sum(accepted),
            per_step_accepted=accepted if self.spec_decode_metrics == "detailed" else None,
        )
        return RequestMetrics(speculative_decoding=told)

    def _ids(self, choice: Choice) -> list[int] | None:
        return choice.token_ids if self._request.return_token_ids else None

    @abstractmethod
    def begin(self) -> list[BaseModel]:
        """Make the chunks before the first token."""

    @abstractmethod
    def _chunk(self, new: Choice) -> BaseModel:
        """Make the chunk of an update."""

    @abstractmethod
    def end(self) -> BaseModel:
        """Make the last chunk of a stream, which has the usage."""

    @abstractmethod
    def whole(self) -> BaseModel:
        """Make the response to a request without a stream."""


class CompletionReply(Reply):
    """The response to a request of ``/v1/completions``."""

    prefix = "cmpl"

    def begin(self) -> list[BaseModel]:
        """Make a chunk of each echoed prompt."""
        return [self._chunk(choice) for choice in self.choices if choice.text]

    def _split(self, new: Choice, whole: Choice) -> None:
        pass

    def _chunk(self, new: Choice) -> BaseModel:
        return Completion(**self._head, choices=[self._choice(new)])

    def end(self) -> BaseModel:
        """Make a chunk with the usage and no choices."""
        return Completion(**self._head, choices=[], usage=self.usage(), metrics=self.metrics())

    def whole(self) -> BaseModel:
        """Make the response with all choices."""
        choices = [attrs.evolve(choice, offset=0) for choice in self.choices]
        shown = [self._choice(choice) for choice in choices]
        return Completion(**self._head, choices=shown, usage=self.usage(), metrics=self.metrics())

    def _choice(self, choice: Choice) -> CompletionChoice:
        wanted = self._request.num_logprobs is not None
        return CompletionChoice(
            index=choice.index,
            text=choice.text,
            logprobs=_completion_logprobs(choice) if wanted else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=self._ids(choice),
        )


def _completion_logprobs(choice: Choice) -> CompletionLogprobs:
    offsets, at = [], choice.offset
    for each in choice.logprobs:
        offsets.append(at)
        at += len(each.text)
    return CompletionLogprobs(
        tokens=[each.text for each in choice.logprobs],
        token_logprobs=[_finite(each.logprob) for each in choice.logprobs],
        top_logprobs=[
            {text: _finite(logprob) for text, logprob in reversed(each.top)}  # the likelier stays
            for each in choice.logprobs
        ],
        text_offset=offsets,
    )


class ChatReply(Reply):
    """The response to a request of ``/v1/chat/completions``."""

    prefix = "chatcmpl"

    def __init__(self, request: ChatRequest, model: str, tools: ToolUse | None = None) -> None:
        super().__init__(request, model)
        self._tools = tools
        self._parsers: list[ToolCallParser] = []
        self._ids_of_calls: dict[tuple[int, int], str] = {}

    def accept(self, accepted: Accepted) -> None:
        """Begin with empty choices."""
        super().accept(accepted)
        if self._tools is not None:
            self._parsers = [self._tools.parser() for _ in self.choices]

    def _split(self, new: Choice, whole: Choice) -> None:
        if self._tools is None:
            return
        parser = self._parsers[new.index]
        new.text, pieces = parser.feed(new.text, final=new.finish_reason is not None)
        new.calls = [self._call_delta(new.index, call) for call in _joined(pieces)]
        # For a call that was asked for by name OpenAI's API says "stop".
        if parser.calls and new.finish_reason == "stop" and self._tools.choice != "named":
            new.finish_reason = whole.finish_reason = "tool_calls"

    def _call_delta(self, choice: int, piece: CallPiece) -> ToolCallDelta:
        function = FunctionCall(name=piece.name, arguments=piece.arguments)
        if piece.name is None:
            return ToolCallDelta(index=piece.index, function=function)
        id = self._call_id(choice, piece.index)
        return ToolCallDelta(index=piece.index, id=id, type="function", function=function)

    def _call_id(self, choice: int, index: int) -> str:
        """Return the id of a call. Templates of Mistral's models take nine characters alone."""
        assert self._tools is not None
        mistral = self._tools.form == "mistral"
        made = uuid.uuid4().hex[:9] if mistral else f"call_{uuid.uuid4().hex[:24]}"
        return self._ids_of_calls.setdefault((choice, index), made)

    def _message(self, choice: Choice) -> Answer:
        if self._tools is None:
            return Answer(content=choice.text)
        parser = self._parsers[choice.index]
        calls = [
            ToolCall(
                id=self._call_id(choice.index, index),
                function=FunctionCall(name=call.name, arguments=call.arguments),
            )
            for index, call in enumerate(parser.calls)
        ]
        return Answer(content=parser.content or (None if calls else ""), tool_calls=calls or None)

    def begin(self) -> list[BaseModel]:
        """Make a chunk with the role of each choice."""
        return [
            self._delta(ChatDeltaChoice(index=c.index, delta=Delta(role="assistant", content="")))
            for c in self.choices
        ]

    def _chunk(self, new: Choice) -> BaseModel:
        return self._delta(
            ChatDeltaChoice(
                index=new.index,
                delta=Delta(content=new.text or None, tool_calls=new.calls or None),
                logprobs=self._logprobs(new),
                finish_reason=new.finish_reason,
                stop_reason=new.stop_reason,
                token_ids=self._ids(new),
            )
        )

    def _delta(self, choice: ChatDeltaChoice) -> BaseModel:
        return ChatChunk(**self._head, choices=[choice])

    def end(self) -> BaseModel:
        """Make a chunk with the usage and no choices."""
        return ChatChunk(**self._head, choices=[], usage=self.usage(), metrics=self.metrics())

    def whole(self) -> BaseModel:
        """Make the response with all answers."""
        choices = [
            ChatChoice(
                index=choice.index,
                message=self._message(choice),
                logprobs=self._logprobs(choice),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                token_ids=self._ids(choice),
            )
            for choice in self.choices
        ]
        return ChatCompletion(
            **self._head, choices=choices, usage=self.usage(), metrics=self.metrics()
        )

    def _logprobs(self, choice: Choice) -> ChatLogprobs | None:
        count = self._request.num_logprobs
        if count is None:
            return None
        content = [
            ChatLogprob(
                **_entry(each.text, each.logprob),
                top_logprobs=[TopLogprob(**_entry(*pair)) for pair in each.top[:count]],
            )
            for each in choice.logprobs
        ]
        return ChatLogprobs(content=content)


def _joined(pieces: list[CallPiece]) -> list[CallPiece]:
    """Join the pieces of each call, which come one after another."""
    joined: list[CallPiece] = []
    for piece in pieces:
        if joined and joined[-1].index == piece.index:
            joined[-1] = attrs.evolve(joined[-1], arguments=joined[-1].arguments + piece.arguments)
        else:
            joined.append(piece)
    return joined


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
