"""How soon the choice of drafts follows a change: of a text within its request, and of the machine.

    OMP_NUM_THREADS=1 python benchmarks/draft_changes.py [--output FOLDER] [--seeds 20] [--pieces 6]

Three things are looked at, each with a table of the steps from a change until it is followed:

- simulated, a request whose text changes every 100 steps, from prose to copied to noise, on a
  machine of set costs: one drafter tells what it would draft, as NGRAM does, the other one is known
  by its drafts alone;
- simulated, a machine that slows by half: until the expected time of a plain step is within a tenth
  of what it takes;
- in the engine, requests of the default model that are dictated what they write, so that the text
  is known: new code of a held-out module, then the prompt's code again, then random tokens.

A change of the text is followed at the first step from which on, for 4 steps, drafts are nearer to
the depth of the new text's second half than to that of the old one's; where that text comes again,
to the depth of the time that differs most: else one that is never followed would be at once.
``--output`` writes pictures of the choices over steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from measurement import head, line

sys.path.append(str(Path(__file__).parents[1] / "tests" / "fixtures"))

from draft_simulator import Machine, simulate
from growth import Task, dictated

from specplug import HELD_OUT_PROMPTS, LLM
from specplug.bench.choices import ChoiceLog, StepChoice
from specplug.speculative.choice.draft_policy import DraftPolicy

PHASES = {"prose": (0.2, 0.6), "copied": (0.95, 0.7), "noise": (0.0, 0.02)}
"""The simulated texts: of each drafter, how likely a node is right whose parent is."""
LENGTH, ROUNDS, DEPTH = 100, 3, 12
"""Steps of a simulated phase, how often the three come, and the deepest draft."""
STEADY = 4
"""Steps for which a change has to last to be followed."""
SLOWER_AT = 200
DRAFTERS = ((1e-3, 8e-4, 0.0, 1e-5, 0.0), (1e-3, 8e-4, 0.0, 1e-5, 0.0))
NAMES = "tells", "drafts"
"""The simulated drafters: the first tells what it would draft."""
NEW, COPIED, NOISE = 220, 220, 160
"""Tokens of a dictated text's parts."""


@attrs.frozen
class Phase:
    """A part of a request.

    Attributes:
        name: of what is written in it.
        start, end: its steps.
    """

    name: str
    start: int
    end: int


