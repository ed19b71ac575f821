"""Structured output: compile the grammars of requests, and refuse what cannot be compiled.

xgrammar is imported when the first grammar is asked for: that takes seconds, and few runs need it.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from specplug.errors import UsageError
from specplug.grammar.forced_text import ForcedText
from specplug.grammar.masks import num_words, unpack_masks
from specplug.grammar.state import GrammarState
from specplug.sampling_params import SamplingParams

if TYPE_CHECKING:
    import xgrammar

_log = logging.getLogger(__name__)

_CACHE_BYTES = 64 << 20
"""The size of the cache of compiled grammars."""

_COMPILE_SECONDS = 10.0
"""The longest compilation, without time in which the process was idle. xgrammar has no limit
itself: ``a?`` repeated a thousand times takes it a minute."""

_LONGEST_SECONDS = 60.0
"""The longest compilation, with time in which the process was idle."""

_SLICE_SECONDS = 0.1
"""Interval of that check. Any pause of the process counts as one such slice."""

_EXIT_SECONDS = 10.0
"""The longest that the end of the process waits for compilations."""

_TRIAL_TOKENS = 16
_TRIAL_SECONDS = 1.0
"""Processor time of the trial. ``((((a{0,100}){0,100}){0,100}){0,100})`` compiles at once but takes
seconds per token; 50 µs are usual."""

_BAN_SECONDS = 600.0
"""Time for which a grammar that took too long is refused at once; the machine may be the cause."""

_MOST_BANS = 256

_MOST_GIVEN_UP = 2
"""The most abandoned compilations that still run; with so many, no other is started."""

_MOST_NESTED = 64
"""The most levels of a JSON schema; some hundreds take xgrammar seconds."""

_MOST_BLANKS = 16
"""The most blanks in a row in JSON, outside of strings."""

_MOST_CHARACTERS = {
    "json_schema": 1 << 17,
    "regex": 1 << 14,
    "ebnf": 1 << 15,
    "structural_tag": 1 << 17,
}
"""The longest grammars. They bound the memory of an abandoned compilation to about 2 GB: the states
of ``a*a*a*…`` grow with the square of its length."""

_DATA = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords of a JSON schema whose values are not schemas."""

_EXPECTED = {
    "json_schema": "a JSON schema that xgrammar knows: correct it",
    "regex": "a regular expression without look-around and back-references: correct it",
    "ebnf": "a grammar in GBNF with a rule named root: correct it",
    "structural_tag": "a structural tag that xgrammar knows: correct it",
}

_TOPMOST = "specplug_topmost"

_ONE_RULE = re.compile(
    r"^([\w.-]+)(?:\[.*\])? ::= \(\(([\w.-]+)(\{\d+, -?\d+\})?\)\)(?: \(=.*)?$", re.MULTILINE
)
"""In a grammar that xgrammar prints, a rule that is another one alone, or its repetition: both
names, and the repetition."""

_T = TypeVar("_T")

_compiling: set[threading.Thread] = set()
"""Threads that are in xgrammar."""


