"""An engine in a process of its own: takes commands, runs steps, reports their results.

``python -m specplug.serve.engine_process`` reads its settings as one line of JSON from standard
input, and ends when that is closed: it never outlives the server. Four kinds of threads share the
work, and each socket belongs to one of them:

the loop     (main thread) steps the engine and sends all reports
the receiver takes commands from the server; it passes on to preparation, or to the loop, and drops
             from preparation what is aborted before it has begun
preparation  tokenizes, checks, compiles grammars; those that compile are other threads than the
             rest, so that a slow grammar holds up no other request
the guard    waits for standard input to close
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import attrs
import zmq

from specplug import debug
from specplug.config import EngineConfig
from specplug.engine.request import Request
from specplug.errors import InstanceError, SpecplugError, UsageError
from specplug.heap import freeze_heap
from specplug.llm import LLM
from specplug.model.loading import backend_of, silence_libraries
from specplug.outputs import Logprob, RequestOutput
from specplug.sampling_params import GRAMMARS, SamplingParams
from specplug.serve.messages import (
    Abort,
    Accepted,
    Add,
    AskStats,
    End,
    Failed,
    Flush,
    Flushed,
    Loading,
    Ready,
    Refused,
    Report,
    Stats,
    Stepped,
    TokenLogprobs,
    Update,
    Warned,
    decode,
    encode,
)
from specplug.serve.text_limit import TextLimit
from specplug.startup import startup_reported

_PREPARATION_THREADS = 2
_GRAMMAR_THREADS = 4

_SWITCH_SECONDS = 0.0005
"""Longest that preparation holds Python's lock when a step waits for it. Python's own 5 ms would
slow steps down, since a step gives up the lock hundreds of times."""


_LOADING_SECONDS = 0.1
"""The least time between two reports of how far a part of the start is."""

_FAREWELL_SECONDS = 10.0
"""How long an engine that fails waits until the server has read the reason."""


@attrs.frozen(kw_only=True)
class Prepared:
    """A command whose requests are ready for the loop."""

    id: str
    requests: list[Request]
    answer: Accepted


class PreparationPool:
    """Makes the requests of ``Add`` commands, beside the loop.

    Args:
        llm: whose ``prepare`` is called.
        chat_template: instead of the tokenizer's own.
        max_prompt_tokens: most of one prompt; None: what the context holds.
        done: where to put each ``Prepared`` or ``Refused``.
    """

    def __init__(
        self,
        llm: LLM,
        chat_template: str | None,
        max_prompt_tokens: int | None,
        done: SimpleQueue[Any],
    ) -> None:
        self._llm = llm
        self._template = chat_template
        self._most = max_prompt_tokens
        fits = llm.context_len - 1
        self._texts = TextLimit(
            backend_of(llm.tokenizer),
            fits if max_prompt_tokens is None else min(fits, max_prompt_tokens),
        )
        self._done = done
        self._waiting: dict[str, Add] = {}
        """Commands that no thread has begun with. The threads' own queues have only their ids, so
        what is dropped takes no room."""
        self._plain = ThreadPoolExecutor(_PREPARATION_THREADS, "preparation")
        self._grammars = ThreadPoolExecutor(_GRAMMAR_THREADS, "grammars")

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be completed."""
        own = getattr(self._llm.tokenizer, "chat_template", None)
        return self._llm.tokenizer is not None and bool(self._template or own)

    @property
    def num_waiting(self) -> int:
        """Commands that no thread has begun with."""
        return len(self._waiting)

    def take(self, add: Add) -> None:
        """Begin with a command as soon as a thread is free."""
        self._waiting[add.id] = add
        grammar = any(add.params.get(name) for name in GRAMMARS)
        (self._grammars if grammar else self._plain).submit(self._work, add.id)

    def drop(self, stream_id: str) -> bool:
        """Drop a command that no thread has begun with; return whether that was in time."""
        return self._waiting.pop(stream_id, None) is not None

    def _work(self, stream_id: str) -> None:
        add = self._waiting.pop(stream_id, None)
        if add is None:
            return
        try:
            self._done.put(self._prepare(add))
        except UsageError as error:
            self._done.put(Refused(id=add.id, message=str(error)))
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__} while the prompt was read"
            self._done.put(Refused(id=add.id, message=why, error=True))

    def _prepare(self, add: Add) -> Prepared:
        params = SamplingParams.from_json(add.params)
        prompts = add.prompts if add.messages is None else [self._render(add)]
        requests: list[Request] = []
        for number, prompt in enumerate(prompts, 1):
            try:
                requests += self._choices(add, prompt, params)
            except UsageError as error:
                if len(prompts) == 1:
                    raise
                raise UsageError(f"prompt {number} of {len(prompts)}: {error}") from error
        for index, request in enumerate(requests):
            request.request_id = f"{add.id}.{index}"
        firsts = requests[:: params.n]
        return Prepared(
            id=add.id,
            requests=requests,
            answer=Accepted(
                id=add.id,
                prompt_tokens=[len(request.prompt_token_ids) for request in firsts],
                echo=[self._text(request) for request in firsts] if add.echo else None,
            ),
        )

    def _choices(self, add: Add, prompt: str | list[int], params: SamplingParams) -> list[Request]:
        """Return the requests of a prompt."""
        if isinstance(prompt, str):
            self._texts.check(prompt)
        requests = self._llm.prepare(prompt, params, priority=add.priority)
        count = len(requests[0].prompt_token_ids)
        if self._most is not None and count > self._most:
            raise UsageError(
                f"the prompt has {count} tokens; expected at most {self._most} "
                "(--max-prompt-tokens)"
            )
        return requests

    def _render(self, add: Add) -> list[int]:
        """Return the prompt that the template makes of a chat."""
        if self._llm.tokenizer is None:
            raise UsageError("the model has no tokenizer, so it cannot chat: use /v1/completions")
        if not self.has_chat_template:
            raise UsageError(
                "the model's tokenizer has no chat template: use /v1/completions, or start the "
                "server with --chat-template FILE"
            )
        try:
            text = self._llm.tokenizer.apply_chat_template(
                add.messages,
                chat_template=self._template,
                tokenize=False,
                **{"add_generation_prompt": True, **add.template_options},
            )
        except Exception as error:  # a template refuses what it wants to, with any error
            raise UsageError(f"messages: the chat template refuses them: {error}") from error
        self._texts.check(text)
        # The template writes special tokens itself.
        tokens: list[int] = self._llm.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def _text(self, request: Request) -> str:
        if request.prompt is not None:
            return request.prompt
        if self._llm.tokenizer is None:
            raise UsageError("echo=True: the model has no tokenizer, so the prompt has no text")
        text: str = self._llm.tokenizer.decode(list(request.prompt_token_ids))
        return text


