"""Structured output: which tokens a request's grammar allows next. xgrammar does the parsing.

xgrammar is imported when the first grammar is asked for: that takes seconds, and few runs need it.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import torch
from torch import Tensor

from specplug.engine.sampling_params import SamplingParams
from specplug.errors import UsageError
from specplug.spec.draft import Draft

if TYPE_CHECKING:
    import xgrammar

_CACHE_BYTES = 64 << 20
"""Compiled grammars that are kept, for the requests that ask for the same ones."""

_COMPILE_SECONDS = 10.0
"""xgrammar has no limit of its own: for ``a?`` repeated a thousand times it takes a minute."""

_TRIAL_TOKENS = 16
_TRIAL_SECONDS = 1.0
"""``((((a{0,100}){0,100}){0,100}){0,100})`` compiles at once, but takes seconds a token; what is
usual is 50 µs."""

_STEP_SECONDS = 1.0
"""What a grammar may take of one step; what the trial did not show ends the request alone."""

_MOST_GIVEN_UP = 2
"""Compilations that were given up and still run, beyond which no other is begun."""

_MOST_NESTED = 64
"""Levels of a JSON schema; some hundreds take xgrammar seconds."""

_MOST_BLANKS = 16
"""Blanks in a row, outside of strings, in JSON."""

_MOST_CHARACTERS = {"json_schema": 1 << 17, "regex": 1 << 14, "ebnf": 1 << 15}
"""So that a compilation that is given up takes less than about 2 GB: states of a grammar such as
``a*a*a*…`` grow with the square of its length."""

_DATA = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords of a JSON schema whose values are not schemas."""

_EXPECTED = {
    "json_schema": "a JSON schema that xgrammar knows: correct it",
    "regex": "a regular expression without look-around and back-references: correct it",
    "ebnf": "a grammar in GBNF with a rule named root: correct it",
}

_TOPMOST = "specplug_topmost"

_T = TypeVar("_T")


