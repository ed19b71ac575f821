"""Refuse texts by their length alone, before tokenizing, if no context can hold them."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from specplug.errors import UsageError

_SPLITS = frozenset({"Split", "Punctuation", "Digits"})
"""Pre-tokenizers that cut a text. They drop a part of it only if their behavior is Removed."""


class TextLimit:
    """Refuses texts whose length alone shows that they have too many tokens.

    Args:
        tokenizer: of the model. Without one, or if its tokens have no longest, nothing is refused.
        most: tokens that fit.
    """

    def __init__(self, tokenizer: Tokenizer | None, most: int) -> None:
        self._most = most
        self._longest = None if tokenizer is None else longest_token(tokenizer)

    def check(self, text: str) -> None:
        """Refuse a text that is too long.

        Raises:
            UsageError: it is.
        """
        if self._longest is not None and len(text) > self._most * self._longest:
            least = -(-len(text) // self._longest)
            raise UsageError(
                f"the prompt has {len(text)} characters, which are at least {least} tokens; "
                f"expected at most {self._most} (--max-model-len, --max-prompt-tokens)"
            )


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Return the most characters that one token stands for; None if there is no bound.

    There is one if every byte of a text ends up in some token: with a byte-level BPE that knows all
    bytes, does not normalize, and has no added token that takes the spaces around it.
    """
    model = tokenizer.model
    vocab = tokenizer.get_vocab()
    if (
        tokenizer.normalizer is not None
        or not isinstance(model, BPE)
        or model.continuing_subword_prefix
        or model.end_of_word_suffix
        or not _keeps_all(tokenizer.pre_tokenizer)
        or not all(byte in vocab for byte in ByteLevel.alphabet())
        or any(t.lstrip or t.rstrip for t in tokenizer.get_added_tokens_decoder().values())
    ):
        return None
    return max(map(len, vocab))


def _keeps_all(pre_tokenizer: Any) -> bool:
    """Whether it passes every byte of a text on to the model."""
    if pre_tokenizer is None:
        return False
    state = json.loads(pre_tokenizer.__getstate__())  # of parts, nothing else tells it
    parts = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    kinds = {part["type"] for part in parts}
    removes = any(part.get("behavior") == "Removed" for part in parts)
    return "ByteLevel" in kinds and kinds <= _SPLITS | {"ByteLevel"} and not removes
