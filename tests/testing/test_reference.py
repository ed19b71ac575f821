"""The dense reference allows for what a dtype rounds, and for no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mutants import MUTANTS, WithEagle3
from torch import Tensor

from specplug import Runtime
from specplug.testing import Subject
from specplug.testing.kit import checks_named
from specplug.testing.laboratory import Drafted, Laboratory
from specplug.testing.reference import NONE, Guide
from specplug.testing.verdict import Verdict, judge
from specplug_eagle3.worker import Eagle3Worker

EPS = torch.finfo(torch.bfloat16).eps


class OtherOrder(Eagle3Worker):
    """EAGLE3 whose logits are rounded otherwise in each pass, as other orders of adding do: by half
    of what bf16 rounds in the greatest one."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._dice = torch.Generator().manual_seed(0)

    def logits(self, hidden: Tensor) -> Tensor:
        found = super().logits(hidden)
        error = torch.rand(found.shape, generator=self._dice) - 0.5
        return found + error * EPS * found.abs().amax(-1, keepdim=True)


def _reference(algorithm: object) -> Verdict:
    settings = {"dtype": "bfloat16"}
    laboratory = Laboratory(Subject(algorithm=algorithm, settings=settings))
    return judge(checks_named(["blind.reference"])[0], laboratory)


def test_drafts_that_round_otherwise_are_right() -> None:
    verdict = _reference(WithEagle3(OtherOrder))
    assert verdict.told == "100 % of 16 (declared), 100 % of 16 (wide)"


@pytest.mark.parametrize("name", ["own instead of next tokens", "slot off by one"])
def test_mistake_is_found_in_bf16(name: str) -> None:
    (mutant,) = [each for each in MUTANTS if each.name == name]
    verdict = _reference(mutant.make())
    assert verdict.status == "failed"
    assert [word for word in mutant.words if word not in verdict.told] == []


@pytest.mark.parametrize(
    ("second", "chosen"),
    [(10.0 - 1.9 * 10 * EPS, 7), (10.0 - 2.1 * 10 * EPS, 5)],
    ids=["as likely", "less likely"],
)
def test_guide_takes_the_drafted_of_two_like_tokens(second: float, chosen: int) -> None:
    guide = Guide(Drafted(tokens=(1, 7, 8), parents=(-1, 0, 1)), EPS)
    logits: Any = torch.tensor([[10.0, second, -3.0]])
    token_ids = torch.tensor([5, 7, 9])
    assert guide.next([], logits, token_ids, NONE) == chosen
    assert guide.next([7, 8], logits, token_ids, NONE) == 5  # nothing was drafted there
