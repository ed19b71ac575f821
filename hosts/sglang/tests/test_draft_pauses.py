"""Steps in which nobody drafts since that is faster: what chooses them, and their tokens."""

from __future__ import annotations

from collections import deque

import attrs
import pytest
from engines import TREE, environment, running

from specplug.speculative.choice.draft_turns import DecodeStep, DraftTurns
from specplug.speculative.undrafted import paused_in
from specplug_sglang.draft_pauses import DraftPauses

DRAFTED = 5


@attrs.define
class Clock:
    """Decode steps of a scheduler that launches one before it knows the result of the last; times
    and tokens are made up.

    Attributes:
        drafting: seconds of a step with drafts, of which none is taken; one without takes 1.
        prefills: every how many decode steps a prompt is computed before one, for 20 seconds.
        unable: every how many steps, and so many in a row, no request can be drafted for.
    """

    drafting: float
    prefills: int = 0
    unable: int = 0
    requests: int = 8
    now: float = 0.0
    drafted: int = 0
    steps: int = 0
    pauses: DraftPauses = attrs.field(factory=lambda: DraftPauses("MADE_UP", DRAFTED))
    _ahead: deque[float] = attrs.field(factory=deque)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.steps += 1
            seconds = 0.0
            if self.prefills and self.steps % self.prefills == 0:
                self.pauses.interrupt()
                seconds = 20.0
            able = not (self.unable and self.steps // self.unable % 2)
            drafts = self.pauses.launch([1 + DRAFTED if able else 1] * self.requests)
            assert able or not drafts
            self.drafted += drafts
            self._ahead.append(seconds + (self.drafting if drafts else 1.0))
            if len(self._ahead) > 1:
                self.now += self._ahead.popleft()
                self.pauses.note([0] * self.requests, self.now)


@pytest.mark.parametrize("settings", [{}, {"prefills": 5}, {"unable": 30}], ids=str)
def test_drafts_that_are_not_taken_stop(settings):
    clock = Clock(1.4, **settings)
    clock.run(400)
    clock.drafted = 0
    clock.run(4000)
    assert 0 < clock.drafted < 0.03 * 4000  # tried now and then


def test_prompts_between_steps_are_not_measured():
    """A prompt before every step: nothing is known of what the steps take."""
    clock = Clock(9.0, prefills=1)
    clock.run(400)
    assert clock.drafted == 400


def test_steps_that_cannot_draft_teach_nothing():
    clock = Clock(9.0, unable=1)  # every other one
    clock.run(400)
    assert clock.drafted == 200


def test_step_whose_result_is_dropped_is_passed_over(monkeypatch):
    noted = []
    monkeypatch.setattr(DraftTurns, "note", lambda self, step, now: noted.append(step))
    monkeypatch.setattr(DraftTurns, "drafts", lambda self, size, depth: size == 8)
    pauses = DraftPauses("MADE_UP", DRAFTED)
    for requests in (4, 8, 4):
        pauses.launch([1 + DRAFTED] * requests)
    pauses.note([2] * 8, 1.0)
    pauses.note([0] * 4, 2.0)
    pauses.note([0] * 4, 3.0)  # of no step
    assert noted == [DecodeStep(DRAFTED, (2,) * 8), DecodeStep(0, (0,) * 4)]


ALGORITHMS = {
    "EAGLE3": TREE,
    "EAGLE": {},
    "MULTI_LAYER_EAGLE": {},
    "DFLASH": {},
    "STANDALONE": {},
    "NGRAM": {},
}


def drafts_of(engine):
    """Return what was drafted, by a request's prompt and its committed tokens."""
    each = (draft for step in engine.seen("drafts") for draft in step)
    return {(*prompt, length): tokens for prompt, length, tokens in each}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tokens_are_plain_with_pauses(algorithm, prompts, plain, tmp_path):
    found = []
    for name, given in (("always", {}), ("faster", {"EVERY_OTHER": "3"})):
        folder = tmp_path / name
        folder.mkdir()
        given |= {"SPECPLUG_DRAFT_WHEN": name, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
        with (
            environment(WITNESS_DRAFTS="1", **given),
            running(algorithm, **ALGORITHMS[algorithm]) as engine,
        ):
            made = engine.generate(prompts)
            found.append((drafts_of(engine), made.steps, paused_in(str(folder))))
        assert made.tokens == plain
    (always, steps, none), (pausing, more_steps, paused) = found
    assert none == 0
    assert 0 < paused < more_steps
    assert steps < more_steps < 12 * 63
    if algorithm != "NGRAM":  # which knew nothing at first
        both = always.keys() & pausing.keys()
        assert len(both) > 10
        assert {root: pausing[root] for root in both} == {root: always[root] for root in both}


def test_tokens_are_plain_while_the_clock_chooses(prompts, plain, tmp_path):
    """ECHO drafts badly; what is chosen when depends on the machine."""
    given = {"SPECPLUG_DRAFT_WHEN": "faster", "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    with environment(**given), running("ECHO") as engine:
        for _ in range(4):
            assert engine.generate(prompts).tokens == plain
    assert paused_in(str(tmp_path)) > 0  # tried at least, after six turns
