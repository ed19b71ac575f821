"""A request's text as it grows, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Turns token ids into text one by one and looks for stop strings.

    Args:
        tokenizer: the ``tokenizers.Tokenizer`` of the target.
        stop: strings that end the text.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._skip_special = skip_special_tokens
        self._ids: list[int] = []
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self.text = ""
        self.stopped: str | None = None

    def push(self, token_id: int) -> str | None:
        """Add a token; the stop string that it completed, if any, which ends the text."""
        self._ids.append(token_id)
        piece = self._stream.step(self._tokenizer, token_id)
        if piece:
            self._append(piece)
        return self.stopped

    def finish(self) -> None:
        """Add what an unfinished character or a held-back piece still owes."""
        if self.stopped is None and self._ids:
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special)
            if whole.startswith(self.text):
                self._append(whole[len(self.text) :])

    @property
    def sure(self) -> int:
        """How much of ``text`` no later stop string can take back."""
        if self.stopped is not None or not self._stop:
            return len(self.text)
        for held in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-held:]) for s in self._stop):
                return len(self.text) - held
        return len(self.text)

    def _append(self, piece: str) -> None:
        searched = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        found = [(self.text.find(s, searched), s) for s in self._stop]
        hits = [(at, s) for at, s in found if at >= 0]
        if hits:
            at, self.stopped = min(hits)
            self.text = self.text[:at]
