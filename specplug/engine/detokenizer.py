"""A request's text as it grows, and the stop strings in it."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream

from specplug.engine.stop_strings import StopStrings, stop_strings
from specplug.sampling_params import SamplingParams


class Detokenizer:
    """Turns token ids into text one by one and looks for stop strings.

    Args:
        tokenizer: the ``tokenizers.Tokenizer`` of the target.
        params: of the request.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=params.skip_special_tokens)
        self._skip_special = params.skip_special_tokens
        self._ids: list[int] = []
        self._stop = stop_strings(params.stop)
        self._min_tokens = params.min_tokens
        self._state = 0
        self._stopped_at = 0
        self.text = ""
        self.stopped: str | None = None

    def push(self, token_id: int) -> str | None:
        """Add a token. Returns the stop string that it completes, which ends the text, or None."""
        self._ids.append(token_id)
        piece = self._stream.step(self._tokenizer, token_id)
        if piece:
            self._append(piece)
        return self.stopped

    def finish(self) -> None:
        """Add the text that was held back because a character was not complete."""
        if self.stopped is None and self._ids:
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special)
            if whole.startswith(self.text):
                self._append(whole[len(self.text) :])

    @property
    def sure(self) -> int:
        """The characters of ``text`` that cannot turn out to be part of a stop string."""
        if self.stopped is not None or self._stop is None:
            return len(self.text)
        return len(self.text) - self._stop.depth[self._state]

    def _append(self, piece: str) -> None:
        """Add text. If it completes stop strings, cut it where the first of them begins."""
        if self._stop is not None:
            self._search(self._stop, piece)
        self.text += piece
        if self.stopped is not None:
            self.text = self.text[: self._stopped_at]

    def _search(self, stop: StopStrings, piece: str) -> None:
        start = len(self.text)
        for end, character in enumerate(piece, start + 1):
            self._state = stop.step(self._state, character)
            found = stop.found[self._state] if len(self._ids) > self._min_tokens else None
            if found is not None and (self.stopped is None or end - len(found) < self._stopped_at):
                self.stopped, self._stopped_at = found, end - len(found)