@attrs.frozen
class Followed:
    """How a request's changes were followed.

    Attributes:
        steps: the choices.
        phases: of the text.
    """

    steps: Sequence[StepChoice]
    phases: Sequence[Phase]

    @property
    def depths(self) -> np.ndarray:
        """Of the drafts."""
        return np.array([step.verified - step.requests for step in self.steps], dtype=float)

    def delays(self) -> dict[str, list[int]]:
        """Return the steps until each change was followed, by "from to"."""
        found: dict[str, list[int]] = {}
        for old, new in zip(self.phases, self.phases[1:], strict=False):
            name = f"{old.name} to {new.name}"
            found.setdefault(name, []).append(self._delay(old, new))
        return found

    def _settled(self, phase: Phase) -> float:
        """Return the depth of a text's second half."""
        return float(self.depths[(phase.start + phase.end) // 2 : phase.end].mean())

    def _delay(self, old: Phase, new: Phase) -> int:
        before = self._settled(old)
        # Of a text that is never followed the second half is as that before it.
        alike = (self._settled(phase) for phase in self.phases if phase.name == new.name)
        after = max(alike, key=lambda depth: abs(depth - before))
        mine = self.depths[new.start : new.end]
        near = np.abs(mine - after) <= np.abs(mine - before)
        for step in range(len(near)):
            if near[step : step + STEADY].all():
                return step
        return len(near)


def machine(**more: Any) -> Machine:
    """Return a machine whose step grows by a fiftieth of a per cent with each row."""
    return Machine(
        target=lambda rows: 0.01 * (1 + 0.002 * rows), request=2e-4, drafters=DRAFTERS, **more
    )


def simulated_text(seed: int) -> Followed:
    """Let the policy draft for a request whose acceptance changes."""
    rates = list(PHASES.values())
    run = simulate(
        machine(),
        lambda step: np.array([rates[step // LENGTH % len(rates)]]),
        LENGTH * len(rates) * ROUNDS,
        depth=DEPTH,
        foreseen=(0,),
        seed=seed,
    )
    steps = [
        StepChoice(
            {"NONE" if depth[0] == 0 else NAMES[who[0]]: 1}, 1 + int(depth[0]), round(tokens)
        )
        for who, depth, tokens in zip(run.who, run.depths, run.tokens, strict=True)
    ]
    names = list(PHASES) * ROUNDS
    return Followed(
        steps, [Phase(name, i * LENGTH, (i + 1) * LENGTH) for i, name in enumerate(names)]
    )


def simulated_slowdown(seed: int, slower: float) -> list[float]:
    """Return the expected time of a plain step of 4 requests after each step, as a share of what it
    takes, on a machine that is ``slower`` times as slow from ``SLOWER_AT`` on."""
    shares: list[float] = []
    changed = machine(slowness=lambda step: 1.0 if step < SLOWER_AT else slower)
    none = np.zeros(4, dtype=np.int64)

    def watch(policy: DraftPolicy) -> None:
        expected = policy.estimates.costs.curve(4, 0, 4)[4]
        shares.append(expected / changed.seconds(none - 1, none, len(shares)))

    simulate(
        changed,
        lambda step: np.repeat([[0.7, 0.56]], 4, 0),
        SLOWER_AT + 100,
        depth=DEPTH,
        seed=seed,
        watch=watch,
    )
    return shares


def steps_to_follow(shares: Sequence[float]) -> int:
    """Return the steps from the slowdown until the expected time is within a tenth, and stays."""
    near = np.abs(np.array(shares[SLOWER_AT:]) - 1) < 0.1
    wrong = np.flatnonzero(~near)
    return int(wrong[-1]) + 1 if len(wrong) else 0


def pieces(count: int, tokenizer: Any) -> list[Task]:
    """Return dictated texts, each of another held-out module: new, copied, then noise."""
    stdlib, found = Path(sysconfig.get_paths()["stdlib"]), []
    rows = [json.loads(row) for row in HELD_OUT_PROMPTS.read_text(encoding="utf-8").splitlines()]
    for module in dict.fromkeys(row["module"] for row in rows):
        file = stdlib / f"{module.replace('.', '/')}.py"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        tokens = tokenizer.backend_tokenizer.encode(text).ids
        if len(tokens) > 4 * (NEW + COPIED):
            chance = random.Random(module)
            noise = [chance.randrange(300, len(tokenizer)) for _ in range(NOISE)]
            prompt, later = tokens[COPIED : 2 * COPIED], tokens[3 * COPIED : 3 * COPIED + NEW]
            found.append(Task(prompt, [*later, *prompt, *noise]))
    return found[:count]


def dictated_request(algorithm: str, task: Task, warm_up: Task) -> Followed:
    """Write a text in an engine of its own, after another one by which costs are learnt."""
    log = ChoiceLog()
    with LLM(speculative_algorithm=algorithm, extensions=[log]) as llm, dictated([task, warm_up]):
        llm.generate([warm_up.prompt], warm_up.params)
        log.clear()
        llm.generate([task.prompt], task.params)
    written = 1 + np.cumsum([step.accepted for step in log.choices])
    ends = [int(np.searchsorted(written, end)) for end in (NEW, NEW + COPIED)]
    bounds = [0, *ends, len(log.choices)]
    names = "new", "copied", "noise"
    phases = [Phase(n, a, b) for n, a, b in zip(names, bounds, bounds[1:], strict=False)]
    return Followed(log.choices, phases)


def print_delays(title: str, delays: Sequence[dict[str, list[int]]]) -> None:
    """Print a table of the steps until changes were followed."""
    print(f"\n{title}\n\n{head('change', 'median', 'of ten nine within', 'most', 'changes')}")
    for name in dict.fromkeys(name for each in delays for name in each):
        every = sorted(n for each in delays for n in each.get(name, []))
        nine = every[min(len(every) - 1, int(0.9 * len(every)))]
        print(line([name, statistics.median(every), nine, every[-1], len(every)]))


def draw(followed: Followed, title: str, file: Path) -> None:
    """Draw who drafted and how deep, step by step, with the parts of the text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from specplug.bench.plots import COLORS, DPI, STYLE, WIDTH, draw_shares, draw_step_nodes

    steps = [attrs.asdict(step, recurse=False) for step in followed.steps]
    names = sorted({name for step in steps for name in step["drafters"]} - {"NONE"})
    colors = {name: COLORS[place] for place, name in enumerate(names)} | {"NONE": "#D8D8D8"}
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
        figure.suptitle(title, x=0.012, ha="left", size=14, weight="bold")
        shares, nodes = figure.subplots(2, 1, gridspec_kw={"height_ratios": [1, 2]})
        draw_shares(shares, steps, [*names, "NONE"], colors, most=len(steps))
        draw_step_nodes(nodes, steps, most=len(steps))
        for phase in followed.phases:
            for axes in (shares, nodes):
                axes.axvline(phase.start + 1, color="#1A1A1A", linewidth=1)
            where = (phase.start + 1, 1.04)
            shares.annotate(
                f" {phase.name}", where, xycoords=("data", "axes fraction"), annotation_clip=False
            )
        figure.savefig(file, dpi=DPI)


def draw_slowdown(shares: Sequence[float], file: Path) -> None:
    """Draw the expected time of a plain step over what it takes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from specplug.bench.plots import COLORS, DPI, STYLE, WIDTH

    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
        figure.suptitle("A machine that slows by half", x=0.012, ha="left", size=14, weight="bold")
        axes = figure.subplots()
        axes.plot(range(1, len(shares) + 1), shares, color=COLORS[0])
        axes.axhspan(0.9, 1.1, color="#E4E4E4")
        axes.axvline(SLOWER_AT + 1, color="#1A1A1A", linewidth=1)
        axes.set_ylim(0, 1.3)
        axes.set_xlabel("decode step")
        axes.set_ylabel("expected time of a plain step\nover what it takes")
        figure.savefig(file, dpi=DPI)


def main() -> None:
    """Print the tables, and draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--pieces", type=int, default=6)
    parser.add_argument("--algorithm", default="auto")
    options = parser.parse_args()
    texts = [simulated_text(seed) for seed in range(options.seeds)]
    print_delays(
        "Simulated: steps until a change of the text is followed", [t.delays() for t in texts]
    )
    slowdowns = {
        factor: [simulated_slowdown(seed, factor) for seed in range(options.seeds)]
        for factor in (2.0, 0.5)
    }
    print_delays(
        "Simulated: steps until the expected time of a plain step is within a tenth",
        [
            {f"{factor:g} times as slow": [steps_to_follow(shares) for shares in slow]}
            for factor, slow in slowdowns.items()
        ],
    )
    with LLM() as llm:
        warm_up, *tasks = pieces(options.pieces + 1, llm.tokenizer)
    written = [dictated_request(options.algorithm, task, warm_up) for task in tasks]
    print_delays(
        f"In the engine, {options.algorithm}: steps until a change of the text is followed",
        [each.delays() for each in written],
    )
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        draw(texts[0], "A text that changes, simulated", options.output / "simulated_text.png")
        draw(
            written[0],
            f"A text that changes, in the engine under {options.algorithm}",
            options.output / "engine_text.png",
        )
        draw_slowdown(slowdowns[2.0][0], options.output / "slowdown.png")


if __name__ == "__main__":
    main()
