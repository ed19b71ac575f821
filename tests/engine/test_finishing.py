"""A request ends inside the accepted path exactly where plain decoding would end it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from specplug import LLM, RequestOutput, SamplingParams

Tokens = tuple[int, ...]
EOS = 95
MAX_TOKENS = 30
EOS_BIAS = {EOS: 12.0}  # a random model says it rarely


@attrs.frozen
class Plain:
    """Prompts, what NONE generates after them, and its text token by token.

    Attributes:
        outputs, with_eos, endless: after each prompt; the last ones to the end of the context.
    """

    tokenizer: Any
    outputs: dict[Tokens, Tokens]
    with_eos: dict[Tokens, Tokens]
    endless: dict[Tokens, Tokens]

    def text(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def until(self, prompt: Tokens, stop: str) -> tuple[Tokens, str, str]:
        """Tokens, text and finish reason if ``stop`` ends the output."""
        tokens = self.outputs[prompt]
        for count in range(1, len(tokens) + 1):
            text = self.text(tokens[:count])
            if stop in text:
                return tokens[:count], text[: text.index(stop)], "stop"
        return tokens, self.text(tokens), "length"


@pytest.fixture(scope="module")
def plain(text_model: Path, tiny_tokenizer: Any) -> Plain:
    draw = random.Random(5)
    prompts = [tuple(draw.randrange(EOS) for _ in range(n)) for n in (2, 7, 18, 20)]
    with LLM(text_model, dtype="float64", disable_overlap_schedule=True) as llm:

        def run(max_tokens: int | None = MAX_TOKENS, **changes: Any) -> dict[Tokens, Tokens]:
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **changes)
            return {prompt: llm.generate(prompt, params)[0].token_ids for prompt in prompts}

        return Plain(tiny_tokenizer, run(), run(logit_bias=EOS_BIAS), run(None))


@pytest.fixture(params=["chain", "tree"])
def tree(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "tree")


@pytest.fixture(params=[True, False], ids=["overlap", "plain loop"])
def open_llm(
    request: pytest.FixtureRequest, text_model: Path, scripted: Any, tree: bool
) -> Iterator[Callable[..., LLM]]:
    """``open_llm(references)``: an engine whose drafts are mostly right."""
    made: list[LLM] = []

    def make(references: dict[Tokens, Tokens], **changes: Any) -> LLM:
        algorithm = scripted(references, tree=tree, right=0.9)
        llm = LLM(
            text_model,
            dtype="float64",
            page_size=3,
            disable_overlap_schedule=not request.param,
            speculative_algorithm=algorithm,
            speculative_num_draft_tokens=12 if tree else 5,
            **changes,
        )
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.check_pool()
        assert not llm.engine.has_work, "a step of an ended request was left in flight"
        llm.close()


def _check_counts(output: RequestOutput) -> None:
    assert sum(output.accept_lens) + 1 == len(output.token_ids)
    assert all(count >= 1 for count in output.accept_lens)


def test_ends_at_each_stop_token(open_llm: Callable[..., LLM], plain: Plain) -> None:
    llm = open_llm(plain.outputs)
    for prompt, tokens in plain.outputs.items():
        stops = list(dict.fromkeys(tokens))[:14]
        params = [SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=[s]) for s in stops]
        for stop, output in zip(stops, llm.generate([prompt] * len(stops), params), strict=True):
            at = tokens.index(stop)
            assert output.token_ids == tokens[: at + 1]
            assert output.text == plain.text(tokens[:at])
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)
            _check_counts(output)


def test_ends_at_the_end_of_sequence_unless_it_is_ignored(
    open_llm: Callable[..., LLM], plain: Plain
) -> None:
    llm = open_llm(plain.with_eos)
    for prompt, tokens in plain.with_eos.items():
        assert EOS in tokens
        at = tokens.index(EOS)
        params = SamplingParams(max_tokens=MAX_TOKENS, logit_bias=EOS_BIAS)
        output = llm.generate(prompt, params)[0]
        assert output.token_ids == tokens[: at + 1]
        assert output.text == plain.text(tokens[:at])
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        _check_counts(output)
        ignoring = attrs.evolve(params, ignore_eos=True)
        output = llm.generate(prompt, ignoring)[0]
        assert (output.token_ids, output.finish_reason) == (tokens, "length")
        _check_counts(output)


def test_ends_before_each_stop_string(open_llm: Callable[..., LLM], plain: Plain) -> None:
    llm = open_llm(plain.outputs)
    for prompt, tokens in plain.outputs.items():
        text = plain.text(tokens)
        stops = [text[i : i + 1 + i % 4] for i in range(0, len(text) - 4, 3)] + ["never there"]
        params = [SamplingParams(max_tokens=MAX_TOKENS, stop=s) for s in stops]
        for stop, output in zip(stops, llm.generate([prompt] * len(stops), params), strict=True):
            assert (output.token_ids, output.text, output.finish_reason) == plain.until(
                prompt, stop
            )
            assert output.stop_reason == (stop if output.finish_reason == "stop" else None)
            _check_counts(output)


def test_of_two_stop_strings_the_one_that_comes_first_ends_it(
    open_llm: Callable[..., LLM], plain: Plain
) -> None:
    llm = open_llm(plain.outputs)
    for prompt, tokens in plain.outputs.items():
        text = plain.text(tokens)
        late, early = text[15:18], text[6:10]
        output = llm.generate(prompt, SamplingParams(max_tokens=MAX_TOKENS, stop=[late, early]))[0]
        first = min((late, early), key=lambda s: len(plain.until(prompt, s)[0]))
        assert (output.token_ids, output.text, output.finish_reason) == plain.until(prompt, first)
        assert output.stop_reason == first


def test_ends_after_max_tokens(open_llm: Callable[..., LLM], plain: Plain) -> None:
    llm = open_llm(plain.outputs)
    for prompt, tokens in plain.outputs.items():
        params = [SamplingParams(max_tokens=n) for n in range(1, 15)]
        for count, output in enumerate(llm.generate([prompt] * 14, params), start=1):
            assert output.token_ids == tokens[:count]
            assert output.text == plain.text(tokens[:count])
            assert output.finish_reason == "length"
            _check_counts(output)
    assert llm.stats()["mean_accept_length"] > 2


@pytest.mark.parametrize("max_tokens", [None, MAX_TOKENS])
@pytest.mark.parametrize("room", range(1, 9))
def test_ends_at_the_end_of_the_context(
    room: int, max_tokens: int | None, open_llm: Callable[..., LLM], plain: Plain
) -> None:
    longest = max(plain.outputs, key=len)
    context = len(longest) + room
    known = {prompt: tokens[: context - len(prompt)] for prompt, tokens in plain.outputs.items()}
    llm = open_llm(known, max_model_len=context)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate(list(plain.outputs), params)
    for (prompt, tokens), output in zip(plain.outputs.items(), outputs, strict=True):
        count = min(context - len(prompt), max_tokens or context)
        assert len(output.token_ids) == count
        assert output.token_ids == tokens[:count]
        assert output.finish_reason == "length"
        _check_counts(output)


def test_ends_at_the_end_of_the_rotary_table(open_llm: Callable[..., LLM], plain: Plain) -> None:
    llm = open_llm(plain.outputs)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for prompt, expected in plain.endless.items():
        assert len(expected) == llm.context_len - len(prompt)
        assert llm.generate(prompt, params)[0].token_ids == expected


def test_a_stream_never_takes_text_back(open_llm: Callable[..., LLM], plain: Plain) -> None:
    llm = open_llm(plain.outputs)
    for prompt, tokens in plain.outputs.items():
        text = plain.text(tokens)
        for start in range(4, len(text) - 8, 5):
            stop = text[start : start + 5]
            sent = ""
            for output in llm.stream(prompt, SamplingParams(max_tokens=MAX_TOKENS, stop=stop)):
                sent += output.delta
                assert stop not in sent
                assert (output.text or "").startswith(sent)
            assert sent == output.text == text[: text.index(stop)]
