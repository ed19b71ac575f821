"""A server under load: Poisson arrivals of held-out prompts, through the openai client.

    python benchmarks/serving/load.py [--algorithms A,B] [--modes plain,disaggregated]
        [--rates R ...] [--requests N] [--rounds N] [--mixed] [--slower PERCENT] [--output DIR]

For each algorithm a server is started (``specplug serve``), and, disaggregated, a decode and a
prefill instance. All of them stay up, and take turns: in each round, at each rate, every one gets
the same prompts at the same moments. Requests come after gaps that are exponentially distributed,
whether or not the ones before have been answered. Reported are, over all rounds,

- TTFT, the time to the first text: seconds from sending a request to its first piece of text,
- ITL, the inter-token latency: of each request, the seconds from its first to its last piece of
  text, by the tokens in between; a verification may give several tokens at once,
- gap: seconds between two pieces of text that follow one another,
- request: seconds from sending a request to its last piece of text,
- of NONE: the same as a share of what the same request took in the same round under NONE,

as medians and 99th percentiles (of the last two the 95th), and the output tokens a second from the
first request of a round to the end of its last one. Of each four requests of ``--mixed`` one is a
chat that has to call a tool, and the client of one goes away in the middle; ``load.json`` has the
TTFT of the chats apart, as ``calls_ttft``. Exits with 1 if a
request fails, if its text is not that of the plain server under NONE, or, with ``--slower``, if the
95th percentile of requests is by more than that above the one under NONE, in the same mode at the
same rate.

The load generator, all servers and their engines share the machine: give it more cores than there
are engines that run at a time (one, or two where prefill and decode are apart), and one more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import attrs
from openai import AsyncOpenAI
from server_process import ServerProcess, free_port, head, line, start_server
from torch import cuda

from specplug import HELD_OUT_PROMPTS
from specplug.bench.dataset import read_prompts
from specplug.bench.machine import describe_machine, versions
from specplug.registry import Registry

MODES = ("plain", "disaggregated")
PERCENTILES = (50, 95, 99)
COMPLETES, CALLS, LEAVES = "completes", "calls", "leaves"
MIXED = COMPLETES, CALLS, COMPLETES, LEAVES
"""What requests do in turn."""
LEFT_AFTER = 24
"""Characters of text after which a client goes away that does."""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "store",
        "parameters": {
            "properties": {"names": {"type": "array", "items": {"type": "string"}}},
            "required": ["names"],
        },
    },
}
STYLES = {"plain": "-o", "disaggregated": "--s"}
PANELS = (
    ("ttft_p50", "TTFT, median", "ms"),
    ("ttft_p99", "TTFT, 99th percentile", "ms"),
    ("itl_p50", "ITL, median", "ms a token"),
    ("itl_p99", "ITL, 99th percentile", "ms a token"),
)

Row = dict[str, Any]
"""Algorithm, mode, rate and figures of a deployment at a rate; times in seconds."""


@attrs.frozen
class Sample:
    """One request, as its client saw it.

    Attributes:
        text: what was generated, after the arguments of tools' calls. Where the client went away,
            the text before that.
        tokens: how many; 0 where the client went away.
        ttft: seconds to the first piece of text.
        seconds: to the last one.
        gaps: seconds between pieces.
        kind: what it did, one of ``MIXED``.
    """

    text: str
    tokens: int
    ttft: float
    seconds: float
    gaps: tuple[float, ...]
    kind: str

    @property
    def itl(self) -> float:
        """Seconds a token after the first piece."""
        return (self.seconds - self.ttft) / max(self.tokens - 1, 1)


@attrs.define
class Cell:
    """What a deployment has shown at a rate.

    Attributes:
        samples: of all rounds.
        tokens_per_second: of each round.
    """

    samples: list[Sample] = attrs.field(factory=list)
    tokens_per_second: list[float] = attrs.field(factory=list)

    def figures(self, plain: Cell | None) -> dict[str, float]:
        """Seconds and rates by name.

        Args:
            plain: what NONE has shown with the same requests in the same order.
        """
        found = {"tokens_per_second": statistics.median(self.tokens_per_second)}
        of = {
            "ttft": [s.ttft for s in self.samples],
            "itl": [s.itl for s in self.samples if s.tokens],
            "request": [s.seconds for s in self.samples],
            "gap": [gap for s in self.samples for gap in s.gaps],
            **{
                kind: [s.seconds for s in self.samples if s.kind == kind]
                for kind in {s.kind for s in self.samples}
            },
            f"{CALLS}_ttft": [s.ttft for s in self.samples if s.kind == CALLS],
        }
        if plain is not None:
            both = zip(self.samples, plain.samples, strict=True)
            of["of_none"] = [own.seconds / other.seconds for own, other in both]
        for name, values in of.items():
            for share in PERCENTILES:
                found[f"{name}_p{share}"] = percentile(values, share)
        return found


@attrs.frozen
class Deployment:
    """A server to load, and those that it works with.

    Attributes:
        algorithm, mode: what it runs.
        servers: the one that clients know is the first.
    """

    algorithm: str
    mode: str
    servers: list[ServerProcess]

    @property
    def url(self) -> str:
        """Where clients find it."""
        return self.servers[0].url

    def stop(self) -> None:
        """End its processes."""
        for server in self.servers:
            server.kill()

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.algorithm} {self.mode}"


def percentile(values: Sequence[float], share: int) -> float:
    """The value that ``share`` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)] if ordered else float("nan")


