"""Random schedules under pressure: every algorithm gives NONE's tokens, and the pool stays whole.

Requests arrive and are aborted in the midst of others, in pools from just enough for one request
upwards, so that drafts shrink, cached prefixes go and requests are retracted. Each algorithm runs
``SPECPLUG_SCHEDULES`` of them (12; the benchmarks' README says what 500 gave), and others with
another ``SPECPLUG_FIRST_SEED``. Several in one run do too, where dice say at each step who drafts
for each request and how much, some requests name an algorithm or a greatest length, some are
structured or want log-probabilities, and a step's nodes may have a budget.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache
from random import Random
from typing import Any

import attrs
import pytest
from draft_dice import Dice
from hypothesis import given, settings
from hypothesis import strategies as st
from shallow_target import shallow_target

from specplug import LLM, RequestOutput, SamplingParams
from specplug.registry import Registry

SCHEDULES = int(os.environ.get("SPECPLUG_SCHEDULES", "12"))
FIRST_SEED = int(os.environ.get("SPECPLUG_FIRST_SEED", "0"))
MAX_TOKENS = 20
HEAD = "def total(values):\n    result = 0\n    for value in values:\n"
PROMPTS = (
    "x",
    "import ",
    "class Stack:\n    def __init__(self):\n",
    HEAD,
    HEAD + "        result += value\n",
    HEAD + "        result *= value\n    return",
    HEAD + "        if value is None:\n            continue\n",
)
"""Some of which begin alike."""
SHORT = range(3)

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "penalized": {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "min_p": 0.01},
}

MORE_KINDS: dict[str, dict[str, Any]] = {
    **KINDS,
    "structured": {"regex": "[a-z_]{2,14}", "temperature": 0.6},
    "with logprobs": {"logprobs": 2, "temperature": 0.7, "frequency_penalty": 0.4},
    "greedy with logprobs": {"logprobs": 0},
}


@attrs.frozen
class Arrival:
    """A request: what it is, and when it comes and goes."""

    prompt: int
    kind: str
    max_tokens: int
    priority: int
    arrives: int
    aborted: int | None
    stops_at: int | None
    wish: str | int | None = None


@attrs.frozen
class Schedule:
    """One run: its engine's settings and its requests."""

    arrivals: tuple[Arrival, ...]
    spare: int | None
    page_size: int
    chunk: int | None
    rows: int
    mixed: bool
    overlap: bool
    cached: bool
    topk: int
    num_steps: int
    budget: int | None = None

    def open(self, algorithm: object, branches: bool, dice: Dice | None = None) -> LLM:
        most = max(len(token_ids(a.prompt)) + a.max_tokens for a in self.arrivals)
        drafts = algorithm != "NONE" and dice is None
        return LLM(
            **shallow_target().options(algorithm),
            dtype="float64",
            extensions=[] if dice is None else [dice],
            speculative_num_steps=self.num_steps if drafts else None,
            speculative_eagle_topk=self.topk if branches else None,
            verify_budget=self.budget,
            max_total_tokens=None if self.spare is None else most + self.spare,
            page_size=self.page_size,
            chunked_prefill_size=self.chunk,
            max_running_requests=self.rows,
            enable_mixed_chunk=self.mixed,
            disable_overlap_schedule=not self.overlap,
            disable_radix_cache=not self.cached,
        )


def draw(seed: int, several: tuple[str, ...] = ()) -> Schedule:
    """A random schedule: hypothesis' own would be simpler, and hardly under pressure.

    Args:
        several: algorithms of a run that dice choose from.
    """
    random, more = Random(seed), Random(seed + 1)
    prompts = random.choice([SHORT, range(len(PROMPTS))])
    kinds = sorted(MORE_KINDS if several else KINDS)
    names = [*several, "NONE", 0, 1, 3, *(None for _ in range(8))]

    def arrival() -> Arrival:
        return Arrival(
            prompt=random.choice(prompts),
            kind=random.choice(kinds),
            max_tokens=random.choice([1, 2, 7, MAX_TOKENS, MAX_TOKENS, MAX_TOKENS]),
            priority=random.randrange(3),
            arrives=random.randrange(8),
            aborted=random.choice([None, None, None, random.randrange(25)]),
            stops_at=random.choice([None, None, random.randrange(MAX_TOKENS)]),
            wish=more.choice(names) if several else None,
        )

    return Schedule(
        arrivals=tuple(arrival() for _ in range(random.randint(3, 9))),
        spare=random.choice([0, 3, 10, 20, 40, 70, None]),
        page_size=random.choice([1, 2, 4, 16]),
        chunk=random.choice([None, 3, 5, 16]),
        rows=random.choice([1, 4, 8, 8]),
        mixed=random.random() < 0.5,
        overlap=random.random() < 0.5,
        cached=random.random() < 0.7,
        topk=random.choice([1, 3]),
        num_steps=random.choice([1, 4]),
        budget=more.choice([None, None, 9, 16]) if several else None,
    )


@cache
def plain() -> LLM:
    target = shallow_target().options("NONE")
    return LLM(**target, dtype="float64", max_running_requests=1, disable_radix_cache=True)


@cache
def token_ids(prompt: int) -> tuple[int, ...]:
    return tuple(plain().tokenizer(PROMPTS[prompt])["input_ids"])


@cache
def expected(prompt: int, kind: str) -> RequestOutput:
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=prompt, **MORE_KINDS[kind])
    return plain().generate(token_ids(prompt), params)[0]