class GrammarCompiler:
    """Makes the grammar states of an engine's requests, and caches compiled grammars.

    Args:
        tokenizer: the target's, of transformers; None if it has none.
        vocab_size: V, the width of the target's logits; it may differ from the tokenizer's.
        eos_token_ids: end the output. If there are none, the tokenizer's own end-of-sequence token
            does; if that is missing too, a grammar ends where no token can follow.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._forced_text: ForcedText
        self._banned: dict[int, float] = {}
        """When grammars took too long, by the hash of (kind, text), in order."""
        self._given_up: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self, params: SamplingParams) -> GrammarState:
        """Compile the grammar that ``params`` ask for, and return its state at the start.

        A compilation usually takes milliseconds, and at most 10 s of processor time; a cached
        grammar takes about 1 ms. One that took too long is refused at once for ten minutes. May be
        called from several threads.

        Raises:
            UsageError: xgrammar is not installed, the model has no tokenizer, the grammar cannot
                be compiled, or no output of this vocabulary can match it.
        """
        assert params.grammar is not None, "only for requests that have a grammar"
        kind, text = params.grammar
        shown = f"{kind}={_shortened(text)}"
        if self._tokenizer is None:
            raise UsageError(f"{shown} needs a tokenizer; the model has none: give LLM one")
        _check(kind, text)
        if time.monotonic() - self._banned.get(hash((kind, text)), -math.inf) < _BAN_SECONDS:
            raise _too_slow(kind, text)
        compiler, words = self._loaded(shown), num_words(self._vocab_size)
        try:
            matcher = self._in_time(lambda: _start(compiler, kind, text, words))
        except TimeoutError:
            self._ban(kind, text)
            raise _too_slow(kind, text) from None
        except Exception as error:  # xgrammar mostly raises RuntimeErrors
            raise _refusal(kind, text, _reason(error)) from error
        grammar_state = GrammarState(
            matcher,
            self._vocab_size,
            params.banned_tokens(self._eos_token_ids),
            self._forced_text,
            lambda: self._ban(kind, text),
        )
        if not grammar_state.goes_on:
            why = grammar_state.error or "no output of at least one token matches it"
            raise _refusal(kind, text, why)
        return grammar_state

    def _ban(self, kind: str, text: str) -> None:
        """Refuse a grammar at once for a while."""
        with self._lock:
            while len(self._banned) >= _MOST_BANS:
                del self._banned[next(iter(self._banned))]
            self._banned[hash((kind, text))] = time.monotonic()

    def _in_time(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` in a thread; raise TimeoutError after 10 s of its work.

        xgrammar cannot be interrupted: abandoned work goes on in its thread, without the
        interpreter's lock, and ends with the process at the latest.
        """
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        if len(self._given_up) >= _MOST_GIVEN_UP:
            raise RuntimeError(
                f"{_MOST_GIVEN_UP} other grammars are still being compiled; try again later"
            )
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            finally:
                _compiling.discard(thread)

        thread = threading.Thread(target=run, name="specplug-grammar", daemon=True)
        _compiling.add(thread)
        thread.start()
        try:
            _wait(future)
        except TimeoutError:
            self._given_up.append(thread)
            raise
        return future.result()

    def _loaded(self, shown: str) -> xgrammar.GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._load(shown)
            return self._compiler

    def _load(self, shown: str) -> xgrammar.GrammarCompiler:
        try:
            import xgrammar
        except ImportError as error:
            raise UsageError(
                f"{shown} needs xgrammar, which cannot be imported ({error}): "
                "pip install 'specplug[grammar]'"
            ) from error
        try:
            vocabulary = _vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
            self._forced_text = ForcedText(
                self._tokenizer, vocabulary.decoded_vocab, vocabulary.stop_token_ids
            )
            return xgrammar.GrammarCompiler(
                vocabulary,
                max_threads=min(8, os.cpu_count() or 1),
                cache_limit_bytes=_CACHE_BYTES,
            )
        except Exception as error:
            raise UsageError(
                f"{shown}: xgrammar cannot use the tokenizer, a {type(self._tokenizer).__name__} "
                f"({_reason(error)}): expected a fast tokenizer of transformers"
            ) from error


@atexit.register
def _await_compilations() -> None:
    """Wait, at the end of the process, for the threads that still compile; Ctrl-C ends it at once.

    Up to Python 3.13 a thread that comes back to an interpreter which is being torn down is ended
    where it stands. In the frames of xgrammar's binding that aborts the process.
    """
    ends, told = time.monotonic() + _EXIT_SECONDS, False
    try:
        while sys.version_info < (3, 14) and _compiling and time.monotonic() < ends:
            for thread in list(_compiling):
                thread.join(1.0)
            if _compiling and not told:
                told = True
                _log.warning("a grammar is still being compiled; Ctrl-C ends the process at once")
    except KeyboardInterrupt:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(130)


def _wait(future: Future[Any]) -> None:
    """Wait for other threads of this process, or raise TimeoutError.

    Only time in which the process had a processor counts, since a stopped one compiles nothing.
    """
    at_it = waited = 0.0
    while at_it < _COMPILE_SECONDS and waited < _LONGEST_SECONDS:
        before = time.process_time()
        if wait((future,), timeout=_SLICE_SECONDS).done:
            return
        waited += _SLICE_SECONDS
        at_it += min(_SLICE_SECONDS, time.process_time() - before)
    raise TimeoutError


def _vocabulary(
    tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]
) -> xgrammar.TokenizerInfo:
    """Describe the vocabulary: each token's bytes, and the tokens that end the output."""
    import xgrammar

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a tokenizer without an end-of-sequence token
        found = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    stops = eos_token_ids or {tokenizer.eos_token_id}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token for token, entry in added.items() if entry.special}
    texts = found.decoded_vocab
    for token in special.union(tokenizer.all_special_ids):
        if token < vocab_size:
            # xgrammar would allow it wherever its name fits, but a special token is no text.
            texts[token] = b""
    return xgrammar.TokenizerInfo(
        texts,
        xgrammar.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=sorted(t for t in stops if t is not None),
        add_prefix_space=found.add_prefix_space,
    )


def _start(
    compiler: xgrammar.GrammarCompiler, kind: str, text: str, words: int
) -> xgrammar.GrammarMatcher:
    """Compile a grammar, try it out, and return a matcher at its start."""
    import xgrammar

    compile_by_kind: dict[str, Callable[[str], xgrammar.CompiledGrammar]] = {
        # A weak model would generate blanks for ever.
        "json_schema": partial(compiler.compile_json_schema, max_whitespace_cnt=_MOST_BLANKS),
        "regex": compiler.compile_regex,
        "ebnf": partial(_compile_ebnf, compiler),
        "structural_tag": partial(_compile_structural_tag, compiler),
    }
    matcher = xgrammar.GrammarMatcher(compile_by_kind[kind](text))
    _try_out(matcher.fork(), words)
    return matcher


