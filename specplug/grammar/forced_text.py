"""The tokens that a grammar forces: keys, braces, names of functions. They are drafted, never taken
without the target, so what is found here changes no output."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import xgrammar

_MOST_TOKENS = 32
"""The longest chain."""

_MOST_SPELLINGS = 64
"""The most tokens that are allowed where text is forced: its first characters, one token each."""

_KEPT_TEXTS = 1024

_LOOK_SECONDS = 0.01
"""Processor time of a search, beyond which the grammar is too slow to be asked twice."""


class ForcedText:
    """Finds forced text and spells it as the tokenizer does.

    Text is forced where all tokens that a grammar allows are the beginnings of the longest one of
    them. What follows freely is therefore part of the last token where the vocabulary has such
    tokens, and no chain ends in a token that could be longer.

    xgrammar's own ``find_jump_forward_string`` has no limit: ``((a{1000}){1000}){100}`` takes it
    more than a minute.

    Args:
        tokenizer: the target's, of transformers.
        vocabulary: the bytes of each token; b"" for one that is no text.
        stops: the tokens that end an output.
    """

    def __init__(self, tokenizer: Any, vocabulary: Sequence[bytes], stops: Collection[int]) -> None:
        self._vocabulary = vocabulary
        self._stops = frozenset(stops)
        self._spell = lru_cache(_KEPT_TEXTS)(partial(_encode, tokenizer))

    def is_known(self, token: int) -> bool:
        """Return whether a token is text or an end: about others, which no grammar allows, xgrammar
        writes warnings."""
        is_text = token < len(self._vocabulary) and self._vocabulary[token] != b""
        return is_text or token in self._stops

    def after(self, matcher: xgrammar.GrammarMatcher, allowed: Tensor) -> tuple[int, ...]:
        """Return the tokens that are forced next, at most 32; () if none is.

        Args:
            matcher: stays where it is.
            allowed: [words] int32, the mask of the next token.

        Raises:
            TimeoutError: the grammar is too slow for this.
            Exception: xgrammar's or the tokenizer's.
        """
        first = self._forced_in(allowed)
        if first is None:
            return ()
        found = self._walk(matcher.fork(), first, allowed)
        ends = found[-1:] if found[-1] in self._stops else []
        text = found[: len(found) - len(ends)]
        spelled = self._spell(b"".join(self._vocabulary[token] for token in text))
        if len(found) == _MOST_TOKENS:  # the last one may be a part of a longer one
            spelled = spelled[:-1]
        walker = matcher.fork()
        if spelled and all(self.is_known(t) and walker.accept_token(t) for t in spelled):
            text = [*spelled]  # else what was found, which a tokenizer may spell otherwise
        return (*text, *ends)

    def _walk(self, walker: xgrammar.GrammarMatcher, first: int, allowed: Tensor) -> list[int]:
        """Return the forced tokens, each the longest one that is allowed."""
        found, mask = [first], torch.empty_like(allowed)
        started = time.thread_time()
        while found[-1] not in self._stops and len(found) < _MOST_TOKENS:
            walker.accept_token(found[-1])
            walker.fill_next_token_bitmask(mask)
            token = self._forced_in(mask)
            if time.thread_time() - started > _LOOK_SECONDS:
                raise TimeoutError
            if token is None:
                break
            found.append(token)
        return found

    def _forced_in(self, allowed: Tensor) -> int | None:
        """Return the longest of the tokens that a mask allows, if all of them are its beginnings,
        or the only one."""
        tokens = _few_tokens(allowed)
        if len(tokens) < 2:
            return tokens[0] if tokens else None
        texts = [self._vocabulary[token] for token in tokens]
        longest = max(texts, key=len)
        ends = not self._stops.isdisjoint(tokens)
        forced = not ends and all(longest.startswith(text) for text in texts)
        return tokens[texts.index(longest)] if forced else None


def _encode(tokenizer: Any, text: bytes) -> tuple[int, ...]:
    """Return the tokenizer's tokens for what a text has of whole characters."""
    whole = text.decode("utf-8", errors="ignore")
    return tuple(tokenizer.encode(whole, add_special_tokens=False))


def _few_tokens(allowed: Tensor) -> list[int]:
    """Return the tokens that a mask allows; [] if they are many."""
    words = allowed.numpy()
    places = np.flatnonzero(words)
    if len(places) > _MOST_SPELLINGS:
        return []
    bits = np.unpackbits(words[places].view(np.uint8), bitorder="little")
    ones = np.flatnonzero(bits)
    if len(ones) > _MOST_SPELLINGS:
        return []
    tokens: list[int] = (places[ones // 32] * 32 + ones % 32).tolist()
    return tokens
