"""Steps before the first request: every size takes one, and nothing of them is left."""

from __future__ import annotations

from typing import Any

import pytest
from hosted_engines import FORMS, Engines

from specplug_vllm.v2 import speculator as speculator_module
from specplug_vllm.v2.step_hooks import StepHooks


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("algorithm", [name for name in FORMS if name != "NGRAM"])
def test_a_warm_up_leaves_tokens_and_drafts_as_they_are(
    algorithm: str,
    paused: bool,
    engines: Engines,
    prompts: list[str],
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosted = engines(algorithm, FORMS[algorithm])
    monkeypatch.setattr(speculator_module, "pauses", lambda config: paused)
    speculator = hosted.drafter
    steps = speculator.decode_steps
    assert hosted.generate(prompts, max_tokens=32) == plain
    expected = speculator.decode_steps - steps

    taken: list[tuple[int, int, int]] = []
    decode = StepHooks.decode

    def noted(self: Any, step: Any, chosen: Any, *, drafts_follow: bool) -> None:
        taken.append((len(chosen), int(step.widths[chosen].max()), drafts_follow))
        assert step.is_warm_up
        decode(self, step, chosen, drafts_follow=drafts_follow)

    prefill = StepHooks.prefill

    def looked_at(self: Any, step: Any, chosen: Any, first: Any) -> None:
        assert first[chosen].all()
        for index in chosen.tolist():
            tokens = self._views[step.ids[index]].token_ids
            assert len(tokens[:]) == step.ends[index], "the whole prompt in a chunk"
        prefill(self, step, chosen, first)

    with monkeypatch.context() as patch:
        patch.setattr(StepHooks, "decode", noted)
        patch.setattr(StepHooks, "prefill", looked_at)
        speculator._warm_up([1, 2, 4])
    width = FORMS[algorithm] + 1
    forms = [(width, True), (width, False), (1, False), (1, True)][: 4 if paused else 1]
    assert taken[0] == (1, width, True)  # beside a prompt
    assert taken[1:] == [(size, *form) for size in (1, 2, 4) for _ in range(2) for form in forms]
    assert speculator.undrafted == 0

    steps = speculator.decode_steps
    assert hosted.generate(prompts, max_tokens=32) == plain
    assert speculator.decode_steps - steps == expected
