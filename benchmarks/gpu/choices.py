"""What a choice by step among several algorithms brings on a GPU, and what it costs.

``steps.py choice`` measures it. All ways to decode take turns in each round, on the same prompts,
as many of them at a time as the batch has: what ends makes room for the next, and the time counts
in which all places are taken. EAGLE-3 costs what it does, and is right as often as is set;
NGRAM finds what it has read before, right as often as is set, or nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import attrs
from choice_results import ASKED, CHOSEN, ChoicePoint
from engines import Engine, Variant, settings_of
from known_drafts import PARTLY, KnownEagle3, KnownNgram, share_of
from points import Point, Results, in_turns
from shapes import SHAPES

from specplug import SamplingParams, StepReport, hookimpl
from specplug.heap import freeze_heap

COPIED = 0.9
"""How many of NGRAM's drafted tokens are right, of text that it has read."""
STEPS = 5
LENGTH = 2.5
"""The accept length of chains of ``STEPS`` of EAGLE-3, of text that is no noise."""
DEPTHS = 1, 2, STEPS
"""Fixed depths of EAGLE-3 alone."""
ASKED_BAR = 0.98
"""The least that several algorithms may give, as a share of plain decoding, where no request wants
drafts."""
CONTEXT, TOKENS = 256, 96
_SCATTER = 37
"""A prime, so that outputs have all lengths in turn."""
REQUESTS = 2
"""How many come for each place of a batch."""
BATCHES = 1, 16, 64
ALONE = "eagle3", "ngram"
WORKLOADS: Mapping[str, tuple[str, ...]] = {
    "completion": ("new",),
    "editing": ("copied",),
    "agent": ("parts",),
    "noise": ("noise",),
    "mixed": ("new", "copied", "noise", "copied"),
}
"""The kinds of text that their requests write, in turn: new, copied, of copied stretches and new
ones in turn (``known_drafts.STRETCH``), or noise."""


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


@attrs.frozen
class Task:
    """A prompt to complete.

    Attributes:
        prompt: its tokens.
        tenant: whose texts NGRAM keeps and finds again; None: nobody's.
        share: how many of EAGLE-3's tokens are right.
        tokens: of its output.
    """

    prompt: list[int]
    tenant: str | None
    share: float
    tokens: int