class EngineLoop:
    """Steps an engine and reports the results.

    Args:
        llm: the engine.
        preparation: where commands begin.
        inbox: what the receiver and preparation put for the loop.
        reports: the socket to the server.
    """

    def __init__(
        self,
        llm: LLM,
        preparation: PreparationPool,
        inbox: SimpleQueue[Any],
        reports: zmq.Socket[bytes],
    ) -> None:
        self._llm = llm
        self._preparation = preparation
        self._inbox = inbox
        self._reports = reports
        self._preparing: dict[str, bool] = {}
        """Streams at preparation; whether they are still wanted."""
        self._unfinished: dict[str, set[int]] = {}
        """By stream, the requests that have not ended."""
        self._num_sent: dict[str, int] = {}
        """By request, the number of tokens that were sent."""
        self._ended = False

    @property
    def num_preparing(self) -> int:
        """The number of streams at preparation, aborted ones included."""
        return len(self._preparing)

    def take(self, command: Any) -> None:
        """Take a command from the receiver."""
        if isinstance(command, Add):
            self._preparing[command.id] = True  # before an abort of it can come
            self._preparation.take(command)
        elif isinstance(command, Abort) and self._preparation.drop(command.id):
            del self._preparing[command.id]
        else:
            self._inbox.put(command)

    def fail(self, error: Exception) -> None:
        """End the loop, since the receiver cannot go on."""
        self._inbox.put(error)

    def run(self) -> None:
        """Run steps and commands until ``End`` comes."""
        while not self._ended:
            self._take_all()
            if self._llm.has_unfinished_requests or self._llm.has_peers:
                self._step()
            if debug.DEBUG and not self._llm.has_unfinished_requests:
                self._llm.check_pool()

    def _take_all(self) -> None:
        """Obey the inbox; wait for a command if no request runs and there is no other rank."""
        idle = not (self._llm.has_unfinished_requests or self._llm.has_peers)
        while idle or not self._inbox.empty():
            self._do(self._inbox.get())
            idle = False

    def _do(self, item: Any) -> None:
        match item:
            case Prepared():
                self._submit(item)
            case Refused():
                del self._preparing[item.id]
                self._send(item)
            case Abort():
                self._abort(item.id)
            case AskStats():
                self._send(Stats(totals=self._llm.totals(), occupancy=self._llm.occupancy))
            case Flush():
                self._flush(item.cache_salt)
            case End():
                self._ended = True
            case Exception():
                raise item

    def _submit(self, prepared: Prepared) -> None:
        if not self._preparing.pop(prepared.id):
            return
        self._send(prepared.answer)
        self._unfinished[prepared.id] = set(range(len(prepared.requests)))
        for request in prepared.requests:
            self._llm.submit(request)

    def _abort(self, stream_id: str) -> None:
        if stream_id in self._preparing:
            self._preparing[stream_id] = False
        for index in self._unfinished.get(stream_id, ()):
            self._llm.abort(f"{stream_id}.{index}")

    def _flush(self, cache_salt: str | None) -> None:
        why = None
        try:
            self._llm.flush_cache(cache_salt)
        except InstanceError:
            raise
        except Exception as error:  # every request has ended; the next step says so
            traceback.print_exc()
            why = str(error)
        self._send(Flushed(error=why))

    def _step(self) -> None:
        try:
            outputs = self._llm.step()
        except InstanceError:
            raise
        except Exception:  # every request has ended; the next step says so
            traceback.print_exc()
            return
        updates = [update for output in outputs if (update := self._update_of(output))]
        if updates:
            self._send(Stepped(updates=updates))

    def _update_of(self, output: RequestOutput) -> Update | None:
        """Return the update of a request that a step moved; None if its end was reported before."""
        request_id = output.request_id
        stream_id, index = _parsed(request_id)
        if index not in self._unfinished.get(stream_id, ()):
            return None
        try:
            update = self._update(output, stream_id, index)
        except Exception as error:  # it ends this request, and no other
            traceback.print_exc()
            self._llm.abort(request_id)
            why = f"{type(error).__name__} while the output was read"
            update = Update(id=stream_id, index=index, finish_reason="error", error=why)
        if update.finish_reason is not None:
            self._forget(request_id, stream_id, index)
        return update

    def _update(self, output: RequestOutput, stream_id: str, index: int) -> Update:
        sent = self._num_sent.get(output.request_id, 0)
        self._num_sent[output.request_id] = len(output.token_ids)
        new = None if output.logprobs is None else output.logprobs[sent:]
        drafts = output.finish_reason is not None and self._llm.spec_config.num_draft_tokens > 1
        return Update(
            id=stream_id,
            index=index,
            text=output.delta,
            token_ids=list(output.token_ids[sent:]),
            logprobs=None if new is None else _logprobs(output.token_ids[sent:], new),
            cached_tokens=output.num_cached_tokens,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            error=output.error,
            accept_lens=list(output.accept_lens) if drafts else None,
        )

    def _forget(self, request_id: str, stream_id: str, index: int) -> None:
        self._num_sent.pop(request_id, None)
        self._unfinished[stream_id].discard(index)
        if not self._unfinished[stream_id]:
            del self._unfinished[stream_id]

    def _send(self, report: Report) -> None:
        self._reports.send(encode(report))


