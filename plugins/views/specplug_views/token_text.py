"""The text of tokens, each for itself and in a row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TokenText:
    """Turns tokens into text.

    Args:
        tokenizer: of transformers; None: a token's text is its number.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self.piece = lru_cache(maxsize=None)(self._piece)
        self._before: list[int] = [] if tokenizer is None else tokenizer.encode("a")[-1:]

    def _decode(self, tokens: Sequence[int]) -> str:
        assert self._tokenizer is not None
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def all(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens in a row."""
        if self._tokenizer is None:
            return "".join(map(self.piece, tokens))
        return self._decode(tokens)

    def _piece(self, token: int) -> str:
        """Return a token's text after another one, with the space that it begins with. Where that
        is no whole character, return what the vocabulary has."""
        if self._tokenizer is None:
            return f"⟨{token}⟩"
        before = self._decode(self._before)
        text = self._decode([*self._before, token])
        text = text[len(before) :] if text.startswith(before) else self._decode([token])
        if _UNFINISHED in text or not text:
            return f"⟨{self._tokenizer.convert_ids_to_tokens(token)}⟩"
        return text


class GrowingText:
    """The text of a request's output, token by token.

    Args:
        text: of tokens.
        prompt: the request's prompt.
    """

    def __init__(self, text: TokenText, prompt: Sequence[int]) -> None:
        self._text = text
        self._window = list(prompt[-8:])
        self._told = len(text.all(self._window))

    def add(self, token: int) -> str:
        """Return what a token adds: nothing while a character is unfinished."""
        self._window.append(token)
        text = self._text.all(self._window)
        if text.endswith(_UNFINISHED) and len(self._window) < 16:
            return ""
        added, self._window = text[self._told :], self._window[-8:]
        self._told = len(self._text.all(self._window))
        return added