def deploy(algorithm: str, mode: str, options: Sequence[str]) -> Deployment:
    """Start the servers of a deployment and have them answer a request."""
    speculative = ("--speculative-algorithm", algorithm, *options)
    if mode == "plain":
        servers = [start_server(*speculative)]
    else:
        address = ("--disaggregation-address", f"tcp://127.0.0.1:{free_port()}")
        servers = [
            start_server("--disaggregation-mode", side, *address, *speculative)
            for side in ("decode", "prefill")
        ]
    first = servers[0].complete("import ", max_tokens=4)
    assert first.ok, first.text
    return Deployment(algorithm, mode, servers)


async def ask(client: AsyncOpenAI, kind: str, prompt: str, args: Any) -> Sample:
    """One request, streamed: a completion, or a chat that has to call a tool."""
    shared: dict[str, Any] = {
        **{"model": "tiny-code", "max_tokens": args.max_tokens, "temperature": args.temperature},
        **{"seed": 1, "stream": True, "stream_options": {"include_usage": True}},
    }
    began = time.perf_counter()
    stream: Any
    if kind == CALLS:
        stream = await client.chat.completions.create(
            messages=[{"role": "user", "content": prompt}],
            tools=[TOOL],
            tool_choice="required",
            **shared,
        )
    else:
        stream = await client.completions.create(prompt=prompt, **shared)
    text, called, tokens, moments = "", "", 0, []
    async for chunk in stream:
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        piece, arguments = pieces_of(chunk.choices[0]) if chunk.choices else ("", "")
        if piece or arguments:
            moments.append(time.perf_counter())
            text += piece
            called += arguments
        if kind == LEAVES and len(text) >= LEFT_AFTER:
            await stream.close()
            text, tokens = text[:LEFT_AFTER], 0
            break
    moments = moments or [time.perf_counter()]
    gaps = tuple(after - before for before, after in pairwise(moments))
    return Sample(called + text, tokens, moments[0] - began, moments[-1] - began, gaps, kind)


def pieces_of(choice: Any) -> tuple[str, str]:
    """What a chunk's choice adds to the text, and to the arguments of tools' calls. A chunk may
    have both, and which of them came first it does not say."""
    if not hasattr(choice, "delta"):
        return choice.text or "", ""
    calls = choice.delta.tool_calls or ()
    arguments = (call.function.arguments or "" for call in calls if call.function is not None)
    return choice.delta.content or "", "".join(arguments)


def kinds_of(args: Any) -> list[str]:
    """What each request of a round does."""
    kinds = MIXED if args.mixed else (COMPLETES,)
    return [kinds[number % len(kinds)] for number in range(args.requests)]