def _parsed(request_id: str) -> tuple[str, int]:
    stream_id, _, index = request_id.rpartition(".")
    return stream_id, int(index)


def _logprobs(tokens: Iterable[int], logprobs: Iterable[dict[int, Logprob]]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(
            text=found[token].decoded_token or "",
            logprob=found[token].logprob,
            top=[
                (each.decoded_token or "", each.logprob)
                for each in sorted(found.values(), key=lambda each: each.rank)
            ],
        )
        for token, found in zip(tokens, logprobs, strict=True)
    ]


def _receive(address: str, loop: EngineLoop) -> None:
    try:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        socket.set_hwm(0)
        socket.bind(address)
        while True:
            loop.take(decode(socket.recv()))
    except Exception as error:  # else no other thread would notice
        loop.fail(error)


def _end_with_the_server() -> None:
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(1)


class _LoadingReports:
    """Tells the server how far a start is: of each part its begin and its end, and between them
    what is new since a moment ago."""

    def __init__(self, reports: zmq.Socket[bytes]) -> None:
        self._reports = reports
        self._told = 0.0

    def __call__(self, part: str, done: int, total: int) -> None:
        now = time.monotonic()
        if 0 < done < total and now - self._told < _LOADING_SECONDS:
            return
        self._told = now
        self._reports.send(encode(Loading(part=part, done=done, total=total)))


