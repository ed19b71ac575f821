"""Grammar states allow exactly what a fresh matcher accepts; bad grammars are refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from functools import cache
from typing import Any

import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specplug import SamplingParams, UsageError
from specplug.algorithm import ASSETS
from specplug.grammar import compiler as grammar_compiler
from specplug.grammar import state as grammar_state
from specplug.grammar.compiler import GrammarCompiler
from specplug.grammar.masks import allocate_masks
from specplug.grammar.state import GrammarState
from specplug.sampling_params import Needs
from specplug.speculative.draft import Draft

PIECES = [*'{}[]":,-0123abcd', "ab", "abc", '{"', '":', "12", "aa", "bcd", "],["]
SPECIAL, EOS = len(PIECES), len(PIECES) + 1
TEXT = {*range(SPECIAL), EOS}  # others are never accepted, and xgrammar warns about each
VOCAB_SIZE = 70  # wider than the tokenizer's, and no multiple of 32

GRAMMARS: dict[str, dict[str, Any]] = {
    "schema": {
        "json_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"const": 1}}},
            "required": ["a"],
        }
    },
    "any JSON": {"json_schema": "{}"},
    "regex": {"regex": "(ab|abc)*d[0-3]{2,3}"},
    "end": {"regex": "a?b?c?"},
    "recursive": {"ebnf": 'root ::= "a" root "b" | "[" root "]" | "c"'},
    "left recursive": {"ebnf": 'root ::= root "a" | root root | "b"'},
    "dead ends": {"ebnf": 'root ::= "ab" "x" | "a" root | "c"'},
    "endless": {"ebnf": 'root ::= [ab] root'},
}  # fmt: skip


def make_tokenizer(eos: bool) -> PreTrainedTokenizerFast:
    """Tokens are the pieces; after them a special one, and the end of the sequence."""
    names = [*PIECES, "ca", "<eos>"]  # a special token whose name would fit most grammars
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    special = {"additional_special_tokens": ["ca"], **({"eos_token": "<eos>"} if eos else {})}
    if not eos:
        special["additional_special_tokens"].append("<eos>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@cache
def compiler(eos: bool) -> GrammarCompiler:
    eos_token_ids = frozenset({EOS}) if eos else frozenset[int]()
    return GrammarCompiler(make_tokenizer(eos), VOCAB_SIZE, eos_token_ids)


@cache
def compiled(name: str, eos: bool) -> xgrammar.CompiledGrammar:
    """Made without the code under test."""
    info = xgrammar.TokenizerInfo(
        [*PIECES, "", "<eos>" if eos else ""],
        xgrammar.VocabType.RAW,
        vocab_size=VOCAB_SIZE,
        stop_token_ids=[EOS] if eos else [],
    )
    reference = xgrammar.GrammarCompiler(info, max_threads=1)
    ((kind, text),) = GRAMMARS[name].items()
    if kind == "json_schema":
        return reference.compile_json_schema(text)
    return reference.compile_regex(text) if kind == "regex" else reference.compile_grammar(text)


@cache
def allowed(name: str, eos: bool, path: tuple[int, ...]) -> frozenset[int]:
    """The tokens that a fresh matcher accepts after the path; none if the path is refused."""
    matcher = xgrammar.GrammarMatcher(compiled(name, eos))
    for token in path:
        if token not in TEXT or matcher.is_terminated() or not matcher.accept_token(token):
            return frozenset()
    if matcher.is_terminated():
        return frozenset()
    return frozenset(t for t in TEXT if matcher.fork().accept_token(t))


def tokens_of(row: torch.Tensor) -> frozenset[int] | None:
    """The tokens of a mask; None if it allows all of them."""
    if bool((row == -1).all()):
        return None
    words = row.tolist()
    return frozenset(t for t in range(VOCAB_SIZE) if words[t // 32] >> (t % 32) & 1)


def next_tokens(state: GrammarState) -> frozenset[int] | None:
    masks = allocate_masks(1, VOCAB_SIZE)
    masks.fill_(12345)
    state.fill_next(masks[0])
    return tokens_of(masks[0])


def draw_path(data: st.DataObject, name: str, eos: bool, most: int) -> tuple[int, ...]:
    """Tokens that the grammar allows, perhaps up to its end."""
    path: tuple[int, ...] = ()
    for _ in range(data.draw(st.integers(0, most))):
        choices = sorted(allowed(name, eos, path))
        if not choices:
            break
        path += (data.draw(st.sampled_from(choices)),)
    return path


CASES = st.tuples(st.sampled_from(sorted(GRAMMARS)), st.booleans())


@settings(max_examples=200, deadline=None)
@given(data=st.data(), case=CASES)
def test_following_a_grammar(data: st.DataObject, case: tuple[str, bool]) -> None:
    name, eos = case
    path = draw_path(data, name, eos, 14)
    state = compiler(eos).start(SamplingParams(**GRAMMARS[name]))
    done = 0
    while done < len(path):
        assert state.ended_at is None
        assert next_tokens(state) == allowed(name, eos, path[:done])
        step = data.draw(st.integers(1, 4))
        state.advance(path[done : done + step])
        done = min(done + step, len(path))
    expected = allowed(name, eos, path)
    assert next_tokens(state) == (expected or None)
    assert state.ended_at == (None if expected else len(path))
    state.advance([0, EOS, 5])
    if not expected:
        assert (state.ended_at, next_tokens(state)) == (len(path), None)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), case=CASES)
def test_each_row_of_a_tree_is_what_a_fresh_matcher_accepts(
    data: st.DataObject, case: tuple[str, bool]
) -> None:
    name, eos = case
    history = draw_path(data, name, eos, 8)
    if not history:
        history = (min(allowed(name, eos, ())),)
    state = compiler(eos).start(SamplingParams(**GRAMMARS[name]))
    state.advance(history)
    paths, parents, width = draw_tree(data, name, eos, history)

    # In a batch with a request that drafts something else, wider or narrower.
    tokens = torch.tensor([[path[-1] for path in paths], list(range(len(paths)))])
    draft = Draft.tree(tokens, torch.tensor([parents, parents]), len(paths), (width, len(paths)))
    next_token, next_sibling = draft.links
    masks = allocate_masks(len(paths), VOCAB_SIZE)
    masks.fill_(12345)
    with torch.inference_mode():
        state.fill_tree(tokens[0], next_token[0], next_sibling[0], masks)

    expected = [allowed(name, eos, path) or None for path in paths[:width]]
    assert [tokens_of(row) for row in masks[:width]] == expected
    assert bool((masks[width:] == -1).all()), "nodes that do not count"
    path = history  # the state stands where it stood, and goes on from there
    for _ in range(3):
        expected_next = allowed(name, eos, path)
        assert next_tokens(state) == (expected_next or None)
        assert state.ended_at == (None if expected_next else len(path))
        if not expected_next:
            break
        token = data.draw(st.sampled_from(sorted(expected_next)))
        state.advance([token])
        path += (token,)


def draw_tree(
    data: st.DataObject, name: str, eos: bool, history: tuple[int, ...]
) -> tuple[list[tuple[int, ...]], list[int], int]:
    """Each node's path from the start of the output, its parent; and how many nodes count."""
    paths, parents = [history], [-1]
    for node in range(1, data.draw(st.integers(1, 10))):
        parent = data.draw(st.integers(0, node - 1))
        taken = {p[-1] for p, q in zip(paths, parents, strict=True) if q == parent}
        fits = sorted(allowed(name, eos, paths[parent]) - taken)
        if not fits or data.draw(st.integers(0, 4)) == 0:
            fits = sorted(set(range(VOCAB_SIZE)) - taken)
        paths.append((*paths[parent], data.draw(st.sampled_from(fits))))
        parents.append(parent)
    return paths, parents, data.draw(st.integers(1, len(paths)))


