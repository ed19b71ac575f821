"""The policy on simulated machines whose best fixed setting is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from draft_simulator import Machine, Run, best_fixed, outcome_of, plain, simulate, survival

from specplug.speculative.choice.best_plan import BEST, Plan
from specplug.speculative.choice.catch_ups import CatchUps
from specplug.speculative.choice.draft_policy import DraftPolicy
from specplug.speculative.choice.estimates import StepOutcome
from specplug.speculative.choice.step_cost import CPU_COSTS, GPU_COSTS, StepCosts
from specplug.speculative.choice.tried_ways import TriedWays

DRAFTERS = ((1e-3, 8e-4, 0.0, 1e-5, 0.0), (1e-3, 8e-4, 0.0, 1e-5, 0.0))
DEPTH = 12

CURVES: dict[str, tuple[Callable[[float], float], bool]] = {
    "flat": (lambda rows: 0.01 * (1 + 0.002 * rows), False),
    "linear": (lambda rows: 0.01 * (0.7 + 0.05 * rows), False),
    "stepped": (lambda rows: 0.01 * (1 + 0.25 * np.ceil(rows / 16)), True),
}


def machine(curve: str, **more: Any) -> Machine:
    target, padded = CURVES[curve]
    return Machine(target=target, padded=padded, request=2e-4, drafters=DRAFTERS, **more)


def alike(bs: int, rate: float) -> np.ndarray:
    """Return rates [bs, 2] of which the second algorithm's are lower."""
    return np.repeat([[rate, 0.8 * rate]], bs, 0)


def steadily(rates: np.ndarray) -> Callable[[int], np.ndarray]:
    """Return an acceptance that stays."""
    return lambda step: rates


@pytest.mark.parametrize("bs", [1, 4, 16, 64])
@pytest.mark.parametrize("curve", CURVES)
def test_rate_is_near_the_best_fixed_one(curve: str, bs: int) -> None:
    shares = []
    for rate in (0.1, 0.5, 0.9):
        found, steady = machine(curve), steadily(alike(bs, rate))
        best, _, _ = best_fixed(found, steady, 1, DEPTH)
        runs = [simulate(found, steady, 300, depth=DEPTH, seed=seed) for seed in (1, 2, 3)]
        shares.append(np.mean([run.rate(50) for run in runs]) / best)
    assert min(shares) > LEAST[curve], shares


LEAST = {"flat": 0.94, "linear": 0.94, "stepped": 0.93}
"""Over 50 to 300 steps, in which most of what trials cost at the start is still to be seen."""


@pytest.mark.parametrize("bs", [1, 16, 64])
@pytest.mark.parametrize("curve", CURVES)
def test_noise_costs_little_beside_none(curve: str, bs: int) -> None:
    run = simulate(machine(curve), lambda step: alike(bs, 0.02), 1000, depth=DEPTH)
    assert run.rate(100) > 0.98 * plain(machine(curve), bs, 1)


@pytest.mark.parametrize("bs", [4, 16, 64])
@pytest.mark.parametrize("curve", ["flat", "stepped"])
def test_mixed_batch_beats_every_single_one(curve: str, bs: int) -> None:
    rates = np.where(np.arange(bs)[:, None] % 2 == 0, [[0.9, 0.2]], [[0.2, 0.9]])
    best, _, _ = best_fixed(machine(curve), lambda step: rates, 1, DEPTH)
    run = simulate(machine(curve), lambda step: rates, 400, depth=DEPTH, seed=1)
    assert run.rate() > 1.1 * best


H200_ROWS = 1, 16, 48, 64, 96, 128, 384
H200_MS = 4.39, 4.58, 5.04, 5.76, 6.35, 6.7, 12.3
"""Milliseconds of an 8B Llama's pass in bf16 over so many rows, on an H200."""
TELLS, DRAFTS = (2.5e-4, 0.0, 4e-6, 0.0, 0.0), (2.5e-4, 1.45e-4, 3e-6, 0.0, 0.0)
"""There too: NGRAM, which tells what it would draft, a step too early, and a chain of EAGLE-3."""
TEXTS = {"new": (0.0, 0.64), "copied": (0.9, 0.64), "noise": (0.0, 0.02)}


def h200(drafts: tuple[float, float, float, float, float], **more: Any) -> Machine:
    """NGRAM and a drafter of these costs there."""
    return Machine(
        target=lambda rows: float(np.interp(rows, H200_ROWS, H200_MS)) * 1e-3,
        drafters=(TELLS, drafts),
        padded=True,
        **more,
    )