def _load(settings: dict[str, Any], reports: zmq.Socket[bytes]) -> LLM:
    """Load the model; send progress and warnings to the server."""
    silence_libraries()
    with (
        warnings.catch_warnings(record=True) as told,
        startup_reported(_LoadingReports(reports)),
    ):
        warnings.simplefilter("always")
        llm = LLM(EngineConfig.from_json(settings["engine"]))
    freeze_heap()
    for each in told:
        if each.category.__module__.startswith("specplug"):
            reports.send(encode(Warned(message=str(each.message))))
    return llm


def _run(settings: dict[str, Any], reports: zmq.Socket[bytes]) -> None:
    llm = _load(settings, reports)
    inbox: SimpleQueue[Any] = SimpleQueue()
    preparation = PreparationPool(
        llm, settings["chat_template"], settings["max_prompt_tokens"], inbox
    )
    loop = EngineLoop(llm, preparation, inbox, reports)
    config = {name: value for name, value in llm.effective_config.items() if _is_plain(value)}
    algorithm = llm.spec_config.algorithm
    reports.send(
        encode(
            Ready(
                algorithm=algorithm, config=config, has_chat_template=preparation.has_chat_template
            )
        )
    )
    threading.Thread(target=_receive, args=(settings["commands"], loop), daemon=True).start()
    loop.run()
    llm.close()


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def main() -> None:
    """Run an engine until the server ends it, or ends itself."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are the server's to handle
    sys.setswitchinterval(_SWITCH_SECONDS)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("specplug").setLevel(logging.INFO)
    settings = json.loads(_first_line())
    if not settings["verbose"]:
        logging.getLogger("specplug.llm").setLevel(logging.WARNING)
    guard = threading.Thread(target=_end_with_the_server, daemon=True)
    guard.start()
    reports: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    reports.set_hwm(0)
    reports.connect(settings["reports"])
    try:
        _run(settings, reports)
    except Exception as error:
        _tell(error, reports)
        guard.join(_FAREWELL_SECONDS)
        os._exit(1)
    os._exit(0)  # threads at preparation may be at it for a while


def _tell(error: Exception, reports: zmq.Socket[bytes]) -> None:
    """Say why the engine ends."""
    ours = isinstance(error, SpecplugError)
    if debug.DEBUG or not ours:
        traceback.print_exc()
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    reports.send(encode(Failed(message=text, usage=isinstance(error, UsageError))))


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        read = os.read(0, 1)
        if not read:
            raise SystemExit(1)
        line += read
    return line


if __name__ == "__main__":
    main()
