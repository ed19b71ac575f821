"""The host's time for a choice of drafts: a plan, and what is learned of its step.

    python benchmarks/draft_choice.py

As an engine's are: plans of several requests are found in C where there is a compiler, and steps of
one that take what they were planned to are seldom learned from. Each step of several is planned
anew, and so learned from; an engine keeps to most plans for some steps. Nothing of it waits for a
device. Run it alone on the machine, with one thread.
"""

from __future__ import annotations

import time
from statistics import median, quantiles

import numpy as np

from specplug.speculative.choice.best_plan import load_plans
from specplug.speculative.choice.draft_policy import DraftPolicy
from specplug.speculative.choice.estimates import StepOutcome
from specplug.speculative.choice.step_cost import CPU_COSTS, StepCosts

_DEPTH = 12
_STEPS = 400
_SKIPPED = 100


def measure(bs: int, algorithms: int) -> tuple[list[float], list[float]]:
    """Return the microseconds of plans and of what is learned, step by step."""
    random = np.random.default_rng(0)
    policy = DraftPolicy(StepCosts(algorithms, CPU_COSTS, padded=True), _DEPTH, load_plans())
    rates = random.uniform(0.2, 0.9, (bs, algorithms))
    ids = [str(number) for number in range(bs)]
    most = np.full((bs, algorithms), _DEPTH)
    plans, learned = [], []
    for _ in range(_STEPS):
        began = time.perf_counter()
        plan = policy.plan(ids, most, 100.0 * bs)
        planned = time.perf_counter()
        lasts = random.random((bs, _DEPTH)) < rates[np.arange(bs), plan.who][:, None]
        accepted = np.minimum(np.cumprod(lasts, 1).sum(1), plan.depths)
        rows = bs + plan.depths.sum()
        draft = 0.0005 * float(plan.depths.max())
        outcome = StepOutcome(
            request_ids=ids,
            who=plan.who.tolist(),
            asked=plan.depths.tolist(),
            nodes=plan.depths.tolist(),
            accepted=accepted.tolist(),
            context=100.0 * bs,
            seconds=0.01 + 0.0002 * float(rows) + draft,
            draft_seconds=draft,
            plan=plan,
        )
        told = time.perf_counter()
        policy.estimates.observe(outcome)
        learned.append((time.perf_counter() - told) * 1e6)
        plans.append((planned - began) * 1e6)
    return plans[_SKIPPED:], learned[_SKIPPED:]


def main() -> None:
    """Print a table."""
    print(f"{'bs':>4} {'algorithms':>10} {'plan':>8} {'learn':>8} {'both':>8} {'p95':>8}  us")
    for bs in (1, 4, 16, 64):
        for algorithms in (1, 2, 3):
            plans, learned = measure(bs, algorithms)
            both = [plan + learn for plan, learn in zip(plans, learned, strict=True)]
            print(
                f"{bs:4} {algorithms:10} {median(plans):8.0f} {median(learned):8.0f} "
                f"{median(both):8.0f} {quantiles(both, n=20)[-1]:8.0f}"
            )


if __name__ == "__main__":
    main()