def catch_up_there(rows: int) -> float:
    """Return seconds: few rows are read by a recorded pass, more by one of single launches."""
    return 7e-4 if rows <= 256 else 8e-3 + 1e-6 * rows


def simulated_there(
    gpu: Machine,
    acceptance: Callable[[int], np.ndarray],
    *,
    steps: int = 300,
    depth: int = 7,
    renew: int = 0,
) -> Run:
    """Let the policy choose, none of whose steps is probed before."""
    return simulate(
        gpu,
        acceptance,
        steps,
        depth=depth,
        declared=GPU_COSTS,
        noise=0.01,
        lag=2,
        foreseen=(0,),
        probes=False,
        renew=renew,
    )


@pytest.mark.parametrize("bs", [1, 4, 16, 64])
@pytest.mark.parametrize(
    "kinds", [("new",), ("copied",), ("noise",), ("new", "copied", "noise", "copied")]
)
def test_choice_on_a_gpu_gives_the_best_of_single_ones(kinds: tuple[str, ...], bs: int) -> None:
    """Within 4 %, or 2 % of none; nothing is probed, and only a tenth of the time is for learning.
    A single one drafts equally deep for all requests for which it has a draft."""
    rates = np.array([TEXTS[kinds[place % len(kinds)]] for place in range(bs)])
    gpu = h200(DRAFTS)
    none, found = np.zeros(bs, dtype=np.int64), []
    for a in (0, 1):
        for depth in range(1, 8):
            depths = np.where(rates[:, a] > 0, depth, 0)
            tokens = bs + (survival(rates, 7)[:, a, :depth]).sum()
            found.append(tokens / gpu.seconds(np.where(depths > 0, a, -1), depths))
    run = simulated_there(gpu, lambda step: rates)
    rate = run.rate(30)
    assert rate > 0.96 * max(found)
    assert rate > 0.98 * bs / gpu.seconds(none - 1, none)


@pytest.mark.parametrize("some", [0.0, 5e-4])
@pytest.mark.parametrize("bs", [1, 16, 64])
def test_drafter_that_is_caught_up_first_is_found(bs: int, some: float) -> None:
    """Requests that copied text begin to write new text. A first step of EAGLE-3 then takes nearly
    twice as long, since it is fed what it was not; that says nothing of the second one. Nor does a
    step in which it drafts for some requests, for whose launches the device waits."""
    gpu = h200((*DRAFTS[:4], some), catch_up=(None, catch_up_there))
    texts = [np.array([TEXTS[kind]] * bs) for kind in ("copied", "new")]
    run = simulated_there(gpu, lambda step: texts[step >= 150])
    best, *_ = best_fixed(gpu, lambda step: texts[1], 1, 7)
    assert run.rate(180) > 0.95 * best


