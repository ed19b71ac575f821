"""An engine that stops drafting, and drafts again: its tokens are plain, its drafts as good."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hosted_engines import FORMS, Engines

from specplug_vllm.v2 import runner_patches
from specplug_vllm.v2.draft_widths import DraftWidths
from specplug_vllm.v2.step_hooks import StepHooks

FASTER = {"draft_when": "faster"}


class EveryOther:
    """Drafts in three steps, then not in three; nothing is measured."""

    asked = 0

    def __call__(self, num_requests: int, most: int) -> bool:
        self.asked += 1
        return self.asked % 6 < 3


@pytest.mark.parametrize("algorithm", FORMS)
def test_tokens_are_plain_with_pauses(
    algorithm: str,
    engines: Engines,
    prompts: list[str],
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosted = engines(algorithm, FORMS[algorithm], FASTER)
    scheduler, drafter = hosted.core.scheduler, hosted.drafter
    assert isinstance(scheduler.dynamic_sd_lookup, DraftWidths)
    every_other = EveryOther()
    drafted = []
    # Pauses first: what they do not write, another run has not left there.
    for way in (every_other, lambda num_requests, most: True):
        with monkeypatch.context() as patch:
            patch.setattr(scheduler.dynamic_sd_lookup, "drafts", way)
            drafted.append(drafts_of(patch))
            assert hosted.generate(prompts, max_tokens=32) == plain
        assert drafter.undrafted == 0
    pausing, always = drafted
    assert every_other.asked > 6
    if algorithm != "NGRAM":  # which knew nothing at first
        both = always.keys() & pausing.keys()
        assert len(both) > 10
        assert {root: pausing[root] for root in both} == {root: always[root] for root in both}


def drafts_of(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[int]]:
    """Return what gets each draft from now on, by the request's prompt and its committed tokens."""
    found: dict[tuple[int, ...], list[int]] = {}
    draft = StepHooks.draft

    def noted(self: Any, step: Any, chosen: Any, wanted: int) -> Any:
        drafts = draft(self, step, chosen, wanted)
        lengths = self._order.committed.seq_lens[step.req_indices]
        for index, drafted in zip(chosen.tolist(), drafts.tokens.tolist(), strict=True):
            prompt = self._views[step.ids[index]].prompt_token_ids
            found[*prompt, int(lengths[index])] = drafted[1:]
        return drafts

    monkeypatch.setattr(StepHooks, "draft", noted)
    return found


def test_step_that_a_request_begins_with_is_not_measured(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted = engines.make("NGRAM", 3, FASTER)  # no step of another request is under way
    steps: list[Any] = []
    widths = hosted.core.scheduler.dynamic_sd_lookup
    monkeypatch.setattr(widths, "note", lambda step, now: steps.append(step))
    # A prompt of one token is computed as fast as a step without drafts; before it nothing ran.
    hosted.generate([{"prompt_token_ids": [5]}], max_tokens=8, ignore_eos=True)
    assert steps[0] is None
    assert steps[1].num_requests == 1


def test_always_is_vllms_own_way(engines: Engines) -> None:
    hosted = engines("EAGLE3", FORMS["EAGLE3"], {"draft_when": "always"})
    assert hosted.core.scheduler.dynamic_sd_lookup is None


def test_own_schedule_of_a_user_stays(
    engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    hosted = engines("EAGLE3", FORMS["EAGLE3"], FASTER, schedule=[[1, 2, 5], [3, 4, 2]])
    widths = hosted.core.scheduler.dynamic_sd_lookup
    assert [widths[n] for n in (1, 2, 3, 4)] == [5, 5, 2, 2]
    assert hosted.generate(prompts, max_tokens=32) == plain


def test_own_schedule_that_is_too_wide_is_cut(engines: Engines) -> None:
    hosted = engines("NGRAM", 3, FASTER, schedule=[[1, 2, 5], [3, 4, 2]])
    told = hosted.llm.llm_engine.vllm_config.speculative_config
    # Graphs are recorded of the widths that stand there.
    assert told.num_speculative_tokens_per_batch_size == [(1, 2, 3), (3, 4, 2), (5, 5, 0)]


def test_every_batch_finds_a_graph_of_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five requests of six rows are 30 tokens: of 32 there are narrow graphs alone."""
    monkeypatch.setattr(runner_patches, "pauses", lambda config: True)

    def graph(tokens: int, width: int | None) -> Any:
        return SimpleNamespace(num_tokens=tokens, uniform_token_count=width, num_active_loras=0)

    narrow, wide, any_width = graph(32, 1), graph(48, 6), graph(64, None)
    manager = SimpleNamespace(
        vllm_config=None, _capture_descs={"full": [any_width, wide], "piecewise": [narrow]}
    )

    def as_vllm_does(manager: Any) -> None:
        manager._candidates = {(30, 0): [narrow], (40, 0): [wide], (30, 1): []}

    runner_patches.init_candidates(as_vllm_does, manager)
    assert manager._candidates == {
        (30, 0): [narrow, wide, any_width],
        (40, 0): [wide, any_width],
        (30, 1): [],
    }