def ids(text: str) -> list[int]:
    """One token a character; $ is the end of the sequence."""
    return [EOS if c == "$" else PIECES.index(c) for c in text]


@pytest.mark.parametrize(
    ("regex", "eos", "text", "ended_at"),
    [
        ("ab", True, "ab", None),  # the end-of-sequence token is still to come
        ("ab", True, "ab$", 3),
        ("ab", True, "ab$ab", 3),
        ("ab", False, "a", None),
        ("ab", False, "ab", 2),
        ("ab", False, "abab", 2),
        ("abc?", False, "ab", None),  # without one, what may go on must
        ("abc?", False, "abc", 3),
        ("a*", True, "aaa$", 4),
        ("a*", False, "aaa", None),
        ("abx|c", True, "ab", 2),  # no token spells x
        ("abx|c", True, "ab$", 2),
        ("ab", True, "aa", 1),  # not allowed there
        ("ab", True, "$", 0),
        ("ab", True, "", None),
    ],
)
def test_where_a_grammar_ends(regex: str, eos: bool, text: str, ended_at: int | None) -> None:
    for split in (1, 2, 9):
        state = compiler(eos).start(SamplingParams(regex=regex))
        tokens = ids(text)
        for start in range(0, len(tokens), split):
            state.advance(tokens[start : start + split])
        state.advance([])
        assert state.ended_at == ended_at
        assert state.goes_on == (ended_at is None)
        masks = allocate_masks(2, VOCAB_SIZE)
        if ended_at is not None:
            masks.zero_()
            links = torch.tensor([1, -1]), torch.tensor([-1, -1])
            state.fill_tree(torch.tensor([0, 1]), *links, masks)
            assert bool((masks == -1).all())