class GrammarCompiler:
    """Makes the guides of an engine's requests, and keeps what it has compiled.

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
        self._too_slow: deque[int] = deque(maxlen=256)  # hashes of (kind, text)
        self._given_up: list[threading.Thread] = []
        self._lock = threading.Lock()

    def guide(self, params: SamplingParams) -> Guide:
        """A guide at the start of the grammar that ``params`` ask for.

        A compilation takes milliseconds, and at most 10 s; a grammar in the cache takes one.
        May be called from several threads.

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
        if hash((kind, text)) in self._too_slow:
            raise _too_slow(kind, text)
        compiler, words = self._loaded(shown), _words(self._vocab_size)
        try:
            matcher = self._in_time(lambda: _start(compiler, kind, text, words))
        except TimeoutError:
            self._too_slow.append(hash((kind, text)))
            raise _too_slow(kind, text) from None
        except Exception as error:  # xgrammar's are RuntimeErrors, mostly
            raise _refusal(kind, text, _reason(error)) from error
        guide = Guide(matcher, self._vocab_size, lambda: self._too_slow.append(hash((kind, text))))
        if not guide.goes_on:
            raise _refusal(kind, text, "no output of at least one token matches it")
        return guide

    def _in_time(self, work: Callable[[], _T]) -> _T:
        """What ``work`` returns or raises, or TimeoutError after 10 s.

        xgrammar cannot be interrupted: what is given up goes on in a thread of its own, without
        the interpreter's lock, and ends with the process at the latest.
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

        thread = threading.Thread(target=run, name="specplug-grammar", daemon=True)
        thread.start()
        try:
            return future.result(timeout=_COMPILE_SECONDS)
        except TimeoutError:
            self._given_up.append(thread)
            raise

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
            return xgrammar.GrammarCompiler(
                _vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids),
                max_threads=min(8, os.cpu_count() or 1),
                cache_limit_bytes=_CACHE_BYTES,
            )
        except Exception as error:
            raise UsageError(
                f"{shown}: xgrammar cannot use the tokenizer, a {type(self._tokenizer).__name__} "
                f"({_reason(error)}): expected a fast tokenizer of transformers"
            ) from error


class Guide:
    """Where one request stands in its grammar.

    The grammar ends by an end-of-sequence token, which is allowed where the output so far is a
    whole match. It also ends where no token at all may follow: right at the end of a match if the
    vocabulary has no end-of-sequence token, and in a dead end, where the vocabulary cannot spell
    what the grammar demands. Last, it ends before a token that it does not allow, which comes up
    only if masks are not applied, or if every allowed token is banned by other means.

    Args:
        matcher: xgrammar's, at the start.
        vocab_size: V.
        on_slow: called if the grammar turns out to take too long.

    Attributes:
        error: why the grammar was given up, or None.
        ended_at: the number of output tokens after which the grammar ended, the end-of-sequence
            token included if it ended by one; None while it goes on. Output behind it is not the
            grammar's, and must be dropped.
    """

    def __init__(
        self,
        matcher: xgrammar.GrammarMatcher,
        vocab_size: int,
        on_slow: Callable[[], None] = lambda: None,
    ) -> None:
        self.ended_at: int | None = None
        self.error: str | None = None
        self._on_slow = on_slow
        self._matcher = matcher
        self._taken = 0
        self._next = torch.zeros(_words(vocab_size), dtype=torch.int32)
        self._look_ahead()

    @property
    def goes_on(self) -> bool:
        """Whether the grammar has not ended."""
        return self.ended_at is None

    def advance(self, tokens: Sequence[int]) -> None:
        """Take the request's next output tokens, in order, each once.

        Those behind the grammar's end are ignored. How they are split over calls does not matter.
        """
        if not self.goes_on or not tokens:
            return
        with self._in_time():
            self._advance(tokens)

    def _advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # A matcher that has ended must not be asked: it writes warnings.
            if not self._matcher.accept_token(token):
                return self._end()
            self._taken += 1
            if self._matcher.is_terminated():
                return self._end()
        self._look_ahead()

    def fill_next(self, mask: Tensor) -> None:
        """Write which tokens may come next.

        Args:
            mask: [words] int32 on the CPU; bit ``t % 32`` of word ``t // 32`` is token t. All ones
                if the grammar has ended.
        """
        mask.copy_(self._next)

    def fill_tree(
        self, tokens: Tensor, next_token: Tensor, next_sibling: Tensor, masks: Tensor
    ) -> None:
        """Write which tokens may follow each node of a draft tree. The guide stays where it is.

        Args:
            tokens: [N] int64 on the CPU. Node 0 is the last token that the guide was advanced by.
            next_token, next_sibling: [N] int64 on the CPU, this request's ``Draft.links``.
            masks: [N, words] int32 on the CPU, contiguous. Row i: what may follow the path from
                the root to node i. All ones where the grammar allows no such path or ends on it,
                so that no row bans every token: the target never gets to the first, and what it
                gives behind the second is dropped.
        """
        assert masks.is_contiguous(), masks.stride()
        masks.fill_(-1)
        if not self.goes_on:
            return
        # Rows of paths that end or are refused become 0; those behind them are not written.
        with self._in_time():
            self._matcher.traverse_draft_tree(next_token, next_sibling, tokens, masks)
        masks.masked_fill_((masks == 0).all(1, keepdim=True), -1)

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """Give the grammar up if what is done takes far too long: it holds up every request."""
        started = time.monotonic()
        yield
        if self.goes_on and time.monotonic() - started > _STEP_SECONDS:
            self.error = (
                f"the grammar took more than {_STEP_SECONDS:.0f} s for one step: have fewer "
                "nested repetitions"
            )
            self._on_slow()
            self._end()

    def _look_ahead(self) -> None:
        self._matcher.fill_next_token_bitmask(self._next)
        if not self._next.any():
            self._end()

    def _end(self) -> None:
        self.ended_at = self._taken
        self._next.fill_(-1)


@attrs.frozen(eq=False)
class HostTree:
    """A batch's drafts on their way to the host, where grammars follow them.

    Attributes:
        nodes: [3, bs, N] int64 on the host: tokens, next token, next sibling (``Draft.links``).
        widths: nodes of each request.
        ready: None on the CPU.
    """

    nodes: Tensor
    widths: tuple[int, ...]
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, draft: Draft) -> HostTree:
        """Start a draft's way to the host."""
        nodes, ready = torch.stack((draft.tokens, *draft.links)), None
        if nodes.is_cuda:
            nodes = torch.empty_like(nodes, device="cpu", pin_memory=True).copy_(
                nodes, non_blocking=True
            )
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        return cls(nodes, draft.widths or (draft.width,) * len(draft.tokens), ready)

    def fill_masks(self, guides: Sequence[Guide | None], masks: Tensor) -> None:
        """Write what may follow each node; waits for the nodes.

        Args:
            guides: of the requests; None for one without a grammar.
            masks: [T, words] int32 on the CPU, T the sum of the widths.
        """
        if self.ready is not None:
            self.ready.synchronize()
        ends = accumulate(self.widths)
        for b, (guide, width, end) in enumerate(zip(guides, self.widths, ends, strict=True)):
            if guide is not None:
                tokens, next_token, next_sibling = self.nodes[:, b, :width]
                guide.fill_tree(tokens, next_token, next_sibling, masks[end - width : end])


def allocate_masks(rows: int, vocab_size: int, *, pinned: bool = False) -> Tensor:
    """[rows, words] int32 of ones, so all is allowed; on the CPU."""
    return torch.full((rows, _words(vocab_size)), -1, dtype=torch.int32, pin_memory=pinned)


