"""Steps before the first request: every size takes one, and nothing of them is left."""

from __future__ import annotations

from typing import Any

import pytest
from hosted_engines import FORMS, Engines

from specplug_vllm.step_hooks import StepHooks


@pytest.mark.parametrize("algorithm", [name for name in FORMS if name != "NGRAM"])
def test_a_warm_up_leaves_tokens_and_drafts_as_they_are(
    algorithm: str,
    engines: Engines,
    prompts: list[str],
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosted = engines(algorithm, FORMS[algorithm])
    speculator = hosted.drafter
    steps = speculator.decode_steps
    assert hosted.generate(prompts, max_tokens=32) == plain
    expected = speculator.decode_steps - steps

    taken: list[tuple[int, bool, bool]] = []
    draft = StepHooks.draft

    def noted(self: Any, step: Any, chosen: Any, wanted: int) -> Any:
        taken.append((len(chosen), step.greedy, step.is_warm_up))
        return draft(self, step, chosen, wanted)

    with monkeypatch.context() as patch:
        patch.setattr(StepHooks, "draft", noted)
        speculator._warm_up([1, 2, 4])
    assert taken == [(1, True, True)] * 2 + [
        (size, greedy, True) for size in (1, 2, 4) for greedy in (True, False)
    ]
    assert speculator.undrafted == 0

    steps = speculator.decode_steps
    assert hosted.generate(prompts, max_tokens=32) == plain
    assert speculator.decode_steps - steps == expected