async def load(
    deployment: Deployment, prompts: Sequence[str], moments: Sequence[float], args: Any
) -> tuple[list[Sample], float]:
    """Send each prompt at its moment; the samples, and the seconds until all were answered."""
    async with AsyncOpenAI(
        base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=600
    ) as client:
        began = time.perf_counter()

        async def at(moment: float, kind: str, prompt: str) -> Sample:
            await asyncio.sleep(max(0.0, moment - (time.perf_counter() - began)))
            return await ask(client, kind, prompt, args)

        samples = await asyncio.gather(*map(at, moments, kinds_of(args), prompts))
        return samples, time.perf_counter() - began


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Moments of a Poisson process: ``count`` of them, ``rate`` a second."""
    gaps, now, moments = random.Random(seed), 0.0, []
    for _ in range(count):
        now += gaps.expovariate(rate)
        moments.append(now)
    return moments


def rows_of(cells: Mapping[tuple[str, str, float], Cell]) -> list[Row]:
    """The figures of all cells, as the report has them."""
    return [
        {
            **{"algorithm": algorithm, "mode": mode, "rate": rate},
            **cell.figures(cells.get(("NONE", mode, rate))),
        }
        for (algorithm, mode, rate), cell in cells.items()
    ]


def show(rows: Sequence[Row]) -> None:
    """Print the figures of all deployments, times in milliseconds."""
    shown = {"TTFT": 99, "ITL": 99, "gap": 99, "request": 95}
    times = (f"{name} p50 / p{most}" for name, most in shown.items())
    print(head("requests/s", "algorithm", "mode", *times, "of NONE p50 / p95", "tokens/s"))
    for row in rows:
        times = (
            f"{1000 * row[f'{name.lower()}_p50']:.1f} / {1000 * row[f'{name.lower()}_p{most}']:.1f}"
            for name, most in shown.items()
        )
        cells = f"{row['rate']:g}", f"`{row['algorithm']}`", row["mode"]
        shares = [f"{row[name]:.2f}" for name in ("of_none_p50", "of_none_p95") if name in row]
        print(line([*cells, *times, " / ".join(shares), f"{row['tokens_per_second']:.0f}"]))


def draw(rows: Sequence[Row], title: str, file: Path) -> None:
    """Medians and 99th percentiles by rate: a panel for each latency, a colour an algorithm,
    a line style a mode."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from specplug.bench.plots import BASELINE_COLOR, COLORS, DPI, STYLE

    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    others = [name for name in names if name != "NONE"]
    colors = {"NONE": BASELINE_COLOR, **dict(zip(others, COLORS, strict=False))}
    with rc_context(STYLE):
        figure = Figure(figsize=(9.5, 8), layout="constrained")
        figure.suptitle(title)
        axes = figure.subplots(2, 2, sharex=True).flat
        for axis, (name, heading, unit) in zip(axes, PANELS, strict=True):
            for algorithm in names:
                for mode, style in STYLES.items():
                    own = [r for r in rows if (r["algorithm"], r["mode"]) == (algorithm, mode)]
                    if own:
                        axis.plot(
                            [row["rate"] for row in own],
                            [1000 * row[name] for row in own],
                            style,
                            color=colors[algorithm],
                            markersize=4,
                            label=f"{algorithm}, {mode}",
                        )
            axis.set_title(heading)
            axis.set_ylabel(unit)
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
            axis.tick_params(axis="y", which="minor", labelsize=7)
            axis.set_xticks(sorted({row["rate"] for row in rows}))
            axis.grid(axis="y", which="both")
        for axis in figure.axes[2:]:
            axis.set_xlabel("requests a second")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
        figure.savefig(file, dpi=DPI)