def test_drafter_that_is_mostly_tried_is_caught_up_in_time() -> None:
    """Of 64 requests few copy text for 60 steps, then more, then few. NGRAM waits for the host, so
    EAGLE-3 is better for all while few copy; but it was seldom tried for long."""
    gpu = attrs.evolve(
        h200((1.5e-4, 2.7e-4, 0.0, 1e-6, 3e-4), catch_up=(None, lambda rows: 3e-3 + 1e-6 * rows)),
        drafters=((8e-4, 0.0, 0.0, 0.0, 0.0), (1.5e-4, 2.7e-4, 0.0, 1e-6, 3e-4)),
    )

    def acceptance(step: int) -> np.ndarray:
        copies = (np.arange(3 if step // 60 % 2 else 19) * 3 + step // 12 * 5) % 64
        rates = np.array([TEXTS["noise"]] * 64)
        rates[:48, 1], rates[copies, 0] = 0.59, 0.9
        return rates

    best, *_ = best_fixed(gpu, acceptance, 400, 7)
    run = simulate(gpu, acceptance, 400, depth=7, declared=GPU_COSTS, foreseen=(0,))
    assert run.rate() > 1.03 * best
    assert np.mean([(who == 1).mean() for who in run.who]) > 0.2


def test_catching_up_makes_no_draft_deeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long however deep is drafted, and the next steps do without."""
    policy = DraftPolicy(StepCosts(1, GPU_COSTS, padded=False, is_fixed=True), 12)
    ids, most = tuple(map(str, range(64))), np.full((64, 1), 12)
    known = {0: np.full((64, 12), 0.85) ** np.arange(1, 13)}
    usual = policy.plan(ids, most, known=known)
    monkeypatch.setattr(CatchUps, "are_free", False)
    late = np.array([1.0]), np.zeros(1)
    monkeypatch.setattr(CatchUps, "starts", lambda *given: late)
    found = policy.plan(ids, most, known=known)
    assert 0 < usual.depths.max() < 12
    assert (found.depths == usual.depths).all()
    assert found.seconds == pytest.approx(usual.seconds + 1.0)


@pytest.mark.parametrize("bs", [1, 16, 64])
def test_noise_after_prose_costs_little_on_a_gpu(bs: int) -> None:
    """EAGLE-3's drafts were right, and no more are: it stops, and is tried seldom."""
    gpu = h200(DRAFTS, catch_up=(None, catch_up_there))
    texts = [np.array([TEXTS[kind]] * bs) for kind in ("new", "noise")]
    run = simulated_there(gpu, lambda step: texts[step >= 150])
    none = np.zeros(bs, dtype=np.int64)
    assert run.rate(190) > 0.97 * bs / gpu.seconds(none - 1, none)
    drafted = np.array(
        [(who == 1) & (depths > 0) for who, depths in zip(run.who, run.depths, strict=True)]
    )
    assert drafted[60:150].mean() > 0.9
    assert drafted[190:].mean() < 0.2


@pytest.mark.parametrize("bs", [1, 16, 64])
def test_new_requests_after_noise_are_drafted_for(bs: int) -> None:
    """Batches of requests of 96 steps each: six of noise, then prose. Which is found in three of
    them, at no more than 3 % of the time of the noise."""
    gpu = h200(DRAFTS, catch_up=(None, catch_up_there))
    noise, prose = (np.array([TEXTS[kind]] * bs) for kind in ("noise", "new"))
    run = simulated_there(
        gpu, lambda step: noise if step < 576 else prose, steps=960, renew=96, depth=5
    )
    none = np.zeros(bs, dtype=np.int64)
    best, *_ = best_fixed(gpu, lambda step: prose, 1, 5)
    assert run.rate(192, 576) > 0.97 * bs / gpu.seconds(none - 1, none)
    assert run.rate(864) > 0.94 * best


def test_change_within_a_request_is_followed() -> None:
    phases = 0.5, 0.95, 0.02
    run = simulate(
        machine("flat"),
        lambda step: alike(1, phases[step // 100 % 3]),
        600,
        depth=DEPTH,
        foreseen=(0, 1),
        seed=2,
    )
    depths = np.array([each[0] for each in run.depths])
    assert depths[408:500].min() >= 8  # copied text, from its eighth step on
    noise = depths[512:600]
    assert np.mean(noise) < 0.25 * np.mean(depths[408:500])


@pytest.mark.parametrize("slower", [2.0, 0.5])
def test_machine_that_changes_is_followed_in_50_steps(slower: float) -> None:
    changed = machine("linear", slowness=lambda step: 1.0 if step < 200 else slower)
    times: list[float] = []
    simulate(
        changed,
        lambda step: alike(4, 0.7),
        260,
        depth=DEPTH,
        watch=lambda policy: times.append(policy.estimates.costs.curve(4, 0, 20)[4]),
    )
    assert times[249] == pytest.approx(slower * times[199], rel=0.1)


@pytest.mark.parametrize("bs", [1, 16])
def test_drafting_that_seemed_dear_is_tried_again(bs: int) -> None:
    """The first steps with drafts take ten times as long, as if something was compiled in each;
    then drafting is as cheap as it is. All is accepted."""
    policy = DraftPolicy(StepCosts(1, CPU_COSTS, padded=False), DEPTH)
    ids, most = [str(number) for number in range(bs)], np.full((bs, 1), 4)
    drafts = []
    for step in range(3000):
        plan = policy.plan(ids, most)
        drafts.append(plan.drafts)
        draft = plan.drafts * (0.1 if step < 60 else 0.002)
        times = {"seconds": 0.01 + draft, "draft_seconds": draft or None}
        policy.estimates.observe(outcome_of(plan, ids, plan.depths, **times))
    assert not any(drafts[60:80])
    assert all(drafts[-100:])


@pytest.mark.parametrize("ends", [120, 600])
def test_drafting_goes_on_after_the_host_was_late(ends: int) -> None:
    """A step of 64 requests with drafts gives 1.2 times the tokens a second; 0.9 times as many in
    some steps, or in all from one on."""
    now = [0]

    class LateHost(Machine):
        def draft_seconds(self, who: np.ndarray, depths: np.ndarray) -> float:
            is_late = bool(depths.any()) and 100 <= now[0] < ends
            return super().draft_seconds(who, depths) + 3e-3 * is_late

    own = LateHost(
        target=lambda rows: 4.4e-3 + 1.25e-5 * rows,
        drafters=((1e-4, 3e-4, 0.0, 0.0, 3e-4),),
        padded=True,
        catch_up=(lambda rows: 3e-3 + 1e-6 * rows,),
    )

    def acceptance(step: int) -> np.ndarray:
        now[0] = step
        return np.full((64, 1), 0.6)

    run = simulate(own, acceptance, 600, depth=7, declared=GPU_COSTS)
    drafts = [bool(depths.any()) for depths in run.depths]
    assert sum(drafts[40:100]) > 55
    assert not any(drafts[114:120]), "it looks too dear"
    if ends == 120:
        assert sum(drafts[200:]) > 380
    else:
        assert sum(drafts[140:]) < 18
        assert run.rate(200) > 0.96 * 64 / own.target(64)


def test_fixed_costs_repeat_the_same_plans() -> None:
    runs = [
        simulate(
            machine("linear"),
            lambda step: alike(4, 0.7),
            100,
            depth=DEPTH,
            noise=noise,
            fixed=True,
        )
        for noise in (0.0, 0.0)
    ]
    assert all(
        (one == other).all() for one, other in zip(runs[0].depths, runs[1].depths, strict=True)
    )


def test_draft_that_is_known_counts_more_than_averages() -> None:
    policy = DraftPolicy(StepCosts(2, CPU_COSTS, padded=False, is_fixed=True), DEPTH)
    most = np.full((1, 2), DEPTH)
    for step in range(80):  # both look fair, so that none is tried for being unknown
        policy.plan(["a"], most)
        policy.estimates.observe(
            StepOutcome(
                request_ids=["a"], who=[step % 2], asked=[4], nodes=[4], accepted=[2], seconds=None
            )
        )
    sure, absent = np.array([[0.99, 0.98, 0.97, 0.0]]), np.zeros((1, 4))
    known = policy.plan(["a"], most, 0.0, {1: sure})
    assert (known.who.tolist(), known.depths.tolist()) == ([1], [3])
    assert [policy.plan(["a"], most, 0.0, {1: absent}).who[0] for _ in range(8)].count(1) == 0


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(("seconds", "pays"), [(1.4, True), (6.0, False)])
def test_all_or_none_draft_by_what_steps_gave(seconds: float, pays: bool, goes_on: bool) -> None:
    """Four requests, of whose five drafted tokens three are taken: 4 tokens for 1.4 or 6 plain
    steps. The other way is tried now and then."""
    policy = DraftPolicy(StepCosts(1, CPU_COSTS, padded=False), 5)
    policy.estimates.keep_all()
    names, drafted = list("abcd"), []
    for turn in range(400):
        drafts = bool(policy.plan_alike(names, 5, goes_on=goes_on).depths.any()) ^ (turn == 3)
        drafted.append(drafts)
        policy.estimates.observe(
            StepOutcome(
                request_ids=names,
                who=[0 if drafts else -1] * 4,
                asked=[5 * drafts] * 4,
                nodes=[5 * drafts] * 4,
                accepted=[3 * drafts] * 4,
                seconds=seconds if drafts else 1.0,
            )
        )
    settled = drafted[40:]
    assert (np.mean(settled) > 0.95) == pays
    assert (np.mean(settled) < 0.05) != pays
    assert any(settled), "it is tried again"
    assert not all(settled)


class HeardCosts(StepCosts):
    """They keep the times that they are told."""

    def __init__(self) -> None:
        super().__init__(1, CPU_COSTS, padded=False)
        self.told: list[float] = []

    def observe(self, work: Any, seconds: float, *rest: Any, **more: Any) -> None:
        self.told.append(seconds)
        super().observe(work, seconds, *rest, **more)


def test_cost_of_one_request_as_planned_is_seldom_learned() -> None:
    """Every fourth step tells, and each that takes another time."""
    policy = DraftPolicy(costs := HeardCosts(), 4)
    most = np.zeros((1, 1), dtype=np.int64)
    for seconds in [0.01] * 17 + [0.02]:
        plan = policy.plan(("a",), most)
        policy.estimates.observe(outcome_of(plan, ("a",), [0], seconds=seconds))
    assert costs.told == [0.01] * 5 + [0.02]


@pytest.mark.parametrize(("right", "least", "most"), [(1, 0.9, 1), (0, 0, 0.1), (-1, 0.6, 0.6)])
def test_hindsight_says_how_likely_drafts_are(right: int, least: float, most: float) -> None:
    """Of requests that have ended, and of no token, nothing is learned."""
    policy, ids = DraftPolicy(StepCosts(1, CPU_COSTS, padded=False), 4), ("a", "b", "c", "d")
    policy.plan(ids, np.full((4, 1), 4))
    for _ in range(3):
        policy.estimates.hear(0, ("a", "gone", "b", "c", "d"), np.full((5, 8), right))
    found = policy.estimates.acceptance.survival(range(4))[:, 0, 0]
    assert (found >= least - 0.05).all()
    assert (found <= most + 0.05).all()


@pytest.mark.parametrize("unlike", [False, True])
def test_drafts_of_unlike_chances_are_deeper_and_cut(unlike: bool) -> None:
    """In as many rows; of what is accepted then nothing is learned of the others."""
    policy = DraftPolicy(StepCosts(1, GPU_COSTS, padded=True), 8)
    ids, most = tuple(map(str, range(64))), np.full((64, 1), 8)
    random, chances, plans = np.random.default_rng(0), np.full(64, 0.6), []
    for _ in range(40):
        plan = policy.plan(ids, most)
        plans += [plan] if plan.reason == BEST else []
        chances = random.uniform(0.2, 1.0, 64) if unlike else chances
        taken = (random.random((64, 8)) < 0.6).cumprod(1).sum(1)
        accepted, seconds = np.minimum(taken, plan.depths), 0.005 + 2e-5 * plan.depths.sum()
        policy.estimates.observe(
            outcome_of(plan, ids, accepted, chances=chances.tolist(), seconds=seconds)
        )
    plan = plans[-1]
    assert plan.depths.max() < 7
    assert policy.deepened(plan, most, ()) is None  # those that keep to one draft as planned first
    accepted = plan.depths * (np.arange(64) % 5 < 2)
    policy.estimates.observe(outcome_of(plan, ids, accepted, seconds=0.006, is_kept=True))
    found = policy.deepened(plan, most, ())
    if not unlike:
        assert found is None
        return
    assert found is not None
    more, depths, rows = found
    assert more == 1
    assert (depths == np.where(plan.who == 0, plan.depths + 1, 0)).all()
    assert rows == policy.estimates.costs.padded_rows(64 + int(plan.depths.sum()))
    assert policy.deepened(plan, plan.depths[:, None], ()) is None  # there is no room
    assert policy.deepened(plan, most, {0}) is None  # it is told what is drafted
    for _ in range(40):
        policy.estimates.observe(outcome_of(plan, ids, plan.depths, more=1))
    assert policy.estimates.acceptance.survival(range(64))[:, 0, 0].mean() < 0.7


@pytest.mark.parametrize(("seconds", "nodes"), [(0.0052, True), (0.006, False)])
def test_kept_steps_take_what_was_foreseen_if_it_pays(seconds: float, nodes: bool) -> None:
    """Each way is tried first."""
    declared = [GPU_COSTS.of_text(), GPU_COSTS]
    policy = DraftPolicy(StepCosts(2, declared, padded=True, waiting=[0]), 8)
    ids, most = tuple(map(str, range(16))), np.full((16, 2), 8)
    plan = Plan(
        who=np.arange(16) % 2,
        depths=np.full(16, 2),
        tokens=32.0,
        seconds=0.006,
    )
    policy.plan(ids, most)
    found = []
    for _ in range(60):
        took = policy.foreseen_nodes(plan, {0})
        found.append(took)
        waits, accepted = took is None, np.ones(16, dtype=int)
        time = 0.006 if waits else seconds
        policy.estimates.observe(
            outcome_of(plan, ids, accepted, seconds=time, is_kept=True, waits=waits)
        )
    # Of the first step it is not known what others take. 48 rows need no padding.
    assert found[1:13] == [None, 16] * 6
    assert found[13:].count(16 if nodes else None) > 0.8 * 47


@pytest.mark.parametrize("way", [0, 1])
def test_plan_counts_no_wait_for_drafts_that_were_foreseen(
    way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TriedWays, "best", lambda known, form: way)
    declared = [attrs.evolve(GPU_COSTS.of_text(), draft=2.0), GPU_COSTS]
    policy = DraftPolicy(StepCosts(2, declared, padded=True, waiting=[0], is_fixed=True), 4)
    ids, most = tuple(map(str, range(16))), np.full((16, 2), (4, 0))
    known = {0: np.full((16, 4), 0.6) ** np.arange(1, 5)}
    for early in ([], [0]):
        plan = policy.plan(ids, most, known=known, early=early)
        assert plan.drafts == (way == 1 and bool(early))