def run(
    schedule: Schedule, algorithm: object, branches: bool, dice: Dice | None = None
) -> Counter[str]:
    """Run a schedule, check every output and the pool; what happened."""
    with schedule.open(algorithm, branches, dice) as llm:
        names: dict[str, Arrival] = {}
        step = 0
        ended = {}
        while llm.has_unfinished_requests or len(names) < len(schedule.arrivals):
            for arrival in schedule.arrivals:
                if arrival.arrives == step:
                    names[_add(llm, arrival)] = arrival
            for name, arrival in names.items():
                if arrival.aborted == step:
                    llm.abort(name)
            ended.update({o.request_id: o for o in llm.step() if o.finished})
            step += 1
        llm.check_pool()
        for name, arrival in names.items():
            _check(arrival, ended[name])
        llm.flush_cache()
        assert llm.occupancy["free"] == llm.occupancy["total"]
        stats = llm.stats()
    happened = ("retractions", "evicted_pages", "cached_tokens")
    return Counter({name: stats[name] > 0 for name in happened} | stats["steps"])


def _add(llm: LLM, arrival: Arrival) -> str:
    more: dict[str, Any] = {}
    if arrival.stops_at is not None:
        more["stop_token_ids"] = (_stop_token(arrival),)
    if isinstance(arrival.wish, str):
        more["speculative_algorithm"] = arrival.wish
    elif arrival.wish is not None:
        more["max_draft_tokens"] = arrival.wish
    return llm.add_request(
        token_ids(arrival.prompt),
        SamplingParams(
            max_tokens=arrival.max_tokens, seed=arrival.prompt, **MORE_KINDS[arrival.kind], **more
        ),
        priority=arrival.priority,
    )


def _stop_token(arrival: Arrival) -> int:
    whole = expected(arrival.prompt, arrival.kind).token_ids
    return whole[(arrival.stops_at or 0) % len(whole)]


def _check(arrival: Arrival, output: Any) -> None:
    known = expected(arrival.prompt, arrival.kind)
    tokens = known.token_ids[: arrival.max_tokens]
    assert sum(output.accept_lens) == max(0, len(output.token_ids) - 1), arrival
    if arrival.stops_at is not None and _stop_token(arrival) in tokens:
        tokens = tokens[: tokens.index(_stop_token(arrival)) + 1]
    if output.finish_reason == "abort":
        assert output.token_ids == tokens[: len(output.token_ids)], arrival
    else:
        assert output.token_ids == tokens, arrival
    assert (output.logprobs is None) == (known.logprobs is None)
    for ours, theirs in zip(output.logprobs or (), known.logprobs or (), strict=False):
        assert {token: of.rank for token, of in ours.items()} == {
            token: of.rank for token, of in theirs.items()
        }
        for token, of in ours.items():
            assert of.logprob == pytest.approx(theirs[token].logprob, abs=1e-9)


NAMES = [*Registry().names(), "EAGLE3+NGRAM"]


@pytest.mark.parametrize("name", [*NAMES, "SUCCESSORS"])
def test_random_schedules_change_no_token(name: str, successors: Any) -> None:
    algorithm: object = successors() if name == "SUCCESSORS" else name
    branches = name in NAMES and Registry().select(name).info.capabilities.branching
    seen: Counter[str] = Counter()

    @settings(max_examples=SCHEDULES, deadline=None, derandomize=True, database=None)
    @given(seed=st.integers(0, 1 << 32))
    def every(seed: int) -> None:
        seen.update(run(draw(FIRST_SEED + seed), algorithm, branches))

    every()
    print(f"{name}: {SCHEDULES} schedules, of which some had {dict(seen)}")
    assert seen["retractions"], "no schedule was under pressure"
    assert seen["evicted_pages"]
    assert seen["cached_tokens"]
    assert seen["mixed"]


SEVERAL = (
    ("NGRAM", "EAGLE3"),
    ("EAGLE3+NGRAM", "MULTI_LAYER_EAGLE", "DFLASH"),
    ("STANDALONE", "PEAGLE", "EAGLE"),
    ("SPARSE_SELF", "DSPARK", "NGRAM"),
)


@pytest.mark.parametrize("names", SEVERAL, ids=",".join)
def test_random_schedules_under_dice_change_no_token(names: tuple[str, ...]) -> None:
    seen: Counter[str] = Counter()
    drafters: Counter[str] = Counter()

    @settings(max_examples=SCHEDULES, deadline=None, derandomize=True, database=None)
    @given(seed=st.integers(0, 1 << 32))
    def every(seed: int) -> None:
        schedule, dice = draw(FIRST_SEED + seed, names), Dice(seed)
        parts = []
        for name in names:
            branches = Registry().select(name).info.capabilities.branching
            topk = f",topk={schedule.topk}" if branches else ""
            parts.append(f"{name}:steps={schedule.num_steps}{topk}")
        seen.update(run(schedule, ",".join(parts), False, dice))
        seen["requests"] += len(schedule.arrivals)
        drafters.update(dice.drafters)

    every()
    print(f"{','.join(names)}: {SCHEDULES} schedules, some had {dict(seen)}; {dict(drafters)}")
    assert seen["retractions"], "no schedule was under pressure"
    assert seen["evicted_pages"]
    assert seen["cached_tokens"]
    assert seen["mixed"]
    assert set(drafters) == {*names, "NONE"}
