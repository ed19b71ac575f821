"""Text grows as the whole would be decoded, and stop strings are found where they first stand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import SamplingParams
from specplug.engine.detokenizer import Detokenizer

TEXTS = ("plain", "naïve café", "snow ☃ and 🐍🐍", "日本語", " leading and trailing ", "a\n\tb")
exactly = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module")
def byte_tokenizer() -> Any:
    """Every byte is a token, so characters come in pieces; token 256 is special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_whole(text: str, byte_tokenizer: Any) -> None:
    detokenizer = Detokenizer(byte_tokenizer, SamplingParams())
    for token in byte_tokenizer.encode(text).ids:
        assert detokenizer.push(token) is None
        assert text.startswith(detokenizer.text)
        assert detokenizer.sure == len(detokenizer.text)
    assert detokenizer.text == text
    detokenizer.finish()
    assert detokenizer.text == text


def test_an_unfinished_character_is_told_at_the_end(byte_tokenizer: Any) -> None:
    ids = byte_tokenizer.encode("a☃").ids
    detokenizer = Detokenizer(byte_tokenizer, SamplingParams())
    for token in ids[:-1]:
        detokenizer.push(token)
    assert detokenizer.text == "a"
    detokenizer.finish()
    assert detokenizer.text == byte_tokenizer.decode(ids[:-1])


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<eos>b")])
def test_special_tokens_are_text_only_if_asked_for(
    skip: bool, text: str, byte_tokenizer: Any
) -> None:
    detokenizer = Detokenizer(byte_tokenizer, SamplingParams(skip_special_tokens=skip))
    for token in byte_tokenizer.encode("a<eos>b").ids:
        detokenizer.push(token)
    detokenizer.finish()
    assert detokenizer.text == text


@exactly
@given(
    text=st.text(alphabet="ab☃", max_size=14),
    stops=st.lists(st.text(alphabet="ab☃", min_size=1, max_size=4), max_size=3),
)
def test_the_first_stop_string_ends_the_text(
    text: str, stops: list[str], byte_tokenizer: Any
) -> None:
    detokenizer = Detokenizer(byte_tokenizer, SamplingParams(stop=stops))
    sent = ""
    found = None
    for token in byte_tokenizer.encode(text).ids:
        found = detokenizer.push(token)
        assert detokenizer.text.startswith(sent)
        sent = detokenizer.text[: detokenizer.sure]
        if found is not None:
            break
    detokenizer.finish()
    # Character by character: the stop string that is complete first; of two, the one that
    # began earlier.
    whole = ""
    for character in text:
        whole += character
        ends = [(whole.index(stop), stop) for stop in stops if stop in whole]
        if ends:
            at, stop = min(ends)
            assert (detokenizer.text, found) == (text[:at], stop)
            break
    else:
        assert (detokenizer.text, found) == (text, None)
    assert detokenizer.text.startswith(sent)


def test_stop_string_within_the_first_tokens_is_text(byte_tokenizer: Any) -> None:
    params = SamplingParams(stop=["ab", "bc"], min_tokens=3)
    detokenizer = Detokenizer(byte_tokenizer, params)
    found = [detokenizer.push(token) for token in byte_tokenizer.encode("abbc").ids]
    assert found == [None, None, None, "bc"], "it ends after the third token"
    assert detokenizer.text == "ab"
