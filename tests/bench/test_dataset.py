"""Prompts from a file, and how they are dealt out."""

from __future__ import annotations

import json

import pytest

from specplug.algorithm import HELD_OUT_PROMPTS
from specplug.bench.dataset import Prompt, deal, read_prompts
from specplug.errors import FallbackWarning, UsageError


@pytest.fixture
def file(tmp_path):
    return tmp_path / "prompts.jsonl"


def test_the_built_in_set():
    prompts = read_prompts(HELD_OUT_PROMPTS)
    assert len(prompts) == len({str(prompt.content) for prompt in prompts}) == 256


def test_texts_tokens_and_what_is_passed_over(file):
    file.write_bytes('\ufeff{"prompt": "ü\u2028\\n"}\r\n\n{"id": 7, "prompt": [3, 0]}\n'.encode())
    assert read_prompts(file) == [Prompt("ü\u2028\n", 1), Prompt([3, 0], 3)]


EXPECTED = "token ids as the prompt, or a chat: turns, conversations or messages"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "it is no JSON (Expecting property name"),
        ("[" * 100_000, "it is no JSON (maximum recursion depth"),
        ('"text"', "it has no prompt"),
        ('{"text": "x"}', "it has no prompt"),
        ('{"prompt": 5}', "its prompt is 5"),
        ('{"prompt": null}', "its prompt is null"),
        ('{"prompt": [1, true]}', "its prompt is [1, true]"),
        ('{"prompt": ["xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"]}', 'its prompt is ["xxxxxx'),
        ('{"prompt": ""}', "its prompt is empty"),
        ('{"prompt": []}', "its prompt is empty"),
        (r'{"prompt": "a\ud800"}', "its prompt has a lone surrogate as character 2"),
        (r'{"turns": ["\ud800"]}', "its prompt has a lone surrogate as character 1"),
    ],
)
def test_a_bad_line_is_named(file, line, why):
    file.write_text(f'{{"prompt": "good"}}\n\n{line}\n{{"prompt": 1}}\n')
    with pytest.raises(UsageError) as caught:
        read_prompts(file)
    said = str(caught.value)
    assert said.startswith(f"dataset {str(file)!r}, line 3: {why}")
    assert said.endswith(EXPECTED)
    assert len(said) < len(str(file)) + 250


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", 'has no prompt; expected {"prompt": …} per line'),
        (b"\n \r\n", "has no prompt"),
        (b'{"prompt": "\xff"}', "is not UTF-8 (byte 12)"),
    ],
)
def test_an_unusable_file(file, data, why):
    file.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        read_prompts(file)
    assert str(caught.value).startswith(f"dataset {str(file)!r} {why}")


def test_no_file(file):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_prompts(file)


SPEC_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write it.", "Again."]}
SPEED_BENCH = {
    **{"question_id": "a1", "category": "coding", "sub_category": "", "turns": ["Mend it."]},
    **{"source": "x", "src_id": "1", "difficulty": "", "multiturn": False},
}
SHARE_GPT = {
    "id": "q_0",
    "conversations": [{"from": "gpt", "value": "Yes?"}, {"from": "human", "value": "Why?"}],
}
PREPARED = {"messages": [{"role": "system", "content": "Be."}, {"role": "user", "content": "Do."}]}


def test_published_datasets_give_the_first_message(file):
    rows = [SPEC_BENCH, SPEED_BENCH, SHARE_GPT, PREPARED]
    expected = [
        Prompt(text, line, is_chat=True)
        for line, text in enumerate(("Write it.", "Mend it.", "Why?", "Do."), 1)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert read_prompts(file) == expected
    file.write_text(json.dumps(rows, indent=1))
    assert read_prompts(file) == expected


def test_chats_without_a_text_are_left_out_and_told(file):
    waiting = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    empty = [{"turns": []}, {"turns": [waiting]}, {"conversations": []}]
    file.write_text(json.dumps([*empty, SPEC_BENCH]))
    with pytest.warns(FallbackWarning, match="3 of 4 rows are left out: they have no text of a"):
        assert [prompt.content for prompt in read_prompts(file)] == ["Write it."]


@pytest.mark.parametrize("row", [{"turns": [7]}, {"conversations": [{"role": "human"}]}])
def test_chat_of_another_form_is_named(file, row):
    file.write_text(json.dumps(row))
    with pytest.raises(UsageError, match=f"line 1: its {next(iter(row))} are "):
        read_prompts(file)


def lines(batches):
    return [[prompt.line for prompt in batch] for batch in batches]


PROMPTS = [Prompt("x", line) for line in range(1, 11)]


def test_every_prompt_comes_once_as_long_as_they_last():
    dealt = deal(PROMPTS, batch_size=2, rounds=2, num_prompts=3)
    assert lines([dealt.warm_up]) == [[1, 2]]
    assert [lines(batches) for batches in dealt.rounds] == [[[3, 4], [5]], [[6, 7], [8]]]
    assert (dealt.num_prompts, dealt.num_prompts_per_round) == (8, 3)
    assert not dealt.comes_again
    assert not deal(PROMPTS, batch_size=2, rounds=2, num_prompts=4).comes_again


def test_a_small_dataset_begins_anew():
    dealt = deal(PROMPTS[:3], batch_size=2, rounds=1, num_prompts=2)
    assert lines([dealt.warm_up, *dealt.rounds[0]]) == [[1, 2], [3, 1]]
    assert dealt.comes_again


@pytest.mark.parametrize(("batch_size", "count"), [(1, 4), (3, 6), (4, 4), (8, 8)])
def test_a_round_has_four_prompts_or_more_in_full_batches(batch_size, count):
    dealt = deal(PROMPTS, batch_size, rounds=1)
    assert dealt.num_prompts_per_round == count
    assert {len(batch) for batch in dealt.rounds[0]} == {batch_size}


def test_a_round_must_fill_a_batch():
    with pytest.raises(UsageError, match="num_prompts=3 does not fill a batch of 4; expected at"):
        deal(PROMPTS, batch_size=4, rounds=1, num_prompts=3)
