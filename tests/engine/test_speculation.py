"""What is said at a run's end of what speculation brought."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from specplug import LLM, SamplingParams
from specplug.engine.speculation import speculation_line, speculation_of
from specplug.engine.statistics import Statistics
from specplug.speculative.choice.benefit import Alone, Benefit, TakenSteps
from specplug.speculative.choice.draft_policy import DraftPolicy
from specplug.speculative.choice.estimates import StepOutcome
from specplug.speculative.choice.step_cost import CPU_COSTS, StepCosts

SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 1024}


def chains() -> Statistics:
    """20 chains of 4: 10 accepted whole, 10 of which the first token is."""
    return Statistics(
        verifications=20,
        drafted=80,
        accepted=70,
        accepted_by_length=Counter({5: 10, 2: 10}),
        drafted_by_depth=Counter({4: 20}),
        seconds=Counter({"propose": 1.0, "extend": 0.5, "target": 4.0, "host": 0.5}),
    )


def test_chain_says_what_half_its_depth_would_have_had() -> None:
    found = speculation_of(chains(), None)
    assert found is not None
    assert found["shallower"] == {"depth": 2, "accept_length": 2.5}
    assert speculation_line(found) == (
        "speculation: 3.50 tokens a step; drafting took 25 % of decoding; 2 deep it would be 2.50 "
        "tokens"
    )


def test_tree_says_nothing_of_other_depths() -> None:
    trees = chains()
    trees.drafted = 200
    found = speculation_of(trees, None)
    assert found is not None
    assert found["shallower"] is None
    assert speculation_line(found).endswith("drafting took 25 % of decoding")


def test_nothing_drafted_has_no_line() -> None:
    assert speculation_of(Statistics(), None) is None


def test_line_names_what_each_alone_would_bring() -> None:
    benefit = Benefit(1.9, {"A": Alone(2, 1.2), "B": Alone(5, 1.8)})
    found = speculation_of(chains(), benefit)
    assert found is not None
    assert speculation_line(found) == (
        "speculation: 3.50 tokens a step, 1.90 times plain decoding as measured in this run; "
        "drafting took 25 % of decoding; alone, as in the steps it was chosen for: "
        "B 1.80 (5 deep), A 1.20 (2 deep)"
    )


def observed(policy: DraftPolicy, who: int, depth: int, accepted: int, seconds: float) -> None:
    """Have a policy learn of a step of one request."""
    policy.plan(["r"], np.array([[4]]))
    policy.estimates.observe(outcome(who, depth, accepted, seconds))


def outcome(who: int, depth: int, accepted: int, seconds: float) -> StepOutcome:
    drafted = [depth] if who >= 0 else [0]
    return StepOutcome(
        request_ids=["r"], who=[who], asked=drafted, nodes=drafted, accepted=[accepted],
        seconds=seconds, draft_seconds=0.2 if who >= 0 else 0.0,
    )  # fmt: skip


def test_benefit_is_over_plain_steps_that_were_measured() -> None:
    """A plain step takes 1 s, one with 4 drafted tokens 2 s, of which all are accepted."""
    policy = DraftPolicy(StepCosts(1, CPU_COSTS, padded=False), 4)
    taken = TakenSteps()
    assert taken.benefit(policy.estimates, ["A"]) is None
    for _ in range(60):
        observed(policy, -1, 0, 0, 1.0)
        observed(policy, 0, 4, 4, 2.0)
        taken.add(outcome(0, 4, 4, 2.0), 5)
    unknown = taken.benefit(policy.estimates, ["A"])
    assert unknown is not None
    assert unknown.speed_up is None, "no step without drafts was counted"
    for seconds in (1.0, 9.0, 1.0, 1.0):
        taken.add(outcome(-1, 0, 0, seconds), 1)
    found = taken.benefit(policy.estimates, ["A"])
    assert found is not None
    assert found.speed_up == pytest.approx((60 * 5 + 4) / (60 * 2 + 12))
    assert found.alone["A"].depth == 4
    assert found.alone["A"].speed_up == pytest.approx(2.5, rel=0.1)
    taken.clear()
    assert taken.benefit(policy.estimates, ["A"]) is None


def test_run_of_several_tells_what_they_brought() -> None:
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    with LLM(speculative_algorithm="NGRAM,EAGLE3", **SMALL) as llm:
        llm.generate("def area(width, height):\n    return width * height\n" * 3, params)
        found = llm.stats()["speculation"]
        assert found["accept_length"] == llm.stats()["mean_accept_length"]
        assert found["speed_up"] is None or found["speed_up"] > 0.2
        llm.reset_stats()
        assert llm.stats()["speculation"] is None