def tell(text: str) -> None:
    """Say how far it is."""
    print(text, file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> tuple[dict[Any, Cell], list[str]]:
    """Load all deployments in turns; the figures, and which texts differ."""
    prompts = [p.content for p in read_prompts(HELD_OUT_PROMPTS) if isinstance(p.content, str)]
    texts: dict[str, dict[str, str]] = {}
    cells: dict[tuple[str, str, float], Cell] = {}
    with ExitStack() as ends, ThreadPoolExecutor(args.starters) as starters:
        pairs = [(a, m) for a in args.algorithms for m in args.modes]
        options = [*args.options]
        if args.mixed:
            file = Path(ends.enter_context(tempfile.TemporaryDirectory())) / "chat.jinja"
            file.write_text(TEMPLATE)
            options += ["--chat-template", str(file), "--tool-call-parser", "hermes"]
        starting = [starters.submit(deploy, a, m, options) for a, m in pairs]
        deployments = [each.result() for each in starting]
        tell(f"{len(deployments)} deployments serve")
        for deployment in deployments:
            ends.callback(deployment.stop)
        for turn, (number, rate) in product(range(args.rounds), enumerate(args.rates)):
            start = (turn * len(args.rates) + number) * args.requests
            chosen = [prompts[(start + i) % len(prompts)] for i in range(args.requests)]
            moments = arrivals(rate, args.requests, seed=start)
            # Each begins a turn once, so that none is always the first.
            shift = turn % len(deployments)
            for deployment in deployments[shift:] + deployments[:shift]:
                samples, seconds = asyncio.run(load(deployment, chosen, moments, args))
                cell = cells.setdefault((deployment.algorithm, deployment.mode, rate), Cell())
                cell.samples += samples
                cell.tokens_per_second.append(sum(s.tokens for s in samples) / seconds)
                for kind, prompt, sample in zip(kinds_of(args), chosen, samples, strict=True):
                    key = prompt if kind == COMPLETES else f"{kind}: {prompt}"
                    texts.setdefault(key, {})[deployment.name] = sample.text
                tell(f"{turn + 1}: {deployment.name} {rate:g}/s, {seconds:.1f} s")
    return cells, list(differences(texts))


def differences(texts: dict[str, dict[str, str]]) -> Iterator[str]:
    """Whose text of a prompt is another than that of the first deployment, plain NONE."""
    for prompt, by_name in texts.items():
        first, expected = next(iter(sorted(by_name.items(), key=lambda of: of[0] != "NONE plain")))
        for name, text in by_name.items():
            if text != expected:
                yield f"{name} differs from {first} after {prompt[:40]!r}"


def slower(rows: Sequence[Row], percent: float) -> Iterator[str]:
    """Whose requests take longer than those under NONE, by more than ``percent`` at p95."""
    plain = {(row["mode"], row["rate"]): row for row in rows if row["algorithm"] == "NONE"}
    for row in rows:
        other = plain.get((row["mode"], row["rate"]))
        if other is None:
            continue
        more = 100 * (row["request_p95"] / other["request_p95"] - 1)
        if more > percent:
            yield (
                f"{row['algorithm']} {row['mode']} at {row['rate']:g}/s: the 95th percentile of "
                f"requests is {more:.1f} % above that under NONE, {percent:g} allowed"
            )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    installed = [entry.name for entry in Registry().entries()]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--algorithms", default=",".join(["NONE", *sorted({*installed} - {"NONE"})]))
    add("--modes", default=",".join(MODES))
    add("--rates", type=float, nargs="+", default=[2.0, 4.0, 8.0], help="requests a second")
    add("--requests", type=int, default=48, help="in a round")
    add("--rounds", type=int, default=3)
    add("--max-tokens", type=int, default=96)
    add("--temperature", type=float, default=0.0)
    add("--mixed", action="store_true", help="chats with tools, and clients that go away, too")
    add("--slower", type=float, help="percent that requests may be slower than with NONE at p95")
    add("--starters", type=int, default=2, help="deployments that are started at a time")
    add("--output", type=Path, help="folder for load.json and load.png")
    add("options", nargs="*", help="more options of specplug serve, after --")
    args = parser.parse_args(arguments)
    args.algorithms, args.modes = args.algorithms.split(","), args.modes.split(",")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; 1 if a text differs, or requests are slower than they may be."""
    args = parse(arguments)
    cells, different = run(args)
    rows = rows_of(cells)
    title = f"{args.rounds} rounds of {args.requests} requests"
    show(rows)
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        device = "cuda" if cuda.is_available() and "cpu" not in args.options else "cpu"
        machine = describe_machine(device)
        report = {
            "settings": {name: value for name, value in vars(args).items() if name != "output"},
            "machine": machine,
            "load_average": os.getloadavg(),
            "versions": versions(["specplug", "torch", "transformers", "pyzmq", "openai"]),
            "cells": rows,
        }
        (args.output / "load.json").write_text(json.dumps(report, indent=2) + "\n")
        where = machine["gpu"] or machine["cpu"]
        draw(rows, f"{title}, {where}", args.output / "load.png")
    late = [] if args.slower is None else [*slower(rows, args.slower)]
    for each in (*different, *late):
        tell(each)
    tell("all texts identical" if not different else f"{len(different)} texts differ")
    tell(f"load average {' '.join(f'{each:.1f}' for each in os.getloadavg())}")
    return 1 if different or late else 0


if __name__ == "__main__":
    sys.exit(main())