def _compile_ebnf(compiler: xgrammar.GrammarCompiler, text: str) -> xgrammar.CompiledGrammar:
    import xgrammar

    # Where root is left-recursive, xgrammar bans tokens that span two rounds of it, unless another
    # rule is the topmost.
    text = f"{text}\n{_TOPMOST} ::= root"
    parsed = str(xgrammar.Grammar.from_ebnf(text, root_rule_name=_TOPMOST))
    if _has_endless_rule(parsed):
        raise RuntimeError("one of its rules is nothing but a repetition of itself")
    return compiler.compile_grammar(text, root_rule_name=_TOPMOST)


def _compile_structural_tag(
    compiler: xgrammar.GrammarCompiler, text: str
) -> xgrammar.CompiledGrammar:
    import xgrammar

    if _has_endless_rule(str(xgrammar.Grammar.from_structural_tag(text))):
        raise RuntimeError("one of its rules is nothing but a repetition of itself")
    return compiler.compile_structural_tag(text)


def _has_endless_rule(parsed: str) -> bool:
    """Return whether a rule is nothing but a repetition of itself, perhaps by way of others.

    No text matches such a rule, or the empty one alone. xgrammar (0.2.8) replaces a repeated rule
    by what it is, again and again, until the stack is full and the process crashes.

    Args:
        parsed: the grammar, as xgrammar prints it.
    """
    bodies = {name: (body, repeated) for name, body, repeated in _ONE_RULE.findall(parsed)}
    seen: set[str] = set()
    for name in bodies:
        path: list[str] = []
        while name in bodies and name not in seen:
            seen.add(name)
            path.append(name)
            name = bodies[name][0]
        if name in path and any(bodies[each][1] for each in path[path.index(name) :]):
            return True
    return False


def _try_out(matcher: xgrammar.GrammarMatcher, words: int) -> None:
    """Raise TimeoutError if tokens take far too long: they would delay every request."""
    stops = set(matcher.stop_token_ids)
    mask = torch.zeros(words, dtype=torch.int32)
    started = time.thread_time()
    for _ in range(_TRIAL_TOKENS):
        matcher.fill_next_token_bitmask(mask)
        allowed = [t for t in unpack_masks(mask).nonzero()[:, 0].tolist() if t not in stops]
        if not allowed or not matcher.accept_token(allowed[len(allowed) // 2]):
            return
        if time.thread_time() - started > _TRIAL_SECONDS:
            raise TimeoutError


def _check(kind: str, text: str) -> None:
    """Refuse what would take xgrammar too much memory, or what it would misread."""
    most = _MOST_CHARACTERS[kind]
    if len(text) > most:
        raise _refusal(kind, text, f"it has {len(text)} characters", f"at most {most}: shorten it")
    if kind in ("json_schema", "structural_tag"):
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _refusal(kind, text, f"it is no JSON: {_reason(error)}") from error
        if _depth(schema) > _MOST_NESTED:
            why = f"it is nested more than {_MOST_NESTED} levels deep"
            raise _refusal(kind, text, why, "a flatter one: use $defs and $ref")
        for key, value in _strings(schema):
            _check_keyword(kind, text, key, value)


def _depth(schema: Any) -> int:
    """Count the levels of nested lists and objects."""
    depth, level = 0, [schema]
    while level:
        depth += 1
        parts = [
            p.values() if isinstance(p, dict) else p for p in level if isinstance(p, dict | list)
        ]
        level = [part for of_one in parts for part in of_one]
    return depth


def _check_keyword(kind: str, text: str, key: str, value: str) -> None:
    most = _MOST_CHARACTERS["regex"]
    if key == "$ref" and not value.startswith("#"):  # xgrammar would allow anything there
        why = f"$ref {_shortened(value)} is not in the schema itself"
        raise _refusal(kind, text, why, "#/…: copy it into the schema")
    if key == "pattern" and len(value) > most:
        why = f"pattern {_shortened(value)} has {len(value)} characters"
        raise _refusal(kind, text, why, f"at most {most}: shorten it")


def _strings(schema: Any) -> Iterator[tuple[str, str]]:
    """Yield the keywords of a schema and its parts whose values are strings."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            yield from ((key, value) for key, value in part.items() if isinstance(value, str))
            parts += [value for key, value in part.items() if key not in _DATA]


def _refusal(kind: str, text: str, why: str, expected: str | None = None) -> UsageError:
    return UsageError(f"{kind}={_shortened(text)}: {why}; expected {expected or _EXPECTED[kind]}")


def _too_slow(kind: str, text: str) -> UsageError:
    return _refusal(
        kind,
        text,
        "it takes too long to compile or to follow",
        "a simpler one: have fewer optional parts and nested repetitions",
    )


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:60]}…{text[-15:]}")


def _reason(error: BaseException) -> str:
    """Format an error of xgrammar for users: one line, without its source location."""
    text = re.sub(r"\[[\d:]+\] \S+\.(cc|h):\d+: ", "", str(error))
    text = re.sub(r"Check failed: .*? is false: ", "", text)
    text = " ".join(text.split("The JSON string is:")[0].split()).rstrip(". ")
    if not text or "type mismatch!" in text:
        return "a value in it has a wrong type or is out of range"
    return text if len(text) <= 200 else f"{text[:200]}…"