def test_eos_of_the_tokenizer_serves_if_the_model_has_none() -> None:
    own = GrammarCompiler(make_tokenizer(True), VOCAB_SIZE, frozenset())
    state = own.start(SamplingParams(regex="ab"))
    state.advance(ids("ab"))
    assert (state.ended_at, next_tokens(state)) == (None, {EOS})


def test_every_end_of_sequence_token_of_the_model_ends_it() -> None:
    eos_token_ids = frozenset({EOS, PIECES.index("d"), 10**6})
    state = GrammarCompiler(make_tokenizer(True), VOCAB_SIZE, eos_token_ids).start(
        SamplingParams(regex="a")
    )
    state.advance(ids("a"))
    assert next_tokens(state) == {EOS, PIECES.index("d")}
    state.advance(ids("d"))
    assert state.ended_at == 2


def test_special_tokens_and_ids_without_a_token_are_not_text() -> None:
    state = compiler(True).start(SamplingParams(regex="(.|\n)*"))
    assert next_tokens(state) == {*range(len(PIECES)), EOS}, "not the special token 'ca'"


def test_a_model_may_have_fewer_tokens_than_its_tokenizer() -> None:
    state = GrammarCompiler(make_tokenizer(True), 20, frozenset({3})).start(
        SamplingParams(regex="[abcd]+")
    )
    mask = allocate_masks(1, 20)
    state.fill_next(mask[0])
    expected = [PIECES.index(piece) for piece in ("a", "b", "c", "d", "ab", "abc")]
    assert [t for t in range(32) if mask[0, 0] >> t & 1] == sorted(t for t in expected if t < 20)


def test_guides_of_one_grammar_are_independent() -> None:
    first, second = (compiler(True).start(SamplingParams(regex="ab")) for _ in range(2))
    first.advance(ids("a"))
    assert next_tokens(first) == {PIECES.index("b")}
    assert next_tokens(second) == {PIECES.index("a"), PIECES.index("ab")}


def test_json_of_the_default_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny_code")
    default = GrammarCompiler(tokenizer, 4096, frozenset({0}))
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    good = tokenizer.encode('{"name": "naïve \\n 😀 def f(x):", "age": -12}')
    state = default.start(SamplingParams(json_schema=schema))
    state.advance(good)
    assert state.ended_at is None
    state.advance([0])
    assert state.ended_at == len(good) + 1
    start = tokenizer.encode('{"name": "x", "a')
    bad = tokenizer.encode('{"name": "x", "age": "')
    state = default.start(SamplingParams(json_schema=schema))
    state.advance(bad)
    assert state.ended_at is not None
    assert len(start) <= state.ended_at < len(bad)


