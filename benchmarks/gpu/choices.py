"""What a choice by step among several algorithms brings on a GPU, and what it costs.

``steps.py choice`` measures it. All ways to decode take turns in each round, on the same prompts.
Half of the requests write what NGRAM has read before, the other half what is new to it; EAGLE-3
costs what it does, and is right as often as is set. At batch 1 one request of each half follows
the other.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from engines import Engine, Variant, settings_of
from known_drafts import KnownEagle3, KnownNgram, share_of
from points import Point, Results, in_turns
from shapes import SHAPES

from specplug import SamplingParams

COPIED = 0.9
"""How many of NGRAM's drafted tokens are right, of text that it has read."""
LENGTH = 2.5
"""The accept length of chains of 5 of EAGLE-3."""
ASKED_BAR = 1.02
"""The most that several algorithms may take, in plain steps, where no request wants drafts."""
CONTEXT, TOKENS = 256, 128
BATCHES = 1, 16, 64
ALONE = "eagle3", "ngram"


class HostClock:
    """The host's time for the choices of a run: what is foreseen and planned, and what is learned
    of steps.

    Args:
        engine: whose steps are timed from now on.
    """

    def __init__(self, engine: Engine) -> None:
        self.planned: list[float] = []
        self.learned: list[float] = []
        core = engine.llm.engine
        order, hooks = core.steps.order, core.hooks
        order._plan = self._timed(order._plan, self.planned)  # type: ignore[method-assign]
        hooks.on_step = self._timed(hooks.on_step, self.learned)  # type: ignore[method-assign]

    @staticmethod
    def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            seconds.append(time.perf_counter() - began)
            return result

        return timed

    def clear(self) -> None:
        """Forget the steps so far."""
        self.planned.clear()
        self.learned.clear()

    @property
    def microseconds(self) -> tuple[float, float]:
        """The medians of a plan, and of what is learned of a step; 0 where nothing is planned."""
        both = self.planned, self.learned
        planned, learned = (statistics.median(each) * 1e6 if each else 0.0 for each in both)
        return planned, learned


@attrs.frozen(kw_only=True)
class Round:
    """What a way to decode gave in a round.

    Attributes:
        seconds: of all its generations.
        tokens: that it generated.
        steps: decode steps.
        requests: for how many requests each algorithm drafted, added up over the steps.
        recorded: forms of passes that were recorded meanwhile.
        outputs: of each request.
    """

    seconds: float
    tokens: int
    steps: int
    requests: Mapping[str, int]
    recorded: int
    outputs: list[tuple[int, ...]]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def complete(
    engine: Engine, batch: int, prompts: list[list[int]], wish: str | None, tokens: int
) -> Round:
    """Complete all prompts, ``batch`` of them together. Every other one is of a tenant whose texts
    NGRAM keeps.

    Args:
        wish: what all requests ask for as their algorithm; None: nothing.
        tokens: of each output.
    """
    seconds, made, steps, requests = 0.0, 0, 0, Counter[str]()
    outputs: list[tuple[int, ...]] = []
    before = _recorded(engine)
    for first in range(0, len(prompts), batch):
        places = range(first, first + batch)
        params = [
            SamplingParams(
                max_tokens=tokens,
                temperature=0,
                ignore_eos=True,
                speculative_algorithm=wish,
                cache_salt=f"copied {place}" if place % 2 else None,
            )
            for place in places
        ]
        took, own_steps, own = engine.complete([prompts[place] for place in places], params)
        seconds, made, steps = seconds + took, made + own, steps + own_steps
        requests.update(engine.llm.stats()["verifications_by_drafter"])
        outputs += map(tuple, engine.outputs)
    return Round(seconds=seconds, tokens=made, steps=steps, requests=requests,
                 recorded=_recorded(engine) - before, outputs=outputs)  # fmt: skip


def _recorded(engine: Engine) -> int:
    run = engine.llm.run
    return run.graphs.recordings[0]


