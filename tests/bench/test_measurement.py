"""The order of variants, their prompts, and those that fail. The engine here is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from specplug.bench.dataset import Deal, Prompt, deal
from specplug.bench.measurement import Observer, measure
from specplug.bench.variant import Variant
from specplug.errors import PluginError, UsageError
from specplug.sampling_params import SamplingParams

PROMPTS = [Prompt(f"{n}", n) for n in range(20)]
NONE, A, B = (Variant(name, named=name != "B") for name in ("NONE", "A", "B"))


class Engine:
    """Stands in for ``LLM``: notes its calls, and raises what ``failing`` says."""

    calls: list[tuple[str, str]]
    failing: dict[tuple[str, str], BaseException]

    def __init__(self, speculative_algorithm, **arguments):
        self.name, self.arguments = speculative_algorithm, arguments
        self.tokenizer = lambda text: {"input_ids": [ord(c) for c in text]}
        self.context_len = 8
        self.effective_config = {"name": self.name}
        self.note("load")

    def note(self, what):
        self.calls.append((self.name, what))
        if (self.name, what) in self.failing:
            raise self.failing[self.name, what]

    def generate(self, prompts, params, on_finished):
        self.note(",".join(map(str, prompts)))
        return [SimpleNamespace(token_ids=[len(prompt)]) for prompt in prompts]

    def reset_stats(self):
        pass

    def stats(self):
        return {"stats": self.name}

    def close(self):
        self.note("close")


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    monkeypatch.setattr(Engine, "calls", [], raising=False)
    monkeypatch.setattr(Engine, "failing", {}, raising=False)
    return Engine


def run(*variants, dealt: Deal | None = None, observer: Observer | None = None, kind=Engine):
    def open_engine(variant, size):
        return kind(variant.algorithm, max_running_requests=size, **variant.arguments)

    dealt = dealt or deal(PROMPTS, batch_size=2, rounds=3, num_prompts=4)
    return measure(variants, 2, dealt, SamplingParams(), open_engine, observer or Observer())


def test_they_take_turns_and_each_round_another_one_begins(engine):
    done = run(NONE, A, B)
    warm_up = [(name, "0,1") for name in ("NONE", "A", "B")]
    rounds = [
        (name, prompts)
        for first, names in ((2, "NONE A B"), (6, "A B NONE"), (10, "B NONE A"))
        for name in names.split()
        for prompts in (f"{first},{first + 1}", f"{first + 2},{first + 3}")
    ]
    loads = [(name, "load") for name in ("NONE", "A", "B")]
    closes = [(name, "close") for name in ("B", "A", "NONE")]
    assert engine.calls == [*loads, *warm_up, *rounds, *closes]
    assert [series.variant for series in done] == [NONE, A, B]
    assert all(len(series.runs) == 3 for series in done), "the warm-up does not count"
    first = done[0].runs[0]
    assert (first.output_tokens, first.statistics) == (4, {"stats": "NONE"})
    assert first.tokens_per_second == pytest.approx(4 / first.seconds)


def test_arguments():
    made = []

    class Noting(Engine):
        def __init__(self, *given, **arguments):
            made.append((*given, arguments))
            super().__init__(*given, **arguments)

    run(NONE, Variant("A").with_common({"speculative_num_steps": 3}), kind=Noting)
    assert made == [
        ("NONE", {"max_running_requests": 2}),
        ("A", {"max_running_requests": 2, "speculative_num_steps": 3}),
    ]


def test_the_observer_sees_every_prompt_done():
    said, done = [], []
    run(NONE, A, observer=Observer(say=said.append, advance=done.append))
    assert sum(done) == 2 * (2 + 3 * 4)
    assert said[0] == "loading NONE, batch 2"
    assert said[-1] == "round 3 of 3: A, batch 2"


def test_who_did_not_load_has_no_turn(engine):
    engine.failing[("B", "load")] = KeyError("slot")
    said, done = [], []
    run(NONE, B, A, observer=Observer(say=said.append, advance=done.append))
    assert sum(done) == 3 * (2 + 3 * 4), "the bar gets to its end"
    assert [text for text in said if "B" in text] == ["loading B, batch 2"]
    assert said[-2:] == ["round 3 of 3: NONE, batch 2", "round 3 of 3: A, batch 2"]


def test_one_that_nobody_named_may_fail_to_load(engine):
    engine.failing[("B", "load")] = KeyError("slot")
    none, _, left_out = run(NONE, A, B)
    assert (left_out.problem, left_out.skipped, left_out.runs) == ("KeyError: 'slot'", True, [])
    assert len(none.runs) == 3
    engine.failing[("A", "load")] = PluginError("told")
    with pytest.raises(PluginError, match="told"):
        run(NONE, A, B)


@pytest.mark.parametrize("when", ["0,1", "8,9"])
def test_one_that_fails_later_does_not_stop_the_others(engine, when):
    engine.failing[("A", when)] = UsageError("told")
    none, failed, other = run(NONE, A, B)
    assert (failed.problem, failed.skipped) == ("told", False)
    assert engine.calls.count(("A", when)) == 1
    assert [name for name, what in engine.calls if what == "close"] == ["A", "B", "NONE"]
    assert len(none.runs) == len(other.runs) == 3


def test_the_baseline_must_not_fail(engine):
    engine.failing[("NONE", "6,7")] = RuntimeError("told")
    with pytest.raises(RuntimeError, match="told"):
        run(NONE, A)
    assert [name for name, what in engine.calls if what == "close"] == ["A", "NONE"]


def test_a_prompt_that_is_too_long_is_told_at_once(engine):
    prompts = [*PROMPTS[:13], Prompt("x" * 8, 99)]
    with pytest.raises(UsageError) as caught:
        run(NONE, A, dealt=deal(prompts, batch_size=2, rounds=3, num_prompts=4))
    assert str(caught.value).startswith("dataset line 99: the prompt has 8 tokens; expected at mo")
    assert engine.calls == [("NONE", "load"), ("NONE", "close")]


def test_a_model_without_a_tokenizer_takes_token_ids():
    class Bare(Engine):
        def __init__(self, *given, **arguments):
            super().__init__(*given, **arguments)
            self.tokenizer = None

    ids = [Prompt([n, n], n) for n in range(20)]
    assert run(NONE, dealt=deal(ids, batch_size=2, rounds=1), kind=Bare)[0].runs
    with pytest.raises(UsageError, match="the model has no tokenizer; expected a --dataset whose"):
        run(NONE, kind=Bare)


def test_prompts_with_a_temperature_of_their_own():
    asked = []

    class Noting(Engine):
        def generate(self, prompts, params, on_finished):
            asked.append(params)
            return super().generate(prompts, params, on_finished)

    mixed = [Prompt(f"{n}", n, temperature=4.0 if n in (2, 3, 5) else None) for n in range(6)]
    run(NONE, dealt=deal(mixed, batch_size=2, rounds=1, num_prompts=4), kind=Noting)
    usual, hot = SamplingParams(), SamplingParams(temperature=4.0)
    assert asked == [usual, hot, [usual, hot]]


def test_chat_goes_through_the_template_of_the_model(engine):
    class Tokenizer:
        chat_template = "{{ messages }}"

        def apply_chat_template(self, chat, **options):
            assert options == {"add_generation_prompt": True, "return_dict": True}
            return {"input_ids": [7, *map(ord, chat[0]["content"])]}

    class Chatting(Engine):
        def __init__(self, *given, **arguments):
            super().__init__(*given, **arguments)
            self.tokenizer = Tokenizer()

    chats = [Prompt("a", n, is_chat=True) for n in range(4)]
    run(NONE, dealt=deal(chats, batch_size=1, rounds=1, num_prompts=1), kind=Chatting)
    assert engine.calls[1:3] == [("NONE", "[7, 97]")] * 2