REFUSED = [
    ("json_schema", " ", "json_schema=' ': it is no JSON: Expecting value: line 1 column 2"),
    ("json_schema", "{oops", "it is no JSON: Expecting property name"),
    ("json_schema", '{"type":"string"} x', "it is no JSON: Extra data: line 1 column 19"),
    ("json_schema", "[" * 100_000, "it is no JSON: maximum recursion depth exceeded"),
    ("json_schema", "5", "Schema should be an object or bool, but got 5; expected a JSON"),
    ("json_schema", "false", "Schema 'false' cannot accept any value"),
    ("json_schema", '{"type": "nope"}', 'Unsupported type "nope"; expected a JSON schema that'),
    ("json_schema", '{"type": 5}', "Type should be a string"),
    ("json_schema", '{"enum": []}', "enum array must not be empty"),
    ("json_schema", '{"type": "string", "pattern": 5}', "a value in it has a wrong type"),
    ("json_schema", '{"type": "string", "pattern": "("}', "The parenthesis is not closed"),
    ("json_schema", '{"type": "number", "maximum": 1e999}', "a value in it has a wrong type"),
    ("json_schema", '{"type": "string", "minLength": -1}', "Invalid repetition range"),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum greater than"),
    ("json_schema", '{"$ref": "#/$defs/a"}', "Cannot find field $defs in #/$defs/a"),
    ("json_schema", '{"$ref": "#"}', "no output of at least one token matches it"),
    ("json_schema", '{"not": [{"$ref": "http://x/y"}]}', "$ref 'http://x/y' is not in the"),
    ("json_schema", '{"const": "\ud800"}', "surrogates not allowed"),
    ("json_schema", '{"const": "%s"}' % ("a" * 200_000), "it has 200013 characters; expected"),
    (
        "json_schema",
        '{"pattern": "%s"}' % ("a" * 20_000),
        "a' has 20000 characters; expected at most 16384",
    ),
    ("regex", "(", "regex='(': Regex parsing error at position 2: The parenthesis is not"),
    ("regex", "*", "Expect element, but got *"),
    ("regex", "a{3,2}", "Lower bound is larger than upper bound: 3 > 2"),
    ("regex", "a{1%s}" % ("0" * 30), "Integer is too large"),
    ("regex", r"(a)\1", "Backreference is not supported yet; expected a regular expression"),
    ("regex", "\0", "must not contain null characters"),
    ("regex", "\ud800", "surrogates not allowed"),
    ("regex", r"[^\s\S]", "no output of at least one token matches it"),
    ("regex", "(" * 5000 + ")" * 5000, "Nest layer exceeded the maximum limit"),
    ("regex", "a" * 20_000, "aaa…aaaaaaaaaaaaaaa': it has 20000 characters; expected at most"),
    ("ebnf", "hello", "EBNF parser error at line 1, column 1: Expect rule name; expected a gram"),
    ("ebnf", 'x ::= "a"', 'Rule "root" is not defined; expected a grammar in GBNF with a rule na'),
    ("ebnf", "root ::= foo", 'line 1, column 10: Rule "foo" is not defined'),
    ("ebnf", 'root ::= "a', 'Expect " in string literal'),
    ("ebnf", "root ::= root", "no output of at least one token matches it"),
    ("ebnf", 'root ::= "xyz"', "no output of at least one token matches it"),
    # These crash xgrammar 0.2.8.
    ("ebnf", "root ::= root{2}", "one of its rules is nothing but a repetition of itself; expec"),
    ("ebnf", 'root ::= "a"\nx ::= (y{0,1})\ny[lazy] ::= x', "is nothing but a repetition of"),
    ("ebnf", "root ::= Token(70)", "Token id 70 in the grammar is out of the vocabulary"),
    ("structural_tag", "{", "it is no JSON: Expecting property name"),
    ("structural_tag", '{"format": {}}', "; expected a structural tag that xgrammar knows: corr"),
    (
        "structural_tag",
        '{"format": {"type": "json_schema", "json_schema": {"$ref": "http://x"}}}',
        "$ref 'http://x' is not in the schema itself",
    ),
    (
        "structural_tag",
        '{"format": {"type": "grammar", "grammar": "root ::= root{2}"}}',
        "one of its rules is nothing but a repetition of itself; expec",
    ),
    ("ebnf", "a" * 40_000, "it has 40000 characters; expected at most 32768: shorten it"),
]


