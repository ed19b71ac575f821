"""Random schedules under pressure: every algorithm gives NONE's tokens, and the pool stays whole.

Requests arrive and are aborted in the midst of others, in pools from just enough for one request
upwards, so that drafts shrink, cached prefixes go and requests are retracted. Each algorithm runs
``SPECPLUG_SCHEDULES`` of them (12; the benchmarks' README says what 500 gave), and others with
another ``SPECPLUG_FIRST_SEED``.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache
from random import Random
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shallow_target import shallow_target

from specplug import LLM, SamplingParams
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

    def open(self, algorithm: object, branches: bool) -> LLM:
        most = max(len(token_ids(a.prompt)) + a.max_tokens for a in self.arrivals)
        drafts = algorithm != "NONE"
        return LLM(
            **shallow_target().options(algorithm),
            dtype="float64",
            speculative_num_steps=self.num_steps if drafts else None,
            speculative_eagle_topk=self.topk if branches else None,
            max_total_tokens=None if self.spare is None else most + self.spare,
            page_size=self.page_size,
            chunked_prefill_size=self.chunk,
            max_running_requests=self.rows,
            enable_mixed_chunk=self.mixed,
            disable_overlap_schedule=not self.overlap,
            disable_radix_cache=not self.cached,
        )


def draw(seed: int) -> Schedule:
    """A random schedule: hypothesis' own would be simpler, and hardly under pressure."""
    random = Random(seed)
    prompts = random.choice([SHORT, range(len(PROMPTS))])

    def arrival() -> Arrival:
        return Arrival(
            prompt=random.choice(prompts),
            kind=random.choice(sorted(KINDS)),
            max_tokens=random.choice([1, 2, 7, MAX_TOKENS, MAX_TOKENS, MAX_TOKENS]),
            priority=random.randrange(3),
            arrives=random.randrange(8),
            aborted=random.choice([None, None, None, random.randrange(25)]),
            stops_at=random.choice([None, None, random.randrange(MAX_TOKENS)]),
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
    )


@cache
def plain() -> LLM:
    target = shallow_target().options("NONE")
    return LLM(**target, dtype="float64", max_running_requests=1, disable_radix_cache=True)


@cache
def token_ids(prompt: int) -> tuple[int, ...]:
    return tuple(plain().tokenizer(PROMPTS[prompt])["input_ids"])


@cache
def expected(prompt: int, kind: str) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=prompt, **KINDS[kind])
    return plain().generate(token_ids(prompt), params)[0].token_ids


def run(schedule: Schedule, algorithm: object, branches: bool) -> Counter[str]:
    """Run a schedule, check every output and the pool; what happened."""
    with schedule.open(algorithm, branches) as llm:
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
    stops: dict[str, Any] = {}
    if arrival.stops_at is not None:
        stops["stop_token_ids"] = (_stop_token(arrival),)
    return llm.add_request(
        token_ids(arrival.prompt),
        SamplingParams(
            max_tokens=arrival.max_tokens, seed=arrival.prompt, **KINDS[arrival.kind], **stops
        ),
        priority=arrival.priority,
    )


def _stop_token(arrival: Arrival) -> int:
    whole = expected(arrival.prompt, arrival.kind)
    return whole[(arrival.stops_at or 0) % len(whole)]


def _check(arrival: Arrival, output: Any) -> None:
    tokens = expected(arrival.prompt, arrival.kind)[: arrival.max_tokens]
    assert sum(output.accept_lens) == max(0, len(output.token_ids) - 1), arrival
    if arrival.stops_at is not None and _stop_token(arrival) in tokens:
        tokens = tokens[: tokens.index(_stop_token(arrival)) + 1]
    if output.finish_reason == "abort":
        assert output.token_ids == tokens[: len(output.token_ids)], arrival
    else:
        assert output.token_ids == tokens, arrival


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
