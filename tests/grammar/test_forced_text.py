"""What a grammar forces is found and spelled, and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from specplug import SamplingParams
from specplug.algorithm import ASSETS
from specplug.grammar.compiler import GrammarCompiler
from specplug.grammar.masks import allocate_masks, unpack_masks
from specplug.grammar.state import GrammarState

BEGIN = '<tool_call>\n{"name": "store", "arguments": '
TAG = {
    "type": "tag",
    "begin": BEGIN,
    "content": {
        "type": "json_schema",
        "json_schema": {
            "type": "object",
            "properties": {"names": {"type": "array", "items": {"type": "string"}}},
            "required": ["names"],
        },
    },
    "end": "}\n</tool_call>",
}
TOOL: dict[str, Any] = {"structural_tag": {"type": "structural_tag", "format": TAG}}
LONG = "(a{1000}){1000}b"
"""Forces a million characters."""


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ASSETS / "tiny_code")


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), 4096, frozenset())


def start(**grammar: Any) -> GrammarState:
    return compiler().start(SamplingParams(max_tokens=9, **grammar))


def encoded(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text, add_special_tokens=False))


def next_mask(state: GrammarState) -> torch.Tensor:
    mask = allocate_masks(1, 4096)[0]
    state.fill_next(mask)
    return mask


@pytest.mark.parametrize(
    ("grammar", "forced"),
    [
        ({"regex": "[a-z]+"}, ""),
        ({"regex": "(import|from) x"}, ""),
        ({"regex": "return value[a-z]"}, "return"),  # the last token could be longer
        ({"regex": "value: [0-9]"}, "value:"),
        ({"regex": "return x|return y"}, "return"),
        ({"regex": "été(,|;)"}, "été"),
        (TOOL, BEGIN),
    ],
)
def test_forced_text_is_spelled_as_the_tokenizer_does(grammar: Any, forced: str) -> None:
    found = start(**grammar).forced()
    assert tokenizer().decode(found).startswith(forced)
    assert bool(found) == bool(forced)
    assert found == encoded(tokenizer().decode(found))
    text = tokenizer().decode(found)
    if grammar is TOOL:
        assert text.removeprefix(BEGIN) in ('{"names":', '{"names"', '{"names', '{"', "{")


def test_forced_end_of_the_output_is_a_token_too() -> None:
    assert start(regex="ab,cd").forced() == (*encoded("ab,cd"), tokenizer().eos_token_id)
    assert start(regex="ab,cd?").forced() == encoded("ab,c")  # here it may end, or go on


def test_forced_tokens_are_those_after_what_was_taken() -> None:
    state, whole = start(**TOOL), encoded(BEGIN)
    assert state.forced()[: len(whole) - 1] == whole[:-1]
    state.advance(whole[:3])
    assert (state.taken, state.forced()[:4]) == (3, whole[3:7])
    other = encoded(tokenizer().decode(whole[3])[0])  # spelled otherwise than was expected
    assert other != whole[3:4]
    state.advance(other)
    rest = BEGIN[len(tokenizer().decode([*whole[:3], *other])) :]
    assert tokenizer().decode(state.forced()).startswith(rest)


def test_search_leaves_the_grammar_where_it_is() -> None:
    state, other = start(**TOOL), start(**TOOL)
    for token in encoded(BEGIN):
        state.forced()
        state.allows([0, token, 5, 7], [-1, 0, 1, 0])
        assert next_mask(state).equal(next_mask(other))
        state.advance([token])
        other.advance([token])
    assert state.goes_on


def test_endless_forced_text_is_cut() -> None:
    state = start(regex=LONG)
    assert 16 < len(state.forced()) < 32  # the last one might be a part of a longer one
    assert set(tokenizer().decode(state.forced())) == {"a"}


def test_forced_part_of_a_character_is_a_token() -> None:
    found = start(regex="(é|è)x").forced()
    assert found == encoded("éà")[:1] != ()
    assert tokenizer().decode(found) == "\ufffd"


def test_tokenizer_that_spells_otherwise_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that puts a blank before each text."""
    own = GrammarCompiler(AutoTokenizer.from_pretrained(ASSETS / "tiny_code"), 4096, frozenset())
    spell = own._tokenizer.encode
    monkeypatch.setattr(
        own._tokenizer, "encode", lambda text, **how: spell(f" {text}", **how), raising=False
    )
    found = own.start(SamplingParams(max_tokens=9, **TOOL)).forced()
    assert tokenizer().decode(found).startswith(BEGIN)


@pytest.mark.parametrize("error", [RuntimeError, UnicodeDecodeError("utf-8", b"", 0, 1, "")])
def test_errors_of_a_search_end_it(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = start(**TOOL)

    def fail(*given: Any) -> Any:
        raise error

    monkeypatch.setattr(state._forced_text, "_spell", fail)
    assert state.forced() == ()
    monkeypatch.undo()
    assert state.forced() == ()
    state.advance(encoded(BEGIN)[:1])
    assert (state.error, state.goes_on) == (None, True)


def test_slow_grammar_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specplug.grammar.forced_text._LOOK_SECONDS", -1.0)
    state = start(**TOOL)
    assert state.forced() == ()
    monkeypatch.undo()
    assert state.forced() == ()
    assert state.goes_on


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append([*found[parent], token] if parent >= 0 else [-1])
    return found


@pytest.mark.parametrize("grammar", [{"regex": "(ab|cd)+e?"}, {"regex": "ab"}, TOOL])
def test_allowed_nodes_are_those_that_masks_allow(grammar: Any) -> None:
    a, c, e, eos = (*encoded("a"), *encoded("c"), *encoded("e"), tokenizer().eos_token_id)
    ab, lt = encoded("ab")[0], encoded(BEGIN)[0]
    tokens = [0, ab, c, eos, ab, eos, e, eos, a, lt, 4095, ab]
    parents = [-1, 0, 0, 0, 1, 1, 4, 6, 3, 0, 1, -1]
    allowed = start(**grammar).allows(tokens, parents)
    for path, is_allowed in zip(paths(tokens, parents)[1:], allowed[1:], strict=True):
        state, expected = start(**grammar), True
        for token in path:
            mask = unpack_masks(next_mask(state))
            expected &= token >= 0 and state.goes_on and bool(mask[token])
            if not expected:
                break
            state.advance([token])
        assert is_allowed == expected, path
    assert allowed[0]
    assert not allowed[-1]


def test_nothing_is_allowed_after_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    state = start(regex="ab")
    state.advance([*encoded("ab"), tokenizer().eos_token_id])
    assert (state.goes_on, state.forced()) == (False, ())
    assert state.allows([0, 5, 6], [-1, 0, 1]) == [True, False, False]
    start(regex="ab").allows([0, 4095, 5, 4096], [-1, 0, 1, 0])
    assert "Warning" not in capfd.readouterr().err


def test_drafts_are_kept_where_xgrammar_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    state = start(regex="ab")

    class Broken:
        def is_terminated(self) -> bool:
            raise RuntimeError("broken")

    monkeypatch.setattr(state, "_matcher", Broken())
    assert state.allows([0, 5, 6], [-1, 0, 1]) == [True] * 3