@pytest.mark.parametrize(("field", "text", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_grammar_that_cannot_be_followed_is_refused(field: str, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        compiler(True).start(SamplingParams(**{field: text}))
    said = str(caught.value)
    assert message in said
    assert said.startswith(f"{field}=")
    assert "\n" not in said
    assert ".cc:" not in said
    assert len(said) < 500


TOKENS = ["string", "integer", "object", "array", "#", "#/$defs/a", "^a+$", "(", "a", "email", ""]
KEYWORDS = [
    *("type", "properties", "items", "minItems", "maxItems", "required", "enum", "const", "anyOf"),
    *("oneOf", "allOf", "$ref", "$defs", "pattern", "format", "minLength", "maximum", "multipleOf"),
    *("additionalProperties", "patternProperties", "prefixItems", "not", "propertyNames"),
]  # fmt: skip
ANYTHING = st.recursive(
    st.sampled_from([*TOKENS, None, True, False, -1, 0, 3, 0.5, 1e30]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4)
    ),
    max_leaves=12,
)
SCRAPS = st.lists(st.sampled_from([*"ab()[]{}|*+?.^$,01\\\"'#\n", "{1,3}", "::=", "root", "[^"]))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["json_schema", "regex", "ebnf"]))
def test_garbage_gives_a_usage_error_or_a_grammar(data: st.DataObject, kind: str) -> None:
    if kind == "json_schema":
        text = json.dumps(data.draw(st.dictionaries(st.sampled_from(KEYWORDS), ANYTHING)))
    else:
        text = ("root ::= " if kind == "ebnf" else "") + "".join(data.draw(SCRAPS)) or "a"
    try:
        state = compiler(True).start(SamplingParams(**{kind: text}))
    except UsageError:
        return
    for _ in range(6):
        choices = next_tokens(state)
        assert choices != frozenset(), "a row must allow something"
        if choices is None:
            break
        state.advance([data.draw(st.sampled_from(sorted(choices)))])


def test_slow_grammar_is_given_up_and_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = SamplingParams(regex="a?" * 300)  # up to a second and a half, in its own thread
    mine = GrammarCompiler(make_tokenizer(True), VOCAB_SIZE, frozenset({EOS}))
    mine.start(SamplingParams(regex="a"))  # loads the tokenizer
    monkeypatch.setattr(grammar_compiler, "_COMPILE_SECONDS", 0.001)
    message = r"regex='a\?.*: it takes too long to compile or to follow; expected a simpler one"
    with pytest.raises(UsageError, match=message):
        mine.start(slow)
    monkeypatch.setattr(grammar_compiler, "_COMPILE_SECONDS", 60)
    assert mine.start(SamplingParams(regex="b")).goes_on, "others are served meanwhile"
    started = time.monotonic()
    with pytest.raises(UsageError, match=message):
        mine.start(slow)
    assert time.monotonic() - started < 0.1


ENDS_WHILE_IT_COMPILES = """
import sys
from transformers import PreTrainedTokenizerFast
from specplug import SamplingParams, UsageError
from specplug.grammar import compiler

tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[2])
mine = compiler.GrammarCompiler(tokenizer, 4096, frozenset({0}))
mine.start(SamplingParams(regex="a"))
compiler._COMPILE_SECONDS = 0.001
try:
    mine.start(SamplingParams(regex="a?" * int(sys.argv[1])))
except UsageError:
    print("ends", flush=True)
    sys.exit(3)
"""