def mask_scores(scores: Tensor, masks: Tensor) -> Tensor:
    """The scores with -inf for the tokens that are not allowed.

    Args:
        scores: [T, V] of any floating dtype.
        masks: [T, words] int32 on the same device, words = V / 32 rounded up.

    Returns:
        [T, V], a new tensor of the same dtype.
    """
    vocab_size = scores.shape[1]
    assert masks.shape == (scores.shape[0], _words(vocab_size)), (scores.shape, masks.shape)
    return scores.masked_fill(~_unpacked(masks)[:, :vocab_size], float("-inf"))


def _unpacked(masks: Tensor) -> Tensor:
    """[…, words] int32 -> […, 32 · words] bool."""
    octets = masks.contiguous().view(torch.uint8).to(torch.int32)
    return _octet_bits(masks.device)[octets].view(torch.bool)


@lru_cache
def _octet_bits(device: torch.device) -> Tensor:
    """[256] int64: the bits of each byte as eight bools. Far faster than shifts of every word."""
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    return bits.to(torch.bool).view(torch.int64).squeeze(1).to(device)


def _words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def _vocabulary(
    tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]
) -> xgrammar.TokenizerInfo:
    """The bytes of each token, and the tokens that end the output."""
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
            # xgrammar would allow it wherever its name fits, in any string; but it is no text.
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
    """A matcher at the start of a grammar that has been tried out."""
    import xgrammar

    compile_by_kind: dict[str, Callable[[str], xgrammar.CompiledGrammar]] = {
        # A weak model would go on with blanks for ever.
        "json_schema": partial(compiler.compile_json_schema, max_whitespace_cnt=_MOST_BLANKS),
        "regex": compiler.compile_regex,
        # Where root refers to itself on the left, xgrammar bans tokens that span two rounds of it,
        # unless root is not the topmost rule.
        "ebnf": lambda text: compiler.compile_grammar(
            f"{text}\n{_TOPMOST} ::= root", root_rule_name=_TOPMOST
        ),
    }
    matcher = xgrammar.GrammarMatcher(compile_by_kind[kind](text))
    _try_out(matcher.fork(), words)
    return matcher


def _try_out(matcher: xgrammar.GrammarMatcher, words: int) -> None:
    """Raise TimeoutError if tokens take far too long: later they would hold up every request."""
    stops = set(matcher.stop_token_ids)
    mask = torch.zeros(words, dtype=torch.int32)
    started = time.monotonic()
    for _ in range(_TRIAL_TOKENS):
        matcher.fill_next_token_bitmask(mask)
        allowed = [t for t in _unpacked(mask).nonzero()[:, 0].tolist() if t not in stops]
        if not allowed or not matcher.accept_token(allowed[len(allowed) // 2]):
            return
        if time.monotonic() - started > _TRIAL_SECONDS:
            raise TimeoutError


def _check(kind: str, text: str) -> None:
    """Refuse what xgrammar would take too much memory for, or would take for something else."""
    most = _MOST_CHARACTERS[kind]
    if len(text) > most:
        raise _refusal(kind, text, f"it has {len(text)} characters", f"at most {most}: shorten it")
    if kind == "json_schema":
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _refusal(kind, text, f"it is no JSON: {_reason(error)}") from error
        if _depth(schema) > _MOST_NESTED:
            why = f"it is nested more than {_MOST_NESTED} levels deep"
            raise _refusal(kind, text, why, "a flatter one: use $defs and $ref")
        for key, value in _strings(schema):
            _check_keyword(text, key, value)


def _depth(schema: Any) -> int:
    """Levels of lists and objects within one another."""
    depth, level = 0, [schema]
    while level:
        depth += 1
        parts = [
            p.values() if isinstance(p, dict) else p for p in level if isinstance(p, dict | list)
        ]
        level = [part for of_one in parts for part in of_one]
    return depth


def _check_keyword(schema: str, key: str, value: str) -> None:
    most = _MOST_CHARACTERS["regex"]
    if key == "$ref" and not value.startswith("#"):  # xgrammar would allow anything there
        why = f"$ref {_shortened(value)} is not in the schema itself"
        raise _refusal("json_schema", schema, why, "#/…: copy it into the schema")
    if key == "pattern" and len(value) > most:
        why = f"pattern {_shortened(value)} has {len(value)} characters"
        raise _refusal("json_schema", schema, why, f"at most {most}: shorten it")


def _strings(schema: Any) -> Iterator[tuple[str, str]]:
    """The keywords of a schema and its parts that have strings as values."""
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
    """An error of xgrammar as a user can read it: one line, without the place in its source."""
    text = re.sub(r"\[[\d:]+\] \S+\.(cc|h):\d+: ", "", str(error))
    text = re.sub(r"Check failed: .*? is false: ", "", text)
    text = " ".join(text.split("The JSON string is:")[0].split()).rstrip(". ")
    if not text or "type mismatch!" in text:
        return "a value in it has a wrong type or is out of range"
    return text if len(text) <= 200 else f"{text[:200]}…"