@attrs.frozen(kw_only=True)
class Round:
    """What a way to decode gave in a round, while all places were taken.

    Attributes:
        seconds: that this lasted.
        tokens: that were taken.
        requests: for how many requests each algorithm drafted, added up over the steps.
        recorded: forms of passes that were recorded in the whole round.
        outputs: of each request.
    """

    seconds: float
    tokens: int
    requests: Mapping[str, int]
    recorded: int
    outputs: list[tuple[int, ...]]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class Steps:
    """An extension that keeps what each step of a generation has brought, and when it ended."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, StepReport]] = []

    @hookimpl
    def on_step(self, report: StepReport) -> None:
        self.seen.append((time.perf_counter(), report))

    def while_full(self, places: int) -> tuple[float, int, Counter[str]]:
        """Return the seconds, the tokens and what drafted, from the first decode step until fewer
        than ``places`` requests are left."""
        first = next(n for n, (_, report) in enumerate(self.seen) if report.decode_ids)
        full = [n for n, (_, r) in enumerate(self.seen) if r.num_running + r.num_waiting >= places]
        window = [report for _, report in self.seen[first + 1 : full[-1] + 1]]
        drafters = Counter(name for report in window for name in report.drafters)
        seconds = self.seen[full[-1]][0] - self.seen[first][0]
        return seconds, sum(sum(report.kept) for report in window), drafters


def complete(engine: Engine, batch: int, tasks: Sequence[Task], wish: str | int | None) -> Round:
    """Complete all tasks, ``batch`` of them at a time.

    Args:
        wish: what all requests ask for as their algorithm, or as the most tokens of a draft; None:
            nothing.
    """
    params = [
        SamplingParams(
            max_tokens=task.tokens,
            temperature=0,
            ignore_eos=True,
            speculative_algorithm=wish if isinstance(wish, str) else None,
            max_draft_tokens=wish if isinstance(wish, int) else None,
            cache_salt=task.tenant,
        )
        for task in tasks
    ]
    before, llm = _recorded(engine), engine.llm
    steps: Steps = engine.variant.settings["extensions"][0]
    steps.seen.clear()
    given = zip(tasks, params, strict=True)
    requests = [llm.prepare(task.prompt, own)[0] for task, own in given]
    coming, scheduler = deque(requests), llm.engine.scheduler
    while coming or llm.engine.has_work:
        while coming and len(scheduler.running) + len(scheduler.waiting) < batch:
            llm.submit(coming.popleft())
        llm.engine.step()
    llm.step()  # takes what moved
    seconds, made, drafters = steps.while_full(batch)
    return Round(
        seconds=seconds,
        tokens=made,
        requests=drafters,
        recorded=_recorded(engine) - before,
        outputs=[tuple(request.output_token_ids) for request in requests],
    )


def _recorded(engine: Engine) -> int:
    return engine.llm.run.graphs.recordings[0]


def tasks_of(workload: str, prompts: Sequence[list[int]], tokens: int) -> list[Task]:
    """Return the tasks of a workload, each of another prompt, with outputs of half as many to
    ``tokens`` tokens: so requests end one by one, as they do on a server, however they decode."""
    shares = {"noise": 0.02}
    tenants = {"copied": "", "parts": PARTLY}
    kinds = islice(cycle(WORKLOADS[workload]), len(prompts))
    return [
        Task(
            prompt=prompt,
            tenant=f"{tenants[kind]}{number}" if kind in tenants else None,
            share=shares.get(kind, share_of(LENGTH, STEPS)),
            tokens=tokens - number * _SCATTER % (tokens // 2),
        )
        for number, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]


def measure_choices(arguments: argparse.Namespace, base: Path, results: Results) -> None:
    """Time the choice, and each algorithm alone, in turns with plain decoding."""
    given = {"max_running_requests": max(arguments.batches), **settings_of(arguments)}
    tokens, context = (24, 32) if arguments.tiny else (TOKENS, CONTEXT)
    # The prompts stay for the next round, of every way: else each would compute others again.
    slots = REQUESTS * max(arguments.batches) * (context + tokens + 64)
    known = [KnownEagle3(), KnownEagle3()]
    chain = {"speculative_num_steps": STEPS, "speculative_num_draft_tokens": STEPS + 1}

    def variant(algorithm: Any = "NONE", draft: str | None = None, **more: Any) -> Variant:
        settings = {"extensions": [Steps()], **more}
        return Variant(algorithm=algorithm, draft=draft, settings=settings)

    variants = {
        "plain": variant(),
        "several": variant([KnownNgram(COPIED), known[0]], "eagle3"),
        "eagle3": variant(known[1], "eagle3", **chain),
        "ngram": variant(KnownNgram(COPIED)),
    }
    with ExitStack() as ends:
        engines = {}
        for name in ("plain", "several", *arguments.alone):
            engines[name] = engine = Engine(base, variants[name], slots, **given)
            ends.callback(engine.close)
            print(f"{name}: ready in {engine.ready_s:.1f} s, {_recorded(engine)} forms recorded",
                  flush=True)  # fmt: skip
            results.add("choice_start", shape=base.name, way=name, ready_s=engine.ready_s,
                        recorded=_recorded(engine))  # fmt: skip
        freeze_heap()  # or Python's collector looks at all of three engines in a round
        clock = HostClock(engines["several"])
        print(f"{'workload':11}{'batch':>5} {'way':12}{'tokens/s':>10}{'x plain':>9}{'a step':>8}"
              f"{'plan us':>9}{'learn us':>9}{'recorded':>10}  who drafted")  # fmt: skip
        for batch in arguments.batches:
            prompts = Point(REQUESTS * batch, context).prompts(SHAPES[base.name]["vocab_size"])
            for workload in arguments.workloads:
                tasks = tasks_of(workload, prompts, tokens)
                truth = complete(engines["plain"], batch, tasks, None).outputs
                texts = {tuple(p): t for p, t in zip(prompts, truth, strict=True)}
                for each in known:
                    each.know(texts, [task.share for task in tasks])
                ways = _ways(engines, batch, tasks)
                before = _warm(ways)
                found = _measure(ways, arguments.rounds, clock)
                _tell(found, truth, before, results, shape=base.name, workload=workload,
                      batch=batch)  # fmt: skip


def _ways(
    engines: Mapping[str, Engine], batch: int, tasks: Sequence[Task]
) -> dict[str, Callable[[], Round]]:
    """Return what is timed, by name: EAGLE-3 alone at several depths."""
    wishes: dict[str, tuple[str, str | int | None]] = {name: (name, None) for name in engines}
    wishes["none asked"] = "several", "NONE"
    if "eagle3" in wishes:
        del wishes["eagle3"]
        wishes |= {f"eagle3 {depth}": ("eagle3", depth) for depth in DEPTHS}
    return {
        way: partial(complete, engines[name], batch, tasks, wish)
        for way, (name, wish) in wishes.items()
    }


def _warm(ways: Mapping[str, Callable[[], Round]]) -> Counter[str]:
    """Let all be recorded that rounds bring, and let NGRAM read the texts, and draft them once.
    Return how many forms were, by way."""
    found = Counter[str]()
    for name, run in ways.items():
        least = 2 if name in ("several", "ngram") else 1
        for number in range(1, 4):
            recorded = run().recorded
            found[name] += recorded
            if not recorded and number >= least:
                break
    return found


Found = Mapping[str, tuple[list[Round], tuple[float, ...]]]
"""By way: what its rounds gave, and microseconds of a plan and of what is learned of a step."""


def _measure(ways: Mapping[str, Callable[[], Round]], rounds: int, clock: HostClock) -> Found:
    """Time all ways in turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}

    def timed(name: str) -> Round:
        clock.clear()
        found = ways[name]()
        times[name].append(clock.microseconds)
        return found

    found = in_turns({name: partial(timed, name) for name in ways}, rounds, warm_ups=0)
    medians = {
        name: tuple(map(statistics.median, zip(*own, strict=True))) for name, own in times.items()
    }
    return {name: (own, medians[name]) for name, own in found.items()}