def test_process_that_ends_while_it_compiles() -> None:
    """It waits for a compilation of a second; of one that takes longer, until it is interrupted."""
    tokenizer = ASSETS / "tiny_code" / "tokenizer.json"
    waits, interrupted = (
        subprocess.Popen(
            [sys.executable, "-c", ENDS_WHILE_IT_COMPILES, str(parts), str(tokenizer)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for parts in (250, 600)
    )
    assert interrupted.stderr is not None
    assert "a grammar is still being compiled" in interrupted.stderr.readline()
    interrupted.send_signal(signal.SIGINT)
    for process, status in ((waits, 3), (interrupted, 130)):
        told, said = process.communicate(timeout=60)
        assert (told, process.returncode) == ("ends\n", status)
        assert "terminate called" not in said


def test_a_grammar_whose_tokens_take_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler(True).start(SamplingParams(regex="[abcd]+")).goes_on
    monkeypatch.setattr(grammar_compiler, "_TRIAL_SECONDS", 0.0)
    with pytest.raises(UsageError, match="it takes too long to compile or to follow"):
        compiler(True).start(SamplingParams(regex="[abcd]+x?"))


class Paused:
    """A matcher in a process that is stopped for a moment at each call, as a busy machine does."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        time.sleep(0.007)
        return getattr(self._matcher, name)


def test_a_pause_bans_no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time counts in which the process does nothing: of a compilation, its trial, a step."""
    for name in ("_COMPILE_SECONDS", "_TRIAL_SECONDS"):
        monkeypatch.setattr(grammar_compiler, name, 0.1)
    monkeypatch.setattr(grammar_state, "_STEP_SECONDS", 0.1)
    start, try_out = grammar_compiler._start, grammar_compiler._try_out

    def slow_start(*args: Any) -> Any:
        time.sleep(0.25)
        return Paused(start(*args))

    monkeypatch.setattr(grammar_compiler, "_start", slow_start)
    monkeypatch.setattr(grammar_compiler, "_try_out", lambda m, words: try_out(Paused(m), words))
    mine = GrammarCompiler(make_tokenizer(True), VOCAB_SIZE, frozenset({EOS}))
    params = SamplingParams(regex="[abcd]{40}")
    for _ in range(2):
        state = mine.start(params)
        state.advance(ids("abcd" * 5))
        assert (state.goes_on, state.error) == (True, None)


def test_a_ban_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = GrammarCompiler(make_tokenizer(True), VOCAB_SIZE, frozenset({EOS}))
    params = SamplingParams(regex="[abcd]+y?")
    with monkeypatch.context() as patch:
        patch.setattr(grammar_compiler, "_TRIAL_SECONDS", 0.0)
        with pytest.raises(UsageError, match="it takes too long to compile or to follow"):
            mine.start(params)
    with pytest.raises(UsageError, match="it takes too long to compile or to follow"):
        mine.start(params)
    monkeypatch.setattr(grammar_compiler, "_BAN_SECONDS", 0.0)
    assert mine.start(params).goes_on


def test_without_a_tokenizer() -> None:
    with pytest.raises(UsageError, match="regex='a' needs a tokenizer; the model has none: give"):
        GrammarCompiler(None, VOCAB_SIZE, frozenset({EOS})).start(SamplingParams(regex="a"))


def test_without_xgrammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    message = r"ebnf='x' needs xgrammar, which cannot be .*: pip install 'specplug\[grammar\]'"
    with pytest.raises(UsageError, match=message):
        GrammarCompiler(make_tokenizer(True), 70, frozenset()).start(SamplingParams(ebnf="x"))


def test_a_tokenizer_that_xgrammar_does_not_know() -> None:
    with pytest.raises(
        UsageError, match=r"xgrammar cannot use the tokenizer, a object .*expected a"
    ):
        GrammarCompiler(object(), VOCAB_SIZE, frozenset()).start(SamplingParams(regex="a"))


def test_xgrammar_is_imported_only_when_a_grammar_is_asked_for() -> None:
    code = (
        "import sys; from specplug.grammar.compiler import GrammarCompiler; "
        "from specplug import SamplingParams; SamplingParams(regex='a'); "
        "GrammarCompiler(object(), 5, frozenset()); assert 'xgrammar' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_settings_with_a_grammar() -> None:
    schema = {"type": "object", "properties": {"z": {}, "ä": {"const": True}}}
    params = SamplingParams(json_schema=schema)
    assert params.json_schema == '{"type":"object","properties":{"z":{},"ä":{"const":true}}}'
    assert params == SamplingParams(json_schema=params.json_schema)
    assert params.grammar == ("json_schema", params.json_schema)
    assert SamplingParams(ebnf="x").grammar == ("ebnf", "x")
    assert SamplingParams().grammar is None
    assert SamplingParams().needs == Needs.NOTHING
    for name, value in (("json_schema", {}), ("regex", "a"), ("ebnf", "b")):
        assert SamplingParams(**{name: value}).needs == Needs.GRAMMAR
