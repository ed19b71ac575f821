"""The requests that each workload makes of the same prompts."""

from __future__ import annotations

import pytest

from specplug.algorithm import HELD_OUT_PROMPTS
from specplug.bench.dataset import Prompt, read_prompts
from specplug.bench.workload import WORKLOADS, make_workload
from specplug.errors import UsageError

PROMPTS = read_prompts(HELD_OUT_PROMPTS)[:8]


def contents(name: str, prompts: list[Prompt] = PROMPTS) -> list[str]:
    return [str(prompt.content) for prompt in make_workload(name, prompts)]


def test_completion_leaves_prompts_as_they_are():
    assert make_workload("completion", PROMPTS) == PROMPTS


def test_noise_is_the_same_prompts_at_temperature_4():
    noise = make_workload("noise", PROMPTS)
    assert contents("noise") == contents("completion")
    assert {prompt.temperature for prompt in noise} == {4.0}


def test_edit_begins_the_text_again_under_another_name():
    text = "items = sum(items)\nreturn items\n"
    (edit,) = contents("editing", [Prompt(text, 1)])
    before, _, after = edit.partition("\n\n\n# after\n")
    assert before == f"# before\n{text}"
    assert after == "items2 = su"


def test_agents_share_and_repeat_with_tool_calls():
    made = contents("agent")
    assert len(made) == 3 * len(PROMPTS)
    first, second, third = made[0], made[4], made[8]
    assert first.count("<tool_response>") == 1
    assert third.count("<tool_response>") == 3
    for shorter, longer in ((first, second), (second, third)):
        assert longer.startswith(shorter.rpartition("<tool_call>")[0])
    assert sum(str(PROMPTS[1].content) in each for each in made) > 3


def test_mixed_has_all_workloads_in_each_batch_of_four():
    mixed = make_workload("mixed", PROMPTS)
    others = [make_workload(name, PROMPTS) for name in WORKLOADS if name != "mixed"]
    assert mixed[:4] == [made[0] for made in others]
    assert len(mixed) == 4 * len(PROMPTS)


def test_chats_are_asked_in_words():
    chat = [Prompt("some words here", 1, is_chat=True)]
    (edit,), agents = contents("editing", chat), contents("agent", chat)
    assert edit.startswith("Write this text again, with ")
    assert agents[0].endswith("</tool_response>\nWrite the next tool call.")
    assert all(made.is_chat for name in WORKLOADS for made in make_workload(name, chat))


@pytest.mark.parametrize("name", ["editing", "agent", "mixed"])
def test_token_ids_are_refused_where_text_is_needed(name):
    with pytest.raises(UsageError, match="dataset line 3: its prompt is a list of token ids; exp"):
        make_workload(name, [Prompt([1, 2], 3)])


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_more_is_made_than_is_wanted(name):
    whole, many = make_workload(name, PROMPTS), PROMPTS * 1000
    for most in (1, 5, 8):
        made = make_workload(name, many, most)
        assert most <= len(made) <= 4 * len(PROMPTS)
        assert made[:most] == whole[:most]
