"""The kit's check of ranks: what it runs, where it does not apply, and what is left of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import attrs
import pytest
import torch
from rank_plugins import DiesInRankOne, OneProcessAlone
from shallow_target import ShallowTarget

from specplug.testing import Subject, rank_processes, unequal_ranks
from specplug.testing.check import LeftOut
from specplug.testing.exactness import first_difference
from specplug.testing.kit import checks_named
from specplug.testing.laboratory import Laboratory
from specplug.testing.rank_processes import RankAnswer, RankTask, run_ranks
from specplug.testing.unequal_ranks import unequal_params, uneven_rounds
from specplug.testing.verdict import Verdict, judge
from specplug_ngram import Ngram


class Elsewhere(Ngram):
    """Is of a module that no other process can import."""

    def __reduce__(self) -> Any:
        return import_module, ("of_this_process_alone",)


class Locked(Ngram):
    """Holds what pickle refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.held = lambda: None


def _laboratory(shallow: ShallowTarget, plugin: object) -> Laboratory:
    settings = shallow.options("NGRAM")
    model = settings.pop("model")
    settings.pop("speculative_algorithm")
    return Laboratory(Subject(algorithm=plugin, model=model, settings=settings, quick=True))


def _judged(laboratory: Laboratory) -> Verdict:
    return judge(checks_named(["exact.ranks"])[0], laboratory)


def _no_process_is_left(started: Sequence[Any]) -> bool:
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    return bool(started)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whatever ``run_ranks`` starts."""
    begun: list[Any] = []

    class Noted(rank_processes.subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            begun.append(self)

    monkeypatch.setattr(rank_processes.subprocess, "Popen", Noted)
    return begun


def test_right_plugin_is_exact_in_ranks(shallow: ShallowTarget, started: list[Any]) -> None:
    verdict = _judged(_laboratory(shallow, "NGRAM"))
    assert verdict.status == "passed", verdict.told
    assert verdict.told.startswith("6 requests in 2 ranks, idle in ")
    assert _no_process_is_left(started)


def test_algorithm_that_refuses_ranks_is_not_checked(shallow: ShallowTarget) -> None:
    verdict = _judged(_laboratory(shallow, OneProcessAlone()))
    assert verdict.status == "not applicable"
    assert "expected dp_size=1" in verdict.told


@pytest.mark.parametrize("plugin", [Elsewhere, Locked])
def test_object_of_no_other_process_is_not_checked(
    shallow: ShallowTarget, plugin: type, started: list[Any]
) -> None:
    verdict = _judged(_laboratory(shallow, plugin()))
    assert verdict.status == "not applicable", verdict.told
    assert "other processes cannot make" in verdict.told
    assert plugin is Locked or _no_process_is_left(started)


def test_rank_that_dies_is_named(shallow: ShallowTarget, started: list[Any]) -> None:
    verdict = _judged(_laboratory(shallow, DiesInRankOne()))
    assert verdict.status == "failed"
    assert "rank 1 of 2: its process ended with 3" in verdict.told
    assert _no_process_is_left(started)


def test_ranks_beyond_their_deadline_are_ended(started: list[Any]) -> None:
    task = RankTask(
        model=None, settings={}, devices=("cpu",) * 2, prompts=(), params=(), rounds=(), deadline=0
    )
    assert {answer.error for answer in run_ranks(task)} == {"it had not ended after 0 s"}
    assert _no_process_is_left(started)


def test_interrupted_check_leaves_no_process(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(process: Any, sent: bytes, **_: Any) -> None:
        process.stdin.write(sent)
        process.stdin.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(rank_processes.subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _judged(Laboratory(Subject(algorithm="NGRAM", quick=True)))
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert _no_process_is_left(started)


def test_first_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "_MAIN", "raise SystemExit('no room')")
    verdict = _judged(Laboratory(Subject(algorithm="NGRAM", quick=True)))
    assert verdict.status == "failed"
    assert "ended without an answer, with 1: no room" in verdict.told


def test_other_token_is_told_with_rank_and_prompt(
    shallow: ShallowTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    laboratory = _laboratory(shallow, "NGRAM")
    params = unequal_params(laboratory)
    plain = laboratory.plain(sampled=True)
    rounds = uneven_rounds(4, quick=True)

    def answer(rank: int) -> RankAnswer:
        tokens = [
            [list(plain[i][: params[i].max_tokens]) for _, i in each[rank]] for each in rounds
        ]
        if rank == 1:
            tokens[1][1][2] += 1
        return RankAnswer(tokens=tokens, steps=2, idle_steps=1)

    monkeypatch.setattr(unequal_ranks, "run_ranks", lambda task: [answer(0), answer(1)])
    told = _judged(laboratory).told
    right = plain[3][2]
    assert f"rank 1 of 2, prompt 3, token 2: {right + 1}; expected {right}, as plain" in told


def test_cause_is_told_before_its_consequence(
    shallow: ShallowTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [RankAnswer(error="rank 1 failed", is_consequence=True), RankAnswer(error="a bug")]
    monkeypatch.setattr(unequal_ranks, "run_ranks", lambda task: answers)
    assert "rank 1 of 2: a bug; expected" in _judged(_laboratory(shallow, "NGRAM")).told


@pytest.mark.parametrize("quick", [True, False])
def test_rounds_have_every_prompt_and_idle_ranks(quick: bool) -> None:
    rounds = uneven_rounds(7, quick=quick)
    numbers = {number for each in rounds for jobs in each for _, number in jobs}
    assert numbers == set(range(7))
    assert not rounds[0][1], "the first step of rank 1 is an idle one"
    assert all(len(one) != len(other) for one, other in rounds)


def test_ranks_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unequal_ranks, "choose_device", torch.device)
    laboratory = Laboratory(Subject(algorithm="NGRAM", settings={"device": "cuda"}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert unequal_ranks._devices(laboratory) == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LeftOut, match="2 ranks need as many GPUs, and there is 1"):
        unequal_ranks._devices(laboratory)


def test_half_precision_is_checked_in_float32() -> None:
    half = Laboratory(Subject(algorithm="NGRAM", settings={"dtype": "bfloat16", "device": "cpu"}))
    assert unequal_ranks._in_wide_dtype(half).subject.settings["dtype"] == "float32"
    wide = Laboratory(attrs.evolve(half.subject, settings={"dtype": "float64", "device": "cpu"}))
    assert unequal_ranks._in_wide_dtype(wide) is wide


def test_difference_has_the_number_of_its_prompt() -> None:
    assert first_difference([(1, 2)], [(1, 2)]) == ""
    assert first_difference([(1, 2), (3,)], [(1, 2), (4,)], [5, 8]).startswith("prompt 8, token 0")