def _tell(
    found: Found,
    truth: list[tuple[int, ...]],
    before: Mapping[str, int],
    results: Results,
    **point: Any,
) -> None:
    """Print and keep what each way gave.

    Args:
        before: forms that were recorded between the start and now, by way.
        point: what was measured.
    """
    rows = [
        {**point, "way": name, "rates": [each.rate for each in own], "plan_us": planned,
         "learn_us": learned}
        for name, (own, (planned, learned)) in found.items()
    ]  # fmt: skip
    compared = ChoicePoint.of(rows)
    for row, (name, (own, (planned, learned))) in zip(rows, found.items(), strict=True):
        ratio = compared.ways[name][1]
        who = sum((Counter(each.requests) for each in own), Counter[str]())
        drafted = {each: count / who.total() for each, count in who.most_common()}
        length = sum(each.tokens for each in own) / max(who.total(), 1)
        recorded = sum(each.recorded for each in own)
        rate = statistics.median(each.rate for each in own)
        wrong = sum(a != b for each in own for x, y in zip(truth, each.outputs, strict=True)
                    for a, b in zip(x, y, strict=True))  # fmt: skip
        shares = ", ".join(f"{each} {share:.0%}" for each, share in drafted.items())
        print(f"{point['workload']:11}{point['batch']:5} {name:12}{rate:10.1f}{ratio:9.3f}"
              f"{length:8.2f}{planned:9.0f}{learned:9.0f}{f'{before[name]}+{recorded}':>10}"
              f"  {shares}{f'; {wrong} tokens differ' if wrong else ''}", flush=True)  # fmt: skip
        results.add("choice", **row, rate=rate, ratio=ratio, accept_length=length,
                    recorded=recorded, recorded_before=before[name], differ=wrong,
                    drafted=drafted)  # fmt: skip
    print(f"{CHOSEN}: {compared.of_best:.3f} of {compared.best}; {ASKED} "
          f"{compared.ways[ASKED][1]:.3f} of plain (at least {ASKED_BAR})", flush=True)  # fmt: skip
