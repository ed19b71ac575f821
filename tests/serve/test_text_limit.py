"""A text is refused by its length only where it cannot fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Sequence, Split

import specplug
from specplug.errors import UsageError
from specplug.serve.text_limit import TextLimit, longest_token

(FILE,) = (Path(specplug.__file__).parent / "assets").rglob("tokenizer.json")
DEFAULT = Tokenizer.from_file(str(FILE))
WORDS = sorted(DEFAULT.decode([i]) for i in range(1, DEFAULT.get_vocab_size()))


def byte_level() -> Tokenizer:
    """Bytes, and one merge."""
    letters = {byte: i for i, byte in enumerate(ByteLevel.alphabet())}
    tokenizer = Tokenizer(BPE({**letters, "xy": 256}, [("x", "y")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return tokenizer


@given(st.lists(st.sampled_from(WORDS) | st.text()).map("".join))
def test_longest_token_bounds_every_text(text: str) -> None:
    longest = longest_token(DEFAULT)
    assert longest is not None
    assert len(text) <= longest * len(DEFAULT.encode(text).ids)


def test_text_limit_takes_what_may_fit() -> None:
    limit = TextLimit(byte_level(), 3)
    limit.check("xyxyxy")
    with pytest.raises(UsageError, match="7 characters, which are at least 4 tokens; expected at"):
        limit.check("xyxyxyx")
    TextLimit(None, 3).check("x" * 1000)


def removes(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = Sequence([Split(Regex("x+"), "removed"), ByteLevel()])


def normalizes(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = Lowercase()


def strips(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("<s>", rstrip=True)])


def knows_words(tokenizer: Tokenizer) -> None:
    tokenizer.model = WordLevel({"x": 0, "?": 1}, unk_token="?")


def knows_few_bytes(tokenizer: Tokenizer) -> None:
    tokenizer.model = BPE({"x": 0}, [])


def leaves_letters(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = Metaspace()


def leaves_all(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = None


@pytest.mark.parametrize(
    "change",
    [removes, normalizes, strips, knows_words, knows_few_bytes, leaves_letters, leaves_all],
)
def test_longest_token_is_none_where_text_may_shrink(change: Callable[[Tokenizer], None]) -> None:
    tokenizer = byte_level()
    assert longest_token(tokenizer) == 2
    change(tokenizer)
    assert longest_token(tokenizer) is None


def test_longest_token_counts_added_tokens() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["<long>"])
    assert longest_token(tokenizer) == 6
