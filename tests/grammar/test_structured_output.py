"""Grammars in the engine: the output is NONE's under the same grammar, and it matches."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shallow_target import ShallowTarget, loops_of_chains_and_trees

from specplug import LLM, Batch, Draft, SamplingParams, UsageError, hookimpl

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "sizes", "ok"],
    "additionalProperties": False,
}
REGEX = r"(def|class) [a-z_]{3,9}\((x|y|, ){1,5}\):"
TOOL = {
    "type": "tag",
    "begin": '<tool_call>\n{"name": "store", "arguments": ',
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "}\n</tool_call>",
}
"""Most of it is forced."""
EBNF = 'root ::= "(" item ("," item)* ")"\nitem ::= [0-9]+ | root\n'
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json_schema": SCHEMA},
    {"regex": REGEX},
    {"ebnf": EBNF},
    {"structural_tag": {"type": "structural_tag", "format": TOOL}},
    {},
)
TEMPERATURES = (0.0, 1.0)
PROMPTS = (
    "value = ",
    "import json\n\n",
    "class Stack:\n    ",
    "call = ",
    "def total(values):\n    ",
)


def requests(temperature: float) -> list[SamplingParams]:
    """A request of each kind, one of them without a grammar."""
    return [
        SamplingParams(
            max_tokens=60,
            temperature=temperature,
            seed=7 + i,
            ignore_eos=not grammar,
            **grammar,
        )
        for i, grammar in enumerate(GRAMMARS)
    ]


@pytest.fixture(scope="module")
def plain(shallow: ShallowTarget) -> dict[float, list[Any]]:
    """What NONE generates one by one."""
    with LLM(
        **shallow.options("NONE"),
        dtype="float64",
        disable_radix_cache=True,
        disable_overlap_schedule=True,
    ) as llm:
        return {
            temperature: [
                llm.generate(prompt, params)[0]
                for prompt, params in zip(PROMPTS, requests(temperature), strict=True)
            ]
            for temperature in TEMPERATURES
        }


def test_outputs_match_their_grammars(plain: dict[float, list[Any]]) -> None:
    ended = 0
    for schema, regex, ebnf, tool, free in plain.values():
        assert tool.text.startswith(TOOL["begin"])
        assert free.finish_reason == "length"
        for output in (schema, regex, ebnf):
            assert output.finish_reason in ("stop", "length")
            ended += output.finish_reason == "stop"
        if schema.finish_reason == "stop":
            value = json.loads(schema.text)
            assert list(value) == ["name", "sizes", "ok"]
        if regex.finish_reason == "stop":
            assert re.fullmatch(REGEX, regex.text)
        if ebnf.finish_reason == "stop":
            assert ebnf.text.count("(") == ebnf.text.count(")") > 0
    assert ended >= 3, "most grammars end within 60 tokens"


JOINED = [("EAGLE3+NGRAM", 4, True), ("NGRAM,EAGLE3", None, True), ("NGRAM,EAGLE3", None, False)]
"""As NGRAM alone they draft what is forced."""


@pytest.mark.parametrize(("name", "topk", "overlap"), [*loops_of_chains_and_trees(), *JOINED])
def test_tokens_are_those_of_none(
    name: str,
    topk: int | None,
    overlap: bool,
    plain: dict[float, list[Any]],
    shallow: ShallowTarget,
) -> None:
    with LLM(
        **shallow.options(name),
        dtype="float64",
        speculative_eagle_topk=topk,
        disable_overlap_schedule=not overlap,
        enable_mixed_chunk=overlap,
        chunked_prefill_size=8,
        page_size=4,
        max_total_tokens=160,
    ) as llm:
        params = [each for temperature in TEMPERATURES for each in requests(temperature)]
        outputs = llm.generate(PROMPTS * len(TEMPERATURES), params)
        llm.check_pool()
    known = [output for temperature in TEMPERATURES for output in plain[temperature]]
    for output, expected in zip(outputs, known, strict=True):
        assert output.token_ids == expected.token_ids
        assert output.finish_reason == expected.finish_reason
        assert output.text == expected.text


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    tree=st.booleans(),
    right=st.sampled_from([0.3, 0.8, 1.0]),
    ragged=st.booleans(),
    overlap=st.booleans(),
    mixed=st.booleans(),
    spare=st.sampled_from([None, 0, 9]),
    seed=st.integers(0, 1000),
)
def test_scripted_drafts_follow_the_grammar(
    tree: bool,
    right: float,
    ragged: bool,
    overlap: bool,
    mixed: bool,
    spare: int | None,
    seed: int,
    text_model: Path,
    scripted: Any,
    text_plain: Any,
) -> None:
    """Drafts that are right, wrong, and against the grammar, at every node of random trees."""
    prompts, params, expected = text_plain
    known = {tuple(p): output.token_ids for p, output in zip(prompts, expected, strict=True)}
    most = max(len(p) + w.max_tokens for p, w in zip(prompts, params, strict=True))
    with LLM(
        text_model,
        dtype="float64",
        speculative_algorithm=scripted(known, tree=tree, right=right, ragged=ragged, seed=seed),
        speculative_num_draft_tokens=7 if tree else 5,
        disable_overlap_schedule=not overlap,
        enable_mixed_chunk=mixed,
        chunked_prefill_size=5,
        page_size=2,
        max_total_tokens=None if spare is None else most + spare,
    ) as llm:
        outputs = llm.generate(prompts, params)
        llm.check_pool()
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.finish_reason for o in outputs] == [o.finish_reason for o in expected]


@pytest.fixture(scope="module")
def text_plain(text_model: Path) -> Any:
    """Prompts, settings and NONE's outputs for the random model, which knows no grammar at all."""
    prompts = [[5, 6, 7], [1], [40, 41, 42, 43, 44, 45], [60, 2], [9, 8], [7]]
    tag = {
        "type": "tag",
        "begin": "a",
        "content": {"type": "regex", "pattern": "[b-d]*"},
        "end": "e",
    }
    kinds: list[dict[str, Any]] = [
        {"regex": "[a-f]{3,9}(,[0-9]{2}){0,4}"},
        {"ebnf": 'root ::= "(" root ")" | [a-z]{1,4}\n', "temperature": 1.0},
        {"regex": "(ab|cd){6}", "repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"temperature": 1.0},
        {"regex": "[0-9]{1,5}", "temperature": 2.0, "top_p": 0.8, "logprobs": 2},
        {"structural_tag": {"type": "structural_tag", "format": tag}, "temperature": 1.0},
    ]
    params = [SamplingParams(max_tokens=24, seed=i, **kind) for i, kind in enumerate(kinds)]
    with LLM(text_model, dtype="float64", disable_overlap_schedule=True) as llm:
        outputs = [llm.generate(p, w)[0] for p, w in zip(prompts, params, strict=True)]
    assert re.fullmatch("[a-f]{3,9}(,[0-9]{2}){0,4}", outputs[0].text)
    assert re.fullmatch("(ab|cd){6}", outputs[2].text)
    assert outputs[5].text.startswith("a")
    assert [output.finish_reason for output in outputs[:3]] == ["stop"] * 3
    return prompts, params, outputs


def test_forbidden_nodes_take_no_rows(text_model: Path, scripted: Any, text_plain: Any) -> None:
    """All drafts are wrong, and of a grammar's mostly forbidden."""
    prompts, params, expected = text_plain
    known = {tuple(p): output.token_ids for p, output in zip(prompts, expected, strict=True)}
    algorithm = scripted(known, right=0.0)
    with LLM(text_model, dtype="float64", speculative_algorithm=algorithm, device="cpu") as llm:
        outputs = llm.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    for prompt, wanted in zip(prompts, params, strict=True):
        widths = algorithm.widths[tuple(prompt)]
        assert (set(widths) == {5}) == (wanted.grammar is None)
        assert wanted.grammar is None or sum(widths) < 2 * len(widths)


class Forced:
    """Compares what is drafted with what is forced.

    Attributes:
        drafted: forced tokens that were drafted.
        free: steps in which nothing had a grammar.
    """

    def __init__(self) -> None:
        self.drafted = self.free = 0

    @hookimpl(wrapper=True)
    def propose(self, runtime: Any, batch: Batch) -> Generator[None, Draft, Draft]:
        draft = yield
        found = runtime.forced_tokens(batch.requests, wait=True)
        self.free += not found and not batch.is_warm_up
        for b, forced in enumerate(found):
            if forced is not None:
                assert forced.known == int(batch.seq_lens[b]) + 1
                width = draft.width if draft.widths is None else draft.widths[b]
                chain = draft.tokens[b, 1 : 1 + min(width - 1, len(forced.tokens))].tolist()
                assert tuple(chain) == forced.tokens[: len(chain)]
                self.drafted += len(chain)
        return draft


@pytest.mark.parametrize("overlap", [True, False])
def test_forced_text_is_drafted_from_the_root_on(overlap: bool, shallow: ShallowTarget) -> None:
    params = requests(0.0)[3:]
    steps = {}
    for name in ("NONE", "NGRAM"):
        forced = Forced()
        with LLM(
            **shallow.options(name),
            dtype="float64",
            device="cpu",
            disable_overlap_schedule=not overlap,
            extensions=[forced],
        ) as llm:
            outputs = llm.generate(PROMPTS[3:], params)
            steps[name] = len(outputs[0].accept_lens)
            if name == "NGRAM":
                llm.generate(PROMPTS[3:], [SamplingParams(max_tokens=4)] * 2)
    assert forced.drafted > 20
    assert forced.free > 0
    assert steps["NGRAM"] < 0.8 * steps["NONE"]


def test_a_grammar_ends_its_request_even_if_eos_is_ignored(text_model: Path) -> None:
    with LLM(text_model) as llm:
        params = SamplingParams(max_tokens=30, regex="ab,cd", ignore_eos=True)
        (output,) = llm.generate([[3, 4]], params)
    assert (output.text, output.finish_reason) == ("ab,cd", "stop")


@pytest.mark.parametrize("topk", [1, 4], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_whose_tokens_are_all_banned_is_an_error(
    temperature: float, topk: int, text_model: Path
) -> None:
    """The grammar demands a "b", and a bias forbids every token that begins with it."""
    with LLM(text_model, speculative_algorithm="NGRAM", speculative_eagle_topk=topk) as llm:
        words = {t: llm.tokenizer.decode([t]) for t in range(96)}
        banned = {t: float("-inf") for t, word in words.items() if word.startswith("b")}

        def run(regex: str, bans: dict[int, float]) -> Any:
            params = SamplingParams(
                max_tokens=30, temperature=temperature, seed=5, regex=regex, logit_bias=bans
            )
            return llm.generate([[3, 4]], params)[0]

        output = run("xxxb", banned)
        assert (output.text, output.finish_reason) == ("xxx", "error")
        assert "logit_bias bans every token that the grammar allows after 3 tokens" in output.error
        output = run("x(y|b)z", banned)
        assert (output.text, output.finish_reason) == ("xyz", "stop")
        eos = 95
        output = run("xyz", {eos: float("-inf")})
        assert (output.text, output.finish_reason) == ("xyz", "stop"), output.error
        assert output.token_ids[-1] != eos
        output = run("x+y", {eos: float("-inf"), 0: float("-inf")})
        assert re.fullmatch("x+y?", output.text)
        with pytest.raises(UsageError, match="bans every token that the grammar allows at its"):
            run("b", banned)
        llm.check_pool()


def test_a_bad_grammar_is_refused_and_the_others_go_on(text_model: Path) -> None:
    with LLM(text_model) as llm:
        stream = llm.stream([[5, 6]], SamplingParams(max_tokens=12))
        next(stream)
        with pytest.raises(UsageError, match=r"regex='\(': .*; expected a regular expression"):
            llm.generate([[1]], SamplingParams(regex="("))
        with pytest.raises(UsageError, match="json_schema="):
            llm.generate([[1]], SamplingParams(json_schema='{"type": "no such type"}'))
        assert [*stream][-1].finish_reason in ("length", "stop")
        llm.check_pool()


def test_a_model_without_a_tokenizer_has_no_grammars(tiny_model: Path) -> None:
    with LLM(tiny_model) as llm, pytest.raises(UsageError, match="needs a tokenizer"):
        llm.generate([[1]], SamplingParams(regex="a"))