def measure_choices(arguments: argparse.Namespace, base: Path, results: Results) -> None:
    """Time the choice, and each algorithm alone, in turns with plain decoding."""
    settings = {"max_running_requests": max(arguments.batches), **settings_of(arguments)}
    tokens = 24 if arguments.tiny else TOKENS
    context = 32 if arguments.tiny else CONTEXT
    steps = 5
    slots = max(arguments.batches) * (context + tokens + 64)
    ngram, drafts = KnownNgram(COPIED), KnownEagle3(share_of(LENGTH, steps))
    shape = {"speculative_num_steps": steps, "speculative_num_draft_tokens": steps + 1}
    variants = {
        "plain": Variant(),
        "several": Variant(algorithm=[ngram, drafts], draft="eagle3"),
        "eagle3": Variant(
            algorithm=KnownEagle3(share_of(LENGTH, steps)), draft="eagle3", settings=shape
        ),
        "ngram": Variant(algorithm=KnownNgram(COPIED)),
    }
    with ExitStack() as ends:
        engines = {}
        for name in ("plain", "several", *arguments.alone):
            engines[name] = engine = Engine(base, variants[name], slots, **settings)
            ends.callback(engine.close)
            print(f"{name}: ready in {engine.ready_s:.1f} s, {_recorded(engine)} forms recorded",
                  flush=True)  # fmt: skip
            results.add("choice_start", shape=base.name, way=name, ready_s=engine.ready_s,
                        recorded=_recorded(engine))  # fmt: skip
        known = [drafts, variants["eagle3"].algorithm]
        clock = HostClock(engines["several"])
        print(f"{'batch':>5} {'way':12}{'tokens/s':>10}{'x plain':>9}{'bar':>6}{'a step':>8}"
              f"{'plan us':>9}{'learn us':>9}{'recorded':>10}  who drafted")  # fmt: skip
        for batch in arguments.batches:
            prompts = Point(max(2, batch), context).prompts(SHAPES[base.name]["vocab_size"])
            truth = complete(engines["plain"], batch, prompts, None, tokens).outputs
            continuations = {tuple(p): t for p, t in zip(prompts, truth, strict=True)}
            for each in known:
                assert isinstance(each, KnownEagle3)
                each.know(continuations)
            ways = {name: partial(complete, engine, batch, prompts, None, tokens)
                    for name, engine in engines.items()}  # fmt: skip
            asked = partial(complete, engines["several"], batch, prompts, "NONE", tokens)
            ways["none asked"] = asked
            before = _warm(ways)
            _measure(ways, truth, batch, arguments.rounds, clock, before, base.name, results)


def _warm(ways: Mapping[str, Callable[[], Round]]) -> Counter[str]:
    """Let all be recorded that rounds bring, and let NGRAM read the texts: twice or more. Return
    how many forms were, by way."""
    found = Counter[str]()
    for name, run in ways.items():
        for number in range(4):
            recorded = run().recorded
            found[name] += recorded
            if not recorded and number:
                break
    return found


def _measure(
    ways: Mapping[str, Callable[[], Round]],
    truth: list[tuple[int, ...]],
    batch: int,
    rounds: int,
    clock: HostClock,
    before: Mapping[str, int],
    shape: str,
    results: Results,
) -> None:
    """Time all ways in turns, and tell each.

    Args:
        before: forms that were recorded between the start and now, by way.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}

    def timed(name: str) -> Round:
        clock.clear()
        found = ways[name]()
        times[name].append(clock.microseconds)
        return found

    found = in_turns({name: partial(timed, name) for name in ways}, rounds, warm_ups=0)
    plain = [each.seconds for each in found["plain"]]
    for name, own in found.items():
        ratio = statistics.median(p / o.seconds for p, o in zip(plain, own, strict=True))
        rate = statistics.median(each.rate for each in own)
        planned, learned = (statistics.median(each) for each in zip(*times[name], strict=True))
        if name not in ("several", "none asked"):
            planned = learned = 0.0
        who = sum((Counter(each.requests) for each in own), Counter[str]())
        drafted = {each: count / who.total() for each, count in who.most_common()}
        recorded = sum(each.recorded for each in own)
        decoded = sum(each.tokens - len(each.outputs) for each in own)
        length = decoded / max(who.total(), 1)
        wrong = sum(a != b for each in own for x, y in zip(truth, each.outputs, strict=True)
                    for a, b in zip(x, y, strict=True))  # fmt: skip
        bar = 1 / ASKED_BAR if name == "none asked" else None
        shares = ", ".join(f"{each} {share:.0%}" for each, share in drafted.items())
        print(f"{batch:5} {name:12}{rate:10.1f}{ratio:9.3f}{f'{bar:.3f}' if bar else '':>6}"
              f"{length:8.2f}{planned:9.0f}{learned:9.0f}{f'{before[name]}+{recorded}':>10}"
              f"  {shares}"
              f"{f'; {wrong} tokens differ' if wrong else ''}", flush=True)  # fmt: skip
        results.add("choice", shape=shape, batch=batch, way=name, rate=rate, ratio=ratio, bar=bar,
                    accept_length=length, plan_us=planned, learn_us=learned, recorded=recorded,
                    recorded_before=before[name], differ=wrong, drafted=drafted,
                    seconds=[each.seconds for each in own],
                    steps=[each.steps for each in own])  # fmt: skip
