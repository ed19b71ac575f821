"""The messages between the server and an engine process: JSON, one object a message."""

from __future__ import annotations

import json
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Add:
    """To the engine: complete prompts, all of them or none.

    Attributes:
        id: of the stream; its requests are numbered from 0, those of the first prompt first.
        prompts: texts or lists of token ids; empty if ``messages`` are given.
        messages: a chat, which the tokenizer's template makes a prompt of.
        template_options: further variables of the template.
        params: ``SamplingParams.as_json``; those that are missing have their defaults.
        priority: of all of them.
        echo: whether the prompts' texts are wanted back.
    """

    id: str
    prompts: list[str | list[int]] = attrs.field(factory=list)
    messages: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = attrs.field(factory=dict)
    params: dict[str, Any] = attrs.field(factory=dict)
    priority: int = 0
    echo: bool = False


@attrs.frozen(kw_only=True)
class Abort:
    """To the engine: end a stream; unknown and ended ones are ignored."""

    id: str


@attrs.frozen(kw_only=True)
class AskStats:
    """To the engine: report the statistics so far."""


@attrs.frozen(kw_only=True)
class Flush:
    """To the engine: ``LLM.flush_cache``."""

    cache_salt: str | None = None


@attrs.frozen(kw_only=True)
class End:
    """To the engine: abort all requests and end."""


@attrs.frozen(kw_only=True)
class Loading:
    """From the engine: how far its start is, as ``specplug.startup.Report`` has it."""

    part: str
    done: int
    total: int


@attrs.frozen(kw_only=True)
class Ready:
    """From the engine: the model is loaded.

    Attributes:
        algorithm: what it runs under.
        config: ``LLM.effective_config``, of which only plain values.
        has_chat_template: whether chats can be completed.
    """

    algorithm: str
    config: dict[str, Any]
    has_chat_template: bool


@attrs.frozen(kw_only=True)
class Failed:
    """From the engine: it cannot start, or cannot go on.

    Attributes:
        message: one line.
        usage: whether a value that the user gave is to blame.
    """

    message: str
    usage: bool = False


@attrs.frozen(kw_only=True)
class Warned:
    """From the engine: a warning, such as of a setting that is off."""

    message: str


@attrs.frozen(kw_only=True)
class Accepted:
    """From the engine: prompts can be completed.

    Attributes:
        prompt_tokens: how many each prompt has.
        echo: their texts, if they were wanted.
    """

    id: str
    prompt_tokens: list[int]
    echo: list[str] | None = None


@attrs.frozen(kw_only=True)
class Refused:
    """From the engine: prompts cannot be completed, and why.

    Attributes:
        error: whether the error is the server's, not the request's.
    """

    id: str
    message: str
    error: bool = False


@attrs.frozen(kw_only=True)
class TokenLogprobs:
    """A token's log-probability, and those of the most likely ones in its place.

    Attributes:
        text: of the token alone.
        top: (text, logprob), the most likely first.
    """

    text: str
    logprob: float
    top: list[tuple[str, float]]


@attrs.frozen(kw_only=True)
class Update:
    """The result of a step for a request.

    Attributes:
        id: of its stream.
        index: its number in the stream.
        text: what came since its last update; no stop string is ever part of it.
        token_ids: likewise.
        logprobs: of these tokens, if asked for.
        cached_tokens: of its prompt, how many the prefix cache had.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        stop_reason: the stop string or stop token that ended it, if one did.
        error: what went wrong, with ``finish_reason`` "error".
        accept_lens: ``RequestOutput.accept_lens`` at the end, if the engine drafts; else None.
    """

    id: str
    index: int
    text: str = ""
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    accept_lens: list[int] | None = None


def _updates(values: list[Any]) -> list[Update]:
    return [value if isinstance(value, Update) else _update(**value) for value in values]


def _update(logprobs: list[dict[str, Any]] | None = None, **fields: Any) -> Update:
    found = None if logprobs is None else [TokenLogprobs(**each) for each in logprobs]
    return Update(logprobs=found, **fields)


@attrs.frozen(kw_only=True)
class Stepped:
    """From the engine: all requests that a step moved."""

    updates: list[Update] = attrs.field(converter=_updates)


@attrs.frozen(kw_only=True)
class Stats:
    """From the engine: its statistics, and what it holds.

    Attributes:
        totals: ``LLM.totals()``; a key may be missing, and others may come.
        occupancy: ``LLM.occupancy``.
    """

    totals: dict[str, Any]
    occupancy: dict[str, int]


@attrs.frozen(kw_only=True)
class Flushed:
    """From the engine: the answer to a ``Flush``; they come in its order.

    Attributes:
        error: why it failed; None: it did not.
    """

    error: str | None = None


Command = Add | Abort | AskStats | Flush | End
Report = Loading | Ready | Failed | Warned | Accepted | Refused | Stepped | Stats | Flushed

_KINDS = {kind.__name__: kind for kind in (*Command.__args__, *Report.__args__)}


def encode(message: Command | Report) -> bytes:
    """Return the bytes of a message."""
    named = [type(message).__name__, message]
    return json.dumps(named, separators=(",", ":"), default=_fields).encode()


def _fields(part: Any) -> dict[str, Any]:
    return attrs.asdict(part, recurse=False)


def decode(data: bytes) -> Any:
    """Return the message that ``encode`` made ``data`` of."""
    kind, fields = json.loads(data)
    return _KINDS[kind](**fields)
